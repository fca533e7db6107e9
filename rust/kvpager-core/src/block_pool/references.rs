//! Adding and dropping references.

use super::blocks::Rule;
use super::groups::place;
use super::state::{Kind, MAX_REFERENCES, State};
use super::{BlockPool, StepEpoch, faults};
use crate::error::{Error, HandleFault, Result};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;

/// Words of the filter that finds blocks named twice.
const FILTER: usize = 64;

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Adds a reference to each block, once for each time it is named.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not held by references; nothing has changed then.
    pub fn retain(&self, blocks: &[BlockHandle]) -> Result<()> {
        for &block in blocks {
            let state = self.state(self.checked_id(block)?);
            if FAULT != faults::BLIND_RETAIN {
                check_retainable(state, block, blocks.len())?;
            }
        }
        for (i, &block) in blocks.iter().enumerate() {
            if let Err(error) = self.retain_one(block) {
                // Checked above, so the caller let go of the block meanwhile. What was retained is dropped again.
                if FAULT != faults::KEEP_PARTIAL {
                    self.release(&blocks[..i])?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn retain_one(&self, block: BlockHandle) -> Result<()> {
        let (group, bit) = place(block.id().0);
        loop {
            let seen = self.groups.load(group);
            let state = self.state(block.id().0);
            if state.generation != block.generation() && FAULT != faults::BLIND_RETAIN {
                return Err(state.fault(block));
            }
            if seen.shared() & bit != 0 {
                break;
            }
            if seen.exclusive() & bit == 0 {
                return Err(state.fault(block));
            }
            // The handle was good after `seen` was loaded; see `take_out_run`. Two threads that share a block for
            // the first time at once: one exchange wins, the other sees the block shared, and both count below.
            if self.groups.try_share(group, seen, bit) {
                break;
            }
        }
        self.exchange(block, |state| {
            if FAULT != faults::BLIND_RETAIN {
                check_retainable(state, block, 1)?;
            }
            Ok(State { kind: Kind::Shared, references: state.references + 1, ..state })
        })?;
        Ok(())
    }

    /// Takes a reference from each block, once for each time it is named. The last one frees the block, or
    /// quarantines it while steps are open.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a stale or foreign handle, or more releases than references; nothing has
    /// changed then.
    pub fn release(&self, blocks: &[BlockHandle]) -> Result<()> {
        let num_shared = self.take_out(blocks, Rule::Release)?;
        if num_shared > 0
            && let Err(error) = self.drop_references(blocks)
        {
            self.restore(blocks);
            return Err(error);
        }
        let open = if FAULT == faults::SKIP_QUARANTINE { None } else { self.epochs.newest_open() };
        match open {
            None if num_shared == 0 => {
                self.free_detached(blocks, |account, count| self.give_back(account, count))
            }
            None => self.free_mixed(blocks),
            Some(epoch) => self.quarantine(blocks, epoch),
        }
        Ok(())
    }

    /// Drops a reference for each handle of a shared block. A block whose last one it was is `Dropped` then.
    fn drop_references(&self, blocks: &[BlockHandle]) -> Result<()> {
        self.check_references(blocks)?;
        for (i, &block) in blocks.iter().enumerate() {
            if !self.is_shared(block) {
                continue;
            }
            if FAULT == faults::TORN_REFERENCES {
                let state = self.state(block.id().0);
                let next = dropped(state, block)?;
                std::thread::yield_now();
                self.states[block.id().0 as usize].store(next.pack(), Ordering::Release);
                continue;
            }
            if let Err(error) = self.exchange(block, |state| dropped(state, block)) {
                // Checked above, so another call took references that were this caller's. Undo as far as can be.
                self.regain_references(&blocks[..i]);
                return Err(error);
            }
        }
        Ok(())
    }

    fn is_shared(&self, block: BlockHandle) -> bool {
        let (group, bit) = place(block.id().0);
        self.groups.load(group).shared() & bit != 0
    }

    /// Checks that no shared block is named more often than it has references. Nothing has been dropped yet, so a
    /// batch with too many changes nothing.
    fn check_references(&self, blocks: &[BlockHandle]) -> Result<()> {
        let mut filter = [0u64; FILTER];
        for &block in blocks {
            if !self.is_shared(block) {
                continue;
            }
            let hash = block.id().0.wrapping_mul(0x9e37_79b9) >> 20;
            let (word, bit) = (hash as usize / 64, 1u64 << (hash % 64));
            if filter[word] & bit != 0 {
                let times = blocks.iter().filter(|other| other.id() == block.id()).count();
                let state = self.state(block.id().0);
                if times > state.references as usize {
                    return Err(state.error(block, HandleFault::OverRelease));
                }
            }
            filter[word] |= bit;
        }
        Ok(())
    }

    fn regain_references(&self, blocks: &[BlockHandle]) {
        for &block in blocks {
            if self.is_shared(block) {
                let regained = self.exchange(block, |state| match state.kind {
                    Kind::Shared => Ok(State { references: state.references + 1, ..state }),
                    Kind::Dropped => Ok(State { kind: Kind::Shared, references: 1, ..state }),
                    _ => Err(state.fault(block)),
                });
                debug_assert!(regained.is_ok() || FAULT != faults::NONE, "{regained:?}");
            }
        }
    }

    /// Frees those of a batch that nobody refers to any more: the ones that `take_out` took, and dropped ones.
    fn free_mixed(&self, blocks: &[BlockHandle]) {
        let mut run: Option<(AccountId, u32)> = None;
        for &block in blocks {
            let left = self.leave(block, |state| State::free(state.next_generation::<FAULT>()));
            let Some(account) = left else { continue };
            let (group, bit) = place(block.id().0);
            self.groups.free(group, bit);
            run = match run {
                Some((of, count)) if of == account => Some((of, count + 1)),
                Some((of, count)) => {
                    self.give_back(of, count);
                    Some((account, 1))
                }
                None => Some((account, 1)),
            };
        }
        if let Some((of, count)) = run {
            self.give_back(of, count);
        }
    }

    /// Puts those of a batch that nobody refers to any more on the list of an open step.
    fn quarantine(&self, blocks: &[BlockHandle], epoch: StepEpoch) {
        let mut chain: Option<(u32, u32)> = None;
        let mut counted: Option<(AccountId, i64)> = None;
        for &block in blocks {
            let left = self.leave(block, |state| State {
                generation: state.next_generation::<FAULT>(),
                kind: Kind::Leaving,
                references: epoch.number() as u32 & MAX_REFERENCES,
                ..state
            });
            let Some(account) = left else { continue };
            let id = block.id().0;
            if let Some((_, last)) = chain {
                self.epochs.link(last, id);
            }
            chain = Some((chain.map_or(id, |(first, _)| first), id));
            counted = match counted {
                Some((of, count)) if of == account => Some((of, count + 1)),
                other => {
                    self.note_quarantined(other);
                    Some((account, 1))
                }
            };
        }
        self.note_quarantined(counted);
        if let Some((first, last)) = chain {
            self.epochs.push(epoch, first, last);
            if self.epochs.is_closed(epoch) && FAULT != faults::LOSE_LATE_PUSH {
                self.drain(epoch);
            }
        }
    }

    /// Writes the word of a block that leaves its last holder and returns its account; `None` if it has other
    /// holders, or another call or an earlier place of the batch frees it.
    fn leave(&self, block: BlockHandle, next: impl Fn(State) -> State) -> Option<AccountId> {
        let (group, bit) = place(block.id().0);
        let state = self.state(block.id().0);
        let off = self.groups.load(group).off() & bit != 0;
        match state.kind {
            _ if state.generation != block.generation() => None,
            Kind::Held if off => {
                // Release as in `claim`. Plain, since `take_out` made the block this call's alone.
                self.states[block.id().0 as usize].store(next(state).pack(), Ordering::Release);
                Some(state.account)
            }
            Kind::Dropped => {
                // Another batch may have dropped another reference just before and see the block dropped as well:
                // the exchange says whose it is.
                let won = self.exchange(block, |state| match state.kind {
                    Kind::Dropped => Ok(next(state)),
                    _ => Err(state.fault(block)),
                });
                won.ok()?;
                self.groups.take_out_shared(group, bit);
                Some(state.account)
            }
            _ => None,
        }
    }
}

fn check_retainable(state: State, block: BlockHandle, more: usize) -> Result<()> {
    if state.generation != block.generation() || !state.is_referenced() {
        return Err(state.fault(block));
    }
    if state.references as usize + more > MAX_REFERENCES as usize {
        return Err(Error::invalid(format!(
            "block {} has {} references, {more} more would pass {MAX_REFERENCES}, the most there can be",
            block.id(),
            state.references
        )));
    }
    Ok(())
}

fn dropped(state: State, block: BlockHandle) -> Result<State> {
    match state.references {
        _ if !state.is_referenced() => Err(state.fault(block)),
        1 => Ok(State { kind: Kind::Dropped, references: 0, ..state }),
        more => Ok(State { references: more - 1, ..state }),
    }
}
