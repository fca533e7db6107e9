//! Sequences that share blocks: forking, and copying a shared block before it is written.
//!
//! A fork shares all blocks with what it came from: full indexed ones by a pin of the same node, others by a
//! reference. The last, partly filled block stays shared until one of its owners is to write it: that one takes a
//! block of its own, and the batch has the copy. Who is left alone with the original writes it without a copy.

use super::Scheduler;
use super::compartments::compartment_of;
use super::core::{Core, Draw};
use super::group_blocks::{GroupBlock, rest_tables};
use super::inbox::Inbox;
use super::sequence::Sequence;
use super::waiting_sets::{Known, blocks_of_set, life_of};
use crate::block_pool::Reservation;
use crate::ids::{BlockHandle, SequenceId};
use crate::prefix_index::{ChainPin, PartialBlock, Pin};
use crate::{Error, Result};
use std::sync::Arc;

/// A copy that a batch makes.
#[derive(Debug)]
pub(super) struct Copy {
    id: SequenceId,
    /// In the first group (`None`), or in a further one.
    group: Option<usize>,
    column: u32,
    from: BlockHandle,
    to: BlockHandle,
    keeper: Keeper,
}

/// What keeps the source of a copy.
#[derive(Debug)]
enum Keeper {
    /// A reference, until the copy has been made.
    Reference,
    /// A pin of what the index has, until the step is open; then it is not evicted before that closes.
    Pin(Option<Pin>),
}

/// Copies of the step that is being planned.
#[derive(Debug, Default)]
pub(super) struct Copies(Vec<Copy>);

impl Copies {
    /// How many sequences have left this block for a copy, and still hold it.
    fn num_leaving(&self, block: BlockHandle) -> u32 {
        self.0.iter().filter(|copy| copy.from == block).count() as u32
    }

    /// Notes a copy from a block of the index to the last one of a sequence.
    pub(super) fn copy_pinned(&mut self, sequence: &Sequence, source: PartialBlock, to: BlockHandle) {
        let (column, keeper) = (sequence.blocks.len() as u32 - 1, Keeper::Pin(Some(source.pin)));
        self.0.push(Copy { id: sequence.id, group: None, column, from: source.block, to, keeper });
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
    /// [`Error::WrongState`] if the sequence does not run, has ended, or is in an open step;
    /// [`Error::Refused`] if there are too few running places, the branches together could never fit, or the
    /// scheduler is being drained;
    /// [`Error::OutOfBlocks`] or [`Error::OverQuota`] if what the policy promises to them is not there. Nothing has
    /// changed then.
    pub fn fork(&self, id: SequenceId, count: u32) -> Result<Vec<SequenceId>> {
        self.check_issued(id)?;
        if count == 0 {
            return Err(Error::invalid("a fork makes 0 sequences, must be at least 1"));
        }
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
        let growth = self.growth_after(sequence, shared);
        let tenant = Arc::clone(&sequence.request.tenant);
        let is_first = is_partial && !sequence.shares_tail() && sequence.keeps_first();
        self.check_fork_fits(position, count)?;
        // Whichever of them writes the last block first needs a block for its copy.
        let copy = u32::from(is_first && !self.config.policy.overcommits());
        let mut promised = loop {
            match self.pool.reserve(tenant.account, growth * count + copy) {
                Ok(promised) => break promised,
                Err(short)
                    if self.kept_may_be_enough(&tenant, &short)? && self.release_kept(&tenant, &short)? => {}
                Err(short) => return Err(short),
            }
        };
        let pins = (0..count).map(|_| self.running[position].pin_again()).collect::<Result<Vec<_>>>()?;
        let mut copy = promised.split(copy)?;
        self.keep_within_limit(&tenant)?;
        let promises = self.share_with(position, shared as usize, promised, count)?;
        copy.move_to(copy.num_blocks(), &mut self.running[position].reservation)?;
        let mut ids = Vec::with_capacity(count as usize);
        let compartment = compartment_of(id);
        for (pin, promise) in pins.into_iter().zip(promises) {
            let child =
                self.child_of(position, inbox.issue_id(compartment), shared as usize, pin, promise)?;
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

    /// Shares the first columns of a sequence with `count` branches, all or none, which divide a promise evenly.
    fn share_with(
        &self,
        position: usize,
        shared: usize,
        mut promised: Reservation,
        count: u32,
    ) -> Result<Vec<Reservation>> {
        let each = promised.num_blocks() / count;
        let mut promises: Vec<Reservation> = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let mut promise = promised.split(each)?;
            match self.share_blocks(position, shared, &mut promise, 0) {
                Ok(_is_paid) => promises.push(promise),
                Err(error) => {
                    for mut promise in promises {
                        self.unshare_blocks(position, shared, &mut promise)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(promises)
    }

    /// Refuses a fork after which its set could need more than there may ever be: a set is preempted as a whole, so it
    /// must fit as a whole.
    fn check_fork_fits(&self, position: usize, count: u32) -> Result<()> {
        if !self.config.policy.overcommits() && !self.config.is_grouped() {
            // All of it is promised here and now. With windows, their chunks need more if a reset has them computed again.
            return Ok(());
        }
        let sequence = &self.running[position];
        let life = life_of(&self.config, Known::of_sequence(sequence));
        let full = self.num_spared((sequence.num_computed / self.config.block_size) as usize) as u32;
        let set: Vec<_> = self.running_set(sequence).collect();
        let life_of_branch = |branch: &Sequence| {
            blocks_of_set(&self.config, branch.known(), |known| life_of(&self.config, known))
        };
        let need = self.need_of_set(&set, life_of_branch) + count * (life - full);
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

    /// Blocks that a fork of a sequence is promised, of which it has `num_columns` columns: what is full in a first group that
    /// sees all tokens is there.
    pub(super) fn growth_after(&self, sequence: &Sequence, num_columns: u32) -> u32 {
        let full = sequence.num_computed / self.config.block_size;
        let total = if sequence.layers.is_some() {
            self.branch_blocks(sequence, num_columns as usize)
        } else if self.config.policy.overcommits() {
            self.config.blocks_for(sequence.tokens.len() as u32)
        } else {
            self.config.lifetime_blocks(sequence.progress.prompt_tokens, sequence.request.max_tokens)
        };
        total - self.num_spared(full as usize) as u32
    }

    /// A sequence with the tokens and the first `shared` columns of another, which are shared with it, in a row of its own.
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
        let layers = self.shared_layers(position, shared);
        let parent = &self.running[position];
        let mut tokens = Vec::with_capacity(parent.tokens.capacity());
        tokens.extend_from_slice(&parent.tokens);
        let mut blocks = Vec::with_capacity(parent.blocks.capacity());
        blocks.extend_from_slice(&parent.blocks[..shared]);
        if parent.keeps_first() {
            blocks.iter().for_each(|block| self.tables.append(row, block.id()));
        }
        self.write_rows(layers.as_deref(), row);
        let parent = &self.running[position];
        let mut child = Sequence::new(id, parent.request.clone(), tokens, blocks, reservation, row);
        if shared > 0 {
            child.num_computed = parent.num_computed;
            child.num_indexed = parent.num_indexed;
        }
        (child.pin, child.layers) = (pin, layers);
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

    /// Makes the blocks that a sequence writes next its own, in all groups or none. `Ok(Err(error))` says what is short.
    pub(super) fn own_tail(&mut self, position: usize) -> Result<std::result::Result<(), Error>> {
        let column = self.running[position].frontier() / self.config.block_size;
        let shared = self.shared_in(&self.running[position], column)?;
        if shared.is_empty() {
            return self.forget_shared_tail(position).map(Ok);
        }
        // What is promised already is there, also when the quota was lowered since.
        if let Err(short) = self.draw_blocks(position, shared.len(), Draw::Copies)? {
            return Ok(Err(short));
        }
        let id = self.running[position].id;
        for (i, (group, from)) in shared.into_iter().enumerate() {
            let to = self.scratch[i];
            self.put_block(position, group, column, to);
            self.copies.0.push(Copy { id, group, column, from, to, keeper: Keeper::Reference });
        }
        self.note_owner(self.running[position].request.tenant.account);
        self.forget_shared_tail(position).map(Ok)
    }

    /// Puts a block of its own to its place in a sequence, and in its table row.
    fn put_block(&mut self, position: usize, group: Option<usize>, column: u32, block: BlockHandle) {
        let sequence = &mut self.running[position];
        let row = sequence.row;
        let Some((number, layers)) = group.zip(sequence.layers.as_mut()) else {
            sequence.blocks[column as usize] = block;
            return self.tables.replace(row, column, block.id());
        };
        layers.rest[number].replace(column, GroupBlock::own(block));
        let mut tables = rest_tables(&mut self.tables, &mut self.group_tables, layers.keeps_first);
        if let Some(tables) = tables.nth(number) {
            tables.replace(row, column, block.id());
        }
    }

    /// Blocks of a column that others refer to as well: in the first group (`None`), or in further ones.
    fn shared_in(&self, sequence: &Sequence, column: u32) -> Result<Vec<(Option<usize>, BlockHandle)>> {
        let mut shared = Vec::new();
        if column as usize >= sequence.blocks.len() {
            return Ok(shared);
        }
        let first = sequence.keeps_first().then(|| (None, sequence.blocks[column as usize]));
        let groups = sequence.layers.iter().flat_map(|layers| layers.rest.iter().enumerate());
        let rest = groups.filter_map(|(number, group)| Some((Some(number), group.get(column)?)));
        for (group, block) in first.into_iter().chain(rest) {
            if self.pool.num_references(block)? > 1 + self.copies.num_leaving(block) {
                shared.push((group, block));
            }
        }
        Ok(shared)
    }

    fn forget_shared_tail(&mut self, position: usize) -> Result<()> {
        let sequence = &mut self.running[position];
        sequence.special_mut().shares_tail = false;
        sequence.drop_special();
        self.settle_promise(position)
    }

    /// Hands the copies to the batch of the step that has just opened. What is copied is held until it closes.
    pub(super) fn settle_copies(&mut self, pairs: &mut Vec<[i32; 2]>) -> Result<Vec<Copy>> {
        if self.copies.0.is_empty() {
            return Ok(Vec::new());
        }
        let pool = &self.pool;
        // Who was preempted since has no use for it.
        let gone = self.copies.0.extract_if(.., |copy| pool.num_references(copy.to).is_err());
        let gone: Vec<_> = gone.collect();
        self.end_copies(&gone)?;
        for copy in &mut self.copies.0 {
            pairs.push([copy.from.id().0 as i32, copy.to.id().0 as i32]);
            if let Keeper::Pin(pin) = &mut copy.keeper {
                drop(pin.take());
            }
        }
        Ok(std::mem::take(&mut self.copies.0))
    }

    /// Lets go of what was copied.
    pub(super) fn end_copies(&self, copies: &[Copy]) -> Result<()> {
        let held = copies.iter().filter(|copy| matches!(copy.keeper, Keeper::Reference));
        self.pool.release(&held.map(|copy| copy.from).collect::<Vec<_>>())
    }

    /// Undoes the copies of the step that was being planned and does not open.
    pub(super) fn cancel_copies(&mut self) -> Result<()> {
        let copies = std::mem::take(&mut self.copies.0);
        self.undo_copies(copies)
    }

    /// Undoes copies of which nobody knows whether they were made. With further groups the sequence has again what it was
    /// to leave, because what its windows have let go cannot be computed again; else it computes again what it has in the
    /// block.
    pub(super) fn undo_copies(&mut self, copies: Vec<Copy>) -> Result<()> {
        for copy in copies.into_iter().rev() {
            let position = self.position(copy.id).filter(|_| self.pool.num_references(copy.to).is_ok());
            let Some(position) = position else {
                self.end_copies(&[copy])?;
                continue;
            };
            let sequence = &mut self.running[position];
            if let (Some(layers), Keeper::Reference) = (&mut sequence.layers, &copy.keeper) {
                layers.spare.push(copy.to);
                self.put_block(position, copy.group, copy.column, copy.from);
                self.share_tail_again(position, copy.column)?;
                continue;
            }
            let kept = sequence.num_computed - sequence.num_computed % self.config.block_size;
            self.recomputed_tokens += u64::from(sequence.num_computed - kept);
            sequence.num_computed = kept;
            self.end_copies(&[copy])?;
        }
        Ok(())
    }

    /// Notes that branches may share the block again that they write next.
    fn share_tail_again(&mut self, position: usize, column: u32) -> Result<()> {
        for id in self.sets.members(self.running[position].id) {
            let Some(position) = self.position(id) else { continue };
            if !self.shared_in(&self.running[position], column)?.is_empty() {
                self.running[position].special_mut().shares_tail = true;
            }
        }
        Ok(())
    }
}
