//! Removing a scope's prefixes, whatever uses them.

use super::evictor::MAX_PIECE;
use super::namespace::Namespace;
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
    ///
    /// # Concurrency
    /// The cut is one change, then blocks go in pieces of at most 64, between which others have the namespace.
    pub fn purge(&self, scope: &ShareScope) -> Purged {
        let mut done = Purged::default();
        for (id, namespace) in self.namespaces.all() {
            let mut tree = namespace.write_tree();
            let is_of_scope = |own: &ShareScope| own == scope || own.without_salt() == *scope;
            if is_of_scope(&namespace.names().scope) {
                done.num_namespaces += 1;
                self.cut_off(id, namespace, &mut tree);
                drop(tree);
                done.num_evicted += self.sweep_stale(id, namespace);
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

    /// Empties the namespace of a salt, unless somebody uses it. False if it is used, or if open steps may still read
    /// what is left.
    pub(super) fn empty_unused(&self, id: NamespaceId) -> bool {
        let Ok(namespace) = self.namespaces.get(id) else { return false };
        if is_held(namespace) {
            return false;
        }
        let mut tree = namespace.write_tree();
        if self.check_same(id, namespace).is_err() {
            return false;
        }
        self.cut_off(id, namespace, &mut tree);
        drop(tree);
        self.sweep_stale(id, namespace);
        namespace.read_tree().num_children() == 0
    }

    /// Cuts everything off: what is there is stale from now on.
    fn cut_off(&self, id: NamespaceId, namespace: &Namespace, tree: &mut Tree) {
        let mut order = namespace.lock_order();
        // Whoever lets an attached block go either tells of it before this, or finds it cleared.
        let _attached = self.lock_attached();
        if let Some(events) = self.events() {
            events.cleared(id);
        }
        tree.detach_roots(&mut order);
        // Relaxed: written under the tree's exclusive lock, read under it.
        namespace.num_purges.fetch_add(1, Ordering::Relaxed);
    }

    /// Evicts what is stale and not held; returns how many blocks. Slots that come into use meanwhile are of the new
    /// era, or held.
    fn sweep_stale(&self, id: NamespaceId, namespace: &Namespace) -> usize {
        let (mut slot, mut total) = (0, 0);
        let end = namespace.read_tree().num_slots();
        let mut rest = None;
        while slot < end || rest.is_some() {
            let (next, taken) = self.take_piece(id, namespace, |sweep| {
                let mut next = rest.take();
                for _ in 0..MAX_PIECE {
                    next = match next {
                        Some(node) => sweep.take_path(node),
                        None if slot < end => {
                            // A path is taken from its leaf up, so one look at each slot is enough.
                            slot += 1;
                            sweep.take_path(slot - 1)
                        }
                        None => return None,
                    };
                    if sweep.is_full() {
                        break;
                    }
                }
                next
            });
            rest = next;
            total += taken;
            namespace.let_in();
        }
        total
    }

    /// Evicts what a pin held whose prefix was purged meanwhile. The pin is released already, so its node may be
    /// gone, and its slot another's: what is purged is told by its era.
    pub(super) fn sweep_purged(&self, namespace: &Namespace, pin: &Pin) {
        let mut rest = Some(pin.node);
        while let Some(node) = rest {
            (rest, _) = self.take_piece(pin.namespace, namespace, |sweep| sweep.take_path(node));
        }
    }

    /// Lets `take` take blocks under the namespace's locks, and evicts them. Returns what it returned, and how many.
    fn take_piece<T>(
        &self,
        id: NamespaceId,
        namespace: &Namespace,
        take: impl FnOnce(&mut Sweep<'_>) -> T,
    ) -> (T, usize) {
        let mut tree = namespace.write_tree();
        let mut order = namespace.lock_order();
        let mut sweep = Sweep { index: self, tree: &mut tree, order: &mut order, taken: Vec::new() };
        let taken = take(&mut sweep);
        let blocks = sweep.taken;
        let current = self.namespaces.at(id).map_or(id, |(current, _)| current);
        let num_freed = self.evicted((current, namespace), &blocks);
        (taken, num_freed)
    }
}

/// Whether anybody has a pin in a namespace, or had one while it was looked at.
fn is_held(namespace: &Namespace) -> bool {
    let mut slot = 0;
    loop {
        let tree = namespace.read_tree();
        let end = tree.num_slots().min(slot + MAX_PIECE as u32);
        if (slot..end).any(|id| tree.holds(id) > 0) {
            return true;
        }
        if end == tree.num_slots() {
            return false;
        }
        slot = end;
        drop(tree);
        namespace.let_in();
    }
}

/// A piece of work on what a purge cut off, under a namespace's locks.
struct Sweep<'a> {
    index: &'a PrefixIndex,
    tree: &'a mut Tree,
    order: &'a mut Order,
    taken: Vec<BlockHandle>,
}

impl Sweep<'_> {
    /// Whether it has as many blocks as are taken at once.
    fn is_full(&self) -> bool {
        self.taken.len() >= MAX_PIECE
    }

    /// Takes a stale leaf and what becomes a leaf above it, as far as nobody holds it or may read it. Returns where to
    /// go on, if the piece is full before that.
    fn take_path(&mut self, leaf: u32) -> Option<u32> {
        let (tree, mut id) = (&mut *self.tree, leaf);
        while tree.is_live(id) && tree.is_stale(id) && tree.holds(id) == 0 && tree.node(id).num_children == 0
        {
            if self.index.is_fenced(tree, id) {
                return None;
            }
            if self.taken.len() >= MAX_PIECE {
                return Some(id);
            }
            let parent = tree.node(id).parent;
            let tail = tree.take_tail(id, MAX_PIECE - self.taken.len(), &mut self.taken);
            if !tail.is_removed {
                return Some(id);
            }
            self.order.remove(id);
            unpark(tree, self.order, parent);
            id = parent;
        }
        None
    }
}
