//! Removing a scope's prefixes, whatever uses them.

use super::namespace::{Names, Namespace};
use super::order::{Order, unpark};
use super::tree::Tree;
use super::{Pin, PrefixIndex, ShareScope};
use crate::ids::{BlockHandle, NamespaceId};
use crate::sync::Ordering;

/// What a purge did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Namespaces of the scope, those of clients' salts included.
    pub num_namespaces: usize,
    /// Blocks evicted at once.
    pub num_evicted: usize,
}

impl PrefixIndex {
    /// Removes every prefix of a scope, over all fingerprints and, for a tenant, over all salts of its clients.
    ///
    /// From the return on nothing of it can be matched. Blocks that are not held are evicted; requests that hold
    /// some go on undisturbed, and their blocks are evicted when they release them (or, where open steps may
    /// still read them, as any cached block is). The tenant's next requests start from nothing.
    pub fn purge(&self, scope: &ShareScope) -> Purged {
        let mut done = Purged::default();
        for (id, namespace) in self.namespaces.all() {
            let mut tree = namespace.write_tree();
            let is_of_scope = |own: &ShareScope| own == scope || own.without_salt() == *scope;
            if is_of_scope(&namespace.names().scope) {
                done.num_namespaces += 1;
                let mut order = namespace.lock_order();
                done.num_evicted += self.cut_off(id, namespace, &mut tree, &mut order);
            }
        }
        // Release pairs with the Acquire in `num_purges`: whoever sees the number sees what was cut off.
        self.num_purges.fetch_add(1, Ordering::Release);
        done
    }

    /// How often something was purged.
    #[must_use]
    pub fn num_purges(&self) -> u64 {
        self.num_purges.load(Ordering::Acquire)
    }

    /// Empties the namespace of a salt and gives it to another one, if nobody uses it. Else the names come back.
    pub(super) fn rename_unused(
        &self,
        id: NamespaceId,
        namespace: &Namespace,
        names: Names,
    ) -> std::result::Result<(), Names> {
        let mut tree = namespace.write_tree();
        let mut order = namespace.lock_order();
        if tree.is_held() {
            return Err(names);
        }
        self.cut_off(id, namespace, &mut tree, &mut order);
        if tree.num_children() > 0 {
            // Open steps may still read what is left.
            return Err(names);
        }
        namespace.rename(names);
        Ok(())
    }

    /// Cuts everything off, and evicts what is not held.
    fn cut_off(&self, id: NamespaceId, namespace: &Namespace, tree: &mut Tree, order: &mut Order) -> usize {
        if let Some(events) = &self.events {
            events.cleared(id, tree);
        }
        tree.detach_roots(order);
        // Relaxed: written and read under the order's lock.
        namespace.num_purges.fetch_add(1, Ordering::Relaxed);
        let mut taken = Vec::new();
        // A path is taken from its leaf up, so one look at each node is enough.
        for id in 0..tree.num_slots() {
            self.take_path(tree, order, id, &mut taken);
        }
        self.evicted(id, &taken);
        taken.len()
    }

    /// Takes a leaf and what becomes a leaf above it, as far as nobody holds it or may read it.
    fn take_path(&self, tree: &mut Tree, order: &mut Order, leaf: u32, taken: &mut Vec<BlockHandle>) {
        let mut id = leaf;
        while tree.is_live(id) && tree.holds(id) == 0 && tree.node(id).num_children == 0 {
            if self.is_fenced(tree, id) {
                return;
            }
            let parent = tree.node(id).parent;
            let tail = tree.take_tail(id, usize::MAX, taken);
            debug_assert!(tail.is_removed, "all of it was asked for");
            order.remove(id);
            unpark(tree, order, parent);
            id = parent;
        }
    }

    /// Evicts what a pin held whose prefix was purged meanwhile. The pin is released already, so its node may be
    /// gone, and its slot another's: what is purged is told by its root.
    pub(super) fn sweep_purged(&self, namespace: &Namespace, pin: &Pin) {
        let mut tree = namespace.write_tree();
        let mut order = namespace.lock_order();
        if tree.is_live(pin.node) && !tree.is_reachable(pin.node) {
            let mut taken = Vec::new();
            self.take_path(&mut tree, &mut order, pin.node, &mut taken);
            self.evicted(pin.namespace, &taken);
        }
    }
}
