//! Counts of a reservation or a magazine, where their owner writes them with a plain store.
//!
//! What a reservation still promises is part of its account's statistics. Counting it there would cost a locked
//! operation a draw; a lane costs a store, and statistics add the lanes up. There are [`NUM_LANES`]; who finds none
//! free counts in the account (or the pool) instead.

use crate::ids::AccountId;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// Lanes of a pool.
const NUM_LANES: usize = if cfg!(any(loom, shuttle)) { 2 } else { 256 };
const BITS: usize = 64;

/// Whose counts a lane has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum User {
    Reservation,
    Magazine,
}

/// A lane's counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// A reservation's promised blocks; a magazine's blocks.
    pub(super) blocks: u32,
    /// Free permits that a reservation has for them.
    pub(super) backed: u32,
}

#[derive(Debug)]
struct Lane {
    counts: AtomicU64,
    /// `account << 1 | is_magazine`.
    user: AtomicU32,
}

#[derive(Debug)]
pub(super) struct Lanes {
    lanes: Box<[CachePadded<Lane>]>,
    taken: CachePadded<[AtomicU64; NUM_LANES.div_ceil(BITS)]>,
}

impl Lanes {
    pub(super) fn new() -> Self {
        let lane = || CachePadded::new(Lane { counts: AtomicU64::new(0), user: AtomicU32::new(0) });
        let taken = |word: usize| {
            let lanes = (NUM_LANES - word * BITS).min(BITS);
            AtomicU64::new(if lanes == BITS { 0 } else { u64::MAX << lanes })
        };
        Self {
            lanes: (0..NUM_LANES).map(|_| lane()).collect(),
            taken: CachePadded::new(std::array::from_fn(taken)),
        }
    }

    /// A lane for one owner, if one is free.
    pub(super) fn claim(&self, account: AccountId, user: User) -> Option<u32> {
        for (i, cell) in self.taken.iter().enumerate() {
            let mut word = cell.load(Ordering::Relaxed);
            while word != u64::MAX {
                let bit = (!word).trailing_zeros();
                // Acquire pairs with the Release of `free`: the lane's old counts are gone. A failure means that
                // another owner claimed or freed a lane.
                match cell.compare_exchange_weak(word, word | 1 << bit, Ordering::Acquire, Ordering::Relaxed)
                {
                    Ok(_) => {
                        let lane = (i * BITS) as u32 + bit;
                        let tag = account.0 << 1 | u32::from(user == User::Magazine);
                        // Relaxed, here and below: statistics, each of its own moment.
                        self.lanes[lane as usize].user.store(tag, Ordering::Relaxed);
                        return Some(lane);
                    }
                    Err(now) => word = now,
                }
            }
        }
        None
    }

    pub(super) fn free(&self, lane: u32) {
        self.set(lane, Counts::default());
        let (word, bit) = (lane as usize / BITS, lane as usize % BITS);
        self.taken[word].fetch_and(!(1 << bit), Ordering::Release);
    }

    /// Writes the owner's counts.
    pub(super) fn set(&self, lane: u32, counts: Counts) {
        let word = u64::from(counts.blocks) << 32 | u64::from(counts.backed);
        self.lanes[lane as usize].counts.store(word, Ordering::Relaxed);
    }

    /// Sums of all lanes of a kind, or of those of one account.
    pub(super) fn sum(&self, user: User, account: Option<AccountId>) -> (u64, u64) {
        let mut sums = (0, 0);
        for lane in &self.lanes {
            let word = lane.counts.load(Ordering::Relaxed);
            let tag = lane.user.load(Ordering::Relaxed);
            let of = AccountId(tag >> 1);
            if word != 0
                && (tag & 1 == 1) == (user == User::Magazine)
                && account.is_none_or(|wanted| wanted == of)
            {
                sums.0 += word >> 32;
                sums.1 += word & u64::from(u32::MAX);
            }
        }
        sums
    }
}
