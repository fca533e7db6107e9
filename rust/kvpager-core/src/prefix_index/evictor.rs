//! The order of namespaces for eviction: which one has the block that was released longest ago.
//!
//! Each namespace keeps its own list (see [`super::order`]). Here are the accounts, one *lane* each, with a heap
//! of (stamp of the oldest node, namespace). The stamp of a namespace's oldest node never falls, so a remembered
//! stamp is a lower bound: the namespace with the least one is looked at, and either gives blocks or is put back
//! with its true stamp. A namespace whose list was empty announces itself through a lock-free queue.
//!
//! Lock order: evictor, then a namespace's tree, then its order. Nobody who holds a namespace's lock waits
//! for the evictor.

use super::PrefixIndex;
use super::isolation::Isolation;
use super::waiting::Waiting;
use crate::block_pool::BlockPool;
use crate::ids::{AccountId, BlockHandle, NamespaceId};
use crate::sync::{Ordering, OuterMutex, OuterMutexGuard};
use crossbeam_queue::SegQueue;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::TryLockError;

/// Blocks taken from a namespace under one hold of its locks.
pub(crate) const MAX_PIECE: usize = 64;

/// Whose blocks an eviction may take.
#[derive(Clone, Copy, Debug)]
pub(super) enum Whose {
    /// Anybody's: the operator's call.
    Everyone,
    /// One account's.
    Own(AccountId),
    /// What may go for this account: everything that is not `strict`, of others down to their guarantees
    /// unless the account is `open`.
    Shared(AccountId),
}

/// What an eviction of nodes counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Unit {
    /// Blocks of the device, with those that are attached.
    #[default]
    Blocks,
    /// Ids of the tree.
    Homes,
}

/// Finds the next block to evict over all namespaces.
pub(super) struct Evictor {
    arrivals: SegQueue<(AccountId, NamespaceId)>,
    state: OuterMutex<State>,
    /// Those who wait for the state.
    num_waiting: Waiting,
}

/// The namespaces of one account that have something to give.
#[derive(Default)]
pub(super) struct Lane {
    /// (lower bound of the oldest stamp, namespace), least first.
    heap: BinaryHeap<Reverse<(u64, u32)>>,
    /// Entries whose oldest block an open step may still read, set aside until the next call.
    fenced: Vec<Reverse<(u64, u32)>>,
    /// The same namespaces, for policies that do not order them.
    pub(super) active: Vec<NamespaceId>,
    /// Namespaces that the hand of `clock` went through in this turn of the account.
    pub(super) num_ended: usize,
    isolation: Isolation,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) lanes: Vec<Lane>,
    /// The lane whose turn it is under `clock`, when all may give.
    pub(super) clock_lane: usize,
    /// Buffer of one piece.
    pub(super) taken: Vec<BlockHandle>,
    /// What the eviction of nodes counts that has the state now.
    unit: Unit,
}

/// What one look at a namespace gave.
struct Look {
    num_blocks: usize,
    /// Stamp of its oldest node now; none if it has nothing unheld.
    oldest: Option<u64>,
    /// Whether what is oldest may still be read by an open step.
    is_fenced: bool,
}

impl Evictor {
    pub(super) fn new() -> Self {
        let state = OuterMutex::new(State::default());
        Self { arrivals: SegQueue::new(), state, num_waiting: Waiting::default() }
    }

    /// Announces a namespace whose list is no longer empty. Never waits.
    pub(super) fn announce(&self, account: AccountId, namespace: NamespaceId) {
        self.arrivals.push((account, namespace));
    }

    fn state(&self) -> OuterMutexGuard<'_, State> {
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.num_waiting.count(|| self.state.lock()),
        }
    }

    pub(super) fn set_isolation(&self, account: AccountId, isolation: Isolation) {
        self.state().lane(account).isolation = isolation;
    }

    pub(super) fn isolation(&self, account: AccountId) -> Isolation {
        self.state().lanes.get(account.0 as usize).map_or_else(Isolation::default, |lane| lane.isolation)
    }

    /// The state with every announced namespace in its lane.
    pub(super) fn current(&self) -> OuterMutexGuard<'_, State> {
        let mut state = self.state();
        while let Some((account, namespace)) = self.arrivals.pop() {
            let lane = state.lane(account);
            lane.heap.push(Reverse((0, namespace.0)));
            lane.active.push(namespace);
        }
        state
    }

    /// Calls `take` with the state and how many blocks are wanted at once, until there are `num_blocks` or it finds
    /// nothing more. Between two calls nobody has the lock: whoever evicts for another account waits for one piece.
    pub(super) fn in_pieces(
        &self,
        num_blocks: usize,
        mut take: impl FnMut(&mut State, usize) -> Option<usize>,
    ) -> usize {
        let mut total = 0;
        while total < num_blocks {
            let taken = take(&mut self.current(), (num_blocks - total).min(MAX_PIECE));
            let Some(taken) = taken else { break };
            total += taken;
            self.num_waiting.let_in();
        }
        total
    }

    /// [`Evictor::in_pieces`] for blocks of the tree: `take` is told how many of those are wanted, and returns how many
    /// units they came to.
    pub(super) fn in_tree_pieces(
        &self,
        index: &PrefixIndex,
        unit: Unit,
        count: usize,
        mut take: impl FnMut(&mut State, usize) -> Option<usize>,
    ) -> usize {
        let per_node =
            if unit == Unit::Blocks && index.has_homes() { index.num_attached_groups() } else { 1 };
        self.in_pieces(count, |state, wanted| {
            state.unit = unit;
            take(state, wanted.div_ceil(per_node))
        })
    }

    /// Evicts up to `count` in order of release, over the namespaces of whom it may; returns how many.
    pub(super) fn evict(&self, index: &PrefixIndex, unit: Unit, whose: Whose, count: usize) -> usize {
        let mut is_first = true;
        self.in_tree_pieces(index, unit, count, |state, wanted| {
            if std::mem::take(&mut is_first) {
                state.lanes.iter_mut().for_each(Lane::look_at_fenced);
            }
            state.take_oldest(index, whose, wanted)
        })
    }
}

impl Lane {
    /// Steps may have closed since what was set aside was looked at.
    fn look_at_fenced(&mut self) {
        self.heap.extend(self.fenced.drain(..));
    }

    /// Lower bound of the oldest stamp.
    fn bound(&self) -> u64 {
        self.heap.peek().map_or(u64::MAX, |Reverse((stamp, _))| *stamp)
    }
}

impl State {
    fn lane(&mut self, account: AccountId) -> &mut Lane {
        let index = account.0 as usize;
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, Lane::default);
        }
        &mut self.lanes[index]
    }

    /// How many blocks of a lane may go.
    pub(super) fn allowance(&self, pool: &BlockPool, whose: Whose, lane: usize) -> usize {
        let of = |account: AccountId| account.0 as usize;
        match whose {
            Whose::Everyone => usize::MAX,
            Whose::Own(account) => {
                if lane == of(account) {
                    usize::MAX
                } else {
                    0
                }
            }
            Whose::Shared(_) if self.lanes[lane].isolation == Isolation::Strict => 0,
            Whose::Shared(account) if lane == of(account) => usize::MAX,
            Whose::Shared(account) => {
                let is_open =
                    self.lanes.get(of(account)).is_some_and(|lane| lane.isolation == Isolation::Open);
                if is_open && self.lanes[lane].isolation == Isolation::Open {
                    return usize::MAX;
                }
                let beyond = pool
                    .account_stats(AccountId(lane as u32))
                    .map_or(0, |stats| (stats.committed + stats.cached).saturating_sub(stats.guaranteed));
                beyond as usize
            }
        }
    }

    /// How many blocks of the tree a lane may give. Homes have guarantees of their own; of blocks, a home is taken to
    /// have one of each group.
    pub(super) fn tree_allowance(&self, index: &PrefixIndex, whose: Whose, lane: usize) -> usize {
        match (index.homes(), self.unit) {
            (None, _) => self.allowance(&index.pool, whose, lane),
            (Some(homes), Unit::Homes) => self.allowance(&homes.pool, whose, lane),
            (Some(_), Unit::Blocks) => match self.allowance(&index.pool, whose, lane) {
                usize::MAX => usize::MAX,
                blocks => blocks / index.num_attached_groups(),
            },
        }
    }

    /// What taking blocks of the tree came to, by which so many of the device are free.
    pub(super) fn count(&self, num_taken: usize, num_freed: usize) -> usize {
        match self.unit {
            Unit::Blocks => num_freed,
            Unit::Homes => num_taken,
        }
    }

    /// The lane with the least bound of those that may give, and how much it may.
    fn least_lane(&self, index: &PrefixIndex, whose: Whose) -> Option<(usize, usize)> {
        let filled = self.lanes.iter().enumerate().filter(|(_, lane)| !lane.heap.is_empty());
        let allowed = filled.filter_map(|(number, lane)| {
            let allowance = self.tree_allowance(index, whose, number);
            (allowance > 0).then_some((lane.bound(), number, allowance))
        });
        allowed.min().map(|(_, number, allowance)| (number, allowance))
    }

    /// Takes up to `wanted` blocks from the namespace that has the oldest; none if there is none that may give.
    fn take_oldest(&mut self, index: &PrefixIndex, whose: Whose, wanted: usize) -> Option<usize> {
        let (lane, allowance) = self.least_lane(index, whose)?;
        let Reverse((_, namespace)) = self.lanes[lane].heap.pop()?;
        let bound = self.least_lane(index, whose).map_or(u64::MAX, |(other, _)| self.lanes[other].bound());
        let look = self.take(index, NamespaceId(namespace), wanted.min(allowance), bound);
        match look.oldest {
            Some(stamp) if look.is_fenced => self.lanes[lane].fenced.push(Reverse((stamp, namespace))),
            Some(stamp) => self.lanes[lane].heap.push(Reverse((stamp, namespace))),
            None => {}
        }
        Some(look.num_blocks)
    }

    /// Takes up to `wanted` blocks that were released at `bound` or before.
    fn take(&mut self, index: &PrefixIndex, id: NamespaceId, wanted: usize, bound: u64) -> Look {
        let mut look = Look { num_blocks: 0, oldest: None, is_fenced: false };
        let Some((id, namespace)) = index.namespaces.at(id) else { return look };
        let mut tree = namespace.write_tree();
        let mut order = namespace.lock_order();
        self.taken.clear();
        while let Some((node, stamp)) = order.oldest(0) {
            look.oldest = Some(stamp);
            look.is_fenced = index.is_fenced(&tree, node);
            if stamp > bound || look.is_fenced || look.num_blocks == wanted {
                break;
            }
            let taken = tree.take_tail(node, wanted - look.num_blocks, &mut self.taken);
            if taken.is_removed {
                order.remove(node);
            }
            look.num_blocks += taken.num_blocks;
            look.oldest = None;
        }
        if look.oldest.is_none() {
            // Relaxed: under the tree's exclusive lock, which keeps those out who set it.
            namespace.is_queued.store(false, Ordering::Relaxed);
        }
        index.merge_seams(&mut tree, &mut order, look.num_blocks);
        let num_freed = index.evicted((id, namespace), &self.taken);
        look.num_blocks = self.count(look.num_blocks, num_freed);
        look
    }
}
