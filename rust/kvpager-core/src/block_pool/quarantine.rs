//! Bringing back what waited for a step.

use super::epochs::NIL;
use super::groups::place;
use super::state::{MAX_REFERENCES, State};
use super::{BlockPool, StepEpoch};
use crate::ids::AccountId;
use crate::sync::Ordering;

/// Blocks on their way out of quarantine.
struct Returning {
    group: usize,
    mask: u64,
    account: AccountId,
    count: u32,
}

impl Default for Returning {
    fn default() -> Self {
        Self { group: 0, mask: 0, account: AccountId(0), count: 0 }
    }
}

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
        let mut run = Returning::default();
        while block != NIL {
            // Before anything else: afterwards the block is somebody else's.
            let next = self.epochs.next(block);
            let state = self.state(block);
            match self.waits_for(state) {
                Some(later) => self.push_again(later, block),
                None => self.bring_back(&mut run, block, state),
            }
            block = next;
        }
        self.finish_group(&mut run);
        self.finish_run(&run);
        self.epochs.take_unheld(epoch, |account, count| self.settle_unheld(account, count));
    }

    /// Adds a block to what is being brought back: neighbours in one group are freed by one exchange, blocks of
    /// one account in a row are given back by one.
    fn bring_back(&self, run: &mut Returning, block: u32, state: State) {
        let (group, bit) = place(block);
        if group != run.group || state.account != run.account {
            self.finish_group(run);
            run.group = group;
        }
        if state.account != run.account {
            self.finish_run(run);
            (run.account, run.count) = (state.account, 0);
        }
        // Release as in `claim`. The generation was bumped when the block was released.
        self.states[block as usize].store(State::free(state.generation).pack(), Ordering::Release);
        run.mask |= bit;
        run.count += 1;
    }

    fn finish_group(&self, run: &mut Returning) {
        if run.mask != 0 {
            self.groups.free(run.group, std::mem::take(&mut run.mask));
        }
    }

    /// Gives capacity and permits of a run of freed blocks back.
    fn finish_run(&self, run: &Returning) {
        if run.count > 0 {
            self.note_quarantined(Some((run.account, -i64::from(run.count))));
            self.give_back(run.account, run.count);
        }
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
}
