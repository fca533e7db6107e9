//! Looking a prompt up over several scopes: public, then group, then private.
//!
//! The match may start in a public prefix and go on privately. What goes on is kept in the private namespace
//! under a root of its own, keyed by the digest and the length of the prefix that it continues, not by a
//! pointer: it does not keep the head alive, and it is found again when the head returns.

use super::roots::PrefixKey;
use super::{Extended, Pin, PrefixIndex, ShareScope};
use crate::error::{Error, Result};
use crate::ids::{BlockHandle, NamespaceId};
use std::sync::Arc;

/// Namespaces of one fingerprint in the order of look-up, the most private one last. Inserts go there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeChain {
    namespaces: Vec<NamespaceId>,
}

impl ScopeChain {
    /// The namespaces, most public first.
    #[must_use]
    pub fn namespaces(&self) -> &[NamespaceId] {
        &self.namespaces
    }

    /// Where blocks are inserted.
    #[must_use]
    pub fn last(&self) -> NamespaceId {
        self.namespaces[self.namespaces.len() - 1]
    }
}

/// A pinned prefix, part by part: one pin for each namespace that it runs through.
#[derive(Debug)]
pub struct ChainPin {
    /// Parts before the last one; each covers the blocks from where the one before ends. Mostly none, so that a
    /// prefix of one namespace allocates nothing.
    heads: Vec<Pin>,
    /// The last part; none if nothing matched.
    tail: Option<Pin>,
    /// Where blocks are inserted.
    last: NamespaceId,
    /// What the first part in `last` continues, while there is none yet.
    key: Option<PrefixKey>,
}

impl ChainPin {
    /// A prefix that lies in one namespace, its most private one.
    fn of_one(pin: Pin) -> Self {
        let last = pin.namespace();
        Self { heads: Vec::new(), tail: Some(pin), last, key: None }
    }

    /// One more pin of the same prefix: see [`Pin::again`].
    pub(crate) fn again(&self) -> Result<Self> {
        let heads = self.heads.iter().map(Pin::again).collect::<Result<_>>()?;
        let tail = self.tail.as_ref().map(Pin::again).transpose()?;
        Ok(Self { heads, tail, last: self.last, key: self.key })
    }

    /// Blocks of the pinned prefix.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.parts().map(|(_, num_blocks)| num_blocks).sum()
    }

    /// Where blocks are inserted.
    #[must_use]
    pub fn last(&self) -> NamespaceId {
        self.last
    }

    /// (namespace, blocks) of each part.
    pub fn parts(&self) -> impl Iterator<Item = (NamespaceId, usize)> + '_ {
        self.heads.iter().chain(&self.tail).map(|pin| (pin.namespace(), pin.num_blocks()))
    }

    /// The last part; none if nothing matched.
    pub(super) const fn end(&self) -> Option<&Pin> {
        self.tail.as_ref()
    }

    /// What the first part in the most private namespace would continue, while there is none.
    pub(super) const fn key(&self) -> Option<PrefixKey> {
        self.key
    }

    /// Lets go of what lies in shared scopes. What is left is the part in the most private one, if there is any: a
    /// private continuation does not keep the head alive, and matches again when that returns.
    #[must_use]
    pub fn into_own(self) -> Option<Pin> {
        let last = self.last;
        self.tail.filter(|part| part.namespace() == last)
    }

    /// The part in the most private namespace, if the prefix reaches there.
    pub(super) fn own_part(&self) -> Option<&Pin> {
        self.tail.as_ref().filter(|part| part.namespace() == self.last)
    }

    pub(super) fn own_part_mut(&mut self) -> Option<&mut Pin> {
        let last = self.last;
        self.tail.as_mut().filter(|part| part.namespace() == last)
    }
}

/// The part of a match that a further namespace adds.
struct Continuation {
    /// Blocks of the prefix before it.
    start: usize,
    /// Its root; none is the namespace's own.
    key: Option<PrefixKey>,
    /// Where it ends, in blocks of the prompt.
    end: usize,
}

impl PrefixIndex {
    /// A chain of namespaces.
    ///
    /// # Errors
    /// `InvalidArgument` if it is empty, if its scopes do not go from public to private (each kind once), if its
    /// last is public (only `publish` inserts there), or if the fingerprints differ.
    pub fn chain(&self, namespaces: &[NamespaceId]) -> Result<ScopeChain> {
        let known: Vec<_> = namespaces.iter().map(|&id| self.namespaces.get(id)).collect::<Result<_>>()?;
        let Some(last) = known.last() else { return Err(Error::invalid("a chain needs a namespace")) };
        let ranks: Vec<u8> = known.iter().map(|namespace| rank(&namespace.names().scope)).collect();
        if ranks.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(Error::invalid("a chain goes from public to group to private, each at most once"));
        }
        if last.is_public {
            return Err(Error::invalid(
                "a chain ends in a group or a private scope: only publish inserts publicly",
            ));
        }
        let fingerprint = last.names().fingerprint.clone();
        if known.iter().any(|namespace| namespace.names().fingerprint != fingerprint) {
            return Err(Error::invalid("the namespaces of a chain have different fingerprints"));
        }
        Ok(ScopeChain { namespaces: namespaces.to_vec() })
    }

    /// A chain of one public namespace, for the operator's own requests: what they compute is published.
    ///
    /// # Errors
    /// `InvalidArgument` if the namespace is not public.
    pub fn publishing_chain(&self, namespace: NamespaceId) -> Result<ScopeChain> {
        self.check_public(namespace)?;
        Ok(ScopeChain { namespaces: vec![namespace] })
    }

    pub(super) fn check_public(&self, namespace: NamespaceId) -> Result<()> {
        if self.namespaces.get(namespace)?.is_public {
            return Ok(());
        }
        Err(Error::invalid(format!("namespace {namespace} is not public")))
    }

    /// Pins the longest prefix that the chain's namespaces have together and appends its blocks to `blocks`. At
    /// most `tokens.len() - 1` tokens are matched.
    ///
    /// # Errors
    /// As [`PrefixIndex::match_prefix`]; nothing is pinned then.
    pub fn match_chain(
        self: &Arc<Self>,
        chain: &ScopeChain,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<ChainPin> {
        self.match_chain_whole(chain, self.without_last(tokens), blocks)
    }

    /// Like [`PrefixIndex::match_chain`], but matches all whole blocks of `tokens`, the last one too.
    ///
    /// # Errors
    /// As [`PrefixIndex::match_prefix`]; nothing is pinned then.
    pub fn match_chain_whole(
        self: &Arc<Self>,
        chain: &ScopeChain,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<ChainPin> {
        self.check_has_blocks()?;
        self.find_chain(chain, tokens, blocks)
    }

    /// [`PrefixIndex::match_chain_whole`] for the scheduler, which knows what the ids of the tree are.
    pub(crate) fn find_chain(
        self: &Arc<Self>,
        chain: &ScopeChain,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<ChainPin> {
        if let [only] = chain.namespaces[..] {
            return self.match_from(only, None, tokens, blocks).map(ChainPin::of_one);
        }
        let start = blocks.len();
        let matched = self.match_parts(chain, tokens, blocks);
        if matched.is_err() {
            blocks.truncate(start);
        }
        matched
    }

    /// How many tokens [`PrefixIndex::match_chain`] would find now. Pins and touches nothing.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown namespace.
    pub fn peek_chain(&self, chain: &ScopeChain, tokens: &[u32]) -> Result<usize> {
        if let [only] = chain.namespaces[..] {
            return self.peek_prefix(only, tokens);
        }
        let tokens = self.without_last(tokens);
        let mut covered = 0;
        for &id in &chain.namespaces {
            covered = self.best_continuation(id, tokens, covered)?.map_or(covered, |next| next.end);
        }
        Ok(covered * self.config.block_size as usize)
    }

    fn match_parts(
        self: &Arc<Self>,
        chain: &ScopeChain,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<ChainPin> {
        let before = blocks.len();
        let block_size = self.config.block_size as usize;
        let last = chain.last();
        let mut parts: Vec<Pin> = Vec::new();
        let mut covered = 0;
        for &id in &chain.namespaces {
            let Some(next) = self.best_continuation(id, tokens, covered)? else { continue };
            self.shorten(&mut parts, next.start, tokens)?;
            blocks.truncate(before + next.start);
            let rest = &tokens[next.start * block_size..];
            let pin = self.match_from(id, next.key.as_ref(), rest, blocks)?;
            covered = next.start + pin.num_blocks();
            debug_assert!(covered <= next.end || next.end == 0);
            parts.push(pin);
        }
        let tail = parts.pop();
        let is_continued = tail.as_ref().is_some_and(|part| part.namespace() != last);
        let key = is_continued.then(|| self.prefix_key(&tokens[..covered * block_size]));
        Ok(ChainPin { heads: parts, tail, last, key })
    }

    /// The part of a namespace that leads furthest, if it leads beyond `covered`.
    fn best_continuation(
        &self,
        id: NamespaceId,
        tokens: &[u32],
        covered: usize,
    ) -> Result<Option<Continuation>> {
        let namespace = self.namespaces.get(id)?;
        let tree = namespace.read_tree();
        self.check_same(id, namespace)?;
        let view = self.view();
        let own = tree.count_matched(&view, tree.root(), tokens);
        let mut best = Continuation { start: 0, key: None, end: own };
        if tree.has_continuations() {
            let block_size = self.config.block_size as usize;
            let prefix = &tokens[..covered * block_size];
            for (digest, start) in self.prefix_digests(prefix).zip(1usize..) {
                let key = (digest, start as u32);
                let Some(root) = tree.continuation(&key) else { continue };
                let end = start + tree.count_matched(&view, root, &tokens[start * block_size..]);
                if end > best.end {
                    best = Continuation { start, key: Some(key), end };
                }
            }
        }
        Ok((best.end > covered).then_some(best))
    }

    /// Cuts the pinned parts down to `num_blocks` in all.
    fn shorten(self: &Arc<Self>, parts: &mut Vec<Pin>, num_blocks: usize, tokens: &[u32]) -> Result<()> {
        let mut total: usize = parts.iter().map(Pin::num_blocks).sum();
        while let Some(part) = parts.last() {
            let start = total - part.num_blocks();
            if total <= num_blocks {
                break;
            }
            let keep = num_blocks.saturating_sub(start);
            if keep > 0 {
                let block_size = self.config.block_size as usize;
                let rest = &tokens[start * block_size..num_blocks * block_size];
                let key = (start > 0).then(|| self.prefix_key(&tokens[..start * block_size]));
                let pin = self.match_from(part.namespace(), key.as_ref(), rest, &mut Vec::new())?;
                parts.pop();
                parts.push(pin);
                break;
            }
            parts.pop();
            total = start;
        }
        Ok(())
    }

    /// Whether what follows a chain's match in its most private namespace begins with this block.
    ///
    /// # Errors
    /// `InvalidArgument` if the namespace was given to another salt.
    pub fn leads_further(&self, pin: &ChainPin, block: &[u32]) -> Result<bool> {
        let namespace = self.namespaces.get(pin.last)?;
        let tree = namespace.read_tree();
        let own = pin.tail.as_ref().filter(|part| part.namespace() == pin.last);
        let node = match (own, &pin.key) {
            (Some(part), _) => Some(part.node),
            (None, None) => Some(tree.root()),
            (None, Some(key)) => tree.continuation(key),
        };
        Ok(node.is_some_and(|node| tree.count_matched(&self.view(), node, block) > 0))
    }

    /// Inserts whole blocks below a chain's match, in its most private namespace.
    ///
    /// # Errors
    /// As [`PrefixIndex::extend`]; the chain's match is as it was then.
    pub fn extend_chain(
        self: &Arc<Self>,
        pin: &mut ChainPin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        self.check_has_blocks()?;
        self.extend_chain_any(pin, tokens, blocks)
    }

    /// [`PrefixIndex::extend_chain`] whatever the ids of the tree are.
    pub(super) fn extend_chain_any(
        self: &Arc<Self>,
        pin: &mut ChainPin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        if pin.own_part().is_none() {
            let part = match pin.key {
                None => self.root(pin.last)?,
                Some(key) => self.continuation_pin(pin.last, key)?,
            };
            pin.heads.extend(pin.tail.replace(part));
        }
        match pin.own_part_mut() {
            Some(part) => self.extend_any(part, tokens, blocks),
            None => Ok(Extended::default()),
        }
    }

    /// Inserts below a pin of a public namespace: the operator's call, the only way into a public scope. The
    /// content must have been written. Keep the pin for as long as the prefix is to stay.
    ///
    /// # Errors
    /// `InvalidArgument` if the namespace is not public; else as [`PrefixIndex::extend`].
    pub fn publish(
        self: &Arc<Self>,
        pin: &mut Pin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        self.check_public(pin.namespace)?;
        self.check_has_blocks()?;
        self.extend_any(pin, tokens, blocks)
    }

    fn prefix_key(&self, tokens: &[u32]) -> PrefixKey {
        let num_blocks = tokens.len() / self.config.block_size as usize;
        (self.prefix_digests(tokens).last().unwrap_or(self.digest_key), num_blocks as u32)
    }

    /// Keyed digests of the whole-block prefixes, shortest first.
    fn prefix_digests<'a>(&'a self, tokens: &'a [u32]) -> impl Iterator<Item = [u8; 32]> + 'a {
        let chain = |digest: &mut [u8; 32], block: &[u32]| {
            *digest = chain_digest(&self.digest_key, digest, block);
            Some(*digest)
        };
        tokens.chunks_exact(self.config.block_size as usize).scan(self.digest_key, chain)
    }
}

/// Keyed digest of a prefix by that of the prefix one block shorter: `MAC(key, previous || tokens)`.
pub(super) fn chain_digest(key: &[u8; 32], previous: &[u8; 32], block: &[u32]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(previous);
    for token in block {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Place of a scope in a chain.
fn rank(scope: &ShareScope) -> u8 {
    match scope {
        ShareScope::Public(_) => 0,
        ShareScope::Group(_) => 1,
        ShareScope::Private(_) | ShareScope::Salted { .. } => 2,
    }
}
