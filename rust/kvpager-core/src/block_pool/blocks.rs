//! Handing out blocks, and what a handle's block is.

use super::BlockPool;
use super::faults;
use super::groups::WIDTH;
use super::state::{Kind, State};
use crate::error::{Error, HandleFault, Result};
use crate::ids::{AccountId, BlockHandle, BlockId};
use crate::sync::{AtomicU64, Ordering};

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Hands out blocks, all of `out` or none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::OverQuota`], [`Error::InvalidArgument`] for an unknown account, or
    /// [`Error::NeedsReclaim`] if the capacity is there and cached blocks are in the way.
    pub fn allocate(&self, account: AccountId, out: &mut [BlockHandle]) -> Result<()> {
        let count = u32::try_from(out.len()).unwrap_or(u32::MAX);
        self.accounts.take::<FAULT>(account, count, count)?;
        self.claim(account, out);
        self.note_peak();
        Ok(())
    }

    /// Claims blocks. The caller holds capacity and free permits for them.
    pub(super) fn claim(&self, account: AccountId, out: &mut [BlockHandle]) {
        let mut rest = out;
        self.groups.claim::<FAULT>(rest.len(), |group, mut mask| {
            let members = self.members(group);
            let first = mask.trailing_zeros() as usize;
            let run = mask >> first;
            // Neighbours need no search for their bits.
            if run & (run + 1) == 0 {
                let len = run.trailing_ones() as usize;
                let (slots, others) = std::mem::take(&mut rest).split_at_mut(len);
                rest = others;
                let ids = (group * WIDTH + first) as u32..;
                for ((slot, cell), id) in slots.iter_mut().zip(&members[first..]).zip(ids) {
                    *slot = hand_out(cell, id, account);
                }
                return len;
            }
            let mut count = 0;
            for slot in rest.iter_mut() {
                let offset = mask.trailing_zeros() as usize;
                *slot = hand_out(&members[offset], (group * WIDTH + offset) as u32, account);
                mask &= mask - 1;
                count += 1;
                if mask == 0 {
                    break;
                }
            }
            rest = &mut std::mem::take(&mut rest)[count..];
            count
        });
    }

    /// A block's state. Acquire pairs with the Release of the block's last change.
    pub(super) fn state(&self, id: u32) -> State {
        State::unpack(self.states[id as usize].load(Ordering::Acquire))
    }

    /// A handle's block, if the pool has it.
    pub(super) fn checked_id(&self, block: BlockHandle) -> Result<u32> {
        let id = block.id().0;
        if id < self.num_blocks() {
            Ok(id)
        } else {
            Err(State::free(0).error(block, HandleFault::NeverIssued))
        }
    }

    /// The words of a group's blocks.
    pub(super) fn members(&self, group: usize) -> &[AtomicU64] {
        let first = group * WIDTH;
        &self.states[first..self.states.len().min(first + WIDTH)]
    }

    /// Whether a block may be written: one reference, and not in the index. Otherwise it is copied first.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that names no block in use.
    pub fn is_exclusive(&self, block: BlockHandle) -> Result<bool> {
        let state = self.state(self.checked_id(block)?);
        match state.kind {
            _ if state.generation != block.generation() => Err(state.fault(block)),
            Kind::Held | Kind::Shared => Ok(state.references == 1),
            Kind::Indexed => Ok(false),
            Kind::Free | Kind::Leaving | Kind::Dropped | Kind::Stored => Err(state.fault(block)),
        }
    }

    /// How many references a block has; 0 for one that is the index's.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that names no block in use.
    pub fn num_references(&self, block: BlockHandle) -> Result<u32> {
        let state = self.state(self.checked_id(block)?);
        match state.kind {
            _ if state.generation != block.generation() => Err(state.fault(block)),
            Kind::Held | Kind::Shared => Ok(state.references),
            Kind::Indexed => Ok(0),
            Kind::Free | Kind::Leaving | Kind::Dropped | Kind::Stored => Err(state.fault(block)),
        }
    }

    /// Changes the word of a shared or indexed block by `next`. Returns the new state.
    pub(super) fn exchange(
        &self,
        block: BlockHandle,
        mut next: impl FnMut(State) -> Result<State>,
    ) -> Result<State> {
        let cell = &self.states[block.id().0 as usize];
        let mut word = cell.load(Ordering::Acquire);
        loop {
            let now = State::unpack(word);
            if now.generation != block.generation() && FAULT != faults::BLIND_RETAIN {
                return Err(now.fault(block));
            }
            let state = next(now)?;
            // AcqRel: what was done with the block before a reference went away comes before what is done after
            // the last one did. A failure means that another thread changed the word.
            match cell.compare_exchange_weak(word, state.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(state),
                Err(changed) => word = changed,
            }
        }
    }

    pub(super) fn refuse_open_step(&self, what: &str) -> Result<()> {
        match self.epochs.newest_open() {
            Some(epoch) => Err(Error::WrongState(format!(
                "blocks cannot be {what} while a step is open that may read them (epoch {})",
                epoch.number()
            ))),
            None => Ok(()),
        }
    }
}

/// Writes the word of a block that was just claimed, and makes its handle.
#[inline]
fn hand_out(cell: &AtomicU64, id: u32, account: AccountId) -> BlockHandle {
    // Relaxed: claiming the bit acquired what its last owner published, and it is ours.
    let word = State::handed_out(cell.load(Ordering::Relaxed), account);
    // Release pairs with the Acquire in `state`, for threads that get the handle by other ways than ours.
    cell.store(word, Ordering::Release);
    BlockHandle::new((word >> 32) as u32, BlockId(id))
}
