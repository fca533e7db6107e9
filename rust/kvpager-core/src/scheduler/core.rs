//! The engine thread's state, and what `step`, `commit` and `abandon` share.

use super::batch::BatchMemory;
use super::branch_sets::BranchSets;
use super::compartments::{Bounds, Compartment, compartment_of};
use super::config::{SchedulerConfig, ZeroBlocks};
use super::deadlines::{Deadlines, Moment};
use super::drafts::DraftCounts;
use super::fork::Copies;
use super::host_tier::HostTier;
use super::inbox::Inbox;
use super::kept::KeptPrefixes;
use super::open_steps::{OpenStep, PlannedRow};
use super::pause::{Halted, PausedRequest};
use super::phases::Phases;
use super::queue::Place;
use super::queue::Queue;
use super::request::{Deadline, FinishReason, FinishedRequest};
use super::scopes::{Published, TenantScope};
use super::sequence::{Sequence, Sequences};
use super::swap::Swaps;
use crate::block_pool::{BlockPool, Reclaim, Reservation};
use crate::block_tables::{BlockTables, TableArena};
use crate::ids::{AccountId, BlockHandle, SequenceId, StepId};
use crate::memory::{Asked, bytes_of};
use crate::prefix_index::PrefixIndex;
use crate::{Error, Result, count_of};
use hashbrown::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// Owner of a block that was never handed out.
const NO_OWNER: u32 = u32::MAX;

pub(super) struct Core {
    pub(super) config: SchedulerConfig,
    pub(super) pool: Arc<BlockPool>,
    pub(super) index: Option<Arc<PrefixIndex>>,
    pub(super) tables: BlockTables,
    /// Of the layer groups after the first. Rows are taken and given back in `tables`.
    pub(super) group_tables: Box<[BlockTables]>,
    pub(super) memory: BatchMemory,
    pub(super) queue: Queue,
    /// In order of id, which is order of compartment, then of arrival.
    pub(super) running: Sequences,
    /// Those whose tails are on the host, in the same order.
    pub(super) parked: Sequences,
    pub(super) host: Option<HostTier>,
    pub(super) swaps: Swaps,
    /// The common one, then those of strict tenants.
    pub(super) compartments: Vec<Compartment>,
    /// Sequences that the step that closed last moved between the tiers.
    pub(super) moved: Vec<SequenceId>,
    /// Ids, with their branch, that ended while a step was planned, for the inbox to forget.
    pub(super) refused: Vec<(SequenceId, u32)>,
    /// Running sequences that are to be halted.
    pub(super) pausing: Vec<SequenceId>,
    pub(super) halted: Vec<Halted>,
    pub(super) paused: HashMap<SequenceId, PausedRequest, foldhash::fast::RandomState>,
    pub(super) deadlines: Deadlines,
    /// Deadline of `drain`, and when it was asked for.
    pub(super) draining: Option<(Deadline, Moment)>,
    pub(super) sets: BranchSets,
    /// Ends of sequences that carry branches and are in an open step.
    pub(super) late_ends: Vec<(SequenceId, FinishReason)>,
    pub(super) published: Published,
    pub(super) kept: KeptPrefixes,
    /// Sequences of which the step that is being planned computes a chunk.
    pub(super) in_flight: Vec<SequenceId>,
    /// Oldest first.
    pub(super) open: VecDeque<OpenStep>,
    /// Table rows that wait for a step to close, and the compartments that they are of.
    pub(super) retired_rows: Vec<(StepId, u32, usize)>,
    pub(super) copies: Copies,
    pub(super) draft_counts: DraftCounts,
    pub(super) last_step: StepId,
    /// Seconds on the caller's clock at the last step's planning.
    pub(super) now: f64,
    /// Requests that ended outside a commit, for the next batch.
    pub(super) ended: Vec<FinishedRequest>,
    /// Account that last had each block, to see a change of tenant.
    last_owner: Vec<u32>,
    /// Memory of `OpenStep::rows`, kept between steps.
    pub(super) spare_rows: Vec<PlannedRow>,
    /// Positions of decodes that stand at the edge of a block, in this step's planning or at its end.
    pub(super) edges: Vec<u32>,
    /// Memory for those of them that take their next block by themselves.
    pub(super) alone: Vec<SequenceId>,
    /// Memory for the blocks of one growth or insertion.
    pub(super) scratch: Vec<BlockHandle>,
    /// Blocks drawn since the last batch that must be zeroed before their first write.
    pub(super) zeros: Vec<i32>,
    /// Memory for the requests behind a blocked head.
    pub(super) places: Vec<Place>,
    pub(super) phases: Phases,
    pub(super) computed_tokens: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) dropped_tokens: u64,
    pub(super) num_preemptions: u64,
    /// Times that a paused request's blocks were taken.
    pub(super) num_forced_out: u64,
}

impl Core {
    pub(super) fn new(
        pool: Arc<BlockPool>,
        index: Option<Arc<PrefixIndex>>,
        config: SchedulerConfig,
    ) -> Result<Self> {
        let num_blocks = pool.num_blocks() as usize;
        let (num_rows, max_blocks) =
            (config.max_running as usize, config.columns(pool.num_blocks()) as usize);
        let num_groups = config.layer_groups.len();
        let what = format_args!(
            "a scheduler of {} in {} over {}",
            count_of(num_rows, "sequence"),
            count_of(max_blocks, "column"),
            count_of(num_blocks, "block")
        );
        let num_bytes = BlockTables::num_bytes(num_rows, max_blocks)
            .saturating_mul(num_groups)
            .saturating_add(bytes_of::<u32>(num_blocks))
            .saturating_add(bytes_of::<(Box<Sequence>, PlannedRow, SequenceId, u64)>(num_rows))
            .saturating_add(bytes_of::<BlockHandle>(max_blocks * num_groups));
        let memory = Asked::new(what, num_bytes)?;
        let new_tables = || BlockTables::in_memory(num_rows, max_blocks, &memory);
        Ok(Self {
            tables: new_tables()?,
            group_tables: (1..config.layer_groups.len()).map(|_| new_tables()).collect::<Result<_>>()?,
            last_owner: memory.array(num_blocks, |_| NO_OWNER)?.into_vec(),
            index,
            memory: BatchMemory::default(),
            queue: Queue::new(config.ageing_steps),
            running: memory.room(num_rows)?,
            parked: Vec::new(),
            host: HostTier::new(config.host_tier, &pool)?,
            swaps: Swaps::default(),
            compartments: vec![Compartment::new(None, Bounds::all(&config))],
            moved: Vec::new(),
            refused: Vec::new(),
            pausing: Vec::new(),
            halted: Vec::new(),
            paused: HashMap::default(),
            deadlines: Deadlines::default(),
            draining: None,
            sets: BranchSets::default(),
            late_ends: Vec::new(),
            published: Published::default(),
            kept: KeptPrefixes::new(config.keeps_first()),
            in_flight: Vec::new(),
            open: VecDeque::new(),
            retired_rows: Vec::new(),
            copies: Copies::default(),
            draft_counts: DraftCounts::default(),
            last_step: StepId(0),
            now: f64::NEG_INFINITY,
            ended: Vec::new(),
            spare_rows: memory.room(num_rows)?,
            edges: memory.room(num_rows)?,
            alone: memory.room(num_rows)?,
            scratch: memory.room(max_blocks * num_groups)?,
            zeros: Vec::new(),
            places: Vec::new(),
            phases: Phases::default(),
            computed_tokens: 0,
            recomputed_tokens: 0,
            dropped_tokens: 0,
            num_preemptions: 0,
            pool,
            num_forced_out: 0,
            config,
        })
    }

    /// Now, as the scheduler counts.
    pub(super) const fn moment(&self) -> Moment {
        Moment { step: self.last_step.0, seconds: self.now }
    }

    /// Where a running sequence stands.
    pub(super) fn position(&self, id: SequenceId) -> Option<usize> {
        self.running.binary_search_by_key(&id, |sequence| sequence.id).ok()
    }

    /// Puts a sequence to its place among the running ones; returns where that is.
    pub(super) fn insert_running(&mut self, sequence: Box<Sequence>) -> usize {
        let position = self.running.partition_point(|other| other.id < sequence.id);
        self.running.insert(position, sequence);
        position
    }

    /// Removes every sequence that has ended. Open steps may read its blocks and its row: those wait.
    pub(super) fn remove_ended(
        &mut self,
        inbox: &Inbox,
        finished: &mut Vec<FinishedRequest>,
        detail: Option<&Arc<str>>,
    ) -> Result<()> {
        let first = self.running.iter().position(|sequence| sequence.ending.is_some());
        let mut position = first.unwrap_or(self.running.len());
        while position < self.running.len() {
            let Some(reason) = self.running[position].ending else {
                position += 1;
                continue;
            };
            // `remove`, not `swap_remove`: age is the order of service.
            let mut sequence = self.running.remove(position);
            self.end_running(&mut sequence, reason, detail, inbox)?;
        }
        self.remove_ended_parked(inbox, detail)?;
        finished.append(&mut self.ended);
        Ok(())
    }

    fn remove_ended_parked(&mut self, inbox: &Inbox, detail: Option<&Arc<str>>) -> Result<()> {
        let ended = |sequence: &Sequence| sequence.ending;
        while let Some(position) = self.parked.iter().position(|sequence| ended(sequence).is_some()) {
            let mut sequence = self.parked.remove(position);
            let Some(reason) = sequence.ending else { break };
            self.end_running(&mut sequence, reason, detail, inbox)?;
        }
        Ok(())
    }

    /// Ends a sequence that has been taken out of where it ran; its account goes to `ended`.
    pub(super) fn end_running(
        &mut self,
        sequence: &mut Sequence,
        reason: FinishReason,
        detail: Option<&Arc<str>>,
        inbox: &Inbox,
    ) -> Result<()> {
        sequence.ending.get_or_insert(reason);
        self.leave_promise(sequence)?;
        let branches = self.take_branches(sequence);
        self.end_carried(branches, reason, detail, inbox);
        self.sets.leave(sequence.id);
        if matches!(reason, FinishReason::Stop | FinishReason::Length) {
            let tenant = sequence.request.tenant.index;
            self.own(sequence.id).lengths.learn(tenant, sequence.known_age, sequence.num_outputs());
        }
        self.deadlines.remove(sequence.id, sequence.request.deadline, sequence.progress.arrival());
        self.uncall(sequence.id);
        self.report_end(&sequence.account(reason, detail.cloned()), sequence.request.n, inbox);
        let was_parked = sequence.parked.is_some();
        if let (Some(host), Some(parked)) = (&self.host, sequence.parked.take()) {
            host.release(&parked.blocks)?;
        }
        self.release_device(sequence, was_parked)
    }

    /// Nobody makes room for a parked sequence any more.
    pub(super) fn uncall(&mut self, id: SequenceId) {
        let called = &mut self.own(id).called;
        *called = called.filter(|&called| called != id);
    }

    /// Gives back all that a sequence has on the device but the reservation, which goes when it is dropped. Its
    /// indexed blocks stay cached. A parked one has no row.
    pub(super) fn release_device(&mut self, sequence: &mut Sequence, was_parked: bool) -> Result<()> {
        if !was_parked {
            self.free_row(sequence.row, compartment_of(sequence.id));
        }
        let newest = self.open.back().map(|open| open.id);
        let own = self.own(sequence.id);
        own.num_unforked -= sequence.num_unsplit();
        own.frees_at = newest.or(own.frees_at);
        self.queue.note_end(sequence.request.tenant.index);
        let pin = sequence.pin.take();
        let indexed = match sequence.request.tenant.scope() {
            TenantScope::Public if self.config.keeps_first() => {
                sequence.blocks[..sequence.num_indexed as usize].to_vec()
            }
            _ => Vec::new(),
        };
        let published = self.publish_groups(sequence, pin.as_ref())?;
        let (own, attached) = sequence.take_blocks();
        if let (Some(index), false) = (&self.index, attached.is_empty()) {
            index.leave_all_attached(&attached, sequence.request.tenant.account)?;
        }
        self.pool.release(&own)?;
        self.let_pin_go(sequence, pin, indexed, published)
    }

    /// Gives a sequence the blocks that cover `num_tokens` positions. `Ok(Err(error))` says what is short: the
    /// pool, its quota, or cached blocks that cannot be evicted now.
    pub(super) fn grow(
        &mut self,
        position: usize,
        num_tokens: u32,
    ) -> Result<std::result::Result<(), Error>> {
        if self.running[position].shares_tail()
            && let Err(short) = self.own_tail(position)?
        {
            return Ok(Err(short));
        }
        let sequence = &self.running[position];
        if sequence.layers.is_some() {
            return self.grow_groups(position, num_tokens);
        }
        let missing = (self.config.blocks_for(num_tokens) as usize).saturating_sub(sequence.blocks.len());
        if missing == 0 {
            return Ok(Ok(()));
        }
        if let Err(short) = self.draw_blocks(position, missing, Draw::Growth)? {
            return Ok(Err(short));
        }
        let sequence = &mut self.running[position];
        for &block in &self.scratch {
            sequence.blocks.push(block);
            self.tables.append(sequence.row, block.id());
        }
        let account = sequence.request.tenant.account;
        self.note_drawn(account);
        Ok(Ok(()))
    }

    /// Draws blocks on what a sequence has to spare and on what is promised to it into `scratch`, and promises more if that
    /// is short. `Ok(Err(error))` as in `grow`.
    pub(super) fn draw_blocks(
        &mut self,
        position: usize,
        count: usize,
        what: Draw,
    ) -> Result<std::result::Result<(), Error>> {
        self.scratch.clear();
        let more = if count == 0 { 0 } else { self.borrow_promise(position, count as u32, what)? };
        let spare = (self.running[position].num_spare() as usize).min(count);
        if count > spare || more > 0 {
            self.scratch.resize(count - spare, BlockHandle::from_bits(0));
            let sequence = &mut self.running[position];
            let drawn = if more > 0 { sequence.reservation.grow(more) } else { Ok(()) };
            self.keep_within_limit(&self.running[position].request.tenant)?;
            let sequence = &mut self.running[position];
            match drawn
                .and_then(|()| draw(self.index.as_deref(), &mut sequence.reservation, &mut self.scratch))
            {
                Ok(()) => {}
                Err(
                    error
                    @ (Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. }),
                ) => return Ok(Err(error)),
                Err(error) => return Err(error),
            }
        }
        if let Some(layers) = &mut self.running[position].layers {
            self.scratch.extend(layers.spare.drain(layers.spare.len() - spare..));
        }
        Ok(Ok(()))
    }

    /// Notes who has the blocks in `scratch` now, and which of them must be zeroed.
    pub(super) fn note_drawn(&mut self, account: AccountId) {
        for block in &self.scratch {
            let owner = std::mem::replace(&mut self.last_owner[block.id().0 as usize], account.0);
            let zero = match self.config.zero_blocks {
                ZeroBlocks::Never => false,
                ZeroBlocks::Always => true,
                ZeroBlocks::OnTenantChange => owner != NO_OWNER && owner != account.0,
            };
            if zero {
                self.zeros.push(block.id().0 as i32);
            }
        }
    }

    /// The memory of each layer group's tables.
    pub(super) fn arenas(&self) -> impl Iterator<Item = &Arc<TableArena>> {
        std::iter::once(&self.tables).chain(&self.group_tables).map(BlockTables::arena)
    }

    /// Notes who has the blocks in `scratch` now. They need no zeroing: all of them is about to be written.
    pub(super) fn note_owner(&mut self, account: AccountId) {
        for block in &self.scratch {
            self.last_owner[block.id().0 as usize] = account.0;
        }
    }
}

/// What blocks are drawn for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draw {
    /// New columns.
    Growth,
    /// Copies of blocks that other branches of the set have as well.
    Copies,
}

/// Takes blocks out of a reservation, evicting cached ones where they are in the way.
pub(super) fn draw(
    index: Option<&PrefixIndex>,
    reservation: &mut Reservation,
    out: &mut [BlockHandle],
) -> Result<()> {
    loop {
        match reservation.allocate(out) {
            Err(Error::NeedsReclaim { needed, free, cached }) => {
                let missing = u32::try_from(needed.saturating_sub(free).max(1)).unwrap_or(u32::MAX);
                // Another thread may have taken what was evicted; whoever holds capacity gets a block in the
                // end, so the loop ends when eviction finds nothing.
                // By account: its own cached blocks go first, and no other tenant falls below its guarantee.
                let account = reservation.account();
                if index.is_none_or(|index| index.reclaim(account, missing) == 0) {
                    return Err(Error::NeedsReclaim { needed, free, cached });
                }
            }
            other => return other,
        }
    }
}
