//! Eviction by value: the leaf that is worth least, over the classes of a namespace and over namespaces.
//!
//! Inside a class, value first rises and then falls with age, so the least is at one of its ends: the oldest
//! leaf or the newest. Those two a class are looked at, once per call, and again where something changed.

use super::evictor::{Evictor, MAX_PIECE};
use super::learned::{NUM_CLASSES, Values};
use super::namespace::{Namespace, Namespaces};
use super::order::Order;
use super::tree::Tree;
use crate::block_pool::BlockPool;
use crate::ids::{BlockHandle, NamespaceId};
use std::sync::PoisonError;

/// Namespaces compared per piece; with more of them, the next ones in turn.
const MAX_COMPARED: usize = 16;
/// Nodes looked at from the new end of a class in search of a leaf.
const MAX_SEARCHED: usize = 16;

/// A leaf and what it is worth.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    value: f32,
    node: u32,
}

impl Evictor {
    /// Evicts up to `num_blocks`, what is worth least first; returns how many were evicted.
    pub(super) fn evict_by_value(
        &self,
        pool: &BlockPool,
        namespaces: &Namespaces,
        num_blocks: usize,
        values: &Values,
    ) -> usize {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(namespace) = self.arrivals.pop() {
            state.active.push(namespace);
        }
        let mut total = 0;
        let mut num_idle = 0;
        while total < num_blocks && num_idle < state.active.len() {
            let compared = state.active.len().min(MAX_COMPARED);
            let ranked = rank(pool, namespaces, &state.active[..compared], values);
            let Some(&(_, first)) = ranked.first() else {
                // None of these has anything to give now: the next ones in turn.
                num_idle += compared;
                state.active.rotate_left(compared);
                continue;
            };
            let bound = ranked.get(1).map_or(f32::INFINITY, |(value, _)| *value);
            let wanted = (num_blocks - total).min(MAX_PIECE);
            state.taken.clear();
            let Ok(namespace) = namespaces.get(first) else { break };
            let is_left = take(pool, namespace, wanted, bound, values, &mut state.taken);
            total += state.taken.len();
            num_idle = 0;
            let compared = if is_left {
                compared
            } else {
                state.active.retain(|id| *id != first);
                compared - 1
            };
            if state.active.len() > compared {
                state.active.rotate_left(compared);
            }
        }
        total
    }
}

/// (least value, namespace) of those that have something to give, least first.
fn rank(
    pool: &BlockPool,
    namespaces: &Namespaces,
    ids: &[NamespaceId],
    values: &Values,
) -> Vec<(f32, NamespaceId)> {
    let least = |&id: &NamespaceId| {
        let namespace = namespaces.get(id).ok()?;
        let tree = namespace.read_tree();
        let mut order = namespace.lock_order();
        let candidates =
            (0..NUM_CLASSES).filter_map(|class| candidate(pool, &tree, &mut order, class, values));
        candidates.map(|found| found.value).min_by(f32::total_cmp).map(|value| (value, id))
    };
    let mut ranked: Vec<(f32, NamespaceId)> = ids.iter().filter_map(least).collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    ranked
}

/// Takes up to `wanted` blocks worth at most `bound` from a namespace; returns whether it has anything left.
fn take(
    pool: &BlockPool,
    namespace: &Namespace,
    wanted: usize,
    bound: f32,
    values: &Values,
    taken: &mut Vec<BlockHandle>,
) -> bool {
    let mut tree = namespace.write_tree();
    let mut order = namespace.lock_order();
    let mut candidates: [Option<Candidate>; NUM_CLASSES] =
        std::array::from_fn(|class| candidate(pool, &tree, &mut order, class, values));
    while taken.len() < wanted {
        let present = candidates.iter().enumerate().filter_map(|(class, found)| found.map(|c| (class, c)));
        let Some((class, least)) = present.min_by(|a, b| a.1.value.total_cmp(&b.1.value)) else { break };
        if least.value > bound {
            break;
        }
        let parent = tree.node(least.node).parent;
        let tail = tree.take_tail(least.node, wanted - taken.len(), taken);
        order.shrink(least.node, tail.num_blocks as u32, tail.is_removed);
        if tail.is_removed {
            if tree.node(parent).num_children == 0 {
                let other = order.unpark(parent);
                candidates[other] = candidate(pool, &tree, &mut order, other, values);
            }
            candidates[class] = candidate(pool, &tree, &mut order, class, values);
        }
    }
    let is_left = !order.is_empty();
    order.is_queued = is_left;
    let evicted = pool.evict(taken);
    debug_assert!(evicted.is_ok(), "unheld blocks of the index can be evicted: {evicted:?}");
    is_left
}

/// The leaf of a class that is worth least. Parks nodes at the old end that have children.
fn candidate(
    pool: &BlockPool,
    tree: &Tree,
    order: &mut Order,
    class: usize,
    values: &Values,
) -> Option<Candidate> {
    let is_leaf = |id: u32| tree.node(id).num_children == 0;
    let (node, stamp) = loop {
        let (node, stamp) = order.oldest(class)?;
        if is_leaf(node) {
            break (node, stamp);
        }
        order.park(node);
    };
    if order.is_fenced(stamp, |epoch| pool.epoch_closed(epoch)) {
        return None;
    }
    let oldest = Candidate { value: values.of(class, stamp), node };
    let newest = order.newest_first(class).take(MAX_SEARCHED).find(|&(id, _)| is_leaf(id));
    let Some((node, stamp)) = newest else { return Some(oldest) };
    let value = values.of(class, stamp);
    if value < oldest.value && !order.is_fenced(stamp, |epoch| pool.epoch_closed(epoch)) {
        return Some(Candidate { value, node });
    }
    Some(oldest)
}
