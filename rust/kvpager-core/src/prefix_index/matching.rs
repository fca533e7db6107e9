//! Looking prefixes up and pinning them.

use super::holding::PartlyHeld;
use super::interning::{is_current, unknown};
use super::learned::History;
use super::namespace::Namespace;
use super::roots::PrefixKey;
use super::tree::{Place, Tree};
use super::{EvictionPolicy, Learned, Pin, PrefixIndex, lock};
use crate::error::Result;
use crate::ids::{BlockHandle, NamespaceId};
use crate::sync::Ordering;
use std::sync::Arc;

impl PrefixIndex {
    /// Pins the longest cached prefix of `tokens` and appends its blocks to `blocks`, first to last.
    ///
    /// At most `tokens.len() - 1` tokens are matched, in whole blocks: the last token is always computed,
    /// since its logits are needed. A prefix that only another namespace has is absent here.
    ///
    /// # Errors
    /// `OutOfBlocks` or `OverQuota` if there is no capacity to hold the path: nothing is pinned, `blocks` is
    /// as it was. `InvalidArgument` for an unknown namespace; `WrongState` if no layer group of the index's model sees all
    /// tokens: its scheduler alone knows what can be used.
    ///
    /// # Concurrency
    /// Runs beside other matches; waits for a writer of the same namespace only.
    pub fn match_prefix(
        self: &Arc<Self>,
        namespace: NamespaceId,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<Pin> {
        self.check_has_blocks()?;
        self.match_from(namespace, None, self.without_last(tokens), blocks)
    }

    /// Like [`PrefixIndex::match_prefix`], but matches all whole blocks of `tokens`, the last one too: for
    /// replays and for callers that append tokens anyway.
    ///
    /// # Errors
    /// As [`PrefixIndex::match_prefix`].
    pub fn match_whole(
        self: &Arc<Self>,
        namespace: NamespaceId,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<Pin> {
        self.check_has_blocks()?;
        self.match_from(namespace, None, tokens, blocks)
    }

    /// How many tokens [`PrefixIndex::match_prefix`] would find now. Pins and touches nothing.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown namespace.
    pub fn peek_prefix(&self, namespace: NamespaceId, tokens: &[u32]) -> Result<usize> {
        let known = self.namespaces.get(namespace)?;
        let tree = known.read_tree();
        self.check_same(namespace, known)?;
        let matched = tree.count_matched(&self.view(), tree.root(), self.without_last(tokens));
        Ok(matched * self.config.block_size as usize)
    }

    /// The blocks that a match of whole blocks would find in one namespace now. Pins and touches nothing.
    pub(crate) fn resident_blocks(
        &self,
        namespace: NamespaceId,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<()> {
        let known = self.namespaces.get(namespace)?;
        let tree = known.read_tree();
        self.check_same(namespace, known)?;
        tree.walk(&self.view(), tree.root(), tokens, blocks);
        Ok(())
    }

    /// A pin of the empty prefix.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown namespace.
    pub fn root(self: &Arc<Self>, namespace: NamespaceId) -> Result<Pin> {
        let known = self.namespaces.get(namespace)?;
        let tree = known.read_tree();
        let held = self.hold((namespace, known), &tree, tree.root())?;
        self.pin(namespace, held, &[], 0)
    }

    /// A pin of the root of what continues a prefix in this namespace.
    pub(super) fn continuation_pin(self: &Arc<Self>, namespace: NamespaceId, key: PrefixKey) -> Result<Pin> {
        let known = self.namespaces.get(namespace)?;
        let mut tree = known.write_tree();
        let root = tree.make_continuation(&mut known.lock_order(), key);
        let held = self.hold((namespace, known), &tree, root)?;
        self.pin(namespace, held, &[], 0)
    }

    pub(super) fn without_last<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        &tokens[..tokens.len().saturating_sub(1)]
    }

    /// Matches all whole blocks of `tokens` below a root: the namespace's, or that of a continuation.
    pub(super) fn match_from(
        self: &Arc<Self>,
        id: NamespaceId,
        key: Option<&PrefixKey>,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<Pin> {
        let namespace = self.namespaces.get(id)?;
        let before = blocks.len();
        let found = self.match_shared((id, namespace), key, tokens, blocks).unwrap_or_else(|| {
            blocks.truncate(before);
            self.match_exclusive((id, namespace), key, tokens, blocks)
        });
        match found {
            Ok((held, num_blocks)) => self.pin(id, held, tokens, num_blocks),
            Err(error) => {
                blocks.truncate(before);
                Err(error)
            }
        }
    }

    /// Matches under the shared lock. `None` if a node must be split.
    fn match_shared(
        &self,
        (id, namespace): (NamespaceId, &Namespace),
        key: Option<&PrefixKey>,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Option<Result<(Held, usize)>> {
        let tree = namespace.read_tree();
        let place = tree.walk(&self.view(), start(&tree, key), tokens, blocks);
        if place.is_partial {
            return None;
        }
        // The tree's lock is still held: nobody can evict the node before it is pinned.
        Some(self.hold((id, namespace), &tree, place.node).map(|held| (held, place.num_blocks)))
    }

    /// Matches under the exclusive lock, and splits the node inside which the match ends.
    fn match_exclusive(
        &self,
        (id, namespace): (NamespaceId, &Namespace),
        key: Option<&PrefixKey>,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<(Held, usize)> {
        let mut tree = namespace.write_tree();
        // Before the path is held, and so cannot be merged.
        self.merge_seams_in(namespace, &mut tree, 1);
        let view = self.view();
        let place = tree.walk(&view, start(&tree, key), tokens, blocks);
        let node = if place.is_partial { self.split(namespace, &mut tree, place) } else { place.node };
        self.hold((id, namespace), &tree, node).map(|held| (held, place.num_blocks))
    }

    /// Splits the node inside which a walk ended; returns the head.
    pub(super) fn split(&self, namespace: &Namespace, tree: &mut Tree, place: Place) -> u32 {
        let head = tree.split(&self.view(), place.node, place.offset);
        namespace.lock_order().split(place.node, head);
        head
    }

    /// Pins a node of a tree whose lock the caller has.
    pub(super) fn hold(
        &self,
        (id, namespace): (NamespaceId, &Namespace),
        tree: &Tree,
        node: u32,
    ) -> Result<Held> {
        self.check_same(id, namespace)?;
        if !tree.hold_again(node) {
            self.hold_first(namespace, tree, node)?;
        }
        // Relaxed: changes under the tree's exclusive lock only.
        Ok(Held { node, num_purges: namespace.num_purges.load(Ordering::Relaxed) })
    }

    /// Pins a node that was not held a moment ago: capacity first, then the holds.
    fn hold_first(&self, namespace: &Namespace, tree: &Tree, node: u32) -> Result<()> {
        let take = |num_blocks: u32| match num_blocks {
            0 => Ok(()),
            _ => self.tree_pool().hold_cached(namespace.account, num_blocks),
        };
        let taken = tree.unheld_blocks(node);
        take(taken)?;
        let held = if self.config.eviction == EvictionPolicy::Clock {
            tree.hold_from_above(node, taken, take)
        } else {
            hold_in_order(namespace, tree, node, taken, take)
        };
        match held {
            Ok(left) => {
                self.give_back(namespace, tree, node, left);
                Ok(())
            }
            Err(PartlyHeld { node: reached, left, error }) => {
                let unheld = reached.map_or(0, |reached| tree.release_path(reached, |id, _| tree.touch(id)));
                self.give_back(namespace, tree, reached.unwrap_or(node), unheld + left);
                Err(error)
            }
        }
    }

    /// Gives the capacity of blocks that are no longer held back: those above `node`, as far as there are any.
    fn give_back(&self, namespace: &Namespace, tree: &Tree, node: u32, num_blocks: u32) {
        if num_blocks == 0 {
            return;
        }
        let given = self.tree_pool().unhold_cached(namespace.account, num_blocks);
        // No step reads a home, but what is attached to it.
        let given = given.map(|epoch| if self.has_homes() { self.pool.newest_open_step() } else { epoch });
        match given {
            Ok(None) => {}
            Ok(Some(epoch)) => tree.fence(node, num_blocks, epoch),
            Err(error) => debug_assert!(false, "what a pin held can be given back: {error}"),
        }
    }

    /// Whether open steps may still read a node's blocks.
    pub(super) fn is_fenced(&self, tree: &Tree, node: u32) -> bool {
        tree.is_fenced(node, |epoch| self.pool.epoch_closed(epoch))
    }

    /// Whether the namespace was not given to another salt before its tree was locked.
    pub(super) fn check_same(&self, id: NamespaceId, namespace: &Namespace) -> Result<()> {
        if is_current(id, namespace) { Ok(()) } else { Err(unknown(id)) }
    }

    pub(super) fn pin(
        self: &Arc<Self>,
        namespace: NamespaceId,
        held: Held,
        tokens: &[u32],
        num_blocks: usize,
    ) -> Result<Pin> {
        let Held { node, num_purges } = held;
        let history =
            if tokens.is_empty() { History::default() } else { self.history(namespace, tokens, num_blocks)? };
        let (index, num_blocks) = (Arc::clone(self), num_blocks as u32);
        Ok(Pin { index, namespace, node, num_blocks, num_purges, is_own_node: false, history })
    }

    /// What the `learned` policy makes of a prompt; nothing under another policy.
    fn history(&self, id: NamespaceId, tokens: &[u32], num_matched: usize) -> Result<History> {
        let (Some(learned), Some(learner)) = (&self.learned, &self.namespaces.get(id)?.learner) else {
            return Ok(History::default());
        };
        let chain = |digest: &mut u64, block: &[u32]| {
            *digest = learned.hash.chain(*digest, block);
            Some(*digest)
        };
        let start = Learned::start(id);
        let blocks = tokens.chunks_exact(self.config.block_size as usize);
        let digests: Vec<u64> = blocks.scan(start, chain).collect();
        let digest = num_matched.checked_sub(1).map_or(start, |last| digests[last]);
        Ok(lock(learner).look_up(&digests, tokens.len(), digest))
    }

    /// Takes a pin away. The last one on a path gives its capacity back.
    pub(super) fn unpin(&self, pin: &Pin) {
        let Ok(namespace) = self.namespaces.get(pin.namespace) else { return };
        let time = namespace.learner.as_deref().map(|learner| {
            let mut learner = lock(learner);
            let now = learner.now();
            learner.finish(&pin.history, pin.num_blocks);
            now
        });
        let tree = namespace.read_tree();
        if tree.release_again(pin.node) {
            return;
        }
        let num_blocks = if self.config.eviction == EvictionPolicy::Clock {
            tree.release_path(pin.node, |id, _| tree.touch(id))
        } else {
            let mut order = namespace.lock_order();
            let stamp = time.unwrap_or_else(|| self.tick());
            // A pin of a part of a block counts one block, whatever lies above.
            let class = |below| pin.history.class_at(pin.num_blocks.saturating_sub(below).max(1));
            tree.release_path(pin.node, |id, below| order.enter(id, stamp, class(below)))
        };
        if num_blocks == 0 {
            return;
        }
        self.give_back(namespace, &tree, pin.node, num_blocks);
        // Relaxed: the tree's lock orders it with whoever clears it; of those who set it, one announces. The load spares
        // most releases the exchange.
        if !namespace.is_queued.load(Ordering::Relaxed) && !namespace.is_queued.swap(true, Ordering::Relaxed)
        {
            self.evictor.announce(namespace.account, pin.namespace);
        }
        // Relaxed: changes under the tree's exclusive lock only.
        let is_purged = namespace.num_purges.load(Ordering::Relaxed) != pin.num_purges;
        drop(tree);
        if is_purged {
            self.sweep_purged(namespace, pin);
        }
    }
}

/// A node that was just pinned.
pub(super) struct Held {
    node: u32,
    num_purges: u32,
}

/// [`Tree::hold_from_above`] for policies with lists, under the order's lock. The pool's counters are not touched under
/// it, unless another release came between.
fn hold_in_order(
    namespace: &Namespace,
    tree: &Tree,
    node: u32,
    taken: u32,
    take: impl FnOnce(u32) -> Result<()>,
) -> std::result::Result<u32, PartlyHeld> {
    let mut order = namespace.lock_order();
    let needed = tree.unheld_blocks(node);
    if let Err(error) = take(needed.saturating_sub(taken)) {
        return Err(PartlyHeld { node: None, left: taken, error });
    }
    tree.hold_path(node, |id| order.leave(id));
    Ok(taken.saturating_sub(needed))
}

/// Where a walk starts.
fn start(tree: &Tree, key: Option<&PrefixKey>) -> u32 {
    key.and_then(|key| tree.continuation(key)).unwrap_or(tree.root())
}
