//! One turn: decodes first, then prefill chunks within the token budget, then admission.

use super::batch::{Batch, BatchArrays};
use super::core::{Core, OpenStep};
use super::inbox::Inbox;
use super::policy::AdmissionRequest;
use super::sequence::Sequence;
use crate::ids::StepId;
use crate::prefix_index::Pin;
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
        self.drain_inbox(inbox);
        let mut ended = std::mem::take(&mut self.ended);
        self.remove_ended(inbox, &mut ended, None)?;

        let epoch = self.pool.open_step()?;
        let mut shared = self.memory.take();
        let mut planned = std::mem::take(&mut self.spare_planned);
        planned.clear();
        self.last_step = StepId(self.last_step.0 + 1);
        if self.last_step.0.is_multiple_of(RECHECK_STEPS) {
            self.queue.note_change();
        }
        let arrays = Arc::get_mut(&mut shared);
        let arrays = arrays.ok_or_else(|| Error::WrongState("batch memory is still lent out".to_owned()))?;
        let filled = self.fill(inbox, arrays, &mut planned);
        arrays.pad(pad_to, self.tables.padding_row());
        arrays.finished = ended;
        self.tables.drain_changes(&mut arrays.table_changes);
        let num_rows = arrays.sequence_ids.len();
        self.open = Some(OpenStep { id: self.last_step, epoch, planned, num_rows });
        self.memory.give_back(Arc::clone(&shared));
        if let Err(error) = filled {
            self.abandon(inbox, self.last_step, "planning failed", false)?;
            return Err(error);
        }
        Ok(Batch { step_id: self.last_step, arrays: shared })
    }

    fn fill(&mut self, inbox: &Inbox, arrays: &mut BatchArrays, planned: &mut Vec<u32>) -> Result<()> {
        let mut budget = self.config.max_batch_tokens;
        for position in 0..self.running.len() {
            if self.running[position].remaining() == 1 {
                self.plan_tokens(position, &mut budget, arrays, planned)?;
            }
        }
        for position in 0..self.running.len() {
            if budget > 0 && self.running[position].remaining() > 1 {
                self.plan_tokens(position, &mut budget, arrays, planned)?;
            }
        }
        while budget > 0 && self.running.len() < self.config.max_running as usize {
            let Some(tenant) = self.queue.next_tenant() else { break };
            if self.try_admit(tenant, inbox)? {
                self.plan_tokens(self.running.len() - 1, &mut budget, arrays, planned)?;
            } else {
                self.queue.block(tenant);
            }
        }
        Ok(())
    }

    /// Adds what the budget allows of one sequence to the batch.
    fn plan_tokens(
        &mut self,
        position: usize,
        budget: &mut u32,
        arrays: &mut BatchArrays,
        planned: &mut Vec<u32>,
    ) -> Result<()> {
        let sequence = &self.running[position];
        let chunk = match self.config.max_prefill_chunk {
            0 => u32::MAX,
            limit => limit,
        };
        let num_tokens = sequence.remaining().min(*budget).min(chunk);
        let start = sequence.num_computed;
        if num_tokens == 0 || !self.grow(position, start + num_tokens, &mut arrays.block_zeros)? {
            return Ok(());
        }
        *budget -= num_tokens;
        let sequence = &mut self.running[position];
        sequence.num_planned = num_tokens;
        let sequence = &*sequence;
        arrays.push_sequence(
            sequence.id.0,
            sequence.row,
            &sequence.tokens[start as usize..(start + num_tokens) as usize],
            start,
            self.config.block_size,
            |logical| Self::block_id(sequence, logical).0,
        );
        if sequence.samples() {
            arrays.sample_rows.push(arrays.token_ids.len() as i32 - 1);
        }
        self.queue.charge(sequence.tenant.index, num_tokens);
        planned.push(position as u32);
        Ok(())
    }

    /// Admits the head of a tenant's queue if what it needs can be promised to it. Otherwise it keeps nothing.
    fn try_admit(&mut self, tenant: usize, inbox: &Inbox) -> Result<bool> {
        let Some(head) = self.queue.head(tenant) else { return Ok(false) };
        let request = &head.request;
        self.scratch.clear();
        let mut pin: Option<Pin> = None;
        if let (true, Some(index), Some(namespace)) = (request.reuse, &self.index, request.tenant.namespace) {
            match index.match_prefix(namespace, &request.prompt, &mut self.scratch) {
                Ok(found) => pin = Some(found),
                Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let pinned_blocks = self.scratch.len() as u32;
        let need = self.config.policy.blocks_to_reserve(
            &self.config,
            AdmissionRequest {
                prompt_tokens: request.prompt.len() as u32,
                max_tokens: request.max_tokens,
                pinned_blocks,
            },
        );
        let reservation = match self.pool.reserve(request.tenant.account, need) {
            Ok(reservation) => reservation,
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        let Some(row) = self.tables.take_row() else { return Ok(false) };
        let Some(waiting) = self.queue.pop_head(tenant) else { return Ok(false) };
        inbox.leave_place();
        let mut tokens = waiting.request.prompt;
        let prompt_tokens = tokens.len() as u32;
        tokens.reserve_exact(waiting.request.max_tokens as usize);
        let mut blocks = Vec::with_capacity((pinned_blocks + need) as usize);
        blocks.extend_from_slice(&self.scratch);
        for block in &blocks {
            self.tables.append(row, block.id());
        }
        self.running.push(Sequence {
            id: waiting.id,
            tenant: waiting.request.tenant,
            tokens,
            prompt_tokens,
            max_tokens: waiting.request.max_tokens,
            min_tokens: waiting.request.min_tokens,
            stop_token_ids: waiting.request.stop_token_ids,
            num_computed: pinned_blocks * self.config.block_size,
            num_planned: 0,
            blocks,
            num_indexed: pinned_blocks,
            pin,
            reservation,
            row,
            ending: None,
            cached_tokens: pinned_blocks * self.config.block_size,
            steps: 0,
            queue_steps: self.last_step.0 - waiting.arrival_step - 1,
        });
        Ok(true)
    }
}
