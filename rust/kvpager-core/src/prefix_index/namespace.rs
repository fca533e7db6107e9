//! One namespace: a tree and its order.

use super::encoding::Encoder;
use super::fingerprint::Fingerprint;
use super::learned::Learner;
use super::order::Order;
use super::scope::ShareScope;
use super::tree::Tree;
use super::waiting::Waiting;
use crate::ids::AccountId;
use crate::sync::{
    AtomicBool, AtomicU32, Mutex, MutexGuard, Ordering, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use crossbeam_utils::CachePadded;
use std::sync::{Arc, PoisonError, TryLockError};

/// A tree, held exclusively.
pub(super) type TreeGuard<'a> = RwLockWriteGuard<'a, CachePadded<Tree>>;

/// Who shares, and what must be equal.
#[derive(Clone)]
pub(super) struct Names {
    /// Who may share.
    pub(super) scope: ShareScope,
    /// What must be equal, encoded.
    pub(super) fingerprint: Vec<u8>,
    /// Scope and fingerprint, encoded.
    pub(super) identity: Vec<u8>,
}

impl Names {
    pub(super) fn new(scope: &ShareScope, fingerprint: &Fingerprint) -> Self {
        let mut encoder = Encoder::new();
        scope.encode(&mut encoder);
        fingerprint.encode(&mut encoder);
        Self { scope: scope.clone(), fingerprint: fingerprint.to_bytes(), identity: encoder.finish() }
    }
}

/// The prefixes of one (scope, fingerprint).
///
/// Two locks, always taken in this order: the tree's, then the order's. Matching, pinning and unpinning have the
/// tree's, shared; a first pin and a last unpin the order's too, unless the policy is `clock`, which keeps no lists;
/// whatever changes the structure has both, exclusively.
pub(super) struct Namespace {
    /// Who is charged for its held blocks.
    pub(super) account: AccountId,
    /// What learns from it, under the `learned` policy.
    pub(super) learner: Option<Arc<std::sync::Mutex<Learner>>>,
    /// Whether only `publish` inserts there.
    pub(super) is_public: bool,
    /// How often it was given to another salt. Changes under both locks.
    generation: AtomicU32,
    /// Changes with the generation.
    names: RwLock<Names>,
    /// How often everything was cut off. Changes under both locks.
    pub(super) num_purges: AtomicU32,
    /// Whether the evictor knows that there may be something unheld. Set under the tree's shared lock, cleared
    /// under the exclusive one.
    pub(super) is_queued: AtomicBool,
    /// Those who wait for the tree.
    num_waiting: Waiting,
    // The words of the locks are written by every match: apart from each other and from what is only read.
    tree: RwLock<CachePadded<Tree>>,
    order: CachePadded<Mutex<Order>>,
}

impl Namespace {
    pub(super) fn new(
        names: Names,
        account: AccountId,
        learner: Option<Arc<std::sync::Mutex<Learner>>>,
        num_lists: usize,
    ) -> Self {
        Self {
            account,
            learner,
            is_public: matches!(names.scope, ShareScope::Public(_)),
            generation: AtomicU32::new(0),
            names: RwLock::new(names),
            num_purges: AtomicU32::new(0),
            is_queued: AtomicBool::new(false),
            num_waiting: Waiting::default(),
            tree: RwLock::new(CachePadded::new(Tree::new())),
            order: CachePadded::new(Mutex::new(Order::new(num_lists))),
        }
    }

    /// How often it was given to another salt.
    #[inline]
    pub(super) fn generation(&self) -> u32 {
        // Acquire pairs with the Release in `rename_if_empty`: whoever finds a generation finds its names.
        self.generation.load(Ordering::Acquire)
    }

    /// Gives the namespace to another salt if nothing is in it and nobody has a pin there.
    pub(super) fn rename_if_empty(&self, names: Names) -> bool {
        let tree = self.write_tree();
        if tree.num_children() > 0 || tree.is_held() {
            return false;
        }
        let _order = self.lock_order();
        *self.names.write().unwrap_or_else(PoisonError::into_inner) = names;
        // Release pairs with the Acquire in `generation`.
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    pub(super) fn names(&self) -> RwLockReadGuard<'_, Names> {
        self.names.read().unwrap_or_else(PoisonError::into_inner)
    }

    // A lock is poisoned only by a panic inside the index, which is a bug that has been reported there;
    // refusing every later call would only hide it.
    #[inline]
    pub(super) fn read_tree(&self) -> RwLockReadGuard<'_, CachePadded<Tree>> {
        match self.tree.try_read() {
            Ok(tree) => tree,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.num_waiting.count(|| self.tree.read()),
        }
    }

    #[inline]
    pub(super) fn write_tree(&self) -> TreeGuard<'_> {
        match self.tree.try_write() {
            Ok(tree) => tree,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.num_waiting.count(|| self.tree.write()),
        }
    }

    /// Lets those go first who wait for the tree. To be called without its lock.
    pub(super) fn let_in(&self) {
        self.num_waiting.let_in();
    }

    pub(super) fn lock_order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
