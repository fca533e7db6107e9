//! Sequences that share blocks: forking, and copying a shared block before it is written.
//!
//! A fork shares all blocks with what it came from: full indexed ones by a pin of the same node, others by a
//! reference. The last, partly filled block stays shared until one of its owners is to write it: that one takes a
//! block of its own, and the batch has the copy. Who is left alone with the original writes it without a copy.

use super::Scheduler;
use super::branch_promises::num_copies;
use super::branches::{Known, blocks_of_set, life_of};
use super::compartments::compartment_of;
use super::core::{Core, draw};
use super::inbox::Inbox;
use super::scopes::{Reach, find};
use super::sequence::Sequence;
use crate::block_pool::Reservation;
use crate::ids::{BlockHandle, SequenceId};
use crate::prefix_index::{ChainPin, PartialBlock, Pin};
use crate::{Error, Result};
use std::sync::Arc;

/// A copy that the next batch makes.
#[derive(Debug)]
struct Copy {
    id: SequenceId,
    from: BlockHandle,
    to: BlockHandle,
    /// What keeps `from` if it is the index's; else the sequence's own reference does.
    pin: Option<Pin>,
}

/// Copies of the step that is being planned. The sources stay held until it is open.
#[derive(Debug, Default)]
pub(super) struct Copies(Vec<Copy>);

impl Copies {
    /// How many sequences have left this block for a copy, and still hold it.
    fn num_leaving(&self, block: BlockHandle) -> u32 {
        self.0.iter().filter(|copy| copy.from == block).count() as u32
    }

    /// Notes a copy from a block of the index.
    pub(super) fn copy_pinned(&mut self, id: SequenceId, source: PartialBlock, to: BlockHandle) {
        self.0.push(Copy { id, from: source.block, to, pin: Some(source.pin) });
    }

    /// Whether the next batch copies a block of this sequence.
    pub(super) fn concern(&self, id: SequenceId) -> bool {
        self.0.iter().any(|copy| copy.id == id)
    }
}

impl Scheduler {
    /// Makes `count` new requests that go on from where a running sequence is, with all its tokens; they share its
    /// blocks and its limits, and end by themselves. Between two steps only.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the sequence does not run, has ended, is in an open step, or if its prefix was
    /// purged; [`Error::Refused`] if there are too few running places, the branches together could never fit, or the
    /// scheduler is being drained;
    /// [`Error::OutOfBlocks`] or [`Error::OverQuota`] if what the policy promises to them is not there. Nothing has
    /// changed then.
    pub fn fork(&self, id: SequenceId, count: u32) -> Result<Vec<SequenceId>> {
        self.check_issued(id)?;
        if count == 0 {
            return Err(Error::invalid("a fork makes 0 sequences, must be at least 1"));
        }
        self.config.check_forks()?;
        if self.inbox.is_draining() {
            return Err(Error::refused("the scheduler is being drained and accepts nothing"));
        }
        let mut core = self.enter()?;
        let forked = core.fork(id, count, &self.inbox);
        self.publish(&core);
        forked
    }
}

impl Core {
    fn fork(&mut self, id: SequenceId, count: u32, inbox: &Inbox) -> Result<Vec<SequenceId>> {
        let position = self.forkable(id, count, inbox)?;
        let sequence = &self.running[position];
        let num_computed = sequence.num_computed;
        let is_partial = !num_computed.is_multiple_of(self.config.block_size);
        let shared = self.config.blocks_for(num_computed);
        let growth = self.growth_after(sequence, num_computed / self.config.block_size);
        let tenant = Arc::clone(&sequence.request.tenant);
        let is_first = is_partial && !sequence.shares_tail();
        self.check_fork_fits(position, count)?;
        // Whichever of them writes the last block first needs a block for its copy.
        let copy = u32::from(is_first && !self.config.policy.overcommits());
        let mut promised = loop {
            match self.pool.reserve(tenant.account, growth * count + copy) {
                Ok(promised) => break promised,
                Err(short) if self.release_kept(&tenant, &short)? => {}
                Err(short) => return Err(short),
            }
        };
        let pins = (0..count).map(|_| self.pin_again(position)).collect::<Result<Vec<_>>>()?;
        promised.move_to(copy, &mut self.running[position].reservation)?;
        self.keep_within_limit(&self.running[position].request.tenant)?;
        let own = self.running[position].blocks[self.running[position].num_indexed as usize..shared as usize]
            .repeat(count as usize);
        if let Err(error) = self.pool.retain(&own) {
            self.trim_promise(position)?;
            return Err(error);
        }
        let mut ids = Vec::with_capacity(count as usize);
        let compartment = compartment_of(id);
        for pin in pins {
            let reservation = promised.split(growth)?;
            let child =
                self.child_of(position, inbox.issue_id(compartment), shared as usize, pin, reservation)?;
            ids.push(child.id);
            self.sets.join(child.id, id);
            self.insert_running(Box::new(child));
        }
        self.running[position].is_branch = true;
        self.note_shared(position, shared, is_partial);
        if self.pausing.contains(&id) {
            self.pausing.extend(&ids);
        }
        Ok(ids)
    }

    /// Refuses a fork after which its set could need more than there may ever be: a set is preempted as a whole, so it
    /// must fit as a whole.
    fn check_fork_fits(&self, position: usize, count: u32) -> Result<()> {
        if !self.config.policy.overcommits() {
            // All of it is promised here and now.
            return Ok(());
        }
        let sequence = &self.running[position];
        let life = life_of(&self.config, Known::of_sequence(sequence));
        let mut need = self.num_held_by_set(sequence) as u32 + num_copies(self.running_set(sequence));
        need += count * (life - sequence.num_computed / self.config.block_size);
        for branch in self.running_set(sequence) {
            let total = blocks_of_set(&self.config, branch.known(), |known| life_of(&self.config, known));
            need += total.saturating_sub(branch.blocks.len() as u32);
        }
        let tenant = &sequence.request.tenant;
        let reachable = self.reach_of(sequence)?;
        if need <= reachable {
            return Ok(());
        }
        Err(Error::refused(format!(
            "with {}, the set of sequence {} may need {}; tenant {:?} may have {reachable}",
            crate::count(count, "more branch"),
            sequence.id,
            crate::count(need, "block"),
            tenant.name
        )))
    }

    /// Where a sequence that can be forked stands.
    fn forkable(&self, id: SequenceId, count: u32, inbox: &Inbox) -> Result<usize> {
        let wrong =
            |what: &str| Err(Error::WrongState(format!("sequence {id} {what}: it cannot be forked now")));
        let Some(position) = self.position(id) else { return wrong("does not run") };
        let sequence = &self.running[position];
        // Its end may still be in the inbox, which is emptied at the same moments whoever calls what.
        if sequence.ending.is_some() || !inbox.is_live(id) {
            return wrong("has ended");
        }
        if sequence.in_flight > 0 {
            return wrong("is in an open step");
        }
        if sequence.num_unsplit() > 0 {
            return wrong("has not split into its branches yet");
        }
        let left = self.num_rows_left(compartment_of(id));
        let most = self.compartments[compartment_of(id)].bounds.max_running;
        if left < count as usize || self.tables.num_free_rows() < count as usize {
            return Err(Error::Refused {
                reason: format!(
                    "{}: {} of {} places are taken",
                    crate::count(count, "more sequence"),
                    most as usize - left.min(most as usize),
                    most
                ),
                retryable: true,
                retry_after_steps: None,
            });
        }
        Ok(position)
    }

    /// Blocks that a fork of a sequence is promised beyond `shared` ones that are full.
    pub(super) fn growth_after(&self, sequence: &Sequence, shared: u32) -> u32 {
        let total = if self.config.policy.overcommits() {
            self.config.blocks_for(sequence.tokens.len() as u32)
        } else {
            self.config.lifetime_blocks(sequence.progress.prompt_tokens, sequence.request.max_tokens)
        };
        total - shared
    }

    /// One more pin of what a sequence has pinned.
    pub(super) fn pin_again(&mut self, position: usize) -> Result<Option<ChainPin>> {
        let sequence = &self.running[position];
        let (Some(index), Some(_)) = (&self.index, &sequence.pin) else { return Ok(None) };
        let indexed = sequence.num_indexed as usize;
        let tokens = &sequence.tokens[..indexed * self.config.block_size as usize];
        self.scratch.clear();
        let again = find(index, &sequence.request, Reach::All, tokens, &mut self.scratch)?;
        if again.is_none() || self.scratch[..] != sequence.blocks[..indexed] {
            return Err(Error::WrongState(format!("the prefix of sequence {} was purged", sequence.id)));
        }
        Ok(again)
    }

    /// A sequence with the tokens and the first `shared` blocks of another, in a row of its own.
    pub(super) fn child_of(
        &mut self,
        position: usize,
        id: SequenceId,
        shared: usize,
        pin: Option<ChainPin>,
        reservation: Reservation,
    ) -> Result<Sequence> {
        let Some(row) = self.tables.take_row() else {
            return Err(Error::WrongState("a running place has no table row".to_owned()));
        };
        let parent = &self.running[position];
        let mut tokens = Vec::with_capacity(parent.tokens.capacity());
        tokens.extend_from_slice(&parent.tokens);
        let mut blocks = Vec::with_capacity(parent.blocks.capacity());
        blocks.extend_from_slice(&parent.blocks[..shared]);
        for block in &blocks {
            self.tables.append(row, block.id());
        }
        let mut child = Sequence::new(id, parent.request.clone(), tokens, blocks, reservation, row);
        if shared > 0 {
            child.num_computed = parent.num_computed;
            child.num_indexed = parent.num_indexed;
        }
        child.pin = pin;
        child.has_sampled = parent.has_sampled;
        child.resumed_at = self.now;
        child.progress = parent.progress;
        child.progress.steps = 0;
        child.progress.preemptions = 0;
        child.progress.branch = 0;
        child.progress.queue_steps = Some(0);
        child.num_shared = shared as u32;
        child.is_branch = true;
        child.special_mut().shares_tail = !child.num_computed.is_multiple_of(self.config.block_size);
        child.drop_special();
        self.queue.note_start(child.request.tenant.index);
        self.deadlines.insert(id, child.request.deadline, child.progress.arrival());
        Ok(child)
    }

    pub(super) fn note_shared(&mut self, position: usize, shared: u32, is_partial: bool) {
        let parent = &mut self.running[position];
        parent.num_shared = parent.num_shared.max(shared);
        if is_partial {
            parent.special_mut().shares_tail = true;
        }
    }

    /// Makes the block that a sequence writes next its own. `Ok(Err(error))` says what is short.
    pub(super) fn own_tail(&mut self, position: usize) -> Result<std::result::Result<(), Error>> {
        let sequence = &mut self.running[position];
        let column = (sequence.frontier() / self.config.block_size) as usize;
        let Some(&from) = sequence.blocks.get(column) else {
            return self.forget_shared_tail(position).map(Ok);
        };
        if self.pool.num_references(from)? - self.copies.num_leaving(from) <= 1 {
            return self.forget_shared_tail(position).map(Ok);
        }
        let more = u32::from(sequence.reservation.num_blocks() == 0);
        let more = self.borrow_promise(position, more)?;
        let sequence = &mut self.running[position];
        let mut to = [BlockHandle::from_bits(0)];
        // What is promised already is there, also when the quota was lowered since.
        let drawn = if more > 0 { sequence.reservation.grow(more) } else { Ok(()) };
        self.keep_within_limit(&self.running[position].request.tenant)?;
        let sequence = &mut self.running[position];
        match drawn.and_then(|()| draw(self.index.as_deref(), &mut sequence.reservation, &mut to)) {
            Ok(()) => {}
            Err(
                error @ (Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. }),
            ) => {
                return Ok(Err(error));
            }
            Err(error) => return Err(error),
        }
        let [to] = to;
        sequence.blocks[column] = to;
        self.tables.replace(sequence.row, column as u32, to.id());
        self.copies.0.push(Copy { id: sequence.id, from, to, pin: None });
        self.scratch.clear();
        self.scratch.push(to);
        self.note_owner(self.running[position].request.tenant.account);
        self.forget_shared_tail(position).map(Ok)
    }

    fn forget_shared_tail(&mut self, position: usize) -> Result<()> {
        let sequence = &mut self.running[position];
        sequence.special_mut().shares_tail = false;
        sequence.drop_special();
        self.trim_promise(position)
    }

    /// Hands the copies to the batch of the step that has just opened, and lets their sources go: they stay as they
    /// are until it closes. Returns whose blocks are copied.
    pub(super) fn settle_copies(&mut self, pairs: &mut Vec<[i32; 2]>) -> Result<Vec<SequenceId>> {
        let mut copied = Vec::new();
        for Copy { id, from, to, pin } in std::mem::take(&mut self.copies.0) {
            // Who was preempted since has no use for it.
            if self.position(id).is_some_and(|position| self.running[position].blocks.contains(&to)) {
                pairs.push([from.id().0 as i32, to.id().0 as i32]);
                copied.push(id);
            }
            match pin {
                Some(pin) => drop(pin),
                None => self.pool.release(&[from])?,
            }
        }
        Ok(copied)
    }
}
