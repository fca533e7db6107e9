//! One namespace: a tree, its order, and the table that interns (scope, fingerprint) to an integer.

use super::encoding::Encoder;
use super::fingerprint::Fingerprint;
use super::learned::{Learner, NUM_CLASSES};
use super::order::Order;
use super::scope::ShareScope;
use super::tree::Tree;
use crate::error::{Error, Result};
use crate::ids::{AccountId, NamespaceId};
use crate::sync::AtomicU32;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The prefixes of one (scope, fingerprint).
///
/// Two locks, always taken in this order: the tree's, then the order's. Matching walks under the shared tree
/// lock and pins under the order lock before it lets the tree go; unpinning takes the order lock alone;
/// whatever changes the structure has both.
pub(super) struct Namespace {
    /// Who is charged for its held blocks.
    pub(super) account: AccountId,
    /// What learns from it, under the `learned` policy.
    pub(super) learner: Option<Arc<Mutex<Learner>>>,
    /// Who may share.
    pub(super) scope: ShareScope,
    /// What must be equal, encoded.
    pub(super) fingerprint: Vec<u8>,
    /// Scope and fingerprint, encoded.
    pub(super) identity: Vec<u8>,
    /// How often everything was cut off. Changes under both locks.
    pub(super) num_purges: AtomicU32,
    tree: RwLock<Tree>,
    order: Mutex<Order>,
}

impl Namespace {
    fn new(
        scope: &ShareScope,
        fingerprint: &Fingerprint,
        identity: Vec<u8>,
        account: AccountId,
        learner: Option<Arc<Mutex<Learner>>>,
    ) -> Self {
        let num_classes = if learner.is_some() { NUM_CLASSES } else { 1 };
        Self {
            account,
            learner,
            scope: scope.clone(),
            fingerprint: fingerprint.to_bytes(),
            identity,
            num_purges: AtomicU32::new(0),
            tree: RwLock::new(Tree::new()),
            order: Mutex::new(Order::new(num_classes)),
        }
    }

    /// Whether only `publish` inserts there.
    pub(super) fn is_public(&self) -> bool {
        matches!(self.scope, ShareScope::Public(_))
    }

    // A lock is poisoned only by a panic inside the index, which is a bug that has been reported there;
    // refusing every later call would only hide it.
    pub(super) fn read_tree(&self) -> RwLockReadGuard<'_, Tree> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write_tree(&self) -> RwLockWriteGuard<'_, Tree> {
        self.tree.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Buckets of doubling size, so that a namespace never moves and is found without a lock.
const NUM_BUCKETS: usize = 32;
const FIRST_BUCKET: usize = 16;

type Bucket = Box<[OnceLock<Namespace>]>;

/// Every namespace of an index.
pub(super) struct Namespaces {
    buckets: [OnceLock<Bucket>; NUM_BUCKETS],
    interned: Mutex<HashMap<Vec<u8>, NamespaceId>>,
}

impl Namespaces {
    pub(super) fn new() -> Self {
        let buckets = [const { OnceLock::new() }; NUM_BUCKETS];
        Self { buckets, interned: Mutex::new(HashMap::new()) }
    }

    /// The integer of (scope, fingerprint), the same at every call.
    pub(super) fn intern(
        &self,
        scope: &ShareScope,
        fingerprint: &Fingerprint,
        account: AccountId,
        learner: Option<Arc<Mutex<Learner>>>,
    ) -> Result<NamespaceId> {
        let mut encoder = Encoder::new();
        scope.encode(&mut encoder);
        fingerprint.encode(&mut encoder);
        let identity = encoder.finish();
        let mut interned = self.interned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&known) = interned.get(&identity) {
            let charged = self.get(known)?.account;
            if charged != account {
                return Err(Error::invalid(format!(
                    "namespace {known} is charged to account {charged}, not to account {account}"
                )));
            }
            return Ok(known);
        }
        let id =
            NamespaceId(u32::try_from(interned.len()).map_err(|_| Error::invalid("too many namespaces"))?);
        self.cell(id).get_or_init(|| Namespace::new(scope, fingerprint, identity.clone(), account, learner));
        interned.insert(identity, id);
        Ok(id)
    }

    fn position(id: NamespaceId) -> (usize, usize) {
        let index = id.0 as usize + FIRST_BUCKET;
        let bucket = index.ilog2() as usize;
        (bucket - FIRST_BUCKET.ilog2() as usize, index - (1 << bucket))
    }

    fn cell(&self, id: NamespaceId) -> &OnceLock<Namespace> {
        let (bucket, offset) = Self::position(id);
        let cells = self.buckets[bucket]
            .get_or_init(|| (0..FIRST_BUCKET << bucket).map(|_| OnceLock::new()).collect());
        &cells[offset]
    }

    /// A namespace by its integer.
    #[inline]
    pub(super) fn get(&self, id: NamespaceId) -> Result<&Namespace> {
        let (bucket, offset) = Self::position(id);
        self.buckets
            .get(bucket)
            .and_then(OnceLock::get)
            .and_then(|cells| cells[offset].get())
            .ok_or_else(|| Error::invalid(format!("namespace {id} was never interned by this index")))
    }

    /// Whether one has the property.
    pub(super) fn any(&self, property: impl Fn(&Namespace) -> bool) -> bool {
        (0..self.len()).filter_map(|id| self.get(NamespaceId(id)).ok()).any(property)
    }

    /// How many there are.
    pub(super) fn len(&self) -> u32 {
        self.interned.lock().unwrap_or_else(PoisonError::into_inner).len() as u32
    }
}
