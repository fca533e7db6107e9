//! Bounds of the queue, and when a refused caller may come back.
//!
//! A place is taken by `submit` on any thread and left when the request is admitted or ends. A tenant's bound and
//! the estimate for it are functions of the tenant's own state alone.

use super::compartments::COMMON;
use super::request::{Request, WaitingRequest};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::{Error, Result};

/// Weight of the newest interval in the mean interval between admissions.
const SMOOTHING: f32 = 0.125;

/// What may wait at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Requests.
    pub max_requests: u32,
    /// Prompt tokens of those requests together.
    pub max_tokens: u64,
}

impl QueueLimits {
    /// No bound.
    pub const NONE: Self = Self { max_requests: u32::MAX, max_tokens: u64::MAX };

    /// What is wrong with the limits, in words.
    pub(super) fn problem(self) -> Option<String> {
        let zero = |name: &str| Some(format!("{name} is 0, must be at least 1"));
        match self {
            Self { max_requests: 0, .. } => zero("max_waiting"),
            Self { max_tokens: 0, .. } => zero("max_waiting_tokens"),
            _ => None,
        }
    }
}

/// What waits, against its limits.
#[derive(Debug)]
pub(super) struct Places {
    max_requests: AtomicU32,
    max_tokens: AtomicU64,
    requests: AtomicU32,
    tokens: AtomicU64,
    /// Step of the last admission, or of the first request that waited for one.
    since_step: AtomicU64,
    /// Mean steps between admissions while requests waited, as the bits of an `f32`.
    interval: AtomicU32,
}

impl Places {
    pub(super) fn new(limits: QueueLimits) -> Self {
        Self {
            max_requests: AtomicU32::new(limits.max_requests),
            max_tokens: AtomicU64::new(limits.max_tokens),
            requests: AtomicU32::new(0),
            tokens: AtomicU64::new(0),
            since_step: AtomicU64::new(0),
            interval: AtomicU32::new(0f32.to_bits()),
        }
    }

    pub(super) fn limits(&self) -> QueueLimits {
        // Relaxed, here and below: the counters guard no other memory, and each is exact by itself.
        QueueLimits {
            max_requests: self.max_requests.load(Ordering::Relaxed),
            max_tokens: self.max_tokens.load(Ordering::Relaxed),
        }
    }

    /// Changes the limits; what waits beyond them stays.
    pub(super) fn set_limits(&self, limits: QueueLimits) {
        self.max_requests.store(limits.max_requests, Ordering::Relaxed);
        self.max_tokens.store(limits.max_tokens, Ordering::Relaxed);
    }

    pub(super) fn num_requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(super) fn num_tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Takes a place, or says which limit is in the way.
    fn take(&self, tokens: u32, step: u64) -> std::result::Result<(), String> {
        let limits = self.limits();
        let one_more = |requests: u32| (requests < limits.max_requests).then_some(requests + 1);
        let before = self.requests.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).map_err(
            |requests| {
                format!("{} waiting, the limit is {}", crate::count(requests, "request"), limits.max_requests)
            },
        )?;
        let more = |waiting: u64| {
            waiting.checked_add(u64::from(tokens)).filter(|&waiting| waiting <= limits.max_tokens)
        };
        if let Err(waiting) = self.tokens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            self.requests.fetch_sub(1, Ordering::Relaxed);
            return Err(format!(
                "{} waiting, {tokens} more would pass the limit of {}",
                crate::count(waiting, "prompt token"),
                limits.max_tokens
            ));
        }
        if before == 0 {
            self.since_step.fetch_max(step, Ordering::Relaxed);
        }
        Ok(())
    }

    fn leave(&self, tokens: u32) {
        self.requests.fetch_sub(1, Ordering::Relaxed);
        self.tokens.fetch_sub(u64::from(tokens), Ordering::Relaxed);
    }

    /// The engine thread admitted a request.
    fn note_admission(&self, step: u64) {
        let elapsed = step.saturating_sub(self.since_step.swap(step, Ordering::Relaxed)) as f32;
        let mean = f32::from_bits(self.interval.load(Ordering::Relaxed));
        let mean = if mean == 0.0 { elapsed } else { mean + SMOOTHING * (elapsed - mean) };
        self.interval.store(mean.to_bits(), Ordering::Relaxed);
    }

    /// Steps until enough places will be free for a request of `tokens`, by how admissions have gone.
    fn retry_after_steps(&self, tokens: u32, step: u64) -> u64 {
        let requests = self.num_requests().max(1);
        let waiting = self.num_tokens();
        // How many admissions free what is missing: one place, and tokens at the mean of what waits.
        let missing = (waiting + u64::from(tokens)).saturating_sub(self.limits().max_tokens) as f64;
        let per_request = (waiting as f64 / f64::from(requests)).max(1.0);
        let admissions = (missing / per_request).ceil().max(1.0);
        let since = step.saturating_sub(self.since_step.load(Ordering::Relaxed)) as f64;
        // An admission that is overdue says that the mean is out of date.
        let mean = f64::from(f32::from_bits(self.interval.load(Ordering::Relaxed))).max(since);
        (admissions * mean - since).ceil().max(1.0) as u64
    }
}

/// Takes a waiting place of the tenant, then one of all, unless the tenant has places of its own.
///
/// # Errors
/// [`Error::Refused`] with the limit in the way and an estimate of when to come back; nothing is taken then.
pub(super) fn take_places(request: &Request, all: &Places, step: u64) -> Result<()> {
    let tokens = request.prompt.len() as u32;
    let own = &request.tenant.places;
    let refused = |reason: String| Error::Refused {
        reason,
        retryable: true,
        retry_after_steps: Some(own.retry_after_steps(tokens, step)),
    };
    let is_common = request.tenant.compartment == COMMON;
    let all_tokens = if is_common { all.limits().max_tokens } else { u64::MAX };
    let longest = own.limits().max_tokens.min(all_tokens);
    if u64::from(tokens) > longest {
        return Err(Error::refused(format!(
            "the prompt has {}; at most {longest} may wait at once",
            crate::count(tokens, "token")
        )));
    }
    own.take(tokens, step)
        .map_err(|passed| refused(format!("tenant {:?}: {passed}", request.tenant.name)))?;
    if !is_common {
        return Ok(());
    }
    all.take(tokens, step).map_err(|passed| {
        own.leave(tokens);
        refused(passed)
    })
}

/// Leaves the places of a request that is admitted or ends; it has none any more after its first admission.
pub(super) fn leave_places(waiting: &WaitingRequest, all: &Places) {
    if waiting.progress.queue_steps.is_none() {
        waiting.request.tenant.places.leave(waiting.progress.prompt_tokens);
        if waiting.request.tenant.compartment == COMMON {
            all.leave(waiting.progress.prompt_tokens);
        }
    }
}

/// Leaves the places of a request that is admitted in `step`.
pub(super) fn note_admission(waiting: &WaitingRequest, all: &Places, step: u64) {
    if waiting.progress.queue_steps.is_none() {
        leave_places(waiting, all);
        waiting.request.tenant.places.note_admission(step);
    }
}
