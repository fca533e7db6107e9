//! Counts, and the check that they agree with the blocks.

use super::BlockPool;
use super::groups::place;
use super::lanes::User;
use super::state::{Kind, State};
use crate::error::Result;
use crate::ids::AccountId;
use crate::sync::Ordering;

/// Blocks by state. Each number is exact when nothing moves; while threads work, each is of its own moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks of the pool.
    pub capacity: u64,
    /// In use by references or pins; a shared block counts once. Includes the `stranded` ones.
    pub held: u64,
    /// In the index and not pinned.
    pub cached: u64,
    /// In no use.
    pub free: u64,
    /// Promised, not yet turned into blocks.
    pub reserved: u64,
    /// Released, waiting for a step to close.
    pub quarantined: u64,
    /// Most blocks held at once since the pool was made. Blocks put back into a reservation still count here.
    pub peak_held: u64,
    /// In magazines, where only their threads can get at them.
    pub stranded: u64,
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

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Blocks by state.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let (in_lanes, backed) = self.lanes.sum(User::Reservation, None);
        let (mut reserved, mut quarantined) = (in_lanes as i64, 0);
        for id in self.accounts.ids() {
            let account = self.accounts.of_block(id);
            // Relaxed, here and below: each number is of its own moment.
            reserved += account.reserved.load(Ordering::Relaxed);
            quarantined += account.quarantined.load(Ordering::Relaxed);
        }
        let free = i64::from(self.accounts.permits.load().free) + backed as i64;
        let cached = self.accounts.permits.cached();
        let capacity = i64::from(self.num_blocks());
        PoolStats {
            capacity: count(capacity),
            held: count(capacity - free - cached - quarantined),
            cached: count(cached),
            free: count(free),
            reserved: count(reserved),
            quarantined: count(quarantined),
            peak_held: count(self.accounts.permits.peak_held()),
            stranded: self.lanes.sum(User::Magazine, None).0,
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
        let (in_lanes, _) = self.lanes.sum(User::Reservation, Some(account));
        let reserved = count(of.reserved.load(Ordering::Relaxed)) + in_lanes;
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

    /// Raises the peak to what is held now. Called after blocks or pins were added.
    pub(super) fn note_peak(&self) {
        self.accounts.permits.note_peak();
    }

    /// Checks that bits, words, permits and counters agree. Exact when nothing moves. Reads every block.
    ///
    /// # Errors
    /// What disagrees, with the numbers.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        let mut by_kind = [0u64; 8];
        for (i, word) in self.states.iter().enumerate() {
            let state = State::unpack(word.load(Ordering::Acquire));
            self.check_block(i as u32, state)?;
            by_kind[state.kind as usize] += 1;
        }
        self.groups.check_summary()?;
        let stats = self.stats();
        if by_kind[Kind::Free as usize] != stats.free {
            return Err(format!("{} blocks are free, {stats:?}", by_kind[Kind::Free as usize]));
        }
        let referenced: u64 =
            [Kind::Held, Kind::Shared, Kind::Stored].iter().map(|k| by_kind[*k as usize]).sum();
        let indexed = by_kind[Kind::Indexed as usize];
        if referenced > stats.held || stats.held - referenced > indexed {
            return Err(format!("{referenced} blocks are referenced and {indexed} indexed, {stats:?}"));
        }
        if by_kind[Kind::Leaving as usize] > stats.quarantined || by_kind[Kind::Dropped as usize] > 0 {
            return Err(format!("blocks by kind are {by_kind:?}, {stats:?}"));
        }
        if by_kind[Kind::Stored as usize] != stats.stranded {
            return Err(format!("{} blocks are in magazines, {stats:?}", by_kind[Kind::Stored as usize]));
        }
        let committed: u64 = self.accounts.ids().map(|id| self.accounts.used(id)).sum();
        if committed != stats.held + stats.reserved + stats.quarantined || committed > stats.capacity {
            return Err(format!("{committed} committed, {stats:?}"));
        }
        self.accounts.check_invariants()
    }

    fn check_block(&self, id: u32, state: State) -> std::result::Result<(), String> {
        let (group, bit) = place(id);
        let now = self.groups.load(group);
        let agrees = match state.kind {
            Kind::Free => now.free() & bit != 0,
            Kind::Held => (now.exclusive() | now.shared()) & bit != 0 && state.references == 1,
            Kind::Shared => now.shared() & bit != 0 && state.references > 0,
            Kind::Indexed | Kind::Leaving | Kind::Stored => now.off() & bit != 0,
            Kind::Dropped => false,
        };
        if agrees { Ok(()) } else { Err(format!("block {id} is {state:?}, its group is {now:?}")) }
    }
}
