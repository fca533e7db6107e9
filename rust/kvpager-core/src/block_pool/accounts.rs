//! Capacity: what every account has committed, under its limit, its guarantee and the pool's size.
//!
//! An account's first `guaranteed` blocks are set aside for it. What it commits beyond them comes from the shared
//! counter, which starts at the capacity less all guarantees. The shared counter is always lowered *before* the
//! account's use is raised and raised *after* it is lowered, so `shared <= capacity - guarantees - sum of what is
//! beyond them` at every moment and nothing is ever over-committed.

use crate::error::{Error, Result};
use crate::ids::AccountId;
use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use std::sync::{Mutex, PoisonError};

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

    /// Blocks that come from the shared counter.
    const fn beyond(self) -> i64 {
        self.used.saturating_sub(self.guaranteed) as i64
    }
}

#[derive(Debug, Default)]
pub(super) struct Account {
    word: AtomicU64,
    limit: AtomicU32,
    /// Of what is used: promised, not yet turned into blocks.
    pub(super) reserved: AtomicI64,
    /// Of what is used: released, waiting for a step to close.
    pub(super) quarantined: AtomicI64,
    /// Beside what is used: in the index and not held.
    pub(super) cached: AtomicI64,
}

#[derive(Debug)]
pub(super) struct Accounts {
    accounts: Box<[CachePadded<Account>]>,
    num_accounts: AtomicU32,
    shared: CachePadded<AtomicI64>,
    capacity: u32,
    /// One change of quotas at a time.
    changing: Mutex<()>,
}

impl Accounts {
    pub(super) fn new(capacity: u32, max_accounts: u32) -> Self {
        Self {
            accounts: (0..max_accounts).map(|_| CachePadded::default()).collect(),
            num_accounts: AtomicU32::new(0),
            shared: CachePadded::new(AtomicI64::new(i64::from(capacity))),
            capacity,
            changing: Mutex::new(()),
        }
    }

    pub(super) fn len(&self) -> u32 {
        // Acquire pairs with the Release in `add`: a counted account has its quota.
        self.num_accounts.load(Ordering::Acquire)
    }

    pub(super) fn get(&self, account: AccountId) -> Result<&Account> {
        match self.accounts.get(account.0 as usize) {
            Some(found) if account.0 < self.len() => Ok(found),
            _ => {
                Err(Error::invalid(format!("account {account} does not exist; the pool has {}", self.len())))
            }
        }
    }

    fn check(&self, quota: Quota) -> Result<()> {
        if quota.limit == 0 || quota.guaranteed > quota.limit || quota.limit > self.capacity {
            return Err(Error::invalid(format!(
                "quota of {} guaranteed and at most {} blocks: the limit must be 1 to {} and no less than the guarantee",
                quota.guaranteed, quota.limit, self.capacity
            )));
        }
        Ok(())
    }

    pub(super) fn add(&self, quota: Quota) -> Result<AccountId> {
        self.check(quota)?;
        let _guard = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let id = self.len();
        if id as usize == self.accounts.len() {
            return Err(Error::invalid(format!("the pool has all of its {id} accounts")));
        }
        self.take_shared(i64::from(quota.guaranteed)).map_err(|left| lent_out(quota.guaranteed, left))?;
        let account = &self.accounts[id as usize];
        account.word.store(Use { used: 0, guaranteed: quota.guaranteed }.pack(), Ordering::Relaxed);
        account.limit.store(quota.limit, Ordering::Relaxed);
        self.num_accounts.store(id + 1, Ordering::Release);
        Ok(AccountId(id))
    }

    pub(super) fn quota(&self, account: AccountId) -> Result<Quota> {
        let account = self.get(account)?;
        let guaranteed = Use::unpack(account.word.load(Ordering::Relaxed)).guaranteed;
        Ok(Quota { guaranteed, limit: account.limit.load(Ordering::Relaxed) })
    }

    /// Changes a quota while blocks move. A limit below what is used takes effect as blocks are released; a
    /// guarantee that is lent out cannot be raised.
    pub(super) fn set_quota(&self, account: AccountId, quota: Quota) -> Result<()> {
        self.check(quota)?;
        let _guard = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let account = self.get(account)?;
        let mut word = account.word.load(Ordering::Relaxed);
        loop {
            let old = Use::unpack(word);
            let new = Use { used: old.used, guaranteed: quota.guaranteed };
            let cost = i64::from(new.guaranteed) - i64::from(old.guaranteed) + new.beyond() - old.beyond();
            self.take_shared(cost.max(0))
                .map_err(|left| lent_out(quota.guaranteed - old.guaranteed, left))?;
            // AcqRel: as in `take`.
            match account.word.compare_exchange(word, new.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    self.give_shared((-cost).max(0));
                    account.limit.store(quota.limit, Ordering::Relaxed);
                    return Ok(());
                }
                Err(now) => {
                    self.give_shared(cost.max(0));
                    word = now;
                }
            }
        }
    }

    /// Commits `count` blocks to an account, all or none.
    pub(super) fn take(&self, id: AccountId, count: u32) -> Result<()> {
        let account = self.get(id)?;
        let limit = account.limit.load(Ordering::Relaxed);
        let mut word = account.word.load(Ordering::Relaxed);
        let mut held = 0;
        loop {
            let old = Use::unpack(word);
            let Some(used) = old.used.checked_add(count).filter(|used| *used <= limit) else {
                self.give_shared(held);
                return Err(Error::OverQuota {
                    account: id,
                    needed: u64::from(count),
                    available: u64::from(limit.saturating_sub(old.used)),
                    limit: u64::from(limit),
                });
            };
            let new = Use { used, ..old };
            let cost = new.beyond() - old.beyond();
            if let Err(left) = self.take_shared(cost - held) {
                self.give_shared(held);
                return Err(Error::OutOfBlocks {
                    needed: u64::from(count),
                    available: left.max(0) as u64 + u64::from(old.guaranteed.saturating_sub(old.used)),
                    capacity: u64::from(self.capacity),
                });
            }
            held = cost;
            // Acquire pairs with the Release of `give`: who gave this capacity has published its bits. Release:
            // the shared counter was lowered before.
            match account.word.compare_exchange_weak(word, new.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
    }

    /// Gives `count` committed blocks of an account back. The caller owns them.
    pub(super) fn give(&self, id: AccountId, count: u32) {
        let account = &self.accounts[id.0 as usize];
        let mut word = account.word.load(Ordering::Relaxed);
        loop {
            let old = Use::unpack(word);
            debug_assert!(old.used >= count, "account {id} gives {count} of {}", old.used);
            let new = Use { used: old.used.saturating_sub(count), ..old };
            // AcqRel: as in `take`.
            match account.word.compare_exchange_weak(word, new.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return self.give_shared(old.beyond() - new.beyond()),
                Err(now) => word = now,
            }
        }
    }

    /// Takes from the shared counter; a negative count gives. `Err` has what is left.
    fn take_shared(&self, count: i64) -> std::result::Result<(), i64> {
        if count <= 0 {
            self.give_shared(-count);
            return Ok(());
        }
        // AcqRel: pairs with itself, takes and gives form one order.
        self.shared
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |left| (left >= count).then_some(left - count))
            .map(|_| ())
    }

    fn give_shared(&self, count: i64) {
        if count > 0 {
            self.shared.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// Most blocks that an account can ever have committed as quotas are: its limit, and what is not guaranteed
    /// to others.
    pub(super) fn reachable(&self, id: AccountId) -> Result<u32> {
        let own = self.quota(id)?;
        let mut others = 0u32;
        for other in self.ids().filter(|other| *other != id) {
            others += self.quota(other)?.guaranteed;
        }
        Ok(own.limit.min(self.capacity.saturating_sub(others)))
    }

    /// Blocks that an account could commit now; of its own moment while others work.
    pub(super) fn available(&self, id: AccountId) -> Result<u64> {
        let account = self.get(id)?;
        let limit = account.limit.load(Ordering::Relaxed);
        let Use { used, guaranteed } = Use::unpack(account.word.load(Ordering::Relaxed));
        let shared = self.shared.load(Ordering::Relaxed).max(0) as u64;
        let own = u64::from(guaranteed.saturating_sub(used));
        Ok(u64::from(limit.saturating_sub(used)).min(own + shared))
    }

    pub(super) fn used(&self, account: AccountId) -> u64 {
        u64::from(Use::unpack(self.accounts[account.0 as usize].word.load(Ordering::Relaxed)).used)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = AccountId> {
        (0..self.len()).map(AccountId)
    }

    /// Exact when nothing moves.
    pub(super) fn check_invariants(&self) -> std::result::Result<(), String> {
        let uses = self.accounts[..self.len() as usize].iter();
        let taken: i64 = uses
            .map(|account| Use::unpack(account.word.load(Ordering::Relaxed)))
            .map(|of| i64::from(of.guaranteed) + of.beyond())
            .sum();
        let shared = self.shared.load(Ordering::Relaxed);
        if taken + shared != i64::from(self.capacity) {
            return Err(format!("{taken} taken and {shared} shared make not {}", self.capacity));
        }
        Ok(())
    }
}

fn lent_out(needed: u32, left: i64) -> Error {
    Error::invalid(format!(
        "a guarantee of {needed} more blocks cannot be given: {left} are neither guaranteed nor lent out"
    ))
}
