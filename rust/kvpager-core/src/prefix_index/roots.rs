//! The roots of a tree: the empty prefix, continuations of prefixes that other namespaces keep, and what a
//! purge cut off.

use super::order::Order;
use super::tree::{NO_NODE, Node, Tree};
use std::collections::{HashMap, HashSet};

/// Keyed digest of a prefix's tokens, and its length in blocks.
pub(super) type PrefixKey = ([u8; 32], u32);

/// Which nodes are roots. A root has no blocks and no parent.
pub(super) struct Roots {
    /// The empty prefix.
    current: u32,
    /// Continuations of prefixes kept elsewhere. Keyed by content: the head may go and come back.
    continuations: HashMap<PrefixKey, u32>,
    all: HashSet<u32>,
    /// How many roots there may be before those that nobody needs are looked for.
    next_sweep: usize,
}

impl Roots {
    pub(super) fn new(current: u32) -> Self {
        Self { current, continuations: HashMap::new(), all: HashSet::from([current]), next_sweep: 64 }
    }
}

impl Tree {
    /// The root of the empty prefix.
    #[inline]
    pub(super) fn root(&self) -> u32 {
        self.roots.current
    }

    /// Whether the node is a root.
    pub(super) fn is_root(&self, id: u32) -> bool {
        self.roots.all.contains(&id)
    }

    /// What a root continues, if it is that of a continuation.
    pub(super) fn key_of(&self, root: u32) -> Option<PrefixKey> {
        self.roots.continuations.iter().find(|&(_, &id)| id == root).map(|(key, _)| *key)
    }

    /// Every root.
    pub(super) fn all_roots(&self) -> impl Iterator<Item = u32> + '_ {
        self.roots.all.iter().copied()
    }

    /// Whether any prefix kept elsewhere is continued here.
    pub(super) fn has_continuations(&self) -> bool {
        !self.roots.continuations.is_empty()
    }

    /// The root of what continues this prefix.
    pub(super) fn continuation(&self, key: &PrefixKey) -> Option<u32> {
        self.roots.continuations.get(key).copied()
    }

    /// The same, made if it is not there.
    pub(super) fn make_continuation(&mut self, order: &mut Order, key: PrefixKey) -> u32 {
        if let Some(root) = self.continuation(&key) {
            return root;
        }
        let root = self.add_root(order);
        self.roots.continuations.insert(key, root);
        root
    }

    /// Cuts everything off: nothing that is there now can be matched any more.
    pub(super) fn detach_roots(&mut self, order: &mut Order) {
        self.roots.continuations.clear();
        self.era = self.era.wrapping_add(1);
        self.roots.current = self.add_root(order);
    }

    fn add_root(&mut self, order: &mut Order) -> u32 {
        if self.roots.all.len() >= self.roots.next_sweep {
            self.sweep_roots();
        }
        let id = self.occupy(Node::new(Vec::new(), NO_NODE, 0));
        self.node_mut(id).era = self.era;
        order.add(id);
        self.roots.all.insert(id);
        id
    }

    /// Removes roots, but for the current one, that have no children and no pins.
    fn sweep_roots(&mut self) {
        let current = self.roots.current;
        let is_idle = |id: &u32| *id != current && self.node(*id).num_children == 0 && self.holds(*id) == 0;
        let idle: Vec<u32> = self.roots.all.iter().copied().filter(is_idle).collect();
        self.roots.continuations.retain(|_, id| !idle.contains(id));
        for id in idle {
            self.roots.all.remove(&id);
            self.vacate(id);
        }
        self.roots.next_sweep = 64.max(2 * self.roots.all.len());
    }
}
