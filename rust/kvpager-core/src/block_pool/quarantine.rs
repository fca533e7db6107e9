//! Bringing back what waited for a step.

use super::groups::place;
use super::state::{MAX_REFERENCES, State};
use super::{BlockPool, StepEpoch};
use crate::ids::AccountId;
use crate::sync::Ordering;

use super::epochs::NIL;

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Counts blocks that were put into quarantine.
    pub(super) fn note_quarantined(&self, counted: Option<(AccountId, i64)>) {
        if let Some((account, count)) = counted {
            // Relaxed: statistics.
            self.accounts.of_block(account).quarantined.fetch_add(count, Ordering::Relaxed);
            self.quarantined.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Brings back what waited for a closed epoch. May run on several threads at once: each takes a list whole.
    pub(super) fn drain(&self, epoch: StepEpoch) {
        let mut block = self.epochs.take_list(epoch);
        let mut run: Option<(AccountId, u32)> = None;
        while block != NIL {
            // Before anything else: afterwards the block is somebody else's.
            let next = self.epochs.next(block);
            let state = self.state(block);
            match self.waits_for(state) {
                Some(later) => self.push_again(later, block),
                None => {
                    run = match run {
                        Some((of, count)) if of == state.account => Some((of, count + 1)),
                        other => {
                            self.release_run(other);
                            Some((state.account, 1))
                        }
                    };
                    self.free_off(block, state);
                }
            }
            block = next;
        }
        self.release_run(run);
        self.epochs.take_unheld(epoch, |account, count| self.settle_unheld(account, count));
    }

    /// The epoch that a leaving block still waits for.
    fn waits_for(&self, state: State) -> Option<StepEpoch> {
        let closed = self.epochs.closed_through();
        let ahead = state.references.wrapping_sub(closed as u32) & MAX_REFERENCES;
        (ahead != 0 && ahead <= MAX_REFERENCES / 2).then(|| StepEpoch::from_number(closed + u64::from(ahead)))
    }

    fn push_again(&self, epoch: StepEpoch, block: u32) {
        self.epochs.push(epoch, block, block);
        if self.epochs.is_closed(epoch) {
            self.drain(epoch);
        }
    }

    fn free_off(&self, block: u32, state: State) {
        let (group, bit) = place(block);
        // Release: published by `free`. The generation was bumped when the block was released.
        self.states[block as usize].store(State::free(state.generation).pack(), Ordering::Release);
        self.groups.free(group, bit);
    }

    /// Gives capacity and permits of a run of freed blocks back.
    fn release_run(&self, run: Option<(AccountId, u32)>) {
        if let Some((account, count)) = run {
            self.note_quarantined(Some((account, -i64::from(count))));
            self.give_back(account, count);
        }
    }
}
