//! One turn: decide what runs (decodes, prefill chunks, admissions), then write the batch.

use super::batch::{Batch, BatchArrays};
use super::core::{Core, OpenStep};
use super::inbox::Inbox;
use super::phases::Phase;
use super::queue::Queue;
use super::sequence::Sequence;
use crate::ids::StepId;
use crate::{Error, Result};
use std::sync::Arc;

/// Every so many steps a blocked head is looked at without a change of ours: somebody else may share the pool.
const RECHECK_STEPS: u64 = 32;

impl Core {
    /// Plans a step.
    pub(super) fn step(&mut self, inbox: &Inbox, pad_to: usize) -> Result<Batch> {
        if let Some(open) = &self.open {
            return Err(Error::WrongState(format!(
                "step {} is open: commit or abandon it before the next one",
                open.id
            )));
        }
        self.phases.start();
        self.drain_inbox(inbox)?;
        self.end_overdue(inbox)?;
        self.halt_paused();
        let mut ended = std::mem::take(&mut self.ended);
        self.remove_ended(inbox, &mut ended, None)?;
        self.last_step = StepId(self.last_step.0 + 1);
        if self.last_step.0.is_multiple_of(RECHECK_STEPS) {
            self.queue.note_change();
        }
        self.phases.name_step(self.last_step.0);
        self.phases.lap(Phase::Inbox);
        let decided = self.decide(inbox);
        self.refused.drain(..).for_each(|id| {
            inbox.end_id(id);
        });
        let epoch = self.pool.open_step()?;
        self.release_swapped()?;
        let mut shared = self.memory.take();
        let mut planned = std::mem::take(&mut self.spare_planned);
        planned.clear();
        let arrays = Arc::get_mut(&mut shared);
        let arrays = arrays.ok_or_else(|| Error::WrongState("batch memory is still lent out".to_owned()))?;
        self.write(arrays, &mut planned);
        arrays.pad(pad_to, self.tables.padding_row());
        arrays.finished = ended;
        let num_rows = arrays.sequence_ids.len();
        self.memory.give_back(Arc::clone(&shared));
        self.phases.lap(Phase::BatchArrays);
        let moved = std::mem::take(&mut self.swaps.moved);
        self.open = Some(OpenStep { id: self.last_step, epoch, planned, num_rows, moved });
        if let Err(error) = decided {
            self.abandon(inbox, self.last_step, "planning failed", false)?;
            return Err(error);
        }
        Ok(Batch { step_id: self.last_step, arrays: shared })
    }

    /// Decides how many tokens of which sequence run, and gives them their blocks.
    fn decide(&mut self, inbox: &Inbox) -> Result<()> {
        let mut budget = self.config.max_batch_tokens;
        let before = self.num_preemptions;
        self.rotation.note(self.now);
        self.coming.clear();
        self.in_flight.clear();
        if !self.parked.is_empty() {
            self.return_parked()?;
        } else {
            self.owed = 0;
        }
        let block_size = self.config.block_size;
        let mut num_prefills = 0;
        let mut position = 0;
        while position < self.running.len() {
            let sequence = &mut self.running[position];
            if sequence.remaining() != 1 {
                num_prefills += 1;
            } else if sequence.num_computed < sequence.blocks.len() as u32 * block_size
                || self.grow_or_preempt(position, 1)?
            {
                self.running[position].num_planned = 1;
                budget -= 1;
            }
            position += 1;
        }
        for position in 0..self.running.len() {
            if num_prefills == 0 || budget == 0 {
                break;
            }
            if self.running[position].remaining() > 1 && !self.catch_up(position)? {
                self.plan_chunk(position, &mut budget)?;
            }
        }
        self.phases.lap(Phase::Growth);
        if self.num_preemptions == before && self.coming.is_empty() {
            self.admit(inbox, &mut budget)?;
        }
        self.phases.lap(Phase::Admission);
        Ok(())
    }

    /// Plans what the budget allows of a sequence whose known tokens are not all computed.
    pub(super) fn plan_chunk(&mut self, position: usize, budget: &mut u32) -> Result<()> {
        let sequence = &self.running[position];
        let limit = if self.config.max_prefill_chunk == 0 { u32::MAX } else { self.config.max_prefill_chunk };
        let num_tokens = sequence.remaining().min(*budget).min(limit);
        let end = sequence.num_computed + num_tokens;
        if num_tokens > 0 && self.grow(position, end)?.is_ok() {
            let sequence = &mut self.running[position];
            sequence.num_planned = num_tokens;
            *budget -= num_tokens;
            if sequence.pin.is_some() {
                self.in_flight.push(sequence.id);
            }
        }
        Ok(())
    }

    /// Writes the batch: decodes first, then prefill chunks.
    fn write(&mut self, arrays: &mut BatchArrays, planned: &mut Vec<u32>) {
        let block_size = self.config.block_size;
        let mut service = Service::default();
        let mut num_prefills = 0;
        arrays.reserve(self.running.len());
        for (position, sequence) in self.running.iter().enumerate() {
            if sequence.num_planned != 1 || sequence.remaining() != 1 {
                num_prefills += usize::from(sequence.num_planned > 0);
                continue;
            }
            let start = sequence.num_computed;
            let block = sequence.blocks[(start / block_size) as usize].id().0;
            let slot = i64::from(block) * i64::from(block_size) + i64::from(start % block_size);
            arrays.push_decode(sequence.id.0, sequence.row, sequence.tokens[start as usize], start, slot);
            service.add(&mut self.queue, sequence);
            planned.push(position as u32);
        }
        for (position, sequence) in self.running.iter().enumerate() {
            if num_prefills == 0 {
                break;
            }
            if sequence.num_planned == 0 || sequence.remaining() == 1 {
                continue;
            }
            num_prefills -= 1;
            let start = sequence.num_computed as usize;
            arrays.push_sequence(
                sequence.id.0,
                sequence.row,
                &sequence.tokens[start..start + sequence.num_planned as usize],
                sequence.num_computed,
                block_size,
                |logical| sequence.blocks[logical].id().0,
            );
            if sequence.samples() {
                arrays.sample_rows.push(arrays.token_ids.len() as i32 - 1);
            }
            service.add(&mut self.queue, sequence);
            planned.push(position as u32);
        }
        service.settle(&mut self.queue);
        self.tables.drain_changes(&mut arrays.table_changes);
        arrays.block_zeros.append(&mut self.zeros);
        arrays.swap_out.append(&mut self.swaps.outgoing);
        arrays.swap_in.append(&mut self.swaps.incoming);
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
        self.amount += u64::from(sequence.num_planned) + sequence.blocks.len() as u64;
    }

    fn settle(&mut self, queue: &mut Queue) {
        if self.amount > 0 {
            queue.charge(self.tenant, std::mem::take(&mut self.amount));
        }
    }
}
