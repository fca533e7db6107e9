//! In which order the nodes that nobody holds may go, under `lru` and `learned`.
//!
//! A list has unheld nodes, oldest release first; the root is in none. A path is released deepest node first,
//! so with one list (`lru`) a node always lies nearer to the old end than its parent: the oldest node of the
//! list is a leaf, and eviction needs no search. A node that becomes a leaf needs no insertion either, since
//! it has its place.
//!
//! With one list a class (`learned`), the oldest of a class may have children in other lists. It is *parked*
//! then: taken out, and put back at the old end when its last child goes.

use super::tree::{NO_NODE, Tree};

/// A node's place in the order.
#[derive(Clone, Copy, Debug)]
struct Slot {
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
    const NEW: Self = Self { newer: NO_NODE, older: NO_NODE, class: 0, is_linked: false, stamp: 0 };
}

/// Ends of a list.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

/// Recency of one namespace.
pub(super) struct Order {
    slots: Vec<Slot>,
    lists: Box<[List]>,
}

impl Order {
    /// An order with this many lists; with none (`clock`) it keeps nothing.
    pub(super) fn new(num_classes: usize) -> Self {
        let lists = vec![List { oldest: NO_NODE, newest: NO_NODE }; num_classes].into_boxed_slice();
        let mut order = Self { slots: Vec::new(), lists };
        order.add(0);
        order
    }

    /// Whether there are lists to keep.
    pub(super) fn has_lists(&self) -> bool {
        !self.lists.is_empty()
    }

    #[inline]
    fn slot(&self, id: u32) -> &Slot {
        &self.slots[id as usize]
    }

    /// Bytes of the slots.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    /// Enters a new node that is held, or a root.
    pub(super) fn add(&mut self, id: u32) {
        if self.has_lists() {
            self.put(id, Slot::NEW);
        }
    }

    /// A node became held.
    pub(super) fn leave(&mut self, id: u32) {
        if self.has_lists() && self.is_linked(id) {
            self.unlink(id);
        }
    }

    /// A node became unheld.
    pub(super) fn enter(&mut self, id: u32, stamp: u64, class: u8) {
        let slot = &mut self.slots[id as usize];
        slot.stamp = stamp;
        slot.class = class;
        self.link_newest(id);
    }

    /// Whether two unheld nodes were released together and are alike to the policy.
    pub(super) fn go_together(&self, id: u32, child: u32) -> bool {
        let alike = |id: u32| (self.slot(id).stamp, self.slot(id).class);
        !self.has_lists() || alike(id) == alike(child)
    }

    /// `head` took the first blocks of `id` and became its parent.
    pub(super) fn split(&mut self, id: u32, head: u32) {
        if !self.has_lists() {
            return;
        }
        let Slot { stamp, class, is_linked, .. } = *self.slot(id);
        self.put(head, Slot { stamp, class, ..Slot::NEW });
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

    /// Eviction removed a node.
    pub(super) fn remove(&mut self, id: u32) {
        if self.has_lists() {
            self.unlink(id);
        }
    }

    /// Takes the oldest node of its class out, because it has children.
    pub(super) fn park(&mut self, id: u32) {
        self.unlink(id);
    }

    /// Puts a node back that may be parked, is no root and has become an unheld leaf. Returns its class.
    pub(super) fn unpark(&mut self, id: u32) -> usize {
        let Slot { class, is_linked, .. } = *self.slot(id);
        if !is_linked {
            self.link_oldest(id);
        }
        class as usize
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
}

/// After the removal of a child of `parent`: puts the parent back if it was parked and is an unheld leaf now. Returns
/// its class.
pub(super) fn unpark(tree: &Tree, order: &mut Order, parent: u32) -> Option<usize> {
    let is_leaf = tree.is_live(parent) && tree.node(parent).num_children == 0 && tree.holds(parent) == 0;
    (is_leaf && order.has_lists()).then(|| order.unpark(parent))
}
