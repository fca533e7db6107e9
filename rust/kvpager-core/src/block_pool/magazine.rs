//! A thread's own store of free blocks.

use super::groups::place;
use super::lanes::{Counts, User};
use super::state::{Kind, State};
use super::{BlockPool, faults};
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle, BlockId};
use crate::sync::Ordering;
use std::sync::Arc;

/// Blocks that a magazine holds at most.
const SIZE: usize = if cfg!(any(loom, shuttle)) { 2 } else { 64 };

/// A store of up to 64 blocks for a thread that allocates and releases one at a time.
///
/// Its blocks are committed to its account and *stranded*: other threads cannot get at them
/// ([`PoolStats::stranded`](super::PoolStats)). That is its price, so it is opt-in. Dropping it gives them back.
///
/// A release goes through the pool while a step is open, and for a block that is shared or of another account.
///
/// # Examples
/// ```
/// use kvpager_core::block_pool::{BlockPool, Magazine, PoolConfig, Quota};
///
/// let pool = BlockPool::new(PoolConfig { num_blocks: 1024, ..PoolConfig::default() })?;
/// let tenant = pool.add_account(Quota { guaranteed: 0, limit: 1024 })?;
/// let mut magazine = Magazine::new(&pool, tenant)?;
/// let block = magazine.allocate()?;
/// magazine.release(block)?;
/// assert!(magazine.release(block).is_err()); // it is in there already
/// drop(magazine);
/// assert_eq!(pool.stats().free, 1024);
/// # Ok::<(), kvpager_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Magazine<const FAULT: u8 = { faults::NONE }> {
    pool: Arc<BlockPool<FAULT>>,
    account: AccountId,
    blocks: [BlockHandle; SIZE],
    len: usize,
    lane: u32,
}

impl<const FAULT: u8> Magazine<FAULT> {
    /// An empty magazine.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account; [`Error::WrongState`] if the pool's lanes for magazines
    /// and reservations are all in use.
    pub fn new(pool: &Arc<BlockPool<FAULT>>, account: AccountId) -> Result<Self> {
        pool.quota(account)?;
        let lane = pool.lanes.claim(account, User::Magazine).ok_or_else(|| {
            Error::WrongState("all lanes are in use: drop a magazine or a reservation first".into())
        })?;
        let blocks = [BlockHandle::new(0, BlockId(0)); SIZE];
        Ok(Self { pool: Arc::clone(pool), account, blocks, len: 0, lane })
    }

    /// Blocks in it.
    #[must_use]
    pub const fn num_blocks(&self) -> usize {
        self.len
    }

    fn set_len(&mut self, len: usize) {
        self.len = len;
        self.pool.lanes.set(self.lane, Counts { blocks: len as u32, backed: 0 });
    }

    /// Hands out a block.
    ///
    /// # Errors
    /// As [`BlockPool::allocate`] for one block.
    pub fn allocate(&mut self) -> Result<BlockHandle> {
        if self.len == 0 {
            self.refill()?;
        }
        let block = self.blocks[self.len - 1];
        self.set_len(self.len - 1);
        let (group, bit) = place(block.id().0);
        // Release as in `BlockPool::claim`. The block is off and ours until it is reissued.
        let held = State::held(block.generation(), self.account);
        self.pool.states[block.id().0 as usize].store(held.pack(), Ordering::Release);
        self.pool.groups.reissue(group, bit);
        Ok(block)
    }

    /// Fetches half a magazine, or as much as there is room for.
    #[cold]
    fn refill(&mut self) -> Result<()> {
        let mut count = SIZE / 2;
        loop {
            match self.pool.allocate(self.account, &mut self.blocks[..count]) {
                Ok(()) => break,
                Err(_) if count > 1 => count /= 2,
                Err(error) => return Err(error),
            }
        }
        self.pool.detach(&self.blocks[..count], Some(self.account))?;
        for i in 0..count {
            self.store(i, self.blocks[i]);
        }
        self.set_len(count);
        Ok(())
    }

    /// Puts a block that is off and ours at a place, in its next generation.
    fn store(&mut self, at: usize, block: BlockHandle) {
        let generation = State::held(block.generation(), self.account).next_generation::<FAULT>();
        let stored = State { generation, kind: Kind::Stored, account: self.account, references: 0 };
        // Release as in `BlockPool::claim`.
        self.pool.states[block.id().0 as usize].store(stored.pack(), Ordering::Release);
        self.blocks[at] = BlockHandle::new(generation, block.id());
    }

    /// Takes a block's only reference.
    ///
    /// # Errors
    /// As [`BlockPool::release`].
    pub fn release(&mut self, block: BlockHandle) -> Result<()> {
        let state = self.pool.state(self.pool.checked_id(block)?);
        let simple = state.kind == Kind::Held && state.account == self.account;
        if !simple || self.pool.epochs.newest_open().is_some() {
            return self.pool.release(&[block]);
        }
        self.pool.detach(&[block], Some(self.account))?;
        if self.len == SIZE {
            self.flush(SIZE / 2);
        }
        self.store(self.len, block);
        self.set_len(self.len + 1);
        Ok(())
    }

    /// Gives the newest `count` blocks back to the pool.
    fn flush(&mut self, count: usize) {
        let rest = self.len - count;
        let pool = &self.pool;
        pool.free_detached(&self.blocks[rest..self.len], |account, count| pool.give_back(account, count));
        self.set_len(rest);
    }
}

impl<const FAULT: u8> Drop for Magazine<FAULT> {
    fn drop(&mut self) {
        if FAULT != faults::LEAK_MAGAZINE {
            self.flush(self.len);
        }
        self.pool.lanes.free(self.lane);
    }
}
