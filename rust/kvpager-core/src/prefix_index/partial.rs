//! Reuse of a part of a block: the leading tokens of a block that goes on differently.
//!
//! A match ends at whole blocks. The next block of a prompt may still begin as a resident one does, and the KV of
//! those tokens is the same. Blocks that are shared are immutable, so the reader takes a copy: it is told the block
//! and how many of its tokens agree, with a pin that keeps the block until the copy is made. Only what the chain of
//! the match may see is looked at, so a foreign block is as absent as in a match of whole blocks.

use super::namespace::Namespace;
use super::roots::PrefixKey;
use super::tree::{self, Tree, View};
use super::{ChainPin, Pin, PrefixIndex, ScopeChain};
use crate::error::Result;
use crate::ids::{BlockHandle, NamespaceId};
use crate::sync::Ordering;
use std::sync::Arc;

/// Children of a node that are looked at, those added last first: bounds the work under a namespace's lock.
const MAX_CHILDREN: usize = 64;

/// A block whose leading tokens can be copied.
#[derive(Debug)]
pub struct PartialBlock {
    /// Keeps the block.
    pub pin: Pin,
    /// The block to copy from.
    pub block: BlockHandle,
    /// How many of its leading tokens agree; at least 1.
    pub num_tokens: usize,
}

/// Where a match may go on.
#[derive(Clone, Copy)]
enum Place {
    /// Below a pinned node, as long as the namespace was not purged since.
    Node { id: u32, num_purges: u32 },
    /// From the start.
    Root,
    /// Where a prefix that other namespaces keep is continued.
    Continuation(PrefixKey),
}

impl Place {
    fn of(pin: &Pin) -> Self {
        Self::Node { id: pin.node, num_purges: pin.num_purges }
    }

    /// The node, in a tree whose lock the caller has.
    fn find(self, namespace: &Namespace, tree: &Tree) -> Option<u32> {
        match self {
            // Relaxed: changes under the tree's exclusive lock only.
            Self::Node { id, num_purges } => {
                (namespace.num_purges.load(Ordering::Relaxed) == num_purges).then_some(id)
            }
            Self::Root => Some(tree.root()),
            Self::Continuation(key) => tree.continuation(&key),
        }
    }
}

impl Tree {
    /// The child of `parent` whose first block has the longest common beginning with `tokens`, and how long it is.
    fn closest_child(&self, at: &View<'_>, parent: u32, tokens: &[u32]) -> Option<(u32, usize)> {
        let common = |id: u32| {
            let row = at.row(self.node(id).blocks[0]);
            row.iter().zip(tokens).take_while(|(a, b)| a == b).count()
        };
        let children = self.children_of(parent).take(MAX_CHILDREN).map(|id| (id, common(id)));
        children.fold(None, |best, next| match best {
            Some((_, length)) if length >= next.1 => best,
            _ => (next.1 > 0).then_some(next),
        })
    }
}

impl PrefixIndex {
    /// The block that follows a match and begins most like `tokens`, which follow it in the prompt: without the
    /// prompt's last token, which is always computed. `None` if none begins like them. Of a node's children, the 64
    /// that were added last are looked at.
    ///
    /// # Errors
    /// `OutOfBlocks` or `OverQuota` if there is no capacity to hold the block: nothing is pinned. `InvalidArgument`
    /// if the namespace was given to another salt.
    pub fn match_partial(self: &Arc<Self>, pin: &Pin, tokens: &[u32]) -> Result<Option<PartialBlock>> {
        self.check_own(pin)?;
        self.check_has_blocks()?;
        self.pin_closest(&[(pin.namespace, Place::of(pin))], tokens)
    }

    /// [`PrefixIndex::match_partial`] below a match of `chain`, in each namespace in which it may go on.
    ///
    /// # Errors
    /// As [`PrefixIndex::match_partial`].
    pub fn match_partial_chain(
        self: &Arc<Self>,
        chain: &ScopeChain,
        pin: &ChainPin,
        tokens: &[u32],
    ) -> Result<Option<PartialBlock>> {
        self.check_has_blocks()?;
        let mut places: Vec<_> = match pin.end() {
            Some(part) => vec![(part.namespace, Place::of(part))],
            None => chain.namespaces().iter().map(|&id| (id, Place::Root)).collect(),
        };
        places.extend(pin.key().map(|key| (chain.last(), Place::Continuation(key))));
        self.pin_closest(&places, tokens)
    }

    fn pin_closest(
        self: &Arc<Self>,
        places: &[(NamespaceId, Place)],
        tokens: &[u32],
    ) -> Result<Option<PartialBlock>> {
        let mut best: Option<(usize, (NamespaceId, Place))> = None;
        for &(id, place) in places {
            let namespace = self.namespaces.get(id)?;
            let tree = namespace.read_tree();
            self.check_same(id, namespace)?;
            let closest =
                place.find(namespace, &tree).and_then(|node| tree.closest_child(&self.view(), node, tokens));
            let length = closest.map_or(0, |(_, length)| length);
            if length > best.map_or(0, |(length, _)| length) {
                best = Some((length, (id, place)));
            }
        }
        best.map_or(Ok(None), |(_, (id, place))| self.pin_first_block(id, place, tokens))
    }

    /// Pins the first block of the closest child. The rest of the child's edge is split off: it may go meanwhile.
    fn pin_first_block(
        self: &Arc<Self>,
        id: NamespaceId,
        place: Place,
        tokens: &[u32],
    ) -> Result<Option<PartialBlock>> {
        let namespace = self.namespaces.get(id)?;
        let mut tree = namespace.write_tree();
        self.merge_seams_in(namespace, &mut tree, 1);
        let closest =
            place.find(namespace, &tree).and_then(|node| tree.closest_child(&self.view(), node, tokens));
        let Some((mut node, num_tokens)) = closest else { return Ok(None) };
        let block = tree.node(node).blocks[0];
        let is_partial = tree.num_blocks(node) > 1;
        if is_partial {
            let place = tree::Place { node, offset: 1, is_partial, num_blocks: 1 };
            node = self.split(namespace, &mut tree, place);
        }
        let held = self.hold((id, namespace), &tree, node)?;
        drop(tree);
        Ok(Some(PartialBlock { pin: self.pin(id, held, &[], 1)?, block, num_tokens }))
    }
}
