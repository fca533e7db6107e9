//! Capacity: what every account has committed, under its limit, its guarantee and the pool's size.
//!
//! An account's *footprint* is `max(guaranteed, used)`: its guarantee is set aside for it, and what it commits
//! beyond comes from the shared counter, which holds the capacity less all footprints. The shared counter is
//! always lowered *before* a footprint grows and raised *after* it shrank, so the footprints never add up to more
//! than the capacity, and a borrower cannot take what another is promised.

use super::faults;
use super::permits::{PermitCounter, Permits};
use crate::error::{Error, Result};
use crate::ids::AccountId;
use crate::memory::{Asked, bytes_of};
use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Mutex, Ordering, lock};
use crossbeam_utils::CachePadded;
use std::fmt::Display;

/// What an account may have committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Blocks that it gets whatever others do.
    pub guaranteed: u32,
    /// Most blocks that it may have committed.
    pub limit: u32,
}

/// `used << 32 | guaranteed`, so that the line between them is crossed in one exchange.
#[derive(Clone, Copy)]
struct Use {
    used: u32,
    guaranteed: u32,
}

impl Use {
    const fn pack(self) -> u64 {
        (self.used as u64) << 32 | self.guaranteed as u64
    }

    const fn unpack(word: u64) -> Self {
        Self { used: (word >> 32) as u32, guaranteed: word as u32 }
    }

    const fn footprint<const FAULT: u8>(self) -> u32 {
        if FAULT == faults::LEND_GUARANTEES || self.used > self.guaranteed {
            self.used
        } else {
            self.guaranteed
        }
    }
}

#[derive(Debug)]
pub(super) struct Account {
    word: AtomicU64,
    limit: AtomicU32,
    /// Of what is used: promised, not yet turned into blocks. Reservations with a lane keep their share there.
    pub(super) reserved: AtomicI64,
    /// Of what is used: released, waiting for a step to close.
    pub(super) quarantined: AtomicI64,
    /// Beside what is used: in the index and not held.
    pub(super) cached: AtomicI64,
    /// Of what is used: stays until its owner lets it go, whoever is short.
    pinned: AtomicU32,
}

impl Account {
    const fn empty() -> Use {
        Use { used: 0, guaranteed: 0 }
    }

    fn new() -> Self {
        Self {
            word: AtomicU64::new(Self::empty().pack()),
            limit: AtomicU32::new(0),
            reserved: AtomicI64::new(0),
            quarantined: AtomicI64::new(0),
            cached: AtomicI64::new(0),
            pinned: AtomicU32::new(0),
        }
    }
}

#[derive(Debug)]
pub(super) struct Accounts {
    accounts: Box<[CachePadded<Account>]>,
    num_accounts: AtomicU32,
    pub(super) permits: PermitCounter,
    /// One change of quotas at a time.
    changing: Mutex<()>,
}

impl Accounts {
    /// Bytes of so many accounts.
    pub(super) const fn num_bytes(max_accounts: u32) -> usize {
        bytes_of::<CachePadded<Account>>(max_accounts as usize)
    }

    pub(super) fn new(capacity: u32, max_accounts: u32, memory: &Asked<impl Display>) -> Result<Self> {
        Ok(Self {
            accounts: memory.array(max_accounts as usize, |_| CachePadded::new(Account::new()))?,
            num_accounts: AtomicU32::new(0),
            permits: PermitCounter::new(capacity),
            changing: Mutex::new(()),
        })
    }

    pub(super) fn len(&self) -> u32 {
        // Acquire pairs with the Release in `add`: a counted account has its quota.
        self.num_accounts.load(Ordering::Acquire)
    }

    pub(super) fn get(&self, account: AccountId) -> Result<&Account> {
        match self.accounts.get(account.0 as usize) {
            Some(found) if account.0 < self.len() => Ok(found),
            _ => Err(self.unknown(account)),
        }
    }

    #[cold]
    fn unknown(&self, account: AccountId) -> Error {
        Error::invalid(format!("account {account} does not exist; the pool has {}", self.len()))
    }

    /// The account of a block, which was there when the block was handed out.
    pub(super) fn of_block(&self, account: AccountId) -> &Account {
        &self.accounts[account.0 as usize]
    }

    fn check(&self, quota: Quota) -> Result<()> {
        let capacity = self.permits.capacity();
        if quota.limit == 0 || quota.guaranteed > quota.limit || quota.limit > capacity {
            return Err(Error::invalid(format!(
                "quota of {} guaranteed and at most {}: the limit must be 1 to {capacity} and no less than \
                 the guarantee",
                quota.guaranteed,
                crate::count(quota.limit, "block")
            )));
        }
        Ok(())
    }

    pub(super) fn add<const FAULT: u8>(&self, quota: Quota) -> Result<AccountId> {
        self.check(quota)?;
        let _guard = lock(&self.changing);
        let id = self.len();
        if id as usize == self.accounts.len() {
            return Err(Error::invalid(format!("the pool has all of its {}", crate::count(id, "account"))));
        }
        let account = &self.accounts[id as usize];
        self.guarantee::<FAULT>(account, quota.guaranteed)?;
        // Relaxed: published by the Release below, which pairs with `len`.
        account.limit.store(quota.limit, Ordering::Relaxed);
        self.num_accounts.store(id + 1, Ordering::Release);
        Ok(AccountId(id))
    }

    pub(super) fn quota(&self, account: AccountId) -> Result<Quota> {
        let account = self.get(account)?;
        // Relaxed: while a quota changes, either half may be the old one.
        let guaranteed = Use::unpack(account.word.load(Ordering::Relaxed)).guaranteed;
        Ok(Quota { guaranteed, limit: account.limit.load(Ordering::Relaxed) })
    }

    /// Changes a quota while blocks move. A limit below what is used takes effect as blocks are released; a
    /// guarantee that is lent out cannot be raised.
    pub(super) fn set_quota<const FAULT: u8>(&self, account: AccountId, quota: Quota) -> Result<()> {
        self.check(quota)?;
        let _guard = lock(&self.changing);
        let account = self.get(account)?;
        self.guarantee::<FAULT>(account, quota.guaranteed)?;
        // Relaxed: a limit guards no memory.
        account.limit.store(quota.limit, Ordering::Relaxed);
        Ok(())
    }

    fn guarantee<const FAULT: u8>(&self, account: &Account, guaranteed: u32) -> Result<()> {
        let mut word = account.word.load(Ordering::Relaxed);
        loop {
            let old = Use::unpack(word);
            let new = Use { guaranteed, ..old };
            let (before, after) = (old.footprint::<FAULT>(), new.footprint::<FAULT>());
            let cost = Permits { free: 0, shared: after.saturating_sub(before) };
            self.permits.take(cost, 0).map_err(|_| {
                Error::invalid(format!(
                    "a guarantee of {} cannot be given: it takes {} more, and {} are neither \
                     guaranteed nor lent out",
                    crate::count(guaranteed, "block"),
                    cost.shared,
                    self.permits.load().shared
                ))
            })?;
            if FAULT == faults::TORN_QUOTA {
                std::thread::yield_now(); // a planted fault shows more often
                account.word.store(new.pack(), Ordering::Relaxed);
                self.permits.give(Permits { free: 0, shared: before.saturating_sub(after) });
                return Ok(());
            }
            // AcqRel: as in `take`. A failure means that the account took or gave meanwhile; the cost is worked
            // out again.
            match account.word.compare_exchange(word, new.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    self.permits.give(Permits { free: 0, shared: before.saturating_sub(after) });
                    return Ok(());
                }
                Err(now) => {
                    self.permits.give(cost);
                    word = now;
                }
            }
        }
    }

    /// Commits `count` blocks to an account and takes `free` free permits, all or none.
    pub(super) fn take<const FAULT: u8>(&self, id: AccountId, count: u32, free: u32) -> Result<()> {
        let account = self.get(id)?;
        let limit = account.limit.load(Ordering::Relaxed);
        let mut word = account.word.load(Ordering::Relaxed);
        let mut taken = Permits { free: 0, shared: 0 };
        loop {
            let old = Use::unpack(word);
            let Some(used) = old.used.checked_add(count).filter(|used| *used <= limit) else {
                self.permits.give(taken);
                return Err(over_quota(id, count, old.used, limit));
            };
            let new = Use { used, ..old };
            let shared = new.footprint::<FAULT>() - old.footprint::<FAULT>();
            // Shared capacity is backed by free blocks, so both are taken at once. What comes from the account's own
            // guarantee is backed when it is committed, not before: until then another call of the account may be
            // after the same capacity, and permits that both took would be missing to others, who are promised them.
            let backed = free.min(shared);
            let more = Permits {
                free: backed.saturating_sub(taken.free),
                shared: shared.saturating_sub(taken.shared),
            };
            let in_account = u64::from(count - shared);
            if let Err(error) = self.permits.take(more, in_account) {
                self.permits.give(std::mem::replace(&mut taken, Permits { free: 0, shared: 0 }));
                // What was asked for is worked out from what the account had: if it has less now, it may need less.
                let now = account.word.load(Ordering::Relaxed);
                if now != word {
                    word = now;
                    continue;
                }
                if FAULT == faults::KEEP_CAPACITY {
                    account.word.store(new.pack(), Ordering::Relaxed);
                }
                return Err(error);
            }
            self.permits.give(Permits {
                free: taken.free.saturating_sub(backed),
                shared: taken.shared.saturating_sub(shared),
            });
            taken = Permits { free: backed, shared };
            // AcqRel pairs with itself in `give` and `guarantee`: whoever sees the use sees the shared counter
            // lowered. A failure means that the same account took or gave meanwhile; the cost is worked out again.
            match account.word.compare_exchange_weak(word, new.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        self.back::<FAULT>(id, count, free, taken.free)
    }

    /// Takes the free permits that committed capacity still lacks. Only cached blocks can be in the way.
    fn back<const FAULT: u8>(&self, id: AccountId, count: u32, free: u32, taken: u32) -> Result<()> {
        let lacking = Permits { free: free - taken, shared: 0 };
        let Err(error) = self.permits.take(lacking, 0) else { return Ok(()) };
        if FAULT != faults::KEEP_CAPACITY {
            self.give::<FAULT>(id, count, taken)?;
        }
        Err(match error {
            Error::NeedsReclaim { needed, free, cached } => Error::NeedsReclaim {
                needed: needed + u64::from(taken),
                free: free + u64::from(taken),
                cached,
            },
            other => other,
        })
    }

    /// Gives `count` committed blocks of an account back, and `free` permits for blocks that are published.
    ///
    /// Free permits come before the account's own capacity, so that its next allocation does not find capacity
    /// without a block; shared capacity comes after it, so that footprints never add up to too much. Where all of
    /// it is shared, both are one addition.
    pub(super) fn give<const FAULT: u8>(&self, id: AccountId, count: u32, mut free: u32) -> Result<()> {
        let account = self.of_block(id);
        let mut word = account.word.load(Ordering::Relaxed);
        loop {
            let old = Use::unpack(word);
            let Some(used) = old.used.checked_sub(count) else {
                return Err(Error::invalid(format!(
                    "account {id} gives {count} of {} back",
                    crate::count(old.used, "block")
                )));
            };
            let new = Use { used, ..old };
            let shared = old.footprint::<FAULT>() - new.footprint::<FAULT>();
            if free > 0 && shared < count {
                self.permits.give(Permits { free: std::mem::take(&mut free), shared: 0 });
            }
            // AcqRel: as in `take`.
            match account.word.compare_exchange_weak(word, new.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    self.permits.give(Permits { free, shared });
                    return Ok(());
                }
                Err(now) => word = now,
            }
        }
    }

    pub(super) fn set_pinned(&self, id: AccountId, num_blocks: u32) -> Result<()> {
        // Relaxed: a hint of what can never be there; blocks are counted by the words.
        self.get(id)?.pinned.store(num_blocks, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn pinned(&self, id: AccountId) -> Result<u32> {
        Ok(self.get(id)?.pinned.load(Ordering::Relaxed))
    }

    /// Most blocks that an account can ever have committed as quotas are: its limit, and what is neither guaranteed
    /// to others nor pinned by them.
    pub(super) fn reachable(&self, id: AccountId) -> Result<u32> {
        Ok(self.quota(id)?.limit.min(self.beside_others(id)?))
    }

    /// What is neither guaranteed to others nor pinned by them.
    pub(super) fn beside_others(&self, id: AccountId) -> Result<u32> {
        let mut others = 0u32;
        for other in self.ids().filter(|other| *other != id) {
            others += self.quota(other)?.guaranteed.max(self.pinned(other)?);
        }
        Ok(self.permits.capacity().saturating_sub(others))
    }

    /// Blocks that an account could commit now.
    pub(super) fn available(&self, account: AccountId) -> Result<u64> {
        let account = self.get(account)?;
        let now = Use::unpack(account.word.load(Ordering::Relaxed));
        let limit = account.limit.load(Ordering::Relaxed).saturating_sub(now.used);
        let own = now.guaranteed.saturating_sub(now.used);
        Ok(u64::from(limit).min(u64::from(own) + u64::from(self.permits.load().shared)))
    }

    pub(super) fn used(&self, account: AccountId) -> u64 {
        u64::from(Use::unpack(self.of_block(account).word.load(Ordering::Relaxed)).used)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AccountId> {
        (0..self.len()).map(AccountId)
    }

    /// Exact when nothing moves.
    pub(super) fn check_invariants(&self) -> std::result::Result<(), String> {
        let words = self.ids().map(|id| self.of_block(id).word.load(Ordering::Relaxed));
        let footprints: u64 =
            words.map(|word| u64::from(Use::unpack(word).footprint::<{ faults::NONE }>())).sum();
        let (shared, capacity) = (self.permits.load().shared, self.permits.capacity());
        if footprints + u64::from(shared) != u64::from(capacity) {
            return Err(format!("footprints of {footprints} and {shared} shared make not {capacity}"));
        }
        Ok(())
    }
}

#[cold]
fn over_quota(account: AccountId, count: u32, used: u32, limit: u32) -> Error {
    Error::OverQuota {
        account,
        needed: u64::from(count),
        available: u64::from(limit.saturating_sub(used)),
        limit: u64::from(limit),
    }
}
