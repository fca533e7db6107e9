//! How a branch set comes back: as one sequence, which splits.
//!
//! A set that was taken back is one entry of the queue, its eldest branch with the others inside. It is promised what all
//! of them need, in one operation, and gets a place for each. Then it is one sequence, which computes what all branches
//! have in common, in whole blocks, and *carries* the others. When that is done, it splits: branches that go on alike
//! stay together, as a smaller set that one of them carries, the others compute what is their own. So whatever several
//! branches have in common is computed once and stored once.

use super::Scheduler;
use super::compartments::{compartment_of, range_of};
use super::core::Core;
use super::inbox::Inbox;
use super::open_steps::OpenStep;
use super::request::{FinishReason, WaitingRequest};
use super::sequence::Sequence;
use super::waiting_sets::{Known, common_blocks, num_common};
use crate::ids::SequenceId;
use crate::{Error, Result};

impl Sequence {
    /// Branches that it carries until what they have in common is computed.
    pub(super) fn branches(&self) -> &[WaitingRequest] {
        self.special.as_ref().map_or(&[], |special| &special.branches)
    }

    /// Places that are taken for it besides its own.
    pub(super) fn num_unsplit(&self) -> u32 {
        self.request.n - 1 + self.branches().len() as u32
    }

    /// It, then the branches that it carries.
    pub(super) fn known(&self) -> Vec<Known<'_>> {
        let carried = self.branches().iter().map(Known::of_waiting);
        std::iter::once(Known::of_sequence(self)).chain(carried).collect()
    }

    /// Leading tokens of it that others may have computed.
    pub(super) fn num_common(&self) -> usize {
        match &self.special {
            Some(special) if !special.branches.is_empty() => special.split_at as usize,
            _ => self.tokens.len() - 1,
        }
    }

    /// Gives it branches to carry.
    pub(super) fn carry(&mut self, branches: Vec<WaitingRequest>, block_size: u32) {
        let split_at = num_common(&self.tokens, &branches, block_size);
        let is_unforked = self.request.n > 1 || !branches.is_empty();
        let special = self.special_mut();
        (special.is_unforked, special.split_at, special.branches) = (is_unforked, split_at, branches);
        self.drop_special();
    }

    fn splits(&self) -> bool {
        let is_ready = || self.in_flight == 0 && self.num_computed as usize >= self.num_common();
        !self.branches().is_empty() && self.ending.is_none() && is_ready()
    }
}

impl Scheduler {
    /// Checks that no branch set is torn: its branches run, are on the host, wait or are paused together; and that each branch
    /// pays for what it shares of further layer groups.
    ///
    /// # Errors
    /// [`Error::WrongState`] that names a set that is torn or does not pay, or if another thread is in the scheduler.
    pub fn check_invariants(&self) -> Result<()> {
        self.enter()?.check_sets()
    }
}

impl Core {
    fn check_sets(&self) -> Result<()> {
        for set in self.sets.all() {
            let mut places: Vec<_> = set.iter().filter_map(|&id| self.place_in_words(id)).collect();
            places.dedup();
            if places.len() > 1 {
                return Err(Error::WrongState(format!("branches {set:?} are torn: {}", places.join(", "))));
            }
            if !self.is_paid(set) {
                return Err(Error::WrongState(format!("branches {set:?} share blocks that they do not pay")));
            }
        }
        let unsplit =
            self.running.iter().chain(&self.parked).chain(self.halted.iter().map(|halted| &halted.sequence));
        let unsplit = unsplit.map(|sequence| sequence.num_unsplit()).sum::<u32>();
        let counted = self.compartments.iter().map(|compartment| compartment.num_unforked).sum::<u32>();
        if unsplit != counted {
            return Err(Error::WrongState(format!("{unsplit} branches are carried, {counted} are counted")));
        }
        Ok(())
    }

    /// Where a branch is; `None` of one that has ended and waits for its removal.
    fn place_in_words(&self, id: SequenceId) -> Option<String> {
        let has = |sequence: &Sequence| {
            sequence.id == id || sequence.branches().iter().any(|branch| branch.id == id)
        };
        if let Some(sequence) = self.running.iter().find(|sequence| has(sequence)) {
            return sequence.ending.is_none().then(|| "running".to_owned());
        }
        if let Some(sequence) = self.parked.iter().find(|sequence| has(sequence)) {
            return sequence.ending.is_none().then(|| "on the host".to_owned());
        }
        if self.halted.iter().any(|halted| has(&halted.sequence)) {
            return Some("halted".to_owned());
        }
        let paused = self.paused.values().find(|paused| paused.waiting.ids().any(|other| other == id));
        Some(match (self.queue.entry_of(id), paused) {
            (Some(eldest), _) => format!("waiting with {eldest}"),
            (None, Some(paused)) => format!("paused with {}", paused.waiting.id),
            (None, None) => format!("{id} nowhere"),
        })
    }

    /// Ends all of a running set if it can't have what it needs to go on: its quota was lowered.
    pub(super) fn end_set_beyond_reach(&mut self, id: SequenceId) -> Result<()> {
        let Some(position) = self.position(id) else { return Ok(()) };
        let sequence = &self.running[position];
        let set: Vec<_> = self.running_set(sequence).collect();
        let next = |branch: &Sequence| {
            let end = self.config.blocks_for(branch.frontier() + 1) as usize;
            if branch.layers.is_none() {
                return end as u32;
            }
            self.blocks_to_keep(branch).max(branch.num_blocks_in(0..end) as u32)
        };
        let need = self.need_of_set(&set, next);
        if need > self.reach_of(sequence)? {
            for id in self.sets.members(id) {
                if let Some(position) = self.position(id) {
                    self.running[position].ending.get_or_insert(FinishReason::Capacity);
                }
            }
        }
        Ok(())
    }

    /// Splits the sets of a compartment that have computed what their branches have in common.
    pub(super) fn split_sets(&mut self, compartment: usize) -> Result<()> {
        if self.compartments[compartment].num_unforked == 0 {
            return Ok(());
        }
        let mut position = range_of(&self.running, compartment).start;
        while position < range_of(&self.running, compartment).end {
            let id = self.running[position].id;
            if self.running[position].splits() {
                self.split_set(position)?;
            }
            position = self.position_of(id, position) + 1;
        }
        Ok(())
    }

    /// Lets the branches go on by themselves that do not go on as the one that carries them.
    fn split_set(&mut self, position: usize) -> Result<()> {
        let block_size = self.config.block_size;
        let sequence = &mut self.running[position];
        let (id, shared) = (sequence.id, sequence.num_computed / block_size);
        let branches =
            sequence.special.as_mut().map_or(Vec::new(), |special| std::mem::take(&mut special.branches));
        let goes_along = |a: &[u32], b: &[u32]| common_blocks(a, b, block_size) > shared;
        let (along, mut others): (Vec<_>, Vec<_>) =
            branches.into_iter().partition(|branch| goes_along(&sequence.tokens, &branch.request.prompt));
        sequence.carry(along, block_size);
        others.sort_unstable_by(|a, b| a.request.prompt.cmp(&b.request.prompt));
        let mut groups: Vec<Vec<WaitingRequest>> = Vec::new();
        for branch in others {
            match groups.last_mut() {
                Some(group) if goes_along(&group[0].request.prompt, &branch.request.prompt) => {
                    group.push(branch)
                }
                _ => groups.push(vec![branch]),
            }
        }
        for branches in groups.into_iter().filter_map(WaitingRequest::gather) {
            let position = self.position_of(id, position);
            self.begin_branch(position, branches, shared)?;
        }
        let position = self.position_of(id, position);
        let sequence = &mut self.running[position];
        sequence.num_shared = sequence.num_shared.max(shared);
        self.settle_promise(position)
    }

    /// Starts a branch, with those that it carries, from the first `shared` blocks of the sequence that carried it.
    fn begin_branch(&mut self, position: usize, branch: WaitingRequest, shared: u32) -> Result<()> {
        let carrier = self.running[position].id;
        let (mut pin, mut shared) = (self.running[position].pin_again()?, shared);
        let Some(row) = self.tables.take_row() else {
            return Err(Error::WrongState("a running place has no table row".to_owned()));
        };
        let need = branch.blocks_to_promise(&self.config, self.num_spared(shared as usize) as u32);
        let sequence = &mut self.running[position];
        let part = need.min(sequence.reservation.num_blocks());
        let mut promise = sequence.reservation.split(part)?;
        let spare = sequence.take_spare(need - part);
        if !self.share_blocks(position, shared as usize, &mut promise, spare.len())? {
            (pin, shared) = (None, 0);
        }
        let sequence = &self.running[position];
        let num_indexed = sequence.num_indexed.min(shared);
        self.scratch.clear();
        self.scratch.extend_from_slice(&sequence.blocks[..shared as usize]);
        let layers = self.shared_layers(position, shared as usize);
        self.write_rows(layers.as_deref(), row);
        self.own(branch.id).num_unforked -= branch.num_sequences();
        self.queue.note_start(branch.request.tenant.index);
        if self.pausing.contains(&carrier) {
            self.pausing.push(branch.id);
        }
        let mut child = self.start(branch, pin, promise, row);
        child.num_indexed = num_indexed;
        child.num_shared = shared;
        child.layers = layers;
        child.give_spare(spare);
        self.insert_running(Box::new(child));
        Ok(())
    }

    /// Takes those that a sequence carries out of it.
    pub(super) fn take_branches(&mut self, sequence: &mut Sequence) -> Vec<WaitingRequest> {
        let Some(special) = &mut sequence.special else { return Vec::new() };
        let branches = std::mem::take(&mut special.branches);
        special.is_unforked = sequence.request.n > 1;
        sequence.drop_special();
        self.own(sequence.id).num_unforked -= branches.len() as u32;
        branches
    }

    /// Whether a sequence carries branches.
    pub(super) fn is_carrier(&self, id: SequenceId) -> bool {
        self.sets.is_branch(id) && self.find(id).is_some_and(|sequence| !sequence.branches().is_empty())
    }

    /// A sequence that has blocks, wherever it is.
    pub(super) fn find(&self, id: SequenceId) -> Option<&Sequence> {
        let halted = self.halted.iter().map(|halted| &halted.sequence);
        let mut all = self.running.iter().chain(&self.parked).chain(halted);
        all.find(|sequence| sequence.id == id).map(|sequence| &**sequence)
    }

    /// Ends a sequence that carries others: one of those takes its place, and what it has computed, which is theirs as
    /// well. Not while a step is open that knows it by its id: then it ends a step later.
    pub(super) fn end_carrier(&mut self, id: SequenceId, reason: FinishReason, inbox: &Inbox) {
        let is_in = |open: &OpenStep| open.rows.iter().any(|row| row.id == id) || open.moved.contains(&id);
        if self.open.iter().any(is_in) {
            self.late_ends.push((id, reason));
            return;
        }
        self.uncall(id);
        let block_size = self.config.block_size;
        let halted = self.halted.iter_mut().map(|halted| &mut halted.sequence);
        let mut all = self.running.iter_mut().chain(&mut self.parked).chain(halted);
        let Some(sequence) = all.find(|sequence| sequence.id == id) else { return };
        let Some(special) = &mut sequence.special else { return };
        let Some(mut heir) = WaitingRequest::gather(std::mem::take(&mut special.branches)) else { return };
        let account = sequence.account(reason, None);
        let branches = std::mem::take(&mut heir.branches);
        let tokens = std::mem::take(&mut heir.request.prompt);
        sequence.tokens.clear();
        sequence.tokens.extend_from_slice(&tokens);
        sequence.known_age = tokens.len() as u32 - heir.progress.prompt_tokens;
        let old = std::mem::replace(&mut sequence.request, heir.request);
        let progress = std::mem::replace(&mut sequence.progress, heir.progress);
        sequence.id = heir.id;
        sequence.carry(branches, block_size);
        self.running.sort_unstable_by_key(|sequence| sequence.id);
        self.parked.sort_unstable_by_key(|sequence| sequence.id);
        self.pausing.iter_mut().filter(|other| **other == id).for_each(|other| *other = heir.id);
        self.compartments[compartment_of(id)].num_unforked -= 1;
        self.deadlines.remove(id, old.deadline, progress.arrival());
        self.sets.leave(id);
        inbox.end_id(id);
        inbox.forget_samples(id, progress.branch);
        self.ended.push(account);
    }

    /// Takes a branch out of the sequence that carries it.
    pub(super) fn take_carried(&mut self, id: SequenceId) -> Option<WaitingRequest> {
        if !self.sets.is_branch(id) {
            return None;
        }
        let halted = self.halted.iter_mut().map(|halted| &mut halted.sequence);
        let sequences = self.running.iter_mut().chain(&mut self.parked).chain(halted);
        let place_in = |sequence: &Sequence| sequence.branches().iter().position(|branch| branch.id == id);
        let (sequence, place) =
            sequences.filter_map(|sequence| place_in(sequence).map(|i| (sequence, i))).next()?;
        let special = sequence.special.as_mut()?;
        let branch = special.branches.remove(place);
        special.is_unforked = !special.branches.is_empty();
        sequence.drop_special();
        self.compartments[compartment_of(id)].num_unforked -= 1;
        Some(branch)
    }
}
