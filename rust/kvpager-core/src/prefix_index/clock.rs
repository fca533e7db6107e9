//! The `clock` policy: one hand for each account, over the nodes of its namespaces in turn.
//!
//! The hand takes unheld leaves, tail first, unless they are marked: those lose their mark and are passed. Marks are
//! set by releases, on any thread and without a lock of the order, so what was used since the hand last came by gets
//! another round. A node that became a leaf under the hand and has no mark goes at once. After two rounds over
//! everything marks no longer count, so an eviction ends however fast they are set.

use super::PrefixIndex;
use super::evictor::{Evictor, MAX_PIECE, State, Unit, Whose};
use super::tree::Tree;
use crate::ids::{BlockHandle, NamespaceId};
use crate::sync::Ordering;

/// Nodes passed under one hold of a namespace's locks.
const MAX_PASSED: usize = MAX_PIECE;

/// What the hand found in one piece.
enum Sweep {
    /// What was wanted, or as many nodes as it may pass at once: it stands still in this namespace.
    Stopped,
    /// The last node.
    Ended,
    /// Nothing to take, now or later.
    Empty,
}

impl Evictor {
    /// Evicts up to `count` of whom it may; returns how many were evicted.
    ///
    /// Others may move the hand between two pieces. What they pass loses its mark, and what they find without one they
    /// take, so it does not matter whose round it is.
    pub(super) fn evict_by_clock(
        &self,
        index: &PrefixIndex,
        unit: Unit,
        whose: Whose,
        count: usize,
    ) -> usize {
        let (mut num_ended, mut round) = (0, None);
        self.in_tree_pieces(index, unit, count, |state, wanted| {
            let all = || state.lanes.iter().map(|lane| lane.active.len()).sum::<usize>();
            let round = *round.get_or_insert_with(all);
            // The first round may begin in the middle of a namespace, and the last must be a whole one.
            if num_ended > 3 * round + 1 {
                return None;
            }
            let (num_blocks, has_ended) = state.move_on(index, whose, wanted, num_ended > 2 * round)?;
            num_ended += usize::from(has_ended);
            Some(num_blocks)
        })
    }
}

impl State {
    /// Moves the hand of the lane whose turn it is, for up to `wanted` blocks. Returns how many it took, and whether it
    /// came to the end of a namespace; none if nobody may give.
    fn move_on(
        &mut self,
        index: &PrefixIndex,
        whose: Whose,
        wanted: usize,
        ignores_marks: bool,
    ) -> Option<(usize, bool)> {
        let (lane, allowance) = self.clock_lane(index, whose)?;
        let &id = self.lanes[lane].active.first()?;
        self.taken.clear();
        let (sweep, num_freed) = sweep(index, id, wanted.min(allowance), ignores_marks, &mut self.taken);
        let num_blocks = self.count(self.taken.len(), num_freed);
        let lane = &mut self.lanes[lane];
        match sweep {
            Sweep::Stopped => return Some((num_blocks, false)),
            Sweep::Ended => lane.active.rotate_left(1),
            Sweep::Empty => drop(lane.active.remove(0)),
        }
        if matches!(whose, Whose::Own(_)) {
            return Some((num_blocks, true));
        }
        lane.num_ended += 1;
        if lane.num_ended >= lane.active.len() {
            lane.num_ended = 0;
            self.clock_lane += 1;
        }
        Some((num_blocks, true))
    }

    /// The lane whose turn it is of those that may give, and how much it may.
    fn clock_lane(&mut self, index: &PrefixIndex, whose: Whose) -> Option<(usize, usize)> {
        let count = self.lanes.len();
        let turn = self.clock_lane;
        let in_turn = (0..count).map(|offset| (turn + offset) % count);
        let mut may_give = in_turn.filter(|&lane| !self.lanes[lane].active.is_empty()).filter_map(|lane| {
            let allowance = self.tree_allowance(index, whose, lane);
            (allowance > 0).then_some((lane, allowance))
        });
        let found = may_give.next();
        drop(may_give);
        // An eviction of one account's own blocks does not move everybody's turn.
        if let (Some((lane, _)), false) = (found, matches!(whose, Whose::Own(_))) {
            self.clock_lane = lane;
        }
        found
    }
}

/// Moves the hand of a namespace until `wanted` blocks are taken, or a piece of nodes is passed. Returns also how many of
/// the device are free by that.
fn sweep(
    index: &PrefixIndex,
    id: NamespaceId,
    wanted: usize,
    ignores_marks: bool,
    taken: &mut Vec<BlockHandle>,
) -> (Sweep, usize) {
    let Some((id, namespace)) = index.namespaces.at(id) else { return (Sweep::Empty, 0) };
    let mut tree = namespace.write_tree();
    let sweep = tree.move_hand(wanted, ignores_marks, |tree, node| index.is_fenced(tree, node), taken);
    index.merge_seams_in(namespace, &mut tree, taken.len());
    let num_freed = index.evicted((id, namespace), taken);
    if tree.num_children() > 0 {
        return (sweep, num_freed);
    }
    // Relaxed: under the tree's exclusive lock, which keeps those out who set it.
    namespace.is_queued.store(false, Ordering::Relaxed);
    (Sweep::Empty, num_freed)
}

impl Tree {
    fn move_hand(
        &mut self,
        wanted: usize,
        ignores_marks: bool,
        is_fenced: impl Fn(&Self, u32) -> bool,
        taken: &mut Vec<BlockHandle>,
    ) -> Sweep {
        for _ in 0..MAX_PASSED {
            if taken.len() == wanted {
                break;
            }
            let id = self.hand;
            if id >= self.num_slots() {
                self.hand = 0;
                return Sweep::Ended;
            }
            self.take_unmarked(id, wanted, ignores_marks, &is_fenced, taken);
            if self.node(id).num_children == 0 {
                // Relaxed: under the exclusive lock.
                self.node(id).is_referenced.store(false, Ordering::Relaxed);
            }
            // A slot that was emptied is passed: what comes into it next gets a whole round.
            self.hand += u32::from(taken.len() < wanted || !self.is_live(id));
        }
        Sweep::Stopped
    }

    /// Takes a node and what becomes a leaf above it, as far as it may.
    fn take_unmarked(
        &mut self,
        id: u32,
        wanted: usize,
        ignores_marks: bool,
        is_fenced: &impl Fn(&Self, u32) -> bool,
        taken: &mut Vec<BlockHandle>,
    ) {
        let mut id = id;
        while taken.len() < wanted && self.is_live(id) && self.holds(id) == 0 {
            let node = self.node(id);
            // Relaxed: under the exclusive lock.
            let is_marked = !ignores_marks && node.is_referenced.load(Ordering::Relaxed);
            if is_marked || node.num_children > 0 || is_fenced(self, id) {
                return;
            }
            let parent = node.parent;
            if !self.take_tail(id, wanted - taken.len(), taken).is_removed {
                return;
            }
            id = parent;
        }
    }
}
