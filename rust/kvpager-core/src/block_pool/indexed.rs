//! The index's side of the pool: blocks that belong to it, and the capacity of those that are held by pins.

use super::groups::place;
use super::permits::Permits;
use super::state::{Kind, State};
use super::{BlockPool, StepEpoch, faults};
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Hands exclusively held blocks to the index. They stay committed: their node is pinned.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not held by exactly one reference; nothing has changed then.
    pub fn index_blocks(&self, blocks: &[BlockHandle]) -> Result<()> {
        self.detach(blocks, None)?;
        for block in blocks {
            let cell = &self.states[block.id().0 as usize];
            // Relaxed load: the block is this call's alone. Release as in `claim`.
            cell.store(State::indexed(cell.load(Ordering::Relaxed)), Ordering::Release);
        }
        Ok(())
    }

    /// Commits capacity for indexed blocks whose path is pinned for the first time: cached becomes held.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] or [`Error::OverQuota`]; nothing has changed then.
    pub fn hold_cached(&self, account: AccountId, num_blocks: u32) -> Result<()> {
        self.accounts.take::<FAULT>(account, num_blocks, 0)?;
        self.count_cached(account, -i64::from(num_blocks));
        self.note_peak();
        Ok(())
    }

    /// Gives the capacity of indexed blocks back whose last pin is gone: held becomes cached. While steps are open
    /// it stays committed (quarantined) until they close, and the blocks must not be evicted before
    /// [`BlockPool::epoch_closed`] of the returned epoch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account, or more than the account has committed.
    pub fn unhold_cached(&self, account: AccountId, num_blocks: u32) -> Result<Option<StepEpoch>> {
        self.accounts.get(account)?;
        let committed = self.accounts.used(account);
        if committed < u64::from(num_blocks) {
            return Err(Error::invalid(format!(
                "account {account} gives the capacity of {num_blocks} pinned blocks back and has {committed}"
            )));
        }
        let Some(epoch) = self.epochs.newest_open() else {
            self.count_cached(account, i64::from(num_blocks));
            self.uncommit(account, num_blocks);
            return Ok(None);
        };
        self.note_quarantined(Some((account, i64::from(num_blocks))));
        let at_once = self.epochs.push_unheld(epoch, account, num_blocks);
        if at_once > 0 {
            self.settle_quarantined(account, at_once);
        }
        if self.epochs.is_closed(epoch) && FAULT != faults::LOSE_LATE_PUSH {
            self.drain(epoch);
        }
        Ok(Some(epoch))
    }

    /// The capacity of indexed blocks that waited in quarantine comes back.
    pub(super) fn settle_quarantined(&self, account: AccountId, num_blocks: u32) {
        self.count_cached(account, i64::from(num_blocks));
        self.note_quarantined(Some((account, -i64::from(num_blocks))));
        self.uncommit(account, num_blocks);
    }

    fn uncommit(&self, account: AccountId, num_blocks: u32) {
        let given = self.accounts.give::<FAULT>(account, num_blocks, 0);
        debug_assert!(given.is_ok() || FAULT != faults::NONE, "{given:?}");
    }

    pub(super) fn count_cached(&self, account: AccountId, change: i64) {
        // Relaxed: statistics.
        self.accounts.of_block(account).cached.fetch_add(change, Ordering::Relaxed);
        self.accounts.permits.count_cached(change);
    }

    /// Gives up exclusively held copies and holds `num_cached` indexed blocks of the same content instead. The
    /// capacity passes over, so it cannot fail for want of room.
    ///
    /// # Errors
    /// [`Error::WrongState`] while a step is open, which may read the copies; [`Error::InvalidArgument`] for more
    /// than is given up; [`Error::InvalidHandle`] as for `release`, or for blocks of another account.
    pub fn trade_held(&self, account: AccountId, own: &[BlockHandle], num_cached: u32) -> Result<()> {
        self.accounts.get(account)?;
        self.refuse_open_step("traded")?;
        if num_cached as usize > own.len() {
            return Err(Error::invalid(format!("{num_cached} blocks to hold for {} given up", own.len())));
        }
        self.detach(own, Some(account))?;
        self.free_detached(own, |_, count| self.accounts.permits.give(Permits { free: count, shared: 0 }));
        self.uncommit(account, own.len() as u32 - num_cached);
        self.count_cached(account, -i64::from(num_cached));
        self.note_peak();
        Ok(())
    }

    /// Frees indexed blocks that nobody has pinned.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not the index's; nothing has changed then.
    pub fn evict(&self, blocks: &[BlockHandle]) -> Result<()> {
        for &block in blocks {
            let state = self.state(self.checked_id(block)?);
            if (state.generation != block.generation() || state.kind != Kind::Indexed)
                && FAULT != faults::BLIND_EVICT
            {
                return Err(state.fault(block));
            }
        }
        for (i, &block) in blocks.iter().enumerate() {
            if let Err(error) = self.begin_eviction(block) {
                self.end_eviction(&blocks[..i]);
                return Err(error);
            }
        }
        self.free_evicted(blocks);
        Ok(())
    }

    /// [`BlockPool::evict`] for the index, which keeps every other eviction of these blocks out by its locks: no exchange
    /// a block is needed, and a block named twice is seen all the same.
    ///
    /// # Errors
    /// As [`BlockPool::evict`].
    pub(crate) fn evict_own(&self, blocks: &[BlockHandle]) -> Result<()> {
        for (i, &block) in blocks.iter().enumerate() {
            if let Err(error) = self.mark_evicted(block) {
                self.end_eviction(&blocks[..i]);
                return Err(error);
            }
        }
        self.free_evicted(blocks);
        Ok(())
    }

    fn mark_evicted(&self, block: BlockHandle) -> Result<()> {
        let cell = &self.states[self.checked_id(block)? as usize];
        // Relaxed load: only an eviction changes an indexed block's word, and this is the only one. Release as in `claim`.
        let word = cell.load(Ordering::Relaxed);
        if !State::is_indexed(word, block) {
            return Err(State::unpack(word).fault(block));
        }
        cell.store(State::dropped(word), Ordering::Release);
        Ok(())
    }

    /// Gives blocks whose eviction is called off back to the index.
    fn end_eviction(&self, blocks: &[BlockHandle]) {
        for block in blocks {
            // Relaxed load: the block is this call's alone. Release as in `claim`.
            let cell = &self.states[block.id().0 as usize];
            cell.store(State::indexed(cell.load(Ordering::Relaxed)), Ordering::Release);
        }
    }

    fn free_evicted(&self, blocks: &[BlockHandle]) {
        self.free_detached(blocks, |account, count| {
            self.count_cached(account, -i64::from(count));
            self.accounts.permits.give(Permits { free: count, shared: 0 });
        });
    }

    /// Makes an indexed block this call's alone: of two evictions of one block, one fails here.
    fn begin_eviction(&self, block: BlockHandle) -> Result<()> {
        let (group, bit) = place(self.checked_id(block)?);
        let evicting = |state: State| match state.kind {
            Kind::Indexed => Ok(State { kind: Kind::Dropped, ..state }),
            _ => Err(state.fault(block)),
        };
        if FAULT == faults::BLIND_EVICT {
            let state = self.state(block.id().0);
            if state.generation != block.generation() || self.groups.load(group).off() & bit == 0 {
                return Err(state.fault(block));
            }
            return Ok(());
        }
        self.exchange(block, evicting)?;
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::block_pool::{PoolConfig, Quota};
    use crate::ids::BlockId;

    #[test]
    fn test_the_indexs_own_eviction_refuses_what_any_eviction_refuses_and_changes_nothing() {
        let pool = BlockPool::new(PoolConfig { num_blocks: 64, ..PoolConfig::default() }).unwrap();
        let account = pool.add_account(Quota { guaranteed: 0, limit: 64 }).unwrap();
        let mut blocks = [BlockHandle::new(0, BlockId(0)); 40];
        pool.allocate(account, &mut blocks).unwrap();
        let (indexed, held) = blocks.split_at(30);
        pool.index_blocks(indexed).unwrap();
        pool.unhold_cached(account, 30).unwrap();
        let before = pool.stats();
        let stale = BlockHandle::new(indexed[3].generation() + 1, indexed[3].id());
        let unknown = BlockHandle::new(0, BlockId(64));
        for bad in [indexed[0], held[0], stale, unknown] {
            assert!(pool.evict_own(&[indexed[0], indexed[1], indexed[2], bad]).is_err(), "{bad:?}");
            assert_eq!(pool.stats(), before);
            pool.check_invariants().unwrap();
        }
        pool.evict_own(indexed).unwrap();
        assert_eq!((pool.stats().free, pool.stats().cached), (54, 0));
        assert!(pool.evict_own(&indexed[..1]).is_err());
        pool.check_invariants().unwrap();
    }
}
