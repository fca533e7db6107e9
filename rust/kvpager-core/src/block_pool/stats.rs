//! Counts, and the check that they agree with the blocks.

use super::BlockPool;
use super::state::{Kind, State};
use crate::error::Result;
use crate::ids::AccountId;
use crate::sync::Ordering;

/// Blocks by state. Each number is exact when nothing moves; while threads work, each is of its own moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks of the pool.
    pub capacity: u64,
    /// In use by references or pins; a shared block counts once.
    pub held: u64,
    /// In the index and not pinned.
    pub cached: u64,
    /// In no use.
    pub free: u64,
    /// Promised, not yet turned into blocks.
    pub reserved: u64,
    /// Released, waiting for a step to close.
    pub quarantined: u64,
    /// Most blocks held at once since the pool was made.
    pub peak_held: u64,
}

/// Blocks of one account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountStats {
    /// Held, reserved and quarantined together.
    pub committed: u64,
    /// In use by references or pins.
    pub held: u64,
    /// Promised, not yet turned into blocks.
    pub reserved: u64,
    /// Released, waiting for a step to close.
    pub quarantined: u64,
    /// In the index and not pinned.
    pub cached: u64,
    /// Blocks that it gets whatever others do.
    pub guaranteed: u64,
    /// Most blocks that it may have committed.
    pub limit: u64,
}

const fn count(value: i64) -> u64 {
    if value < 0 { 0 } else { value as u64 }
}

impl BlockPool {
    /// Blocks by state.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let mut reserved = 0;
        let mut quarantined = 0;
        for id in self.accounts.ids() {
            if let Ok(account) = self.accounts.get(id) {
                reserved += account.reserved.load(Ordering::Relaxed);
                quarantined += account.quarantined.load(Ordering::Relaxed);
            }
        }
        let held = self.held.load(Ordering::Relaxed);
        let free = self.free.load(Ordering::Relaxed);
        let capacity = i64::from(self.num_blocks());
        PoolStats {
            capacity: count(capacity),
            held: count(held),
            cached: count(capacity - held - free - quarantined),
            free: count(free),
            reserved: count(reserved),
            quarantined: count(quarantined),
            peak_held: count(self.peak_held.load(Ordering::Relaxed)),
        }
    }

    /// Blocks of one account.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for an unknown account.
    pub fn account_stats(&self, account: AccountId) -> Result<AccountStats> {
        let quota = self.quota(account)?;
        let of = self.accounts.get(account)?;
        let committed = self.accounts.used(account);
        let reserved = count(of.reserved.load(Ordering::Relaxed));
        let quarantined = count(of.quarantined.load(Ordering::Relaxed));
        Ok(AccountStats {
            committed,
            held: committed.saturating_sub(reserved + quarantined),
            reserved,
            quarantined,
            cached: count(of.cached.load(Ordering::Relaxed)),
            guaranteed: u64::from(quota.guaranteed),
            limit: u64::from(quota.limit),
        })
    }

    /// Checks that bits, words, permits and counters agree. Exact when nothing moves. Reads every block.
    ///
    /// # Errors
    /// What disagrees, with the numbers.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        let mut by_kind = [0u64; 4];
        for (i, word) in self.states.iter().enumerate() {
            let state = State::unpack(word.load(Ordering::Acquire));
            let id = crate::ids::BlockId(i as u32);
            if (state.kind == Kind::Free) != self.bitmap.is_set(id) {
                return Err(format!("block {id} is {state:?}, its free bit says otherwise"));
            }
            by_kind[state.kind as usize] += 1;
        }
        let stats = self.stats();
        let [free, referenced, indexed, leaving] = by_kind;
        if (free, self.bitmap.count()) != (stats.free, stats.free) {
            return Err(format!("{free} blocks are free, {} bits are set, {stats:?}", self.bitmap.count()));
        }
        let held_by_pins = stats.held as i64 - referenced as i64;
        if held_by_pins < 0 || held_by_pins as u64 > indexed {
            return Err(format!("{referenced} referenced and {indexed} indexed blocks, {stats:?}"));
        }
        if leaving > stats.quarantined {
            return Err(format!("{leaving} blocks wait for a step, {stats:?}"));
        }
        let committed: u64 = self.accounts.ids().map(|id| self.accounts.used(id)).sum();
        if committed != stats.held + stats.reserved + stats.quarantined || committed > stats.capacity {
            return Err(format!("{committed} committed, {stats:?}"));
        }
        self.accounts.check_invariants()
    }
}
