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

/// A pinned prefix, part by part: one pin for each namespace that it runs through.
#[derive(Debug)]
pub struct ChainPin {
    /// The parts; each covers the blocks from where the one before ends.
    parts: Vec<Pin>,
    /// Where blocks are inserted.
    last: NamespaceId,
    /// The prefix down to the last part's start, if that part is not in `last` yet.
    key: PrefixKey,
}

impl ChainPin {
    /// Blocks of the pinned prefix.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.parts.iter().map(Pin::num_blocks).sum()
    }

    /// (namespace, blocks) of each part.
    pub fn parts(&self) -> impl Iterator<Item = (NamespaceId, usize)> + '_ {
        self.parts.iter().map(|pin| (pin.namespace(), pin.num_blocks()))
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
        if known.windows(2).any(|pair| rank(&pair[0].scope) >= rank(&pair[1].scope)) {
            return Err(Error::invalid("a chain goes from public to group to private, each at most once"));
        }
        if matches!(last.scope, ShareScope::Public(_)) {
            return Err(Error::invalid(
                "a chain ends in a group or a private scope: only publish inserts publicly",
            ));
        }
        if known.iter().any(|namespace| namespace.fingerprint != last.fingerprint) {
            return Err(Error::invalid("the namespaces of a chain have different fingerprints"));
        }
        Ok(ScopeChain { namespaces: namespaces.to_vec() })
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
        let start = blocks.len();
        let matched = self.match_parts(chain, &tokens[..tokens.len().saturating_sub(1)], blocks);
        if matched.is_err() {
            blocks.truncate(start);
        }
        matched
    }

    fn match_parts(
        self: &Arc<Self>,
        chain: &ScopeChain,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<ChainPin> {
        let before = blocks.len();
        let block_size = self.config.block_size as usize;
        let last = chain.namespaces[chain.namespaces.len() - 1];
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
        let key = (self.prefix_digests(&tokens[..covered * block_size]).last(), covered as u32);
        Ok(ChainPin { parts, last, key: (key.0.unwrap_or(self.digest_key), key.1) })
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

    /// Inserts whole blocks below a chain's match, in its most private namespace.
    ///
    /// # Errors
    /// As [`PrefixIndex::extend`].
    pub fn extend_chain(
        self: &Arc<Self>,
        pin: &mut ChainPin,
        tokens: &[u32],
        blocks: &mut [BlockHandle],
    ) -> Result<Extended> {
        if pin.parts.last().is_none_or(|part| part.namespace() != pin.last) {
            let part = match pin.num_blocks() {
                0 => self.root(pin.last)?,
                _ => self.continuation_pin(pin.last, pin.key)?,
            };
            pin.parts.push(part);
        }
        match pin.parts.last_mut() {
            Some(part) => self.extend(part, tokens, blocks),
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
        if !matches!(self.namespaces.get(pin.namespace)?.scope, ShareScope::Public(_)) {
            return Err(Error::invalid(format!("namespace {} is not public", pin.namespace)));
        }
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
