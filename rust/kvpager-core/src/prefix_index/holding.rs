//! Which nodes are held: counted in the nodes, without a lock of their own.
//!
//! A node counts its pins and its held children; a root, which has no blocks to hold, its pins only: all matches of a
//! namespace would write it. Callers have the tree's lock, shared or exclusive, so the structure
//! stands still. Every further pin of a held node, and every release that leaves it held, is one exchange of its
//! count. What makes a node held or lets it go is different:
//!
//! * Under `lru` and `learned` it changes the lists of unheld nodes too, and is done under the order's lock: from the
//!   deepest node up, after the whole path's capacity was taken.
//! * Under `clock` readers do it side by side. Capacity may be refused on the way, so the path is held *from above*:
//!   at every moment the caller has one pin, and all that is above it is held. A node that somebody else finds held
//!   is so for good, as long as his own pin lasts.

use super::tree::{NO_NODE, Tree};
use crate::block_pool::StepEpoch;
use crate::error::Result;
use crate::sync::Ordering;

// Orderings: a count guards no memory, since blocks are read and evicted under the tree's lock, shared and exclusive. But
// whoever takes a hold away last gives capacity back that another one may have taken, and must see it taken: the exchange
// that makes a count leave zero is Release, and pairs with the Acquire of later holds and of the release. All between are
// exchanges, so they carry it on. Else Relaxed. Under `lru` and `learned` the order's lock does the same.

impl Tree {
    /// Pins on the node, plus its held children; of a root its pins.
    pub(super) fn holds(&self, id: u32) -> u32 {
        self.node(id).holds.load(Ordering::Relaxed)
    }

    /// Adds a pin to a node that is held already; false if it is not.
    pub(super) fn hold_again(&self, id: u32) -> bool {
        let more = |holds: u32| (holds > 0).then(|| holds + 1);
        self.node(id).holds.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    /// Takes a pin away that is not the last hold; false, and nothing is done, if it is.
    pub(super) fn release_again(&self, id: u32) -> bool {
        let fewer = |holds: u32| (holds > 1).then(|| holds - 1);
        self.node(id).holds.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer).is_ok()
    }

    /// Blocks from `id` up to the nearest held ancestor: what a first pin has to take capacity for.
    pub(super) fn unheld_blocks(&self, id: u32) -> u32 {
        let (mut id, mut total) = (id, 0);
        while id != NO_NODE && self.holds(id) == 0 {
            total += self.num_blocks(id);
            id = self.node(id).parent;
        }
        total
    }

    /// Adds a pin, under the order's lock. The path up to the nearest held ancestor becomes held: those nodes are
    /// handed to `became_held`.
    pub(super) fn hold_path(&self, id: u32, mut became_held: impl FnMut(u32)) {
        let mut id = id;
        loop {
            let node = self.node(id);
            // A count of zero is changed under the order's lock only: no exchange is needed.
            if node.holds.load(Ordering::Relaxed) > 0 {
                node.holds.fetch_add(1, Ordering::Relaxed);
                return;
            }
            node.holds.store(1, Ordering::Relaxed);
            if node.parent == NO_NODE {
                return;
            }
            became_held(id);
            id = node.parent;
            if self.node(id).parent == NO_NODE {
                return;
            }
        }
    }

    /// Takes a pin away and returns how many blocks are unheld by that. Their nodes are handed to `became_unheld`,
    /// deepest first, each with how many of those blocks lie below its end.
    ///
    /// A node lets its parent go after itself, so a held node never has an unheld one above it.
    pub(super) fn release_path(&self, id: u32, mut became_unheld: impl FnMut(u32, u32)) -> u32 {
        let (mut id, mut total) = (id, 0);
        loop {
            let node = self.node(id);
            if node.holds.fetch_sub(1, Ordering::Acquire) > 1 || node.parent == NO_NODE {
                return total;
            }
            became_unheld(id, total);
            total += self.num_blocks(id);
            id = node.parent;
            if self.node(id).parent == NO_NODE {
                return total;
            }
        }
    }

    /// Adds a pin beside others who do the same. `take` is asked for the capacity of blocks before they become
    /// held. Returns how much of `taken`, which the caller has taken ahead, was not needed.
    ///
    /// # Errors
    /// Those of `take`. A part of the path may have been held by then: the node to be released instead, if any, and
    /// what is left of `taken`, are in the error.
    pub(super) fn hold_from_above(
        &self,
        id: u32,
        taken: u32,
        mut take: impl FnMut(u32) -> Result<()>,
    ) -> std::result::Result<u32, PartlyHeld> {
        let (mut path, mut left) = (Path::default(), taken);
        let mut pinned = self.hold_nearest(id, &mut path);
        while let Some(next) = path.pop() {
            let num_blocks = self.num_blocks(next);
            loop {
                if self.hold_again(next) {
                    // Another one has held it meanwhile, so what is above is held by it: our pin moves down.
                    if pinned != NO_NODE {
                        self.node(pinned).holds.fetch_sub(1, Ordering::Relaxed);
                    }
                    break;
                }
                if left < num_blocks {
                    let missing = num_blocks - left;
                    if let Err(error) = take(missing) {
                        let node = (pinned != NO_NODE).then_some(pinned);
                        return Err(PartlyHeld { node, left, error });
                    }
                    left = num_blocks;
                }
                // What was our pin on the node above is its held child now.
                let first = |holds: u32| (holds == 0).then_some(1);
                if self.node(next).holds.fetch_update(Ordering::Release, Ordering::Relaxed, first).is_ok() {
                    left -= num_blocks;
                    break;
                }
            }
            pinned = next;
        }
        Ok(left)
    }

    /// Pins the nearest node from `id` up that is held, which may be let go while we look, and notes those below it in
    /// `path`. [`NO_NODE`] if there is none.
    fn hold_nearest(&self, id: u32, path: &mut Path) -> u32 {
        let mut above = id;
        while !self.hold_again(above) {
            path.push(above);
            above = self.node(above).parent;
            if above == NO_NODE || self.node(above).parent == NO_NODE {
                return NO_NODE;
            }
        }
        above
    }

    /// Whether anything is held. Of the structure only roots and their children are looked at.
    pub(super) fn is_held(&self) -> bool {
        let is_held = |id: u32| self.holds(id) > 0;
        self.all_roots().any(|root| is_held(root) || self.children_of(root).any(is_held))
    }

    /// Marks what a release at `id` made unheld, `num_blocks` in all, as used lately.
    pub(super) fn touch(&self, id: u32) {
        self.node(id).is_referenced.store(true, Ordering::Relaxed);
    }

    /// Steps up to `epoch` may still read the `num_blocks` blocks that were unheld by a release at `id`.
    pub(super) fn fence(&self, id: u32, num_blocks: u32, epoch: StepEpoch) {
        let (mut id, mut left) = (id, num_blocks);
        while left > 0 && id != NO_NODE {
            self.node(id).fence.fetch_max(epoch.number(), Ordering::Relaxed);
            left = left.saturating_sub(self.num_blocks(id));
            id = self.node(id).parent;
        }
    }

    /// Whether open steps may still read a node's blocks.
    pub(super) fn is_fenced(&self, id: u32, is_closed: impl Fn(StepEpoch) -> bool) -> bool {
        // Epochs are numbered from 1.
        match self.node(id).fence.load(Ordering::Relaxed) {
            0 => false,
            epoch => !is_closed(StepEpoch::from_number(epoch)),
        }
    }
}

/// A first pin that was refused on its way down.
pub(super) struct PartlyHeld {
    /// Where the pin stands by then.
    pub(super) node: Option<u32>,
    /// Capacity that was taken and not used.
    pub(super) left: u32,
    pub(super) error: crate::Error,
}

/// Nodes from a match up to its nearest held ancestor. Most paths are short, and allocate nothing.
#[derive(Default)]
struct Path {
    near: [u32; 16],
    num_near: usize,
    far: Vec<u32>,
}

impl Path {
    fn push(&mut self, id: u32) {
        match self.near.get_mut(self.num_near) {
            Some(place) => {
                *place = id;
                self.num_near += 1;
            }
            None => self.far.push(id),
        }
    }

    fn pop(&mut self) -> Option<u32> {
        self.far.pop().or_else(|| {
            self.num_near = self.num_near.checked_sub(1)?;
            Some(self.near[self.num_near])
        })
    }
}
