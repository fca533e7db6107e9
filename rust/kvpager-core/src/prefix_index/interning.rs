//! The table that interns (scope, fingerprint) to an integer, and gives the namespaces of old salts to new ones.
//!
//! A client chooses its salts, so there may be any number of them. Each account has at most `max_salts` namespaces
//! of salts at once; beyond that the one used longest ago that nobody has pinned is emptied, piece by piece and
//! without the table's lock, and renamed. The number of a namespace has its *generation*, so a number from before is
//! refused, never taken for another salt's.

use super::PrefixIndex;
use super::fingerprint::Fingerprint;
use super::learned::Learner;
use super::namespace::{Names, Namespace};
use super::scope::ShareScope;
use crate::error::{Error, Result};
use crate::ids::{AccountId, NamespaceId};
use crate::sync::{AtomicU32, Ordering, OuterMutex, OuterMutexGuard};
use arrayvec::ArrayVec;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Buckets of doubling size, so that a namespace never moves and is found without a lock.
const NUM_BUCKETS: usize = 17;
const FIRST_BUCKET: usize = 16;
/// Bits of a namespace's number that say where it is; the rest are its generation.
const SLOT_BITS: u32 = 20;
const MAX_GENERATION: u32 = (1 << (32 - SLOT_BITS)) - 1;
/// Namespaces of salts an account may have at once, unless set otherwise.
const DEFAULT_MAX_SALTS: u32 = 1024;
/// Namespaces of salts that one call tries to empty.
const MAX_TRIED: usize = 8;

type Bucket = Box<[OnceLock<Namespace>]>;

/// Every namespace of an index.
pub(super) struct Namespaces {
    buckets: [OnceLock<Bucket>; NUM_BUCKETS],
    interned: OuterMutex<Interned>,
    max_salts: AtomicU32,
    /// Lists of unheld nodes that each keeps.
    num_lists: usize,
}

#[derive(Default)]
struct Interned {
    ids: HashMap<Vec<u8>, NamespaceId>,
    num_slots: u32,
    /// Counts interning calls: the time of a use.
    num_calls: u64,
    /// Salted namespaces, by account.
    salts: HashMap<AccountId, Salts>,
    num_reclaimed: u64,
}

/// The salted namespaces of an account, by the time of their last use.
#[derive(Default)]
struct Salts {
    times: HashMap<NamespaceId, u64>,
    by_time: BTreeMap<u64, NamespaceId>,
}

impl Salts {
    fn touch(&mut self, id: NamespaceId, now: u64) {
        self.remove(id);
        self.times.insert(id, now);
        self.by_time.insert(now, id);
    }

    fn remove(&mut self, id: NamespaceId) -> bool {
        let time = self.times.remove(&id);
        time.is_some_and(|time| self.by_time.remove(&time).is_some())
    }
}

/// What [`Namespaces::intern`] came to.
enum Interning {
    Done(NamespaceId),
    /// The account has its limit of salts: these are the ones used longest ago, of so many.
    Full(ArrayVec<NamespaceId, MAX_TRIED>, usize),
}

/// Counts of namespaces that clients' salts made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SaltStats {
    /// There now, of the account.
    pub num_salted: usize,
    /// Most that an account may have.
    pub max_salted: u32,
    /// Given to another salt so far, in the index.
    pub num_reclaimed: u64,
}

impl Interned {
    fn full(&self, account: AccountId) -> Interning {
        let Some(salts) = self.salts.get(&account) else { return Interning::Full(ArrayVec::new(), 0) };
        let is_renamable = |id: &NamespaceId| id.0 >> SLOT_BITS < MAX_GENERATION;
        let oldest = salts.by_time.values().copied().filter(is_renamable).take(MAX_TRIED);
        Interning::Full(oldest.collect(), salts.times.len())
    }
}

impl Namespaces {
    pub(super) fn new(num_lists: usize) -> Self {
        let buckets = [const { OnceLock::new() }; NUM_BUCKETS];
        let max_salts = AtomicU32::new(DEFAULT_MAX_SALTS);
        Self { buckets, interned: OuterMutex::default(), max_salts, num_lists }
    }

    fn interned(&self) -> OuterMutexGuard<'_, Interned> {
        self.interned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The integer of (scope, fingerprint), the same at every call. A new salt beyond the account's limit gets the place
    /// of `emptied`, if nobody has used that since.
    fn intern(
        &self,
        names: &Names,
        account: AccountId,
        learner: Option<&Arc<Mutex<Learner>>>,
        emptied: Option<NamespaceId>,
    ) -> Result<Interning> {
        let mut interned = self.interned();
        interned.num_calls += 1;
        let now = interned.num_calls;
        let is_salted = matches!(names.scope, ShareScope::Salted { .. });
        if let Some(&known) = interned.ids.get(&names.identity) {
            let charged = self.get(known)?.account;
            if charged != account {
                return Err(Error::invalid(format!(
                    "namespace {known} is charged to account {charged}, not to account {account}"
                )));
            }
            if is_salted {
                interned.salts.entry(account).or_default().touch(known, now);
            }
            return Ok(Interning::Done(known));
        }
        let num_salts = interned.salts.get(&account).map_or(0, |salts| salts.times.len());
        // Relaxed: a limit guards no memory.
        let id = if is_salted && num_salts >= self.max_salts.load(Ordering::Relaxed) as usize {
            match emptied.and_then(|id| self.reuse(&mut interned, id, names, account)) {
                Some(id) => id,
                None => return Ok(interned.full(account)),
            }
        } else {
            self.add(&mut interned, names.clone(), account, learner.cloned())?
        };
        interned.ids.insert(names.identity.clone(), id);
        if is_salted {
            interned.salts.entry(account).or_default().touch(id, now);
        }
        Ok(Interning::Done(id))
    }

    fn add(
        &self,
        interned: &mut Interned,
        names: Names,
        account: AccountId,
        learner: Option<Arc<Mutex<Learner>>>,
    ) -> Result<NamespaceId> {
        if interned.num_slots == 1 << SLOT_BITS {
            return Err(Error::invalid(format!(
                "the index has all of its {}",
                crate::count(interned.num_slots, "namespace")
            )));
        }
        let id = NamespaceId(interned.num_slots);
        self.cell(id).get_or_init(|| Namespace::new(names, account, learner, self.num_lists));
        interned.num_slots += 1;
        Ok(id)
    }

    /// Renames a salted namespace of the account that was emptied, unless something is in it again.
    fn reuse(
        &self,
        interned: &mut Interned,
        id: NamespaceId,
        names: &Names,
        account: AccountId,
    ) -> Option<NamespaceId> {
        let namespace = self.get(id).ok()?;
        let salts = interned.salts.get_mut(&account)?;
        let before = namespace.names().identity.clone();
        if !salts.times.contains_key(&id) || !namespace.rename_if_empty(names.clone()) {
            return None;
        }
        salts.remove(id);
        interned.ids.remove(&before);
        interned.num_reclaimed += 1;
        Some(NamespaceId(id.0 + (1 << SLOT_BITS)))
    }

    fn position(id: NamespaceId) -> (usize, usize) {
        let index = (id.0 & ((1 << SLOT_BITS) - 1)) as usize + FIRST_BUCKET;
        let bucket = index.ilog2() as usize;
        (bucket - FIRST_BUCKET.ilog2() as usize, index - (1 << bucket))
    }

    fn cell(&self, id: NamespaceId) -> &OnceLock<Namespace> {
        let (bucket, offset) = Self::position(id);
        let cells = self.buckets[bucket]
            .get_or_init(|| (0..FIRST_BUCKET << bucket).map(|_| OnceLock::new()).collect());
        &cells[offset]
    }

    /// What is at a namespace's place now, whoever it was given to, and its number.
    #[inline]
    pub(super) fn at(&self, id: NamespaceId) -> Option<(NamespaceId, &Namespace)> {
        let (bucket, offset) = Self::position(id);
        let namespace = self.buckets.get(bucket)?.get()?[offset].get()?;
        let slot = id.0 & ((1 << SLOT_BITS) - 1);
        Some((NamespaceId(slot | namespace.generation() << SLOT_BITS), namespace))
    }

    /// A namespace by its integer.
    #[inline]
    pub(super) fn get(&self, id: NamespaceId) -> Result<&Namespace> {
        match self.at(id) {
            Some((_, namespace)) if is_current(id, namespace) => Ok(namespace),
            _ => Err(unknown(id)),
        }
    }

    /// Every namespace there is.
    pub(super) fn all(&self) -> impl Iterator<Item = (NamespaceId, &Namespace)> {
        (0..self.len()).filter_map(|slot| self.at(NamespaceId(slot)))
    }

    /// Calls `change` if nothing is in any namespace and nobody has a pin; nobody can look at one meanwhile, or make one.
    pub(super) fn if_empty<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let interned = self.interned();
        let all = (0..interned.num_slots).filter_map(|slot| self.at(NamespaceId(slot)));
        let trees: Vec<_> = all.map(|(_, namespace)| namespace.write_tree()).collect();
        let is_empty = trees.iter().all(|tree| tree.num_children() == 0 && !tree.is_held());
        is_empty.then(change)
    }

    /// How many there are.
    pub(super) fn len(&self) -> u32 {
        self.interned().num_slots
    }
}

/// Whether the number's generation is the namespace's.
#[inline]
pub(super) fn is_current(id: NamespaceId, namespace: &Namespace) -> bool {
    id.0 >> SLOT_BITS == namespace.generation()
}

#[cold]
pub(super) fn unknown(id: NamespaceId) -> Error {
    Error::invalid(format!(
        "namespace {id} was never interned by this index, or was of a salt and has been given to another one"
    ))
}

impl PrefixIndex {
    /// The integer of (scope, fingerprint): the same for equal pairs, another one if any field differs.
    /// `account` is charged for the blocks of it that are held.
    ///
    /// The namespaces of clients' salts are limited; beyond the limit, the account's that was used longest ago
    /// and is not in use is emptied for the new one, and its number is refused from then on.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown account, or if the namespace is known and charged to another one;
    /// `Refused`, to be tried again, if the account has its limit of salts in use.
    pub fn namespace(
        &self,
        scope: &ShareScope,
        fingerprint: &Fingerprint,
        account: AccountId,
    ) -> Result<NamespaceId> {
        self.pool.quota(account)?;
        self.open_account(account)?;
        let learner = self.learned.as_ref().map(|learned| learned.of(account));
        let names = Names::new(scope, fingerprint);
        let intern = |emptied| self.namespaces.intern(&names, account, learner.as_ref(), emptied);
        let (oldest, limit) = match intern(None)? {
            Interning::Done(id) => return Ok(id),
            Interning::Full(oldest, limit) => (oldest, limit),
        };
        for id in oldest {
            if self.empty_unused(id)
                && let Interning::Done(id) = intern(Some(id))?
            {
                return Ok(id);
            }
        }
        Err(Error::Refused {
            reason: format!(
                "account {account} has {} of salts, the limit, and those used longest ago are in use",
                crate::count_of(limit, "namespace")
            ),
            retryable: true,
            retry_after_steps: None,
        })
    }

    /// Sets how many namespaces of salts an account may have at once. Those above it stay until they are reused.
    pub fn set_max_salts(&self, max_salts: u32) {
        // Relaxed: a limit guards no memory.
        self.namespaces.max_salts.store(max_salts, Ordering::Relaxed);
    }

    /// Counts of the namespaces that clients' salts made.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown account.
    pub fn salt_stats(&self, account: AccountId) -> Result<SaltStats> {
        self.pool.quota(account)?;
        let interned = self.namespaces.interned();
        Ok(SaltStats {
            num_salted: interned.salts.get(&account).map_or(0, |salts| salts.times.len()),
            max_salted: self.namespaces.max_salts.load(Ordering::Relaxed),
            num_reclaimed: interned.num_reclaimed,
        })
    }

    /// How many namespaces there are.
    #[must_use]
    pub fn num_namespaces(&self) -> u32 {
        self.namespaces.len()
    }
}
