//! The engine thread's state, and what `step`, `commit` and `abandon` share.

use super::batch::BatchMemory;
use super::config::{SchedulerConfig, ZeroBlocks};
use super::inbox::{Inbox, Message};
use super::phases::Phases;
use super::policy::OutputLengths;
use super::queue::Place;
use super::queue::Queue;
use super::request::{FinishReason, FinishedRequest};
use super::sequence::Sequence;
use crate::block_pool::{BlockPool, Reclaim, StepEpoch};
use crate::block_tables::BlockTables;
use crate::ids::{BlockHandle, SequenceId, StepId};
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
    /// Oldest first: in order of id, which is order of arrival.
    pub(super) running: Vec<Sequence>,
    pub(super) open: Option<OpenStep>,
    pub(super) last_step: StepId,
    /// Seconds on the caller's clock at the last step's planning.
    pub(super) now: f64,
    /// Requests that ended outside a commit, for the next batch.
    pub(super) ended: Vec<FinishedRequest>,
    /// Account that last had each block, to see a change of tenant.
    last_owner: Vec<u32>,
    /// Memory of `OpenStep::planned`, kept between steps.
    pub(super) spare_planned: Vec<u32>,
    /// Memory for the blocks of one growth or insertion.
    pub(super) scratch: Vec<BlockHandle>,
    /// Blocks drawn since the last batch that must be zeroed before their first write.
    pub(super) zeros: Vec<i32>,
    /// Memory for the requests behind a blocked head.
    pub(super) places: Vec<Place>,
    /// What `forecast` has learned.
    pub(super) lengths: OutputLengths,
    pub(super) phases: Phases,
    pub(super) computed_tokens: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) dropped_tokens: u64,
    pub(super) num_preemptions: u64,
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
            now: f64::NEG_INFINITY,
            ended: Vec::new(),
            spare_planned: Vec::with_capacity(config.max_running as usize),
            scratch: Vec::with_capacity(max_blocks),
            zeros: Vec::new(),
            places: Vec::new(),
            lengths: OutputLengths::default(),
            phases: Phases::default(),
            computed_tokens: 0,
            recomputed_tokens: 0,
            dropped_tokens: 0,
            num_preemptions: 0,
            config,
        })
    }

    /// Takes in what other threads asked for since the last call.
    pub(super) fn drain_inbox(&mut self, inbox: &Inbox) {
        while let Some(message) = inbox.pop() {
            match message {
                Message::Submit(mut waiting) => {
                    waiting.progress.arrival_step = self.last_step.0;
                    self.queue.push(*waiting);
                }
                Message::Abort(id) => self.note_abort(id, inbox),
            }
        }
    }

    /// A waiting request ends here; a running one when no open step may touch its blocks.
    fn note_abort(&mut self, id: SequenceId, inbox: &Inbox) {
        if let Some(waiting) = self.queue.remove(id) {
            if waiting.progress.queue_steps.is_none() {
                inbox.leave_place();
            }
            self.ended.push(waiting.account(FinishReason::Aborted, self.last_step.0));
        } else if let Ok(position) = self.running.binary_search_by_key(&id, |sequence| sequence.id) {
            self.running[position].ending = Some(FinishReason::Aborted);
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
            // `remove`, not `swap_remove`: age is the order of service.
            let mut sequence = self.running.remove(position);
            inbox.end_id(sequence.id);
            if matches!(reason, FinishReason::Stop | FinishReason::Length) {
                self.lengths.learn(sequence.num_outputs());
            }
            finished.push(sequence.account(reason, detail.cloned()));
            self.release(&mut sequence)?;
        }
        Ok(())
    }

    /// Gives back all that a sequence has but the reservation, which goes when it is dropped. Its indexed blocks
    /// stay cached.
    pub(super) fn release(&mut self, sequence: &mut Sequence) -> Result<()> {
        self.tables.free_row(sequence.row);
        self.queue.note_end(sequence.request.tenant.index);
        sequence.pin = None;
        let own = sequence.blocks.split_off(sequence.num_indexed as usize);
        sequence.blocks.clear();
        self.pool.release(&own)
    }

    /// Gives a sequence the blocks that cover `num_tokens` positions. `Ok(Err(error))` says what is short: the
    /// pool, its quota, or cached blocks that cannot be evicted now.
    pub(super) fn grow(
        &mut self,
        position: usize,
        num_tokens: u32,
    ) -> Result<std::result::Result<(), Error>> {
        let sequence = &mut self.running[position];
        let have = sequence.blocks.len();
        let missing = (self.config.blocks_for(num_tokens) as usize).saturating_sub(have);
        if missing == 0 {
            return Ok(Ok(()));
        }
        let promised = sequence.reservation.num_blocks() as usize;
        self.scratch.clear();
        self.scratch.resize(missing, BlockHandle::from_bits(0));
        let more = missing.saturating_sub(promised) as u32;
        let drawn = if more > 0 { sequence.reservation.grow(more) } else { Ok(()) };
        match drawn.and_then(|()| draw(self.index.as_deref(), sequence, &mut self.scratch)) {
            Ok(()) => {}
            Err(
                error @ (Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. }),
            ) => {
                return Ok(Err(error));
            }
            Err(error) => return Err(error),
        }
        for &block in &self.scratch {
            sequence.blocks.push(block);
            self.tables.append(sequence.row, block.id());
            let account = sequence.request.tenant.account.0;
            let owner = std::mem::replace(&mut self.last_owner[block.id().0 as usize], account);
            let zero = match self.config.zero_blocks {
                ZeroBlocks::Never => false,
                ZeroBlocks::Always => true,
                ZeroBlocks::OnTenantChange => owner != NO_OWNER && owner != account,
            };
            if zero {
                self.zeros.push(block.id().0 as i32);
            }
        }
        Ok(Ok(()))
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
}

/// Takes blocks out of a reservation, evicting cached ones where they are in the way.
fn draw(index: Option<&PrefixIndex>, sequence: &mut Sequence, out: &mut [BlockHandle]) -> Result<()> {
    loop {
        match sequence.reservation.allocate(out) {
            Err(Error::NeedsReclaim { needed, free, cached }) => {
                let missing = u32::try_from(needed.saturating_sub(free).max(1)).unwrap_or(u32::MAX);
                // Another thread may have taken what was evicted; whoever holds capacity gets a block in the
                // end, so the loop ends when eviction finds nothing.
                // By account: its own cached blocks go first, and no other tenant falls below its guarantee.
                let account = sequence.reservation.account();
                if index.is_none_or(|index| index.reclaim(account, missing) == 0) {
                    return Err(Error::NeedsReclaim { needed, free, cached });
                }
            }
            other => return other,
        }
    }
}
