//! Which nodes are held, and in which order the others may go.
//!
//! A list has unheld nodes, oldest release first; the root is in none. A path is released deepest node first,
//! so with one list (`lru`) a node always lies nearer to the old end than its parent: the oldest node of the
//! list is a leaf, and eviction needs no search. A node that becomes a leaf needs no insertion either, since
//! it has its place.
//!
//! With one list a class (`learned`), the oldest of a class may have children in other lists. It is *parked*
//! then: taken out, and put back at the old end when its last child goes.

use crate::block_pool::StepEpoch;
use std::collections::VecDeque;

const NO_NODE: u32 = u32::MAX;

/// What the order knows of one node.
#[derive(Clone, Copy, Debug)]
struct Slot {
    parent: u32,
    /// Pins on the node, plus its held children.
    holds: u32,
    num_blocks: u32,
    /// Neighbour released after this one.
    newer: u32,
    /// Neighbour released before this one.
    older: u32,
    /// The list it goes to.
    class: u8,
    /// Whether it is in that list: not if it is held or parked.
    is_linked: bool,
    /// Time of the last release.
    stamp: u64,
}

impl Slot {
    fn new(parent: u32, holds: u32, num_blocks: u32) -> Self {
        let (newer, older) = (NO_NODE, NO_NODE);
        Self { parent, holds, num_blocks, newer, older, class: 0, is_linked: false, stamp: 0 }
    }
}

/// Ends of a list.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

/// Holds and recency of one namespace.
pub(super) struct Order {
    slots: Vec<Slot>,
    lists: Box<[List]>,
    /// Nodes released at a stamp or after may be read by steps up to the epoch.
    fences: VecDeque<(u64, StepEpoch)>,
    /// Whether the evictor knows that this namespace has something to give.
    pub(super) is_queued: bool,
}

impl Order {
    /// An order with this many lists.
    pub(super) fn new(num_classes: usize) -> Self {
        let lists = vec![List { oldest: NO_NODE, newest: NO_NODE }; num_classes].into_boxed_slice();
        Self { slots: vec![Slot::new(NO_NODE, 0, 0)], lists, fences: VecDeque::new(), is_queued: false }
    }

    #[inline]
    fn slot(&self, id: u32) -> &Slot {
        &self.slots[id as usize]
    }

    /// Pins on the node, plus its held children.
    pub(super) fn holds(&self, id: u32) -> u32 {
        self.slot(id).holds
    }

    /// Bytes of the slots.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    /// Blocks from `id` up to the nearest held ancestor: what a first pin has to take capacity for.
    pub(super) fn unheld_blocks(&self, id: u32) -> u32 {
        let (mut id, mut total) = (id, 0);
        while id != NO_NODE && self.slot(id).holds == 0 {
            total += self.slot(id).num_blocks;
            id = self.slot(id).parent;
        }
        total
    }

    /// Adds a pin. The path up to the nearest held ancestor becomes held.
    pub(super) fn hold(&mut self, id: u32) {
        let mut id = id;
        loop {
            self.slots[id as usize].holds += 1;
            let Slot { holds, parent, .. } = *self.slot(id);
            if holds > 1 || parent == NO_NODE {
                return;
            }
            if self.slot(id).is_linked {
                self.unlink(id);
            }
            id = parent;
        }
    }

    /// Takes a pin away and returns how many blocks are unheld by that; they enter their lists at `stamp`.
    /// `class_at` gives the class of a node by how many of the released blocks lie below its end.
    pub(super) fn release(&mut self, id: u32, stamp: u64, class_at: impl Fn(u32) -> u8) -> u32 {
        let (mut id, mut total) = (id, 0);
        loop {
            self.slots[id as usize].holds -= 1;
            let Slot { holds, parent, num_blocks, .. } = *self.slot(id);
            if holds > 0 || parent == NO_NODE {
                return total;
            }
            let slot = &mut self.slots[id as usize];
            slot.stamp = stamp;
            slot.class = class_at(total);
            self.link_newest(id);
            total += num_blocks;
            id = parent;
        }
    }

    /// Takes away a pin of a node that stays held by a child.
    pub(super) fn release_inner(&mut self, id: u32) {
        self.slots[id as usize].holds -= 1;
        debug_assert!(self.slot(id).holds > 0, "a held child holds it");
    }

    /// Enters a new node below a pinned one and moves that pin down to it.
    pub(super) fn add_pinned_child(&mut self, id: u32, parent: u32, num_blocks: u32) {
        // The parent loses the pin and gains a held child: its count stays.
        debug_assert!(self.slot(parent).holds > 0);
        self.put(id, Slot::new(parent, 1, num_blocks));
    }

    /// Enters a new root.
    pub(super) fn add_root(&mut self, id: u32) {
        self.put(id, Slot::new(NO_NODE, 0, 0));
    }

    /// Lists.
    pub(super) fn num_classes(&self) -> usize {
        self.lists.len()
    }

    /// Time of a node's last release.
    pub(super) fn stamp(&self, id: u32) -> u64 {
        self.slot(id).stamp
    }

    /// A held leaf grew by this many blocks.
    pub(super) fn grow(&mut self, id: u32, num_blocks: u32) {
        self.slots[id as usize].num_blocks += num_blocks;
    }

    /// `head` took the first `num_blocks` of `id` and became its parent.
    pub(super) fn split(&mut self, id: u32, head: u32, num_blocks: u32) {
        let Slot { parent, holds, stamp, class, is_linked, .. } = *self.slot(id);
        self.put(head, Slot { stamp, class, ..Slot::new(parent, u32::from(holds > 0), num_blocks) });
        let node = &mut self.slots[id as usize];
        node.parent = head;
        node.num_blocks -= num_blocks;
        if is_linked {
            self.link_after(head, id);
        }
    }

    fn put(&mut self, id: u32, slot: Slot) {
        match self.slots.get_mut(id as usize) {
            Some(place) => *place = slot,
            None => {
                debug_assert_eq!(id as usize, self.slots.len(), "ids come from the tree, in order");
                self.slots.push(slot);
            }
        }
    }

    /// The oldest node of a class and its stamp.
    pub(super) fn oldest(&self, class: usize) -> Option<(u32, u64)> {
        let id = self.lists[class].oldest;
        (id != NO_NODE).then(|| (id, self.slot(id).stamp))
    }

    /// The newest node of a class, then older ones.
    pub(super) fn newest_first(&self, class: usize) -> impl Iterator<Item = (u32, u64)> + '_ {
        let first = self.lists[class].newest;
        std::iter::successors((first != NO_NODE).then_some(first), |&id| {
            let older = self.slot(id).older;
            (older != NO_NODE).then_some(older)
        })
        .map(|id| (id, self.slot(id).stamp))
    }

    /// Whether any list has a node.
    pub(super) fn is_empty(&self) -> bool {
        self.lists.iter().all(|list| list.oldest == NO_NODE)
    }

    /// Eviction took blocks from a leaf; `is_removed` if it took the last.
    pub(super) fn shrink(&mut self, id: u32, num_blocks: u32, is_removed: bool) {
        self.slots[id as usize].num_blocks -= num_blocks;
        if is_removed {
            self.unlink(id);
        }
    }

    /// Takes the oldest node of its class out, because it has children.
    pub(super) fn park(&mut self, id: u32) {
        self.unlink(id);
    }

    /// Puts a parked node back that has become a leaf. Returns its class.
    pub(super) fn unpark(&mut self, id: u32) -> usize {
        let Slot { parent, holds, class, is_linked, .. } = *self.slot(id);
        if holds == 0 && !is_linked && parent != NO_NODE {
            self.link_oldest(id);
        }
        class as usize
    }

    /// Steps that were open at the release with this stamp may still read what it released.
    pub(super) fn fence(&mut self, stamp: u64, epoch: StepEpoch) {
        self.fences.push_back((stamp, epoch));
    }

    /// Whether open steps may still read what was released at `stamp`. Exact: while one of the epochs is open,
    /// everything released after it is fenced too.
    pub(super) fn is_fenced(&mut self, stamp: u64, is_closed: impl Fn(StepEpoch) -> bool) -> bool {
        while let Some(&(_, epoch)) = self.fences.front() {
            if !is_closed(epoch) {
                break;
            }
            self.fences.pop_front();
        }
        self.fences.front().is_some_and(|&(start, _)| stamp >= start)
    }

    fn link_newest(&mut self, id: u32) {
        let list = &mut self.lists[self.slots[id as usize].class as usize];
        let before = std::mem::replace(&mut list.newest, id);
        if before == NO_NODE {
            list.oldest = id;
        } else {
            self.slots[before as usize].newer = id;
        }
        self.set_neighbours(id, before, NO_NODE);
    }

    fn link_oldest(&mut self, id: u32) {
        let list = &mut self.lists[self.slots[id as usize].class as usize];
        let after = std::mem::replace(&mut list.oldest, id);
        if after == NO_NODE {
            list.newest = id;
        } else {
            self.slots[after as usize].older = id;
        }
        self.set_neighbours(id, NO_NODE, after);
    }

    /// Links `id` as the next newer one of `older`, which is of the same class.
    fn link_after(&mut self, id: u32, older: u32) {
        let Slot { newer, class, .. } = *self.slot(older);
        self.slots[older as usize].newer = id;
        if newer == NO_NODE {
            self.lists[class as usize].newest = id;
        } else {
            self.slots[newer as usize].older = id;
        }
        self.set_neighbours(id, older, newer);
    }

    fn set_neighbours(&mut self, id: u32, older: u32, newer: u32) {
        let slot = &mut self.slots[id as usize];
        slot.older = older;
        slot.newer = newer;
        slot.is_linked = true;
    }

    fn unlink(&mut self, id: u32) {
        let Slot { newer, older, class, .. } = *self.slot(id);
        let list = &mut self.lists[class as usize];
        if newer == NO_NODE {
            list.newest = older;
        } else {
            self.slots[newer as usize].older = older;
        }
        if older == NO_NODE {
            list.oldest = newer;
        } else {
            self.slots[older as usize].newer = newer;
        }
        self.slots[id as usize].is_linked = false;
    }

    /// Whether a node is in a list.
    pub(super) fn is_linked(&self, id: u32) -> bool {
        self.slot(id).is_linked
    }

    /// The lists, oldest first, as (node, stamp).
    pub(super) fn lists(&self) -> Vec<Vec<(u32, u64)>> {
        let list = |ends: &List| {
            let mut found = Vec::new();
            let mut id = ends.oldest;
            while id != NO_NODE && found.len() <= self.slots.len() {
                found.push((id, self.slot(id).stamp));
                id = self.slot(id).newer;
            }
            found
        };
        self.lists.iter().map(list).collect()
    }

    /// (parent, holds, blocks) of a node.
    pub(super) fn facts(&self, id: u32) -> (u32, u32, u32) {
        let slot = self.slot(id);
        (slot.parent, slot.holds, slot.num_blocks)
    }
}
