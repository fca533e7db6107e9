//! Keeping released blocks until a step closes, and bringing them back.

use super::epochs::NIL;
use super::freeing::{Chain, Returning};
use super::state::{MAX_REFERENCES, State};
use super::{BlockPool, StepEpoch, faults};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;

impl<const FAULT: u8> BlockPool<FAULT> {
    /// The step that blocks released now wait for.
    pub(super) fn waiting_for(&self) -> Option<StepEpoch> {
        if FAULT == faults::SKIP_QUARANTINE { None } else { self.epochs.newest_open() }
    }

    /// Puts blocks that are off and the caller's, each once, on the list of an open step.
    pub(super) fn quarantine(&self, blocks: &[BlockHandle], epoch: StepEpoch) {
        let [first, .., last] = blocks else {
            if let [block] = blocks {
                let id = block.id().0;
                self.note_quarantined(Some((self.leave(id, epoch), 1)));
                self.push(Chain { first: id, last: id }, epoch);
            }
            return;
        };
        let mut counted: Option<(AccountId, i64)> = None;
        for (i, block) in blocks.iter().enumerate() {
            let id = block.id().0;
            if let Some(next) = blocks.get(i + 1) {
                self.epochs.link(id, next.id().0);
            }
            counted = self.count_left(counted, self.leave(id, epoch));
        }
        self.note_quarantined(counted);
        self.push(Chain { first: first.id().0, last: last.id().0 }, epoch);
    }

    /// Puts the blocks of a chain on the list of an open step.
    pub(super) fn quarantine_chain(&self, chain: Chain, epoch: StepEpoch) {
        if chain.is_empty() {
            return;
        }
        let mut counted: Option<(AccountId, i64)> = None;
        for id in self.chained(chain) {
            counted = self.count_left(counted, self.leave(id, epoch));
        }
        self.note_quarantined(counted);
        self.push(chain, epoch);
    }

    /// Writes the word of a block that is the caller's alone and returns its account.
    fn leave(&self, id: u32, epoch: StepEpoch) -> AccountId {
        let cell = &self.states[id as usize];
        // Relaxed: the block is the caller's alone.
        let word = cell.load(Ordering::Relaxed);
        // Release as in `claim`.
        cell.store(State::leaving::<FAULT>(word, epoch.number()), Ordering::Release);
        State::account_of(word)
    }

    fn count_left(&self, counted: Option<(AccountId, i64)>, account: AccountId) -> Option<(AccountId, i64)> {
        match counted {
            Some((of, count)) if of == account => Some((of, count + 1)),
            other => {
                self.note_quarantined(other);
                Some((account, 1))
            }
        }
    }

    fn push(&self, chain: Chain, epoch: StepEpoch) {
        if FAULT == faults::LOSE_LATE_PUSH {
            std::thread::yield_now(); // a planted fault shows more often
        }
        self.epochs.push(epoch, chain.first, chain.last);
        if self.epochs.is_closed(epoch) && FAULT != faults::LOSE_LATE_PUSH {
            self.drain(epoch);
        }
    }

    /// Counts blocks that were put into quarantine.
    pub(super) fn note_quarantined(&self, counted: Option<(AccountId, i64)>) {
        if let Some((account, count)) = counted {
            // Relaxed: statistics.
            self.accounts.of_block(account).quarantined.fetch_add(count, Ordering::Relaxed);
            self.accounts.permits.count_quarantined(count);
        }
    }

    /// Brings back what waited for a closed epoch. May run on several threads at once: each takes a list whole.
    pub(super) fn drain(&self, epoch: StepEpoch) {
        let give = |run: &Returning| {
            self.note_quarantined(Some((run.account, -i64::from(run.count))));
            self.give_back(run.account, run.count);
        };
        let list = Chain { first: self.epochs.take_list(epoch), last: NIL };
        let mut run = Returning::NONE;
        for block in self.chained(list) {
            let state = self.state(block);
            match self.waits_for(state) {
                Some(later) => self.push(Chain { first: block, last: block }, later),
                // The generation was bumped when the block was released.
                None => self.bring_back(&mut run, block, state, give),
            }
        }
        self.finish(&mut run, give);
        self.epochs.take_unheld(epoch, |account, count| self.settle_quarantined(account, count));
    }

    /// The epoch that a leaving block still waits for. The word has its low bits only: a release that stands still
    /// for 2^18 steps before it comes to the list is taken for one from the future, and waits that much longer.
    fn waits_for(&self, state: State) -> Option<StepEpoch> {
        let closed = self.epochs.closed_through();
        let ahead = state.references.wrapping_sub(closed as u32) & MAX_REFERENCES;
        (ahead != 0 && ahead <= MAX_REFERENCES / 2).then(|| StepEpoch::from_number(closed + u64::from(ahead)))
    }
}
