//! What must hold whenever no call is in progress.

use super::PrefixIndex;
use super::namespace::Namespace;
use super::order::Order;
use super::tree::{Tree, run_length};
use crate::sync::Ordering;
use std::collections::HashSet;

type Check = std::result::Result<(), String>;

impl PrefixIndex {
    /// Checks structure, order and counters of every namespace.
    ///
    /// # Errors
    /// The first violated invariant, as a sentence.
    pub fn check_invariants(&self) -> Check {
        let mut seen = HashSet::new();
        for (id, namespace) in self.namespaces.all() {
            self.check_namespace(namespace, &mut seen).map_err(|text| format!("namespace {id}: {text}"))?;
        }
        self.check_homes(seen.len())?;
        self.check_attached()
    }

    fn check_namespace(&self, namespace: &Namespace, seen: &mut HashSet<u32>) -> Check {
        let tree = namespace.read_tree();
        let order = namespace.lock_order();
        let view = self.view();
        let mut num_children = vec![0u32; tree.num_slots() as usize];
        let mut held_children = vec![0u32; tree.num_slots() as usize];
        let live = live_nodes(&tree);
        for &id in &live {
            let node = tree.node(id);
            if node.blocks.is_empty() {
                return Err(format!("node {id} is empty"));
            }
            if node.is_run && run_length(&node.blocks) != node.blocks.len() {
                return Err(format!("the blocks of node {id} are not consecutive"));
            }
            if let Some(block) = node.blocks.iter().find(|block| !seen.insert(block.id().0)) {
                return Err(format!("block {} is indexed twice", block.id()));
            }
            let place = tree.walk(&view, node.parent, view.row(node.blocks[0]), &mut Vec::new());
            if place.node != id {
                return Err(format!("node {id} is not found by its first block"));
            }
            num_children[node.parent as usize] += 1;
            held_children[node.parent as usize] += u32::from(tree.holds(id) > 0);
        }
        if live.len() != tree.num_children() {
            return Err(format!("{} nodes, {} in the table", live.len(), tree.num_children()));
        }
        for id in live.iter().copied().chain(tree.all_roots()) {
            let listed = tree.children_of(id).filter(|&child| tree.node(child).parent == id);
            let counts =
                [tree.node(id).num_children as usize, listed.take(tree.num_slots() as usize).count()];
            if counts != [num_children[id as usize] as usize; 2] {
                return Err(format!("node {id} counts its children wrongly"));
            }
            if !tree.is_root(id) && tree.holds(id) < held_children[id as usize] {
                return Err(format!("node {id} has fewer holds than held children"));
            }
        }
        check_lists(namespace, &tree, &order, &live)
    }
}

fn live_nodes(tree: &Tree) -> Vec<u32> {
    (0..tree.num_slots()).filter(|&id| tree.is_live(id)).collect()
}

/// The lists have every unheld node that is a leaf, children before parents, stamps not falling.
fn check_lists(namespace: &Namespace, tree: &Tree, order: &Order, live: &[u32]) -> Check {
    // Relaxed: nothing is in progress.
    let is_known = namespace.is_queued.load(Ordering::Relaxed);
    if !is_known && live.iter().any(|&id| tree.holds(id) == 0 && tree.node(id).num_children == 0) {
        return Err("the evictor does not know of unheld nodes".into());
    }
    if !order.has_lists() {
        return Ok(());
    }
    let lists = order.lists();
    let listed: HashSet<u32> = lists.iter().flatten().map(|&(id, _)| id).collect();
    let num_listed: usize = lists.iter().map(Vec::len).sum();
    if listed.len() != num_listed || listed.iter().any(|&id| !order.is_linked(id)) {
        return Err("a node is in two lists, or in one that it does not know of".into());
    }
    for &id in live {
        let is_parked = tree.holds(id) == 0 && !listed.contains(&id);
        if is_parked && (lists.len() == 1 || tree.node(id).num_children == 0) {
            return Err(format!("node {id} is unheld and in no list"));
        }
        if tree.holds(id) > 0 && listed.contains(&id) {
            return Err(format!("node {id} is held and in a list"));
        }
    }
    if lists.len() == 1 {
        check_list(tree, &lists[0])?;
    }
    Ok(())
}

/// Exact LRU: children before parents, stamps not falling.
fn check_list(tree: &Tree, list: &[(u32, u64)]) -> Check {
    if list.windows(2).any(|pair| pair[0].1 > pair[1].1) {
        return Err("stamps fall along the list".into());
    }
    let mut gone = HashSet::new();
    for &(id, _) in list {
        if gone.contains(&tree.node(id).parent) {
            return Err(format!("node {id} comes after its parent in the list"));
        }
        gone.insert(id);
    }
    Ok(())
}
