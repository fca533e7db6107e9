//! Capacity that is promised and not yet turned into blocks.

use super::BlockPool;
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle};
use std::sync::Arc;

/// A promise of blocks. Drawing on it cannot fail for want of capacity; at most, cached blocks have to be
/// evicted first. What is left goes back when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    pool: Arc<BlockPool>,
    account: AccountId,
    num_blocks: u32,
}

impl Reservation {
    pub(super) const fn new(pool: Arc<BlockPool>, account: AccountId, num_blocks: u32) -> Self {
        Self { pool, account, num_blocks }
    }

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

    /// Turns promised capacity into blocks, all of `out` or none.
    ///
    /// # Errors
    /// [`Error::NeedsReclaim`] if cached blocks must be evicted first; [`Error::InvalidArgument`] for more than
    /// is promised.
    pub fn allocate(&mut self, out: &mut [BlockHandle]) -> Result<()> {
        let count = out.len();
        if count > self.num_blocks as usize {
            return Err(Error::invalid(format!(
                "{count} blocks asked of a reservation of {}",
                self.num_blocks
            )));
        }
        self.pool.take_free(count)?;
        self.num_blocks -= count as u32;
        self.pool.note_drawn(self.account, count as u32);
        self.pool.claim(self.account, out);
        Ok(())
    }

    /// Promises more.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] or [`Error::OverQuota`]; the promise is as before then.
    pub fn grow(&mut self, num_blocks: u32) -> Result<()> {
        self.pool.promise(self.account, num_blocks)?;
        self.num_blocks += num_blocks;
        Ok(())
    }

    /// Gives a part back.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than is promised.
    pub fn shrink(&mut self, num_blocks: u32) -> Result<()> {
        if num_blocks > self.num_blocks {
            return Err(Error::invalid(format!(
                "{num_blocks} blocks given back of a reservation of {}",
                self.num_blocks
            )));
        }
        self.num_blocks -= num_blocks;
        self.pool.withdraw(self.account, num_blocks);
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.pool.withdraw(self.account, self.num_blocks);
    }
}
