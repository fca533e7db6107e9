//! The engine thread's state, and what `step`, `commit` and `abandon` share.

use super::batch::BatchMemory;
use super::config::{SchedulerConfig, ZeroBlocks};
use super::inbox::{Inbox, Message};
use super::queue::Queue;
use super::request::{FinishReason, FinishedRequest, WaitingRequest};
use super::sequence::Sequence;
use crate::block_pool::{BlockPool, StepEpoch};
use crate::block_tables::BlockTables;
use crate::ids::{BlockHandle, BlockId, SequenceId, StepId};
use crate::prefix_index::PrefixIndex;
use crate::{Error, Result};
use std::sync::Arc;

/// Owner of a block that was never handed out.
const NO_OWNER: u32 = u32::MAX;

/// A step between its planning and its end.
#[derive(Debug)]
pub(super) struct OpenStep {
    pub(super) id: StepId,
    pub(super) epoch: StepEpoch,
    /// Batch order: positions in `running`.
    pub(super) planned: Vec<u32>,
    /// Rows of the batch, padding included.
    pub(super) num_rows: usize,
}

pub(super) struct Core {
    pub(super) config: SchedulerConfig,
    pub(super) pool: Arc<BlockPool>,
    pub(super) index: Option<Arc<PrefixIndex>>,
    pub(super) tables: BlockTables,
    pub(super) memory: BatchMemory,
    pub(super) queue: Queue,
    /// In order of admission.
    pub(super) running: Vec<Sequence>,
    pub(super) open: Option<OpenStep>,
    pub(super) last_step: StepId,
    /// Requests that ended outside a commit, for the next batch.
    pub(super) ended: Vec<FinishedRequest>,
    /// Account that last had each block, to see a change of tenant.
    last_owner: Vec<u32>,
    /// Memory of `OpenStep::planned`, kept between steps.
    pub(super) spare_planned: Vec<u32>,
    /// Memory for the blocks of one growth or insertion.
    pub(super) scratch: Vec<BlockHandle>,
    pub(super) computed_tokens: u64,
    pub(super) dropped_tokens: u64,
}

impl Core {
    pub(super) fn new(
        pool: Arc<BlockPool>,
        index: Option<Arc<PrefixIndex>>,
        config: SchedulerConfig,
    ) -> Result<Self> {
        let max_blocks = config.blocks_for(config.max_model_tokens) as usize;
        Ok(Self {
            tables: BlockTables::new(config.max_running as usize, max_blocks)?,
            last_owner: vec![NO_OWNER; pool.num_blocks() as usize],
            pool,
            index,
            memory: BatchMemory::default(),
            queue: Queue::default(),
            running: Vec::with_capacity(config.max_running as usize),
            open: None,
            last_step: StepId(0),
            ended: Vec::new(),
            spare_planned: Vec::with_capacity(config.max_running as usize),
            scratch: Vec::with_capacity(max_blocks),
            computed_tokens: 0,
            dropped_tokens: 0,
            config,
        })
    }

    /// Takes in what other threads asked for since the last call.
    pub(super) fn drain_inbox(&mut self, inbox: &Inbox) {
        while let Some(message) = inbox.pop() {
            match message {
                Message::Submit(mut waiting) => {
                    waiting.arrival_step = self.last_step.0;
                    self.queue.push(*waiting);
                }
                Message::Abort(id) => self.note_abort(id, inbox),
            }
        }
    }

    /// A waiting request ends here; a running one when no open step may touch its blocks.
    fn note_abort(&mut self, id: SequenceId, inbox: &Inbox) {
        if let Some(waiting) = self.queue.remove(id) {
            inbox.leave_place();
            self.ended.push(self.account_of_waiting(waiting));
        } else if let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.id == id) {
            sequence.ending = Some(FinishReason::Aborted);
        }
    }

    fn account_of_waiting(&self, waiting: WaitingRequest) -> FinishedRequest {
        FinishedRequest {
            id: waiting.id,
            prompt_tokens: waiting.request.prompt.len() as u32,
            tenant: waiting.request.tenant,
            reason: FinishReason::Aborted,
            detail: None,
            cached_tokens: 0,
            output_tokens: 0,
            steps: 0,
            queue_steps: self.last_step.0 - waiting.arrival_step,
            preemptions: 0,
        }
    }

    /// Removes every sequence that has ended. No step may be open.
    pub(super) fn remove_ended(
        &mut self,
        inbox: &Inbox,
        finished: &mut Vec<FinishedRequest>,
        detail: Option<&Arc<str>>,
    ) -> Result<()> {
        debug_assert!(self.open.is_none());
        let mut position = 0;
        while position < self.running.len() {
            let Some(reason) = self.running[position].ending else {
                position += 1;
                continue;
            };
            // `remove`, not `swap_remove`: the order of admission is the order of service.
            let sequence = self.running.remove(position);
            inbox.end_id(sequence.id);
            finished.push(sequence.account(reason, detail.cloned()));
            self.release(sequence)?;
        }
        Ok(())
    }

    /// Gives back all that a sequence has. Its indexed blocks stay cached.
    fn release(&mut self, sequence: Sequence) -> Result<()> {
        self.tables.free_row(sequence.row);
        self.queue.note_end(sequence.tenant.index);
        self.pool.release(&sequence.blocks[sequence.num_indexed as usize..])
        // Dropping the sequence unpins its node and returns what is left of its reservation.
    }

    /// Draws blocks from the sequence's reservation until its tables cover `num_tokens` positions. False if
    /// cached blocks are in the way and cannot be evicted now.
    pub(super) fn grow(&mut self, position: usize, num_tokens: u32, zeros: &mut Vec<i32>) -> Result<bool> {
        let sequence = &mut self.running[position];
        let have = sequence.blocks.len();
        let want = self.config.blocks_for(num_tokens) as usize;
        if want <= have {
            return Ok(true);
        }
        self.scratch.clear();
        self.scratch.resize(want - have, BlockHandle::from_bits(0));
        if !draw(self.index.as_deref(), sequence, &mut self.scratch)? {
            return Ok(false);
        }
        for &block in &self.scratch {
            sequence.blocks.push(block);
            self.tables.append(sequence.row, block.id());
            let owner = std::mem::replace(&mut self.last_owner[block.id().0 as usize], sequence.tenant.account.0);
            let zero = match self.config.zero_blocks {
                ZeroBlocks::Never => false,
                ZeroBlocks::Always => true,
                ZeroBlocks::OnTenantChange => owner != NO_OWNER && owner != sequence.tenant.account.0,
            };
            if zero {
                zeros.push(block.id().0 as i32);
            }
        }
        Ok(true)
    }

    /// The open step, which must be `step_id`.
    pub(super) fn open_step(&self, step_id: StepId) -> Result<&OpenStep> {
        match &self.open {
            Some(open) if open.id == step_id => Ok(open),
            Some(open) => {
                Err(Error::WrongState(format!("step {step_id} is not open; the open step is {}", open.id)))
            }
            None => Err(Error::WrongState(format!(
                "step {step_id} is not open; the last step, {}, has been closed",
                self.last_step
            ))),
        }
    }

    /// Physical block of a sequence's logical block.
    pub(super) fn block_id(sequence: &Sequence, logical: usize) -> BlockId {
        sequence.blocks[logical].id()
    }
}

/// Takes blocks out of a reservation, evicting cached ones where they are in the way.
fn draw(index: Option<&PrefixIndex>, sequence: &mut Sequence, out: &mut [BlockHandle]) -> Result<bool> {
    loop {
        match sequence.reservation.allocate(out) {
            Ok(()) => return Ok(true),
            Err(Error::NeedsReclaim { needed, free, .. }) => {
                let missing = u32::try_from(needed.saturating_sub(free).max(1)).unwrap_or(u32::MAX);
                // Another thread may have taken what was evicted; whoever holds capacity gets a block in the
                // end, so the loop ends when eviction finds nothing.
                if index.is_none_or(|index| index.evict(missing) == 0) {
                    return Ok(false);
                }
            }
            Err(error) => return Err(error),
        }
    }
}
