//! The index's side of the pool: blocks that belong to it, and the capacity of those that are held by pins.

use super::state::{Kind, State};
use super::{BlockPool, FreeRun, StepEpoch};
use crate::error::{Error, HandleFault, Result};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;

impl BlockPool {
    /// Hands exclusively held blocks to the index. They stay committed: their node is pinned.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not held by exactly one reference; nothing has changed then.
    pub fn index_blocks(&self, blocks: &[BlockHandle]) -> Result<()> {
        for (i, &block) in blocks.iter().enumerate() {
            let indexed = self.change(block, |state| match state.expect(block, Kind::Held)? {
                state if state.references == 1 => Ok(State { kind: Kind::Indexed, references: 0, ..state }),
                state => Err(state.fault(block, HandleFault::WrongState)),
            });
            if let Err(error) = indexed {
                for &block in &blocks[..i] {
                    self.change(block, |state| Ok(State { kind: Kind::Held, references: 1, ..state }))?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Commits capacity for indexed blocks whose path is pinned for the first time: cached becomes held.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] or [`Error::OverQuota`]; nothing has changed then.
    pub fn hold_cached(&self, account: AccountId, num_blocks: u32) -> Result<()> {
        self.accounts.take(account, num_blocks)?;
        self.accounts.get(account)?.cached.fetch_sub(i64::from(num_blocks), Ordering::Relaxed);
        self.note_held(i64::from(num_blocks));
        Ok(())
    }

    /// Gives the capacity of indexed blocks back whose last pin is gone: held becomes cached. While steps are open
    /// it stays committed (quarantined) until they close, and the blocks must not be evicted before
    /// [`BlockPool::epoch_closed`] of the returned epoch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn unhold_cached(&self, account: AccountId, num_blocks: u32) -> Result<Option<StepEpoch>> {
        let of = self.accounts.get(account)?;
        self.held.fetch_sub(i64::from(num_blocks), Ordering::Relaxed);
        of.quarantined.fetch_add(i64::from(num_blocks), Ordering::Relaxed);
        let epoch = self.epochs.newest_open();
        match epoch {
            None => self.settle_unheld(account, num_blocks),
            Some(epoch) => {
                self.epochs.push_unheld(epoch, account, num_blocks);
                if self.epochs.is_closed(epoch) {
                    self.drain_number(epoch);
                }
            }
        }
        Ok(epoch)
    }

    /// The capacity of indexed blocks that waited in quarantine comes back.
    pub(super) fn settle_unheld(&self, account: AccountId, num_blocks: u32) {
        if let Ok(of) = self.accounts.get(account) {
            of.cached.fetch_add(i64::from(num_blocks), Ordering::Relaxed);
            of.quarantined.fetch_sub(i64::from(num_blocks), Ordering::Relaxed);
        }
        self.accounts.give(account, num_blocks);
    }

    /// Gives up exclusively held copies and holds `num_cached` indexed blocks of the same content instead. The
    /// capacity passes over, so it cannot fail for want of room.
    ///
    /// # Errors
    /// [`Error::WrongState`] while a step is open, which may read the copies; [`Error::InvalidArgument`] for more
    /// than is given up; [`Error::InvalidHandle`] as for `release`, or for blocks of another account.
    pub fn trade_held(&self, account: AccountId, own: &[BlockHandle], num_cached: u32) -> Result<()> {
        if let Some(epoch) = self.epochs.newest_open() {
            return Err(Error::WrongState(format!(
                "copies cannot be given up while a step is open (epoch {})",
                epoch.number()
            )));
        }
        if num_cached as usize > own.len() {
            return Err(Error::invalid(format!("{num_cached} blocks to hold for {} given up", own.len())));
        }
        for &block in own {
            let state = self.load(block)?.expect(block, Kind::Held)?;
            if state.references != 1 || state.account != account {
                return Err(state.fault(block, HandleFault::WrongState));
            }
        }
        self.drop_references(own)?;
        let mut run = FreeRun::new(self);
        run.keep = num_cached;
        for &block in own {
            if let Some(account) = self.finish_leaving(block) {
                run.push(account, block.id(), 0);
            }
        }
        run.finish();
        self.accounts.get(account)?.cached.fetch_sub(i64::from(num_cached), Ordering::Relaxed);
        self.note_held(i64::from(num_cached));
        Ok(())
    }

    /// Frees indexed blocks that nobody has pinned.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not the index's; nothing has changed then.
    pub fn evict(&self, blocks: &[BlockHandle]) -> Result<()> {
        for (i, &block) in blocks.iter().enumerate() {
            let leaving = self.change(block, |state| {
                Ok(State { kind: Kind::Leaving, ..state.expect(block, Kind::Indexed)? })
            });
            if let Err(error) = leaving {
                for &block in &blocks[..i] {
                    self.change(block, |state| Ok(State { kind: Kind::Indexed, ..state }))?;
                }
                return Err(error);
            }
        }
        let mut run = FreeRun::new(self);
        run.uncommitted = true;
        for &block in blocks {
            if let Some(account) = self.finish_leaving(block) {
                run.push(account, block.id(), 0);
            }
        }
        run.finish();
        Ok(())
    }
}
