//! The loop of an engine without a model: submit what has arrived, step, let time pass, commit.

use super::active::{Active, ActiveTable};
use super::arrivals::{ArrivalQueue, Pending};
use super::columns::Columns;
use super::config::ReplayConfig;
use super::measure::StepMemory;
use super::report::Record;
use super::tokens::{self, END_TOKEN};
use super::waiting::Waiting;
use crate::block_pool::{BlockPool, PoolConfig};
use crate::prefix_index::{IndexConfig, PrefixIndex};
use crate::scheduler::{
    BatchArrays, FinishedRequest, QueueLimits, Request, Scheduler, SchedulerConfig, Tenant, TenantConfig,
    ZeroBlocks,
};
use crate::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

/// Steps without a token, while something runs, after which a run is called stuck.
const MAX_EMPTY_STEPS: u64 = 100_000;

/// What a call of [`Replay::advance`] ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// There is more to do.
    Running,
    /// The next arrival is not known: push more columns, or close the input.
    NeedsInput,
    /// Every request has ended.
    Done,
}

/// One run of a workload.
pub struct Replay {
    config: ReplayConfig,
    pool: Arc<BlockPool>,
    index: Option<Arc<PrefixIndex>>,
    scheduler: Scheduler,
    tenants: Vec<Arc<Tenant>>,
    arrivals: ArrivalQueue,
    waiting: Waiting,
    active: ActiveTable,
    record: Record,
    now: f64,
    /// When the last step ended.
    last_step_end: f64,
    empty_steps: u64,
    token_start: Vec<i32>,
    tokens: Vec<i32>,
}

impl Replay {
    /// A run that has no requests yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with every setting that is out of range.
    pub fn new(config: ReplayConfig) -> Result<Self> {
        config.validate()?;
        let num_tenants = config.tenants.len() as u32;
        let index_config = IndexConfig { block_size: config.block_size, eviction: config.eviction };
        if config.reuse {
            index_config.check_for(config.num_blocks)?;
        }
        let pool_config = PoolConfig { num_blocks: config.num_blocks, ..PoolConfig::default() };
        let pool = BlockPool::new(PoolConfig {
            max_accounts: pool_config.max_accounts.max(num_tenants + 4),
            ..pool_config
        })?;
        let index = config.reuse.then(|| PrefixIndex::new(Arc::clone(&pool), index_config)).transpose()?;
        let waiting = Waiting::new(config.tenants.len(), config.queue_depth);
        let limits = scheduler_config(&config, waiting.max_submitted());
        let scheduler = Scheduler::new(Arc::clone(&pool), index.clone(), limits)?;
        let tenant = |name: &String| scheduler.add_tenant(&TenantConfig::new(name, config.num_blocks));
        let tenants = config.tenants.iter().map(tenant).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            arrivals: ArrivalQueue::new(config.arrivals),
            waiting,
            active: ActiveTable::default(),
            record: Record::new(tenants.len()),
            now: 0.0,
            last_step_end: 0.0,
            empty_steps: 0,
            token_start: Vec::new(),
            tokens: Vec::new(),
            config,
            pool,
            index,
            scheduler,
            tenants,
        })
    }

    /// Takes more requests, in order of arrival.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the column and row; nothing was taken then.
    pub fn push(&mut self, columns: &Columns<'_>) -> Result<()> {
        columns.validate(self.tenants.len() as u32)?;
        self.arrivals.push(columns, self.config.reuse);
        Ok(())
    }

    /// Says that no more requests will come.
    pub fn close(&mut self) {
        self.arrivals.close();
    }

    /// Does at most so many steps.
    ///
    /// # Errors
    /// What the scheduler says, and [`Error::WrongState`] if nothing moves any more: both are bugs.
    pub fn advance(&mut self, max_steps: u64) -> Result<Progress> {
        for _ in 0..max_steps {
            if !self.arrivals.is_ready() {
                return Ok(Progress::NeedsInput);
            }
            self.submit_due()?;
            if self.active.len() == 0 {
                match self.arrivals.next_arrival() {
                    Some(arrival) => self.now = self.now.max(arrival),
                    None if self.arrivals.is_closed() => return Ok(Progress::Done),
                    None => return Ok(Progress::NeedsInput),
                }
                continue;
            }
            self.step()?;
        }
        Ok(Progress::Running)
    }

    /// Requests that have ended or were refused.
    #[must_use]
    pub fn num_ended(&self) -> u64 {
        self.record.finished()
    }

    /// Steps so far.
    #[must_use]
    pub fn num_steps(&self) -> u64 {
        self.record.steps()
    }

    /// Virtual seconds so far.
    #[must_use]
    pub fn now(&self) -> f64 {
        self.now
    }

    /// The run as one JSON object, also before its end.
    #[must_use]
    pub fn report(&self) -> serde_json::Value {
        self.record.report(&self.config, self.last_step_end, self.pool.stats(), self.scheduler.stats())
    }

    /// Checks the pool and the index.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_invariants(&self) -> std::result::Result<(), String> {
        self.pool.check_invariants()?;
        self.index.as_ref().map_or(Ok(()), |index| index.check_invariants())
    }

    /// Submits what has arrived, as long as its tenant has places in the queue; the rest waits outside.
    fn submit_due(&mut self) -> Result<()> {
        loop {
            let arrived = |arrival| self.record.note_arrival(arrival);
            let Some(pending) = self.waiting.next(&mut self.arrivals, self.now, arrived) else {
                return Ok(());
            };
            self.submit(&pending)?;
        }
    }

    fn submit(&mut self, pending: &Pending) -> Result<()> {
        let active = Active::new(pending, self.config.max_output_tokens);
        self.record.note_request(active.output_tokens < pending.output_tokens);
        let longest = pending.prompt_tokens as usize + active.max_tokens as usize;
        let mut prompt = Vec::with_capacity(longest);
        let hash_block = self.config.hash_block;
        tokens::prompt(pending.prompt_tokens, hash_block, &pending.hash_ids, pending.number, &mut prompt);
        let tenant = Arc::clone(&self.tenants[pending.tenant as usize]);
        let request = Request {
            stop_token_ids: vec![END_TOKEN],
            reuse: self.config.reuse,
            ..Request::new(tenant, prompt, active.max_tokens)
        };
        match self.scheduler.submit(request) {
            Ok(id) => {
                self.waiting.submit(pending.tenant);
                self.active.insert(id, active);
            }
            Err(Error::Refused { retryable, reason, .. }) => {
                let kind = if retryable { "queue_full" } else { "never_fits" };
                self.record.note_refusal(pending.arrival, kind, reason);
                self.arrivals.answered(pending.session, self.now);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        let began = Instant::now();
        let batch = self.scheduler.step_at(0, self.now)?;
        let planning = began.elapsed();
        let arrays = &batch.arrays;
        let kv_tokens: u64 = arrays.context_lens.iter().map(|&length| length as u64).sum();
        let swapped = (arrays.swap_in.len() + arrays.swap_out.len()) as u64;
        let num_tokens = arrays.token_ids.len() as u64;
        let seconds = self.config.step_time.seconds(num_tokens, kv_tokens, swapped);
        let start = self.now;
        self.now += seconds;
        self.last_step_end = self.now;
        self.record.note_backlog(|tenant| self.waiting.is_backlogged(tenant));
        let memory = self.sample(arrays, start);
        // What the step holds while it runs: commit lets go of what ended.
        let during = self.pool.stats();
        let before_commit = Instant::now();
        let outcome = self.scheduler.commit(batch.step_id, &self.token_start, &self.tokens)?;
        let wall = planning + before_commit.elapsed();
        self.record.note_step((start, seconds, wall), during, memory, swapped, self.config.block_size);
        let held = self.pool.stats().held;
        for ended in arrays.finished.iter().chain(&outcome.finished) {
            self.note_end(ended, held);
        }
        self.empty_steps = if num_tokens == 0 { self.empty_steps + 1 } else { 0 };
        if self.empty_steps > MAX_EMPTY_STEPS {
            return Err(Error::WrongState(format!(
                "{} requests are under way and {MAX_EMPTY_STEPS} steps computed nothing",
                self.active.len()
            )));
        }
        Ok(())
    }

    /// Samples a token for each row that has its logits, and adds up what the batch holds.
    fn sample(&mut self, arrays: &BatchArrays, start: f64) -> StepMemory {
        self.token_start.clear();
        self.token_start.push(0);
        self.tokens.clear();
        let mut memory =
            StepMemory { num_sequences: arrays.sequence_ids.len() as u64, ..StepMemory::default() };
        let mut sample_rows = arrays.sample_rows.iter().peekable();
        let block_size = self.config.block_size;
        for (row, &id) in arrays.sequence_ids.iter().enumerate() {
            let samples = sample_rows.next_if_eq(&&(arrays.query_start[row + 1] - 1)).is_some();
            let length = arrays.context_lens[row] as u32;
            let blocks = length.div_ceil(block_size);
            memory.unshared_blocks += u64::from(blocks);
            memory.unused_slots += u64::from(blocks * block_size - length);
            if let Some(active) = self.active.get_mut(id) {
                if active.started.is_none() {
                    active.started = Some(start);
                    self.waiting.leave(active.tenant);
                }
                let computed = (arrays.query_start[row + 1] - arrays.query_start[row]) as u64;
                active.computed += computed;
                self.record.note_service(active.tenant, computed + u64::from(blocks));
                let longest = active.prompt_tokens + active.max_tokens;
                memory.contiguous_blocks += u64::from(longest.div_ceil(block_size));
                if samples {
                    active.sample(self.now);
                    let ends = active.sampled >= active.output_tokens;
                    let token = if ends { END_TOKEN } else { tokens::output(active.number, active.sampled) };
                    self.tokens.push(token as i32);
                }
            }
            self.token_start.push(self.tokens.len() as i32);
        }
        memory
    }

    fn note_end(&mut self, ended: &FinishedRequest, held: u64) {
        if let Some(active) = self.active.remove(ended.id) {
            if active.started.is_none() {
                self.waiting.leave(active.tenant);
            }
            self.record.note_end(ended, &active, &self.config, held);
            self.arrivals.answered(active.session, self.now);
        }
    }
}

fn scheduler_config(config: &ReplayConfig, max_waiting: u32) -> SchedulerConfig {
    SchedulerConfig {
        block_size: config.block_size,
        max_batch_tokens: config.max_batch_tokens,
        max_running: config.max_running,
        max_model_tokens: config.max_model_tokens,
        queue: QueueLimits { max_requests: max_waiting, ..QueueLimits::NONE },
        max_prefill_chunk: config.max_prefill_chunk,
        policy: config.policy,
        zero_blocks: ZeroBlocks::Never,
        max_bypass: config.max_bypass,
        max_bypass_steps: config.max_bypass_steps,
        max_bypass_seconds: config.max_bypass_seconds,
        overflow: config.overflow,
        host_tier: config.host_tier,
        ..SchedulerConfig::default()
    }
}
