//! Request state, admission and batches.
//!
//! [`Scheduler::submit`] and [`Scheduler::abort`] may be called from any thread; they only leave a message.
//! One engine thread calls [`Scheduler::step`], runs the model on the [`Batch`], and ends it by
//! [`Scheduler::commit`] or [`Scheduler::abandon`]; two threads in these at once is an error at the call.
//!
//! A request is admitted when its prefix is pinned and the policy's blocks are reserved for it. Waiting
//! requests hold nothing. See `docs/notes/scheduler.md`.

mod admit;
mod batch;
mod beams;
mod branch_promises;
mod branch_sets;
mod branches;
mod commit;
mod compartments;
mod config;
mod core;
mod deadlines;
mod drafts;
mod edges;
mod fork;
mod group_blocks;
mod growth;
mod host_tier;
mod inbox;
mod keeping;
mod kept;
mod kept_paths;
mod layer_groups;
mod lifecycle;
mod limits;
mod open_steps;
mod partial;
mod pause;
mod phases;
mod plan;
mod policy;
mod preempt;
mod queue;
mod request;
mod retention;
mod rotation;
mod samples;
mod scopes;
mod sequence;
mod sessions;
mod share;
mod shared_groups;
mod sliding;
mod snapshot;
mod special;
mod swap;
mod tails;
mod tenant;
mod urgent;
mod waiting_sets;

pub use batch::{Batch, BatchArrays, GroupArrays, NO_SLOT, PADDING_SEQUENCE};
pub use commit::CommitOutcome;
pub use compartments::Share;
pub use config::{MAX_TOKENS, SchedulerConfig, ZeroBlocks};
pub use drafts::{DraftCounts, MAX_DRAFTS};
pub use host_tier::{HostTierConfig, Overflow};
pub use lifecycle::CacheReset;
pub use limits::QueueLimits;
pub use phases::{Phase, PhaseSpan, PhaseTimes};
pub use policy::{AdmissionPolicy, AdmissionRequest, AdmissionRoom, ForecastConfig, Trajectory};
pub use request::{Deadline, FinishReason, FinishedRequest, Request};
pub use retention::Retention;
pub use scopes::{Sharing, TenantScope};
pub use sessions::Session;
pub use snapshot::SchedulerSnapshot;
pub use tenant::Tenant;

use self::compartments::{Bounds, COMMON};
use self::core::Core;
use self::inbox::{Inbox, Message};
use self::limits::{Places, take_places};
use self::request::WaitingRequest;
use self::retention::check_retention;
use self::scopes::{Scopes, check_publication, check_salt, check_strict};
use self::sessions::check_session;
use crate::block_pool::{BlockPool, Planner, Quota};
use crate::block_tables::TableArena;
use crate::ids::{SequenceId, StepId};
use crate::prefix_index::{Fingerprint, Isolation, PrefixIndex, check_items};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::{Error, Result, count};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Numbers schedulers, so that a tenant of another one is seen.
static NEXT_SCHEDULER: AtomicU64 = AtomicU64::new(0);

/// What a tenant is made with.
#[derive(Clone, Debug)]
pub struct TenantConfig {
    /// Its name, unique in the scheduler.
    pub name: String,
    /// Blocks that it gets whatever others do.
    pub guaranteed_blocks: u32,
    /// Most blocks that it may have committed; at most the pool's.
    pub limit_blocks: u32,
    /// Share of service, above 0.
    pub weight: f64,
    /// What must be equal for its KV to be reusable.
    pub fingerprint: Fingerprint,
    /// What of it may wait at once.
    pub queue: QueueLimits,
    /// What it shares, and with whom.
    pub sharing: Sharing,
    /// What it is given of the scheduler's bounds, if it is strict.
    pub share: Share,
    /// Most blocks of it that are kept after their requests' ends, by sessions and retentions together, each counted
    /// once; `None` for its limit.
    pub max_kept_blocks: Option<u32>,
}

impl TenantConfig {
    /// A tenant that may use so many blocks and is promised none: weight 1, private, no bound of its queue.
    #[must_use]
    pub fn new(name: &str, limit_blocks: u32) -> Self {
        Self {
            name: name.to_owned(),
            guaranteed_blocks: 0,
            limit_blocks,
            weight: 1.0,
            fingerprint: Fingerprint::default(),
            queue: QueueLimits::NONE,
            sharing: Sharing::default(),
            share: Share::default(),
            max_kept_blocks: None,
        }
    }
}

/// Counts of a scheduler. Of the last `step`, `commit` or `abandon`, except what waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Sequences that have blocks.
    pub num_running: u64,
    /// Requests that have none yet.
    pub num_waiting: u64,
    /// Steps planned.
    pub steps: u64,
    /// Tokens whose KV was computed in committed steps.
    pub computed_tokens: u64,
    /// Tokens computed again because their blocks had been taken back.
    pub recomputed_tokens: u64,
    /// Tokens that came for ended sequences.
    pub dropped_tokens: u64,
    /// Times that a running sequence's blocks were taken back. Always 0 under `reserve`.
    pub num_preemptions: u64,
    /// Sequences, among the running, whose tails are on the host.
    pub num_parked: u64,
    /// Blocks copied to the host.
    pub swapped_out_blocks: u64,
    /// Blocks copied back.
    pub swapped_in_blocks: u64,
    /// Requests that are paused, with blocks or without.
    pub num_paused: u64,
    /// Times that a paused request's blocks were taken for one that needed them.
    pub num_forced_out: u64,
    /// Sessions that keep blocks between turns.
    pub num_sessions_kept: u64,
    /// Prefixes that are kept by the retention of a request.
    pub num_retained: u64,
    /// Blocks, among the held, that sessions and retentions keep.
    pub num_kept_blocks: u64,
}

/// The scheduler of one engine.
pub struct Scheduler {
    id: u64,
    config: SchedulerConfig,
    pool: Arc<BlockPool>,
    _planner: Planner,
    index: Option<Arc<PrefixIndex>>,
    /// Of each layer group.
    arenas: Box<[Arc<TableArena>]>,
    host_pool: Option<Arc<BlockPool>>,
    inbox: Inbox,
    tenants: Mutex<Vec<Arc<Tenant>>>,
    core: Mutex<Core>,
    /// Twice the turns that the engine's thread took in the core, one more while it is in it.
    turns: AtomicU64,
    started: Instant,
    /// Running places of all tenants that are not strict.
    common_running: AtomicU32,
    num_running: AtomicU32,
    steps: AtomicU64,
    computed_tokens: AtomicU64,
    recomputed_tokens: AtomicU64,
    dropped_tokens: AtomicU64,
    num_preemptions: AtomicU64,
    num_parked: AtomicU64,
    swapped_out_blocks: AtomicU64,
    swapped_in_blocks: AtomicU64,
    num_paused: AtomicU64,
    num_forced_out: AtomicU64,
    num_sessions_kept: AtomicU64,
    num_retained: AtomicU64,
    num_kept_blocks: AtomicU64,
}

impl Scheduler {
    /// A scheduler over a pool, with an index for prefix reuse or without one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with every limit that is out of range, [`Error::OutOfMemory`] for tables that there is
    /// no room for, [`Error::WrongState`] while the pool has another scheduler.
    pub fn new(
        pool: Arc<BlockPool>,
        index: Option<Arc<PrefixIndex>>,
        config: SchedulerConfig,
    ) -> Result<Self> {
        config.validate()?;
        if config.max_open_steps > pool.max_open_steps() {
            return Err(Error::invalid(format!(
                "max_open_steps is {}, the pool has {}",
                config.max_open_steps,
                pool.max_open_steps()
            )));
        }
        if let Some(index) = &index
            && !Arc::ptr_eq(index.pool(), &pool)
        {
            return Err(Error::invalid(format!(
                "the index keeps blocks of another pool (of {}) than the scheduler's (of {})",
                count(index.pool().num_blocks(), "block"),
                pool.num_blocks()
            )));
        }
        if let Some(index) = &index
            && index.config().block_size != config.block_size
        {
            return Err(Error::invalid(format!(
                "block_size is {}, the index has blocks of {}",
                config.block_size,
                index.config().block_size
            )));
        }
        let planner = Planner::of(&pool)?;
        let core = Core::new(Arc::clone(&pool), index.clone(), config.clone())?;
        if let Some(index) = &index
            && config.is_grouped()
        {
            index.attach_groups(config.rest_groups(), config.homes_per_block())?;
        }
        Ok(Self {
            id: NEXT_SCHEDULER.fetch_add(1, Ordering::Relaxed),
            arenas: core.arenas().map(Arc::clone).collect(),
            host_pool: core.host.as_ref().map(|host| Arc::clone(host.pool())),
            inbox: Inbox::new(config.queue),
            common_running: AtomicU32::new(config.max_running),
            config,
            pool,
            _planner: planner,
            index,
            tenants: Mutex::new(Vec::new()),
            core: Mutex::new(core),
            turns: AtomicU64::new(0),
            started: Instant::now(),
            num_running: AtomicU32::new(0),
            steps: AtomicU64::new(0),
            computed_tokens: AtomicU64::new(0),
            recomputed_tokens: AtomicU64::new(0),
            dropped_tokens: AtomicU64::new(0),
            num_preemptions: AtomicU64::new(0),
            num_parked: AtomicU64::new(0),
            swapped_out_blocks: AtomicU64::new(0),
            swapped_in_blocks: AtomicU64::new(0),
            num_paused: AtomicU64::new(0),
            num_forced_out: AtomicU64::new(0),
            num_sessions_kept: AtomicU64::new(0),
            num_retained: AtomicU64::new(0),
            num_kept_blocks: AtomicU64::new(0),
        })
    }

    /// The limits it was made with.
    #[must_use]
    pub const fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Blocks of its pool.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.pool.num_blocks()
    }

    /// The pool of its host tier, if it has one.
    #[must_use]
    pub const fn host_pool(&self) -> Option<&Arc<BlockPool>> {
        self.host_pool.as_ref()
    }

    /// The memory of the first layer group's block tables.
    #[must_use]
    pub fn arena(&self) -> &Arc<TableArena> {
        &self.arenas[0]
    }

    /// The memory of each layer group's block tables. A sequence has the same row in all of them.
    #[must_use]
    pub const fn arenas(&self) -> &[Arc<TableArena>] {
        &self.arenas
    }

    /// Adds a tenant with its quota in the pool and its namespace in the index.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that is taken, a weight that is not above 0 or a quota that the
    /// pool cannot give; [`Error::WrongState`] while a step is being planned.
    pub fn add_tenant(&self, config: &TenantConfig) -> Result<Arc<Tenant>> {
        if config.name.is_empty() {
            return Err(Error::invalid("the tenant's name is empty, must have 1 character at least"));
        }
        if !(config.weight > 0.0 && config.weight.is_finite()) {
            return Err(Error::invalid(format!("weight is {}, must be above 0", config.weight)));
        }
        if let Some(problem) = config.queue.problem() {
            return Err(Error::invalid(format!("tenant {:?}: {problem}", config.name)));
        }
        let mut core = self.enter()?;
        let mut tenants = self.tenants.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if tenants.iter().any(|tenant| tenant.name == config.name) {
            return Err(Error::invalid(format!("tenant {:?} exists already", config.name)));
        }
        let Sharing { isolation, scope, .. } = config.sharing;
        config.sharing.check(&config.name, self.id, self.index.is_some())?;
        let quota = Quota { guaranteed: config.guaranteed_blocks, limit: config.limit_blocks };
        check_strict(isolation, quota)?;
        let bounds = self.divide(&core, &tenants, config, quota)?;
        let account = self.pool.add_account(quota)?;
        let new_scopes = |index: &Arc<PrefixIndex>| {
            Scopes::new(index, &config.name, &config.sharing, &config.fingerprint, account)
        };
        let scopes = self.index.as_ref().map(new_scopes).transpose()?;
        let (compartment, queue) = match bounds {
            None => (COMMON, config.queue),
            Some((own, left)) => {
                self.inbox.add_compartment();
                self.inbox.places.set_limits(left.queue);
                self.common_running.store(left.max_running, Ordering::Relaxed);
                (core.add_compartment(account, own, left), own.queue)
            }
        };
        let tenant = Arc::new(Tenant {
            name: config.name.clone(),
            index: core.queue.num_tenants(),
            compartment,
            max_running: bounds.map(|(own, _)| own.max_running),
            scheduler: self.id,
            account,
            isolation,
            scope,
            scopes,
            weight: config.weight,
            max_kept_blocks: config.max_kept_blocks.unwrap_or(config.limit_blocks),
            num_kept_blocks: AtomicU64::new(0),
            places: Places::new(queue),
        });
        if let Some(host) = &mut core.host {
            host.add_tenant(quota)?;
        }
        core.queue.add_tenant(Arc::clone(&tenant));
        tenants.push(Arc::clone(&tenant));
        Ok(tenant)
    }

    /// What a strict tenant gets of the bounds, and what is left to those who are not; `None` for one of those.
    fn divide(
        &self,
        core: &Core,
        tenants: &[Arc<Tenant>],
        config: &TenantConfig,
        quota: Quota,
    ) -> Result<Option<(Bounds, Bounds)>> {
        let common = core.compartments[COMMON].bounds;
        if config.sharing.isolation != Isolation::Strict {
            return common.check_common(&config.name, config.share).map(|()| None);
        }
        let own =
            Bounds::all(&self.config).of_strict(config.share, config.queue, quota, self.pool.num_blocks());
        let has_others = tenants.iter().any(|tenant| tenant.compartment == COMMON);
        let left = common.less(&config.name, own, u32::from(has_others))?;
        core.check_common_fits(&config.name, left)?;
        Ok(Some((own, left)))
    }

    /// Accepts a request; it runs in a later step. From any thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for values out of range; [`Error::Refused`] if it can never fit (not
    /// retryable) or too many wait (retryable).
    pub fn submit(&self, request: Request) -> Result<SequenceId> {
        self.check_request(&request)?;
        if self.inbox.is_draining() {
            return Err(Error::refused("the scheduler is being drained and accepts nothing"));
        }
        take_places(&request, &self.inbox.places, self.steps.load(Ordering::Relaxed))?;
        let id = self.inbox.issue_ids(request.tenant.compartment, request.n);
        let waiting = WaitingRequest::new(id, request);
        self.inbox.push(Message::Submit(Box::new(waiting)));
        Ok(id)
    }

    fn check_request(&self, request: &Request) -> Result<()> {
        let prompt = request.prompt.len() as u64;
        if request.tenant.scheduler != self.id {
            return Err(Error::invalid(format!("tenant {:?} is of another scheduler", request.tenant.name)));
        }
        if prompt == 0 {
            return Err(Error::invalid("the prompt is empty: 0 tokens, at least 1 is needed"));
        }
        if request.max_tokens == 0 || request.min_tokens > request.max_tokens {
            return Err(Error::invalid(format!(
                "max_tokens is {} and min_tokens {}: at least 1, and no less than min_tokens",
                request.max_tokens, request.min_tokens
            )));
        }
        check_salt(request)?;
        check_publication(&self.config, request)?;
        check_session(request)?;
        check_retention(request, self.index.is_some())?;
        check_items(&request.items, request.prompt.len())?;
        if let Some(i) = request.prompt.iter().position(|&token| token > i32::MAX as u32) {
            return Err(Error::invalid(format!(
                "prompt_ids[{i}] is {}, must be 0 to {}",
                request.prompt[i],
                i32::MAX
            )));
        }
        request.deadline.check()?;
        let refused = |reason: String| Err(Error::refused(reason));
        let total = prompt + u64::from(request.max_tokens);
        if total > u64::from(self.config.max_model_tokens) {
            return refused(format!(
                "{} and up to {} exceed the model's {}",
                count(prompt, "prompt token"),
                count(request.max_tokens, "output token"),
                count(self.config.max_model_tokens, "position")
            ));
        }
        let need = self.config.lifetime_blocks(prompt as u32, request.max_tokens);
        let mut reachable = self.pool.reachable(request.tenant.account)?;
        if need > reachable {
            reachable += scopes::peek_public(self.index.as_ref(), request, &self.config)?;
        }
        if request.n != 1 && need <= reachable {
            let common = || self.common_running.load(Ordering::Relaxed);
            let places = request.tenant.max_running.unwrap_or_else(common);
            samples::check_samples(&self.config, request, reachable, places)?;
        }
        if need > reachable {
            return refused(format!(
                "{} and up to {} need {} of {}; tenant {:?} may have {reachable}",
                count(prompt, "prompt token"),
                count(request.max_tokens, "output token"),
                count(need, "block"),
                count(self.config.block_size, "token"),
                request.tenant.name
            ));
        }
        Ok(())
    }

    /// Plans a step. `pad_to` rows at least: padding rows have one token with slot -1 and context length 0.
    ///
    /// # Errors
    /// [`Error::WrongState`] while a step is open or another thread is in the scheduler.
    pub fn step(&self, pad_to: usize) -> Result<Batch> {
        self.step_at(pad_to, self.started.elapsed().as_secs_f64())
    }

    /// [`Scheduler::step`] by the caller's clock: `now` in seconds from any start. Time that goes back stands
    /// still.
    ///
    /// # Errors
    /// As [`Scheduler::step`]; [`Error::InvalidArgument`] if `now` is not finite, or `pad_to` above both
    /// `max_batch_tokens` and `max_running`.
    pub fn step_at(&self, pad_to: usize, now: f64) -> Result<Batch> {
        if !now.is_finite() {
            return Err(Error::invalid(format!("now is {now}, must be finite seconds")));
        }
        let most = (self.config.max_batch_tokens as usize).max(self.config.max_running as usize);
        if pad_to > most {
            return Err(Error::invalid(format!(
                "pad_to is {pad_to}, a batch has at most {}",
                crate::count_of(most, "row")
            )));
        }
        let mut core = self.enter()?;
        core.now = core.now.max(now);
        let batch = core.step(&self.inbox, pad_to);
        self.publish(&core);
        batch
    }

    /// Ends a step with its tokens: `tokens[token_start[i]..token_start[i + 1]]` were sampled for row `i` of the
    /// batch; one for each row that samples, none for others.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for tokens that do not fit the batch; [`Error::WrongState`] if the step is not
    /// open or another thread is in the scheduler. Nothing has changed then.
    pub fn commit(&self, step_id: StepId, token_start: &[i32], tokens: &[i32]) -> Result<CommitOutcome> {
        let mut core = self.enter()?;
        let outcome = core.commit(&self.inbox, step_id, token_start, tokens);
        self.publish(&core);
        outcome
    }

    /// Ends a step that failed. Its sequences go back to their last committed length, or end with `fail`.
    /// The caller says by this call that the device no longer runs the step.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the step is not open or another thread is in the scheduler.
    pub fn abandon(&self, step_id: StepId, reason: &str, fail: bool) -> Result<CommitOutcome> {
        let mut core = self.enter()?;
        let outcome = core.abandon(&self.inbox, step_id, reason, fail);
        self.publish(&core);
        outcome
    }

    /// Whether a step would do anything: something waits or runs that is not paused, or an end has not been reported yet.
    ///
    /// # Errors
    /// [`Error::WrongState`] if another thread is in the scheduler.
    pub fn has_work(&self) -> Result<bool> {
        let core = self.enter()?;
        Ok(!self.inbox.is_empty()
            || !core.queue.is_empty()
            || !core.running.is_empty()
            || !core.parked.is_empty()
            || !core.ended.is_empty())
    }

    /// Records from now on how long each phase of a step takes, and the first `max_spans` of them one by one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more spans than memory holds; [`Error::WrongState`] if another thread is in
    /// the scheduler.
    pub fn begin_phases(&self, max_spans: usize) -> Result<()> {
        self.enter()?.phases.begin(max_spans)
    }

    /// Ends the recording; `None` if there was none.
    ///
    /// # Errors
    /// [`Error::WrongState`] if another thread is in the scheduler.
    pub fn end_phases(&self) -> Result<Option<PhaseTimes>> {
        Ok(self.enter()?.phases.end())
    }

    /// Service of a tenant so far: tokens computed and blocks x steps held, over its weight.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a tenant of another scheduler; [`Error::WrongState`] if another thread is in the
    /// scheduler.
    pub fn service(&self, tenant: &Tenant) -> Result<f64> {
        if tenant.scheduler != self.id {
            return Err(Error::invalid(format!("tenant {:?} is of another scheduler", tenant.name)));
        }
        Ok(self.enter()?.queue.service(tenant.index))
    }

    /// Counts. From any thread.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        // Relaxed: numbers for people; each is a whole one of some moment.
        SchedulerStats {
            num_running: u64::from(self.num_running.load(Ordering::Relaxed)),
            num_waiting: self.num_waiting(),
            steps: self.steps.load(Ordering::Relaxed),
            computed_tokens: self.computed_tokens.load(Ordering::Relaxed),
            recomputed_tokens: self.recomputed_tokens.load(Ordering::Relaxed),
            dropped_tokens: self.dropped_tokens.load(Ordering::Relaxed),
            num_preemptions: self.num_preemptions.load(Ordering::Relaxed),
            num_parked: self.num_parked.load(Ordering::Relaxed),
            swapped_out_blocks: self.swapped_out_blocks.load(Ordering::Relaxed),
            swapped_in_blocks: self.swapped_in_blocks.load(Ordering::Relaxed),
            num_paused: self.num_paused.load(Ordering::Relaxed),
            num_forced_out: self.num_forced_out.load(Ordering::Relaxed),
            num_sessions_kept: self.num_sessions_kept.load(Ordering::Relaxed),
            num_retained: self.num_retained.load(Ordering::Relaxed),
            num_kept_blocks: self.num_kept_blocks.load(Ordering::Relaxed),
        }
    }

    /// Requests that wait, of all tenants.
    fn num_waiting(&self) -> u64 {
        let tenants = self.tenants.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let strict = tenants.iter().filter(|tenant| tenant.compartment != COMMON);
        let waiting = strict.map(|tenant| u64::from(tenant.num_waiting())).sum::<u64>();
        waiting + u64::from(self.inbox.places.num_requests())
    }

    fn publish(&self, core: &Core) {
        self.num_running.store((core.running.len() + core.parked.len()) as u32, Ordering::Relaxed);
        self.num_parked.store(core.parked.len() as u64, Ordering::Relaxed);
        self.swapped_out_blocks.store(core.swaps.num_swapped_out, Ordering::Relaxed);
        self.swapped_in_blocks.store(core.swaps.num_swapped_in, Ordering::Relaxed);
        self.steps.store(core.last_step.0, Ordering::Relaxed);
        self.computed_tokens.store(core.computed_tokens, Ordering::Relaxed);
        self.recomputed_tokens.store(core.recomputed_tokens, Ordering::Relaxed);
        self.dropped_tokens.store(core.dropped_tokens, Ordering::Relaxed);
        self.num_preemptions.store(core.num_preemptions, Ordering::Relaxed);
        self.num_paused.store((core.halted.len() + core.paused.len()) as u64, Ordering::Relaxed);
        self.num_forced_out.store(core.num_forced_out, Ordering::Relaxed);
        self.num_sessions_kept.store(core.kept.num_sessions() as u64, Ordering::Relaxed);
        self.num_retained.store(core.kept.num_retained() as u64, Ordering::Relaxed);
        self.num_kept_blocks.store(core.kept.num_blocks(), Ordering::Relaxed);
    }
}
