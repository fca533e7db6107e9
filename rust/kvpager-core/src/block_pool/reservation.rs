//! Capacity that is promised and not yet turned into blocks.

use super::lanes::{Counts, User};
use super::permits::Permits;
use super::taking::{Plan, Rule, Taken};
use super::{BlockPool, faults};
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;
use std::sync::Arc;

/// A promise of blocks. Drawing on it cannot fail for want of capacity; at most, cached blocks have to be
/// evicted first. What is left goes back when it is dropped.
#[derive(Debug)]
pub struct Reservation<const FAULT: u8 = { faults::NONE }> {
    pool: Arc<BlockPool<FAULT>>,
    account: AccountId,
    num_blocks: u32,
    /// Of these, how many have a free permit already: they were put back.
    backed: u32,
    lane: Option<u32>,
}

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Promises blocks to an account.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::OverQuota`], or [`Error::InvalidArgument`] for an unknown account.
    pub fn reserve(self: &Arc<Self>, account: AccountId, num_blocks: u32) -> Result<Reservation<FAULT>> {
        self.accounts.take::<FAULT>(account, num_blocks, 0)?;
        let mut reservation = self.no_promise(account);
        reservation.count(i64::from(num_blocks));
        Ok(reservation)
    }

    /// A promise of nothing, to which parts of others can be moved: also if the account has more than it may by now.
    pub(crate) fn no_promise(self: &Arc<Self>, account: AccountId) -> Reservation<FAULT> {
        let lane = self.lanes.claim(account, User::Reservation);
        Reservation { pool: Arc::clone(self), account, num_blocks: 0, backed: 0, lane }
    }
}

impl<const FAULT: u8> Reservation<FAULT> {
    /// Blocks that are still promised.
    #[must_use]
    pub const fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// The account that is charged.
    #[must_use]
    pub const fn account(&self) -> AccountId {
        self.account
    }

    /// Changes what is promised, here and in the statistics.
    fn count(&mut self, change: i64) {
        self.num_blocks = (i64::from(self.num_blocks) + change) as u32;
        match self.lane {
            Some(lane) => {
                self.pool.lanes.set(lane, Counts { blocks: self.num_blocks, backed: self.backed });
            }
            None => {
                // Relaxed: statistics.
                self.pool.accounts.of_block(self.account).reserved.fetch_add(change, Ordering::Relaxed);
            }
        }
    }

    /// Turns promised capacity into blocks, all of `out` or none.
    ///
    /// # Errors
    /// [`Error::NeedsReclaim`] if cached blocks must be evicted first; [`Error::InvalidArgument`] for more than
    /// is promised.
    pub fn allocate(&mut self, out: &mut [BlockHandle]) -> Result<()> {
        let count = self.drawn(out.len())?;
        let backed = self.backed.min(count);
        let wanted = Permits { free: count - backed, shared: 0 };
        self.pool.accounts.permits.take(wanted, 0)?;
        self.backed -= backed;
        self.count(-i64::from(count));
        self.pool.claim(self.account, out);
        if wanted.free > 0 {
            self.pool.note_peak();
        }
        Ok(())
    }

    fn drawn(&self, count: usize) -> Result<u32> {
        match u32::try_from(count) {
            Ok(count) if count <= self.num_blocks => Ok(count),
            _ => Err(Error::invalid(format!(
                "{} asked of a reservation of {}",
                crate::count_of(count, "block"),
                self.num_blocks
            ))),
        }
    }

    /// Takes exclusively held blocks of the same account back into the promise: drafts that were not accepted, or
    /// blocks of a preempted sequence that will be needed again. Drawing them again needs no capacity and no
    /// reclaim.
    ///
    /// # Errors
    /// [`Error::WrongState`] while a step is open, which may read the blocks; [`Error::InvalidHandle`] for a block
    /// that is shared, indexed, of another account or not held. Nothing has changed then.
    pub fn put_back(&mut self, blocks: &[BlockHandle]) -> Result<()> {
        self.pool.refuse_open_step("put back")?;
        match blocks {
            [block] if self.pool.take_out_one(*block, Some(self.account)).is_some() => {
                self.pool.free_one(*block)
            }
            _ => {
                let mut plan = Plan::new();
                match self.pool.take_out(&mut plan, blocks, Rule::Exclusive(Some(self.account)))? {
                    Taken::Planned => self.pool.free_planned(blocks, &plan),
                    _ => self.pool.free_detached(blocks, |_, _| ()),
                }
            }
        }
        let count = blocks.len() as u32;
        match self.lane {
            Some(_) => self.backed += count,
            None => self.pool.accounts.permits.give(Permits { free: count, shared: 0 }),
        }
        self.count(i64::from(count));
        Ok(())
    }

    /// Promises more.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] or [`Error::OverQuota`]; the promise is as before then.
    pub fn grow(&mut self, num_blocks: u32) -> Result<()> {
        self.pool.accounts.take::<FAULT>(self.account, num_blocks, 0)?;
        self.count(i64::from(num_blocks));
        Ok(())
    }

    /// Moves a part of the promise into one of its own. Capacity stays where it is, so it cannot fail for want of
    /// room.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than is promised.
    pub fn split(&mut self, num_blocks: u32) -> Result<Self> {
        let count = self.drawn(num_blocks as usize)?;
        // The lane of the part may be missing.
        let lane = self.pool.lanes.claim(self.account, User::Reservation);
        let backed = self.take_part(count)?;
        let pool = Arc::clone(&self.pool);
        let mut part = Self { pool, account: self.account, num_blocks: 0, backed: 0, lane };
        part.add_part(count, backed);
        Ok(part)
    }

    /// Takes a part out, and how much of it has a free permit; what has none yet goes first.
    fn take_part(&mut self, num_blocks: u32) -> Result<u32> {
        let count = self.drawn(num_blocks as usize)?;
        let backed = self.backed.saturating_sub(self.num_blocks - count);
        self.backed -= backed;
        self.count(-i64::from(count));
        Ok(backed)
    }

    /// Adds a part, of which so much has a free permit. Only those of a lane may be noted.
    fn add_part(&mut self, num_blocks: u32, backed: u32) {
        match self.lane {
            Some(_) => self.backed += backed,
            None => self.pool.accounts.permits.give(Permits { free: backed, shared: 0 }),
        }
        self.count(i64::from(num_blocks));
    }

    /// Moves a part of the promise to another one of the same account. Capacity stays where it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than is promised, or another account.
    pub(crate) fn move_to(&mut self, num_blocks: u32, other: &mut Self) -> Result<()> {
        if other.account != self.account {
            return Err(Error::invalid(format!(
                "a promise of account {} moved to one of account {}",
                self.account, other.account
            )));
        }
        let backed = self.take_part(num_blocks)?;
        other.add_part(num_blocks, backed);
        Ok(())
    }

    /// Holds cached blocks with promised capacity: it stays committed, so nothing can be short.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than is promised.
    pub(crate) fn hold_cached(&mut self, num_blocks: u32) -> Result<()> {
        let backed = self.take_part(num_blocks)?;
        // A held block is no free one: the permits that the promise had for it go back.
        self.pool.accounts.permits.give(Permits { free: backed, shared: 0 });
        self.pool.count_cached(self.account, -i64::from(num_blocks));
        self.pool.note_peak();
        Ok(())
    }

    /// Takes the capacity of held indexed blocks, which nobody uses and no open step reads, back into the promise: they
    /// are cached.
    pub(crate) fn unhold_cached(&mut self, num_blocks: u32) {
        self.pool.count_cached(self.account, i64::from(num_blocks));
        self.count(i64::from(num_blocks));
    }

    /// Gives a part back.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than is promised.
    pub fn shrink(&mut self, num_blocks: u32) -> Result<()> {
        if num_blocks > self.num_blocks {
            return Err(Error::invalid(format!(
                "{} given back of a reservation of {}",
                crate::count(num_blocks, "block"),
                self.num_blocks
            )));
        }
        let backed = self.backed.saturating_sub(self.num_blocks - num_blocks);
        self.backed -= backed;
        self.count(-i64::from(num_blocks));
        let given = self.pool.accounts.give::<FAULT>(self.account, num_blocks, backed);
        debug_assert!(given.is_ok() || FAULT != faults::NONE, "{given:?}");
        Ok(())
    }
}

impl<const FAULT: u8> Drop for Reservation<FAULT> {
    fn drop(&mut self) {
        if FAULT != faults::LEAK_RESERVATION {
            let all = self.shrink(self.num_blocks);
            debug_assert!(all.is_ok() || FAULT != faults::NONE, "{all:?}");
        }
        if let Some(lane) = self.lane {
            self.pool.lanes.free(lane);
        }
    }
}
