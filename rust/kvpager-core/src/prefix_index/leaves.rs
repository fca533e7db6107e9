//! Inserting one block below each of many pins, as a step of decodes fills them: under one hold of the tree's lock, and
//! with one call of the pool.
//!
//! That is for pins that have a leaf for themselves, which nearly all running sequences have: nobody else's content can
//! be below them, so there is nothing to look for, and the leaf grows in place.

use super::PrefixIndex;
use super::chain::ChainPin;
use super::namespace::{Namespace, TreeGuard};
use super::pin::Pin;
use crate::error::Result;
use crate::ids::{BlockHandle, NamespaceId};

/// The tree of a namespace, locked. To be held for at most `MAX_PIECE` blocks.
pub(crate) struct Leaves<'a> {
    index: &'a PrefixIndex,
    id: NamespaceId,
    namespace: &'a Namespace,
    tree: TreeGuard<'a>,
}

impl PrefixIndex {
    /// To lengthen leaves of a namespace. `None` if blocks have to be inserted one by one: `learned` notes each of them.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown namespace.
    pub(crate) fn leaves(&self, namespace: NamespaceId) -> Result<Option<Leaves<'_>>> {
        if self.learned.is_some() || self.has_homes() {
            return Ok(None);
        }
        let id = namespace;
        let namespace = self.namespaces.get(id)?;
        Ok(Some(Leaves { index: self, id, namespace, tree: namespace.write_tree() }))
    }
}

impl Leaves<'_> {
    /// Whether a pin has a leaf of the tree for itself.
    pub(crate) fn has(&self, pin: &ChainPin) -> bool {
        pin.own_part().is_some_and(|pin| self.has_part(pin))
    }

    fn has_part(&self, pin: &Pin) -> bool {
        let is_of_it = std::ptr::eq(self.index, &raw const *pin.index) && pin.namespace == self.id;
        is_of_it && self.tree.is_own_leaf(pin.node)
    }

    /// Makes exclusively held blocks the index's. False, and nothing has changed, if one of them is not.
    pub(crate) fn take(&self, blocks: &[BlockHandle]) -> bool {
        self.index.pool.index_blocks(blocks).is_ok()
    }

    /// Appends a block that was taken, written with `tokens`, to the leaf of a pin that has one.
    pub(crate) fn append(&mut self, pin: &mut ChainPin, tokens: &[u32], block: BlockHandle) {
        let Some(pin) = pin.own_part_mut() else { return };
        // SAFETY: `tree` is borrowed exclusively from its lock; the pool has accepted the block as indexed, which it does
        // once, so no tree has it.
        unsafe { self.index.arena().write_rows(block.id(), 1, tokens) };
        if let Some(events) = self.index.events() {
            events.stored((self.id, self.namespace), &self.tree, pin.node, &[block], tokens);
        }
        self.tree.append(pin.node, &[block]);
        pin.num_blocks += 1;
    }
}
