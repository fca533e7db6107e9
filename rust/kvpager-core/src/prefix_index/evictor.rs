//! The order of namespaces for eviction: which one has the block that was released longest ago.
//!
//! Each namespace keeps its own list (see [`super::order`]); here is only a heap of (stamp of the oldest
//! node, namespace). The stamp of a namespace's oldest node never falls, so a remembered stamp is a lower
//! bound: the namespace with the least one is looked at, and either gives blocks or is put back with its
//! true stamp. A namespace whose list was empty announces itself through a lock-free queue.
//!
//! Lock order: evictor, then a namespace's tree, then its order. Nobody who holds a namespace's lock waits
//! for the evictor.

use super::namespace::Namespaces;
use crate::block_pool::BlockPool;
use crate::ids::{BlockHandle, NamespaceId};
use crossbeam_queue::SegQueue;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Mutex, PoisonError};

/// Blocks taken from a namespace under one hold of its locks.
pub(super) const MAX_PIECE: usize = 64;

/// Finds the next block to evict over all namespaces.
pub(super) struct Evictor {
    pub(super) arrivals: SegQueue<NamespaceId>,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// (lower bound of the oldest stamp, namespace), least first.
    heap: BinaryHeap<Reverse<(u64, u32)>>,
    /// Buffer of one piece.
    pub(super) taken: Vec<BlockHandle>,
    /// Namespaces with something to give, for policies that do not order them.
    pub(super) active: Vec<NamespaceId>,
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
        Self { arrivals: SegQueue::new(), state: Mutex::new(State::default()) }
    }

    /// Announces a namespace whose list is no longer empty. Never waits.
    pub(super) fn announce(&self, namespace: NamespaceId) {
        self.arrivals.push(namespace);
    }

    /// Evicts up to `num_blocks` in order of release, over all namespaces; returns how many were evicted.
    pub(super) fn evict(&self, pool: &BlockPool, namespaces: &Namespaces, num_blocks: usize) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(namespace) = self.arrivals.pop() {
            state.heap.push(Reverse((0, namespace.0)));
        }
        let mut fenced = Vec::new();
        let mut total = 0;
        while total < num_blocks {
            let Some(Reverse((_, namespace))) = state.heap.pop() else { break };
            let bound = state.heap.peek().map_or(u64::MAX, |Reverse((stamp, _))| *stamp);
            let wanted = (num_blocks - total).min(MAX_PIECE);
            let look = state.take(pool, namespaces, NamespaceId(namespace), wanted, bound);
            total += look.num_blocks;
            match look.oldest {
                Some(stamp) if look.is_fenced => fenced.push(Reverse((stamp, namespace))),
                Some(stamp) => state.heap.push(Reverse((stamp, namespace))),
                None => {}
            }
        }
        state.heap.extend(fenced);
        total
    }
}

impl State {
    /// Takes up to `wanted` blocks that were released at `bound` or before.
    fn take(
        &mut self,
        pool: &BlockPool,
        namespaces: &Namespaces,
        id: NamespaceId,
        wanted: usize,
        bound: u64,
    ) -> Look {
        let mut look = Look { num_blocks: 0, oldest: None, is_fenced: false };
        let Ok(namespace) = namespaces.get(id) else { return look };
        let mut tree = namespace.write_tree();
        let mut order = namespace.lock_order();
        self.taken.clear();
        while let Some((node, stamp)) = order.oldest(0) {
            look.oldest = Some(stamp);
            look.is_fenced = order.is_fenced(stamp, |epoch| pool.epoch_closed(epoch));
            if stamp > bound || look.is_fenced || look.num_blocks == wanted {
                break;
            }
            let taken = tree.take_tail(node, wanted - look.num_blocks, &mut self.taken);
            order.shrink(node, taken.num_blocks as u32, taken.is_removed);
            look.num_blocks += taken.num_blocks;
            look.oldest = None;
        }
        if look.oldest.is_none() {
            order.is_queued = false;
        }
        let evicted = pool.evict(&self.taken);
        debug_assert!(evicted.is_ok(), "unheld blocks of the index can be evicted: {evicted:?}");
        look
    }
}
