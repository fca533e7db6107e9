//! A request as it is submitted, and what is left of it at its end.

use crate::ids::SequenceId;
use crate::prefix_index::{Item, PrefixIndex};
use crate::scheduler::deadlines::Moment;
use crate::scheduler::retention::Retention;
use crate::scheduler::sessions::Session;
use crate::scheduler::tenant::Tenant;
use crate::{Error, Result};
use std::borrow::Cow;
use std::sync::Arc;

/// When a request ends if it has not ended before; by default never. It holds in every state, paused ones included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Deadline {
    /// Steps after its arrival in which it may run.
    pub steps: Option<u64>,
    /// Seconds after its arrival, on the clock of the steps.
    pub seconds: Option<f64>,
}

impl Deadline {
    /// Checks the values.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 steps, or seconds that are not above 0 and finite.
    pub fn check(self) -> Result<()> {
        self.check_as("the deadline")
    }

    /// [`Deadline::check`] for what is called something else.
    pub(super) fn check_as(self, what: &str) -> Result<()> {
        if self.steps == Some(0) {
            return Err(Error::invalid(format!("{what} is 0 steps away, must be at least 1")));
        }
        match self.seconds {
            Some(seconds) if !(seconds.is_finite() && seconds > 0.0) => {
                Err(Error::invalid(format!("{what} is {seconds} seconds away, must be above 0 and finite")))
            }
            _ => Ok(()),
        }
    }
}

/// What a caller asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Who owns the request and is charged for it.
    pub tenant: Arc<Tenant>,
    /// Token ids of the prompt, each below 2^31.
    pub prompt: Vec<u32>,
    /// Most tokens to sample; at least 1.
    pub max_tokens: u32,
    /// Tokens to sample before a stop id ends the request.
    pub min_tokens: u32,
    /// Token ids that end the request. The id itself is part of the output.
    pub stop_token_ids: Vec<u32>,
    /// Lower runs first, inside the tenant; each `ageing_steps` of waiting make up for one.
    pub priority: i32,
    /// Whether the request looks prefixes up and leaves its own blocks in the index.
    pub reuse: bool,
    /// Whether it also reuses the leading tokens of a block that goes on differently, by a copy.
    pub partial: bool,
    /// Images, embeddings and the like inside the prompt, in order of offset.
    pub items: Vec<Item>,
    /// A client's bytes that narrow reuse to requests of the tenant with the same ones; public prefixes stay.
    pub salt: Option<Vec<u8>>,
    /// When it ends at the latest.
    pub deadline: Deadline,
    /// Sequences that go on from its prompt, each with its own samples; at least 1.
    pub n: u32,
    /// The session that it is a turn of.
    pub session: Option<Arc<Session>>,
    /// What of it is kept after its end, of every sequence that it becomes.
    pub retention: Option<Retention>,
}

impl Request {
    /// What the index compares for a piece of the tokens that begins at `start`: the tokens, with the items in them.
    pub(super) fn keys<'a>(
        &self,
        index: &PrefixIndex,
        start: usize,
        tokens: &'a [u32],
    ) -> Result<Cow<'a, [u32]>> {
        if self.items.is_empty() {
            return Ok(Cow::Borrowed(tokens));
        }
        let mut keys = tokens.to_vec();
        index.key_items(&self.items, start, &mut keys)?;
        Ok(Cow::Owned(keys))
    }

    /// Items before a position.
    pub(super) fn items_before(&self, end: usize) -> &[Item] {
        &self.items[..self.items.partition_point(|item| (item.offset as usize) < end)]
    }

    /// A request with the defaults of everything else: no stop ids, priority 0, reuse, no salt, no deadline.
    #[must_use]
    pub const fn new(tenant: Arc<Tenant>, prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            tenant,
            prompt,
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            priority: 0,
            reuse: true,
            partial: false,
            salt: None,
            items: Vec::new(),
            deadline: Deadline { steps: None, seconds: None },
            n: 1,
            session: None,
            retention: None,
        }
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled.
    Stop,
    /// `max_tokens` were sampled.
    Length,
    /// The caller aborted it.
    Aborted,
    /// It can no longer fit: a quota was lowered, or a guarantee given to another tenant, since it was accepted.
    Capacity,
    /// Its deadline passed.
    Deadline,
    /// The scheduler was drained and its deadline passed.
    Drained,
    /// The step that computed it failed and the caller chose to end it.
    Error,
}

impl FinishReason {
    /// The reason's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Aborted => "aborted",
            Self::Capacity => "capacity",
            Self::Deadline => "deadline",
            Self::Drained => "drained",
            Self::Error => "error",
        }
    }
}

/// The account of a sequence that ended. A request that ends before it has its samples has one for each of them all the
/// same, with the same reason; what it cost is in that of branch 0, the other ones have 0 tokens, steps and preemptions.
#[derive(Clone, Debug)]
pub struct FinishedRequest {
    /// The sequence; of a request with one sequence it is the request's id.
    pub id: SequenceId,
    /// Which of its request's samples it is; the request's id is `id - branch`.
    pub branch: u32,
    /// Its tenant.
    pub tenant: Arc<Tenant>,
    /// Why it ended.
    pub reason: FinishReason,
    /// What the caller of `abandon` gave as the reason, if that ended it.
    pub detail: Option<Arc<str>>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV came from the index, at admission or at a chunk's boundary after it.
    pub cached_tokens: u32,
    /// Tokens sampled for it.
    pub output_tokens: u32,
    /// Steps in which it had tokens.
    pub steps: u64,
    /// Steps between its arrival and its admission (or its end, if it never ran).
    pub queue_steps: u64,
    /// Times its blocks were taken back while it ran.
    pub preemptions: u64,
}

impl FinishedRequest {
    /// The account of a sample that its request ended without, from that of the request.
    pub(super) fn of_sample(&self, branch: u32) -> Self {
        if branch == 0 {
            return self.clone();
        }
        Self {
            id: SequenceId(self.id.0 + u64::from(branch)),
            branch,
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            steps: 0,
            preemptions: 0,
            ..self.clone()
        }
    }
}

/// What a request has behind it; it survives a preemption.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    pub(super) prompt_tokens: u32,
    pub(super) branch: u32,
    pub(super) arrival_step: u64,
    /// Time of its arrival on the clock of the steps.
    pub(super) arrival_time: f64,
    /// Steps for which it was paused; they do not count as waiting.
    pub(super) paused_steps: u64,
    /// Steps it waited before it first ran; `None` before that.
    pub(super) queue_steps: Option<u64>,
    pub(super) cached_tokens: u32,
    /// Steps that it waited for a chunk of another request.
    pub(super) share_waits: u32,
    pub(super) steps: u64,
    pub(super) preemptions: u64,
    /// Tokens whose KV had been computed when it was last preempted.
    pub(super) lost_tokens: u32,
    /// Most leading tokens that it ever had: what it finds of them again, it may have left there itself.
    pub(super) known_once: u32,
}

impl Progress {
    pub(super) const NONE: Self = Self {
        prompt_tokens: 0,
        branch: 0,
        arrival_step: 0,
        arrival_time: 0.0,
        paused_steps: 0,
        queue_steps: None,
        cached_tokens: 0,
        steps: 0,
        preemptions: 0,
        lost_tokens: 0,
        known_once: 0,
        share_waits: 0,
    };

    pub(super) const fn arrival(&self) -> Moment {
        Moment { step: self.arrival_step, seconds: self.arrival_time }
    }

    /// Steps it has waited up to `step`.
    pub(super) const fn waited(&self, step: u64) -> u64 {
        step.saturating_sub(self.arrival_step + self.paused_steps)
    }
}

/// A request in the queue: new, or preempted.
#[derive(Debug)]
pub(super) struct WaitingRequest {
    pub(super) id: SequenceId,
    /// Its `prompt` has all tokens known by now, those sampled before a preemption included.
    pub(super) request: Request,
    pub(super) progress: Progress,
    /// Requests that passed it while it was the head and did not fit.
    pub(super) bypassed: u32,
    /// Step and time at which it first did not fit as the head.
    pub(super) blocked_since: Option<(u64, f64)>,
    /// The younger branches of its set, with which it comes back.
    pub(super) branches: Vec<WaitingRequest>,
}

impl WaitingRequest {
    pub(super) fn new(id: SequenceId, request: Request) -> Self {
        let progress = Progress { prompt_tokens: request.prompt.len() as u32, ..Progress::default() };
        Self { id, request, progress, bypassed: 0, blocked_since: None, branches: Vec::new() }
    }

    /// Tokens sampled before a preemption.
    pub(super) fn num_outputs(&self) -> u32 {
        self.request.prompt.len() as u32 - self.progress.prompt_tokens
    }

    /// The account of a request that ends while it waits.
    pub(super) fn account(self, reason: FinishReason, step: u64) -> FinishedRequest {
        let output_tokens = self.num_outputs();
        let queue_steps = self.progress.queue_steps.unwrap_or_else(|| self.progress.waited(step));
        account(self.id, &self.request.tenant, self.progress, (output_tokens, queue_steps), reason, None)
    }
}

/// The account of a request with (`output_tokens`, `queue_steps`).
pub(super) fn account(
    id: SequenceId,
    tenant: &Arc<Tenant>,
    progress: Progress,
    (output_tokens, queue_steps): (u32, u64),
    reason: FinishReason,
    detail: Option<Arc<str>>,
) -> FinishedRequest {
    FinishedRequest {
        id,
        branch: progress.branch,
        tenant: Arc::clone(tenant),
        reason,
        detail,
        prompt_tokens: progress.prompt_tokens,
        cached_tokens: progress.cached_tokens,
        output_tokens,
        steps: progress.steps,
        queue_steps,
        preemptions: progress.preemptions,
    }
}
