//! Undoing splits that serve nobody any more.
//!
//! A match that ends inside a node splits it, and an eviction may leave a branching point with one child. Such a *seam*,
//! a node with a single child, costs a node's memory and a step of every walk. It is needed while the node is pinned,
//! or used without its child: then the two have different times, and go at different times. Otherwise it is merged
//! with its child, by a later writer, and only when seams are a quarter of the nodes: the same prompts tend to be
//! matched to the same point again.

use super::PrefixIndex;
use super::namespace::Namespace;
use super::order::Order;
use super::tree::{NO_NODE, Node, Tree};
use crate::sync::Ordering;
use std::collections::VecDeque;

/// Seams looked at by one call, besides as many as it may have made.
const MIN_LOOKED_AT: usize = 4;

/// Nodes that had a single child when they were noted; each once.
#[derive(Default)]
pub(super) struct Seams(VecDeque<u32>);

impl Seams {
    pub(super) fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<u32>()
    }
}

impl Tree {
    /// Notes a node that may have been left with a single child.
    pub(super) fn note_seam(&mut self, id: u32) {
        let node = self.node_mut(id);
        if node.num_children == 1 && !node.blocks.is_empty() && !std::mem::replace(&mut node.is_seam, true) {
            self.seams.0.push_back(id);
        }
    }

    /// The next noted node, if they are many.
    fn next_seam(&mut self) -> Option<u32> {
        if self.seams.0.len() * 4 <= self.num_children() {
            return None;
        }
        let id = self.seams.0.pop_front()?;
        self.node_mut(id).is_seam = false;
        Some(id)
    }

    /// The single child of a node that is a seam.
    fn child_of_seam(&self, id: u32) -> Option<u32> {
        let is_seam = self.is_live(id) && self.node(id).num_children == 1;
        is_seam.then(|| self.children_of(id).next()).flatten()
    }

    /// Gives a node's blocks to its only child, which takes its place. Neither is held.
    fn merge(&mut self, id: u32, child: u32) {
        self.withdraw(id);
        self.withdraw(child);
        self.unlink_child(child);
        self.unlink_child(id);
        let Node { parent, hash, .. } = *self.node(id);
        let (fence, is_referenced) = (&self.node(id).fence, &self.node(id).is_referenced);
        // Relaxed: under the exclusive lock.
        let (fence, is_referenced) = (fence.load(Ordering::Relaxed), is_referenced.load(Ordering::Relaxed));
        let mut blocks = std::mem::take(&mut self.node_mut(id).blocks);
        self.vacate(id);
        let node = self.node_mut(child);
        blocks.reserve_exact(node.blocks.len());
        blocks.append(&mut node.blocks);
        node.set_blocks(blocks);
        (node.parent, node.hash) = (parent, hash);
        node.fence.fetch_max(fence, Ordering::Relaxed);
        node.is_referenced.fetch_or(is_referenced, Ordering::Relaxed);
        self.link_child(child);
        self.enter(child);
        debug_assert_ne!(parent, NO_NODE, "a root has no blocks and is no seam");
    }
}

impl PrefixIndex {
    /// Merges some of the seams, if there are many, after a change that may have made `num_made`. The caller has both
    /// locks.
    pub(super) fn merge_seams(&self, tree: &mut Tree, order: &mut Order, num_made: usize) {
        for _ in 0..MIN_LOOKED_AT + num_made {
            let Some(id) = tree.next_seam() else { return };
            let Some(child) = tree.child_of_seam(id) else { continue };
            if tree.holds(id) > 0 || !order.go_together(id, child) {
                tree.note_seam(id);
                continue;
            }
            order.leave(id);
            tree.merge(id, child);
        }
    }

    /// [`PrefixIndex::merge_seams`] for a caller that has the tree's lock only.
    pub(super) fn merge_seams_in(&self, namespace: &Namespace, tree: &mut Tree, num_made: usize) {
        self.merge_seams(tree, &mut namespace.lock_order(), num_made);
    }
}
