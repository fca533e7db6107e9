//! One turn: decide what runs (decodes, prefill chunks, admissions), then write the batch.

use super::batch::{Batch, BatchArrays, DecodeRow, GroupArrays, push_slots};
use super::compartments::{base_id, compartment_of, range_of};
use super::core::Core;
use super::inbox::Inbox;
use super::open_steps::{OpenStep, PlannedRow};
use super::phases::Phase;
use super::queue::Queue;
use super::sequence::Sequence;
use crate::ids::{SequenceId, StepId};
use crate::{Error, Result};
use std::sync::Arc;

impl Core {
    /// Plans a step.
    pub(super) fn step(&mut self, inbox: &Inbox, pad_to: usize) -> Result<Batch> {
        self.check_may_open()?;
        self.phases.start();
        self.drain_inbox(inbox)?;
        self.end_overdue(inbox)?;
        self.halt_paused();
        let mut ended = std::mem::take(&mut self.ended);
        self.remove_ended(inbox, &mut ended, None)?;
        self.last_step = StepId(self.last_step.0 + 1);
        self.phases.name_step(self.last_step.0);
        self.phases.lap(Phase::Inbox);
        let decided = self.decide(inbox);
        self.end_refused(inbox);
        let epoch = match self.pool.open_step() {
            Ok(epoch) => epoch,
            Err(error) => {
                self.running.iter_mut().for_each(|sequence| sequence.num_planned = 0);
                ended.append(&mut self.ended);
                self.ended = ended;
                self.cancel_moves()?;
                self.cancel_copies()?;
                return Err(error);
            }
        };
        let host_epoch = self.release_swapped()?;
        let mut shared = self.memory.take();
        let mut rows = std::mem::take(&mut self.spare_rows);
        rows.clear();
        let arrays = Arc::get_mut(&mut shared);
        let arrays = arrays.ok_or_else(|| Error::WrongState("batch memory is still lent out".to_owned()))?;
        let copies = self.settle_copies(&mut arrays.block_copies)?;
        let num_decodes = self.write(arrays, &mut rows);
        arrays.pad(pad_to, self.tables.padding_row());
        arrays.finished = ended;
        let num_rows = arrays.sequence_ids.len();
        self.memory.give_back(Arc::clone(&shared));
        self.phases.lap(Phase::BatchArrays);
        let moved = std::mem::take(&mut self.swaps.moved);
        self.open.push_back(OpenStep {
            id: self.last_step,
            epoch,
            host_epoch,
            rows,
            num_decodes,
            num_rows,
            moved,
            copies,
        });
        if let Err(error) = decided {
            self.abandon(inbox, self.last_step, "planning failed", false)?;
            return Err(error);
        }
        Ok(Batch { step_id: self.last_step, arrays: shared })
    }

    /// Decides how many tokens of which sequence run, and gives them their blocks.
    fn decide(&mut self, inbox: &Inbox) -> Result<()> {
        self.in_flight.clear();
        for compartment in 0..self.compartments.len() {
            self.decide_of(compartment, inbox)?;
        }
        Ok(())
    }

    /// The same of one compartment, which is a matter of that compartment alone.
    fn decide_of(&mut self, compartment: usize, inbox: &Inbox) -> Result<()> {
        let own = &mut self.compartments[compartment];
        let mut budget = own.bounds.max_batch_tokens;
        let before = self.num_preemptions;
        own.rotation.note(self.now);
        own.coming.iter_mut().for_each(|coming| coming.left = coming.num_blocks);
        own.plans_ahead = !std::mem::take(&mut own.is_pressed);
        own.growth = None;
        self.return_parked(compartment)?;
        self.split_sets(compartment)?;
        let num_prefills = self.plan_running(compartment, &mut budget)?;
        if num_prefills > 0 {
            self.plan_prefills(compartment, &mut budget)?;
        }
        self.phases.lap(Phase::Growth);
        let own = &self.compartments[compartment];
        let is_pressed = self.num_preemptions > before || !own.coming.is_empty();
        if !is_pressed && range_of(&self.parked, compartment).is_empty() {
            self.admit(compartment, inbox, &mut budget)?;
        }
        self.phases.lap(Phase::Admission);
        Ok(())
    }

    /// Plans the decodes of a compartment; returns how many of its sequences have a prefill chunk to plan.
    fn plan_running(&mut self, compartment: usize, budget: &mut u32) -> Result<u32> {
        let block_size = self.config.block_size;
        let last = base_id(compartment + 1);
        let mut num_prefills = 0;
        self.edges.clear();
        let mut position = range_of(&self.running, compartment).start;
        while let Some(sequence) = self.running.get_mut(position) {
            let id = sequence.id;
            if id.0 > last {
                break;
            }
            if sequence.is_special() {
                // Those before it come first where room is short, and may take from it.
                if !self.edges.is_empty() {
                    self.cross_edges(budget)?;
                    position = self.position_of(id, position);
                    if self.running.get(position).is_none_or(|sequence| sequence.id != id) {
                        continue;
                    }
                }
                num_prefills += u32::from(self.plan_special(position, budget)?);
            } else if sequence.remaining() != 1 {
                num_prefills += 1;
            } else if sequence.num_computed < sequence.blocks.len() as u32 * block_size {
                sequence.num_planned = 1;
                *budget -= 1;
                position += 1;
                continue;
            } else {
                self.edges.push(position as u32);
            }
            // Whoever gave blocks for it may have stood before it.
            position = self.position_of(id, position) + 1;
        }
        self.cross_edges(budget)?;
        Ok(num_prefills)
    }

    /// Plans chunks of a compartment's running sequences, oldest first.
    fn plan_prefills(&mut self, compartment: usize, budget: &mut u32) -> Result<()> {
        let mut position = range_of(&self.running, compartment).start;
        while *budget > 0 && position < range_of(&self.running, compartment).end {
            let sequence = &self.running[position];
            let id = sequence.id;
            let is_next = sequence.remaining() > 1 && self.may_plan(sequence);
            if is_next && (sequence.in_flight > 0 || !self.catch_up(position)?) {
                self.plan_chunk(position, budget)?;
            }
            // Whoever gave blocks for it may have stood before it.
            position = self.position_of(id, position) + 1;
        }
        Ok(())
    }

    /// Plans the next token of a sequence that is in flight, has drafts or shares blocks. True if it has a prefill
    /// chunk to plan instead.
    fn plan_special(&mut self, position: usize, budget: &mut u32) -> Result<bool> {
        let sequence = &self.running[position];
        if !self.may_plan(sequence) {
            return Ok(false);
        }
        if sequence.remaining() != 1 || !sequence.branches().is_empty() {
            return Ok(true);
        }
        let id = sequence.id;
        if sequence.is_branch {
            if self.sets.is_branch(id) {
                return self.plan_set(position, budget).map(|()| false);
            }
            self.running[position].is_branch = false;
        }
        let left = (range_of(&self.running, compartment_of(id)).end - position - 1) as u32;
        let num_drafts = self.plan_drafts(position, *budget, left)?;
        if num_drafts > 0 || self.grow_or_preempt(position, 1)? {
            let position = self.position_of(id, position);
            self.running[position].num_planned = 1 + num_drafts;
            *budget -= 1 + num_drafts;
        }
        Ok(false)
    }

    /// Plans the next token of each branch of a set or of none: all must have computed what they know, and have room.
    fn plan_set(&mut self, position: usize, budget: &mut u32) -> Result<()> {
        let id = self.running[position].id;
        let members = self.sets.members(id);
        let is_ready = |&id: &SequenceId| {
            self.position(id).is_some_and(|position| {
                let branch = &self.running[position];
                branch.remaining() == 1 && branch.branches().is_empty() && self.may_plan(branch)
            })
        };
        if !members.iter().all(is_ready) || !self.sets.begin_plan(id, self.last_step) {
            return Ok(());
        }
        let left = (range_of(&self.running, compartment_of(id)).end - position - 1) as u32;
        let (before, mut fits) = (*budget, true);
        for &id in &members {
            // Also when it is known that not all fit: what each is short of is made at once.
            let Some(position) = self.position(id) else { continue };
            let num_drafts = self.plan_drafts(position, *budget, left)?;
            if num_drafts > 0 || self.grow_or_preempt(position, 1)? {
                let position = self.position_of(id, position);
                self.running[position].num_planned = 1 + num_drafts;
                *budget -= 1 + num_drafts;
            } else {
                fits = false;
            }
        }
        if !fits {
            *budget = before;
            for position in members.iter().filter_map(|&id| self.position(id)).collect::<Vec<_>>() {
                self.running[position].num_planned = 0;
            }
        }
        Ok(())
    }

    /// Whether a sequence may be in this step too, whatever of it is in flight.
    fn may_plan(&self, sequence: &Sequence) -> bool {
        if sequence.in_flight == 0 {
            return true;
        }
        let plans_ahead = self.compartments[compartment_of(sequence.id)].plans_ahead;
        let is_plain = plans_ahead && sequence.special.is_none() && sequence.ending.is_none();
        // Its next token must come from the step before this one, and not be the last that it may output.
        let is_known = sequence.num_pending == 0
            || (sequence.sampled_in + 1 == self.last_step.0
                && sequence.num_outputs() + sequence.num_pending < sequence.request.max_tokens);
        is_plain && is_known
    }

    /// Plans what the budget allows of a sequence whose known tokens are not all computed.
    pub(super) fn plan_chunk(&mut self, position: usize, budget: &mut u32) -> Result<()> {
        let sequence = &self.running[position];
        let limit = if self.config.max_prefill_chunk == 0 { u32::MAX } else { self.config.max_prefill_chunk };
        let room = self.promised_end(sequence).saturating_sub(sequence.frontier());
        let num_tokens = self.next_tokens(sequence).min(*budget).min(limit).min(room);
        let end = sequence.frontier() + num_tokens;
        let id = sequence.id;
        if num_tokens > 0 && (self.grow(position, end)?.is_ok() || self.force_chunk(position, num_tokens)?) {
            let position = self.position_of(id, position);
            let sequence = &mut self.running[position];
            sequence.num_planned = num_tokens;
            *budget -= num_tokens;
            if sequence.pin.is_some() {
                self.in_flight.push(sequence.id);
            }
        }
        Ok(())
    }

    /// Tokens of a sequence that a chunk may have: of a branch that carries others, what they have in common, and of each
    /// branch all but the last one, which those of a set compute together.
    fn next_tokens(&self, sequence: &Sequence) -> u32 {
        if !sequence.branches().is_empty() {
            (sequence.num_common() as u32).saturating_sub(sequence.frontier())
        } else if sequence.is_branch && self.sets.is_branch(sequence.id) {
            sequence.remaining() - 1
        } else {
            sequence.remaining()
        }
    }

    /// Takes from others what a chunk needs for which no room was found, if it is of the oldest sequence, which always
    /// gets on: one that came back from the host within its prompt has no promise for the rest of it.
    fn force_chunk(&mut self, position: usize, num_tokens: u32) -> Result<bool> {
        let id = self.running[position].id;
        Ok(self.is_oldest(id) && self.grow_or_preempt(position, num_tokens)?)
    }

    /// Writes the batch: decodes first, then prefill chunks and sequences with drafts. Returns how many decodes there are.
    fn write(&mut self, arrays: &mut BatchArrays, rows: &mut Vec<PlannedRow>) -> usize {
        let block_size = self.config.block_size;
        let is_deep = self.config.max_open_steps > 1;
        let mut service = Service::default();
        let (mut num_decodes, mut num_others) = (0_usize, 0);
        let mut columns = arrays.begin_decodes(self.running.len());
        rows.reserve(self.running.len());
        for (position, sequence) in self.running.iter_mut().enumerate() {
            service.add(&mut self.queue, sequence);
            if sequence.num_planned != 1 || sequence.remaining() != 1 || sequence.special.is_some() {
                num_others += u32::from(sequence.num_planned > 0);
                continue;
            }
            let start = sequence.frontier();
            let (token, source) = if is_deep {
                let found = sequence.token_at(start);
                (sequence.sampled_in, sequence.source) = (self.last_step.0, num_decodes as i32);
                found
            } else {
                (sequence.tokens[start as usize] as i32, -1)
            };
            let row = DecodeRow {
                id: sequence.id.0,
                table_row: sequence.row as i32,
                token,
                source,
                position: start as i32,
                slot: sequence.slot(start, block_size),
            };
            columns.set(num_decodes, &row);
            num_decodes += 1;
            rows.push(sequence.enter_step(position, 1, 0));
        }
        arrays.end_decodes(num_decodes);
        if num_others > 0 {
            self.write_others(arrays, rows);
        }
        // Who holds blocks without a token in this step pays for them as well.
        let halted = self.halted.iter().map(|halted| &halted.sequence);
        for sequence in self.parked.iter().chain(halted) {
            service.add(&mut self.queue, sequence);
        }
        service.settle(&mut self.queue);
        if self.config.is_grouped() {
            self.write_groups(arrays, rows);
        }
        self.tables.drain_changes(&mut arrays.table_changes);
        arrays.block_zeros.append(&mut self.zeros);
        arrays.swap_out.append(&mut self.swaps.outgoing);
        arrays.swap_in.append(&mut self.swaps.incoming);
        num_decodes
    }

    /// Writes what is planned and is no decode: prefill chunks, and tokens with drafts behind them.
    fn write_others(&mut self, arrays: &mut BatchArrays, rows: &mut Vec<PlannedRow>) {
        let block_size = self.config.block_size;
        let mut drafted = Vec::new();
        for (position, sequence) in self.running.iter_mut().enumerate() {
            if sequence.num_planned == 0 {
                continue;
            }
            let (start, count) = (sequence.frontier(), sequence.num_planned);
            let num_drafts = (start + count).saturating_sub(sequence.tokens.len() as u32);
            let mut tokens = &sequence.tokens[start as usize..(start + count - num_drafts) as usize];
            if let (1.., Some(special)) = (num_drafts, &sequence.special) {
                drafted.clear();
                drafted.extend_from_slice(tokens);
                drafted.extend_from_slice(&special.drafts[..num_drafts as usize]);
                tokens = &drafted;
            }
            let block_of = |logical: usize| sequence.blocks[logical].id().0;
            arrays.push_sequence(sequence.id.0, sequence.row, tokens, start, block_size, block_of);
            let n = sequence.request.n;
            let num_samples = match num_drafts {
                0 if sequence.samples() => n,
                0 => 0,
                drafts => 1 + drafts,
            };
            sequence.sampled_in = self.last_step.0;
            sequence.source = arrays.sample_rows.len() as i32;
            let end = arrays.token_ids.len() as i32;
            if n > 1 {
                arrays.sample_rows.extend(std::iter::repeat_n(end - 1, num_samples as usize));
            } else {
                arrays.sample_rows.extend(end - num_samples as i32..end);
            }
            rows.push(sequence.enter_step(position, num_samples, num_drafts));
        }
    }
}

impl Core {
    /// Writes the slots of the layer groups after the first, row by row, and the changes of their tables.
    fn write_groups(&mut self, arrays: &mut BatchArrays, rows: &[PlannedRow]) {
        let block_size = self.config.block_size;
        arrays.groups.resize_with(self.group_tables.len(), GroupArrays::default);
        if !self.config.keeps_first() {
            // What was written there means nothing.
            arrays.slot_mapping.clear();
        }
        for row in rows {
            let sequence = &self.running[row.position as usize];
            let Some(layers) = &sequence.layers else { continue };
            let end = sequence.frontier();
            let first = (!layers.keeps_first).then_some(&mut arrays.slot_mapping);
            let others = arrays.groups.iter_mut().map(|group| &mut group.slot_mapping);
            for (slots, blocks) in first.into_iter().chain(others).zip(&layers.rest) {
                let block_of = |logical: usize| blocks.block(logical as u32).id().0;
                push_slots(slots, end - row.num_tokens..end, block_size, block_of);
            }
        }
        for (group, tables) in arrays.groups.iter_mut().zip(&mut self.group_tables) {
            tables.drain_changes(&mut group.table_changes);
        }
    }
}

/// Service of consecutive sequences of one tenant, charged at once: tokens computed and blocks held.
#[derive(Default)]
struct Service {
    tenant: usize,
    amount: u64,
}

impl Service {
    fn add(&mut self, queue: &mut Queue, sequence: &Sequence) {
        let tenant = sequence.request.tenant.index;
        if tenant != self.tenant {
            self.settle(queue);
            self.tenant = tenant;
        }
        self.amount += u64::from(sequence.num_planned) + sequence.num_held() as u64;
    }

    fn settle(&mut self, queue: &mut Queue) {
        if self.amount > 0 {
            queue.charge(self.tenant, std::mem::take(&mut self.amount));
        }
    }
}
