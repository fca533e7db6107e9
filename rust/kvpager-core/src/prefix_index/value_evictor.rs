//! Eviction by value: the leaf that is worth least, over the classes of a namespace and over namespaces.
//!
//! Inside a class, value first rises and then falls with age, so the least is at one of its ends: the oldest
//! leaf or the newest. Those two a class are looked at, once per call, and again where something changed.

use super::PrefixIndex;
use super::evictor::{Evictor, MAX_PIECE, State, Unit, Whose};
use super::interning::Namespaces;
use super::learned::{NUM_CLASSES, Values};
use super::namespace::Namespace;
use super::order::{Order, unpark};
use super::tree::Tree;
use crate::block_pool::BlockPool;
use crate::ids::{AccountId, BlockHandle, NamespaceId};
use crate::sync::Ordering;

/// Namespaces of an account compared per piece; with more of them, the next ones in turn.
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
    /// Evicts up to `count`, what is worth least first, of whom it may; returns how many were evicted.
    pub(super) fn evict_by_value(
        &self,
        index: &PrefixIndex,
        unit: Unit,
        whose: Whose,
        count: usize,
        values: &dyn Fn(AccountId) -> Values,
    ) -> usize {
        let mut lanes: Option<Vec<(usize, Values)>> = None;
        self.in_tree_pieces(index, unit, count, |state, wanted| {
            let may_give = || {
                let some =
                    (0..state.lanes.len()).filter(|&lane| state.tree_allowance(index, whose, lane) > 0);
                some.map(|lane| (lane, values(AccountId(lane as u32)))).collect()
            };
            let lanes = lanes.get_or_insert_with(may_give);
            state.take_least(index, whose, lanes, wanted)
        })
    }
}

impl State {
    /// Takes up to `wanted` blocks from the namespace that has the one worth least; none if nobody has any.
    fn take_least(
        &mut self,
        index: &PrefixIndex,
        whose: Whose,
        lanes: &mut Vec<(usize, Values)>,
        wanted: usize,
    ) -> Option<usize> {
        let PrefixIndex { pool, namespaces, .. } = index;
        lanes.retain(|(lane, _)| self.tree_allowance(index, whose, *lane) > 0);
        let mut ranked: Vec<Ranked> = Vec::new();
        for (place, (lane, values)) in lanes.iter().enumerate() {
            let active = &self.lanes[*lane].active;
            let compared = &active[..active.len().min(MAX_COMPARED)];
            rank(pool, namespaces, compared, values, place, &mut ranked);
        }
        ranked.sort_by(|a, b| a.value.total_cmp(&b.value));
        let first = ranked.first()?;
        let bound = ranked.get(1).map_or(f32::INFINITY, |second| second.value);
        let (lane, values) = &lanes[first.lane];
        let wanted = wanted.min(self.tree_allowance(index, whose, *lane));
        let namespace = namespaces.at(first.namespace)?;
        self.taken.clear();
        let (is_left, num_freed) = take(index, namespace, wanted, bound, values, &mut self.taken);
        let active = &mut self.lanes[*lane].active;
        if !is_left {
            active.retain(|id| *id != first.namespace);
        } else if active.len() > MAX_COMPARED {
            active.rotate_left(MAX_COMPARED);
        }
        Some(self.count(self.taken.len(), num_freed))
    }
}

/// The least value in a namespace, and its lane's place among those looked at.
struct Ranked {
    value: f32,
    namespace: NamespaceId,
    lane: usize,
}

/// Adds those namespaces that have something to give.
fn rank(
    pool: &BlockPool,
    namespaces: &Namespaces,
    ids: &[NamespaceId],
    values: &Values,
    lane: usize,
    ranked: &mut Vec<Ranked>,
) {
    for &id in ids {
        let Some((_, namespace)) = namespaces.at(id) else { continue };
        let least = loop {
            let tree = namespace.read_tree();
            let mut order = namespace.lock_order();
            let mut parking = MAX_PIECE;
            let candidates = (0..NUM_CLASSES)
                .filter_map(|class| candidate(pool, &tree, &mut order, class, values, &mut parking));
            let least = candidates.map(|found| found.value).min_by(f32::total_cmp);
            if parking > 0 {
                break least;
            }
        };
        ranked.extend(least.map(|value| Ranked { value, namespace: id, lane }));
    }
}

/// Takes up to `wanted` blocks worth at most `bound` from a namespace; returns whether it has anything left, and how many
/// blocks of the device are free.
fn take(
    index: &PrefixIndex,
    (id, namespace): (NamespaceId, &Namespace),
    wanted: usize,
    bound: f32,
    values: &Values,
    taken: &mut Vec<BlockHandle>,
) -> (bool, usize) {
    let pool = &index.pool;
    let mut tree = namespace.write_tree();
    let mut order = namespace.lock_order();
    let mut parking = MAX_PIECE;
    let mut candidates: [Option<Candidate>; NUM_CLASSES] =
        std::array::from_fn(|class| candidate(pool, &tree, &mut order, class, values, &mut parking));
    while taken.len() < wanted && parking > 0 {
        let present = candidates.iter().enumerate().filter_map(|(class, found)| found.map(|c| (class, c)));
        let Some((class, least)) = present.min_by(|a, b| a.1.value.total_cmp(&b.1.value)) else { break };
        if least.value > bound {
            break;
        }
        let parent = tree.node(least.node).parent;
        let tail = tree.take_tail(least.node, wanted - taken.len(), taken);
        if tail.is_removed {
            order.remove(least.node);
            if let Some(other) = unpark(&tree, &mut order, parent) {
                candidates[other] = candidate(pool, &tree, &mut order, other, values, &mut parking);
            }
            candidates[class] = candidate(pool, &tree, &mut order, class, values, &mut parking);
        }
    }
    let is_left = !order.is_empty();
    // Relaxed: under the tree's exclusive lock, which keeps those out who set it.
    namespace.is_queued.store(is_left, Ordering::Relaxed);
    index.merge_seams(&mut tree, &mut order, taken.len());
    (is_left, index.evicted((id, namespace), taken))
}

/// The leaf of a class that is worth least. Parks nodes at the old end that have children, `parking` of them at most:
/// at 0 the answer is none, and the caller lets the locks go before it looks again.
fn candidate(
    pool: &BlockPool,
    tree: &Tree,
    order: &mut Order,
    class: usize,
    values: &Values,
    parking: &mut usize,
) -> Option<Candidate> {
    let is_leaf = |id: u32| tree.node(id).num_children == 0;
    let (node, stamp) = loop {
        let (node, stamp) = order.oldest(class)?;
        if is_leaf(node) {
            break (node, stamp);
        }
        *parking = parking.checked_sub(1)?;
        order.park(node);
    };
    if tree.is_fenced(node, |epoch| pool.epoch_closed(epoch)) {
        return None;
    }
    let oldest = Candidate { value: values.of(class, stamp), node };
    let newest = order.newest_first(class).take(MAX_SEARCHED).find(|&(id, _)| is_leaf(id));
    let Some((node, stamp)) = newest else { return Some(oldest) };
    let value = values.of(class, stamp);
    if value < oldest.value && !tree.is_fenced(node, |epoch| pool.epoch_closed(epoch)) {
        return Some(Candidate { value, node });
    }
    Some(oldest)
}
