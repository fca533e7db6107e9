//! The clairvoyant schedule: first come, first served, with every output length known.
//!
//! A request is admitted when the exact future peak of the running set, itself included, fits the pool. Nothing
//! is shared, nothing is taken back. It is a reference and not a bound: passing a blocked head can beat it.

use super::arrivals::ArrivalQueue;
use super::columns::Columns;
use super::config::ReplayConfig;
use super::driver::Progress;
use super::step_time::StepTime;
use crate::{Error, Result};

/// A request of the schedule.
#[derive(Clone, Copy, Debug)]
struct Job {
    session: u64,
    prompt: u64,
    output: u64,
}

/// A running request, by the step in which it will have its last token.
#[derive(Clone, Copy, Debug)]
struct Running {
    job: Job,
    finish: u64,
    /// Prompt tokens to compute; 0 once it decodes.
    prefill_left: u64,
    sampled: u64,
}

impl Running {
    /// Tokens with KV after the current step: the token just sampled has none yet.
    fn length(&self) -> u64 {
        self.job.prompt - self.prefill_left + self.sampled.saturating_sub(1)
    }

    /// The same, had its prompt been computed.
    fn full_length(&self) -> u64 {
        self.job.prompt + self.sampled.saturating_sub(1)
    }
}

/// What the schedule came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OracleOutcome {
    /// Virtual seconds.
    pub time: f64,
    /// Steps.
    pub steps: u64,
    /// Requests that ran.
    pub finished: u64,
    /// Requests that the pool can never hold.
    pub refused: u64,
    /// Sequences a step, on average.
    pub mean_batch: f64,
    /// Most blocks at once.
    pub peak_blocks: u64,
}

/// The schedule of one workload.
pub struct Oracle {
    num_blocks: u64,
    block_size: u64,
    max_batch_tokens: u64,
    max_running: usize,
    max_output_tokens: u32,
    step_time: StepTime,
    arrivals: ArrivalQueue,
    /// The next request, arrived and not admitted.
    head: Option<Job>,
    /// By `finish`, earliest first.
    running: Vec<Running>,
    step: u64,
    now: f64,
    sequences: u64,
    outcome: OracleOutcome,
}

impl Oracle {
    /// An empty schedule under a run's limits; its policies and its index play no part.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for limits out of range.
    pub fn new(config: &ReplayConfig) -> Result<Self> {
        config.validate()?;
        let (blocks, size) = (config.num_blocks, config.block_size);
        let (tokens, running) = (config.max_batch_tokens, config.max_running);
        if blocks == 0 || size == 0 || running == 0 || tokens < running {
            return Err(Error::invalid(format!(
                "{blocks} blocks of {size} tokens, {running} sequences in {tokens} tokens: all must be at least 1, \
                 and each sequence needs a token"
            )));
        }
        Ok(Self {
            num_blocks: blocks.into(),
            block_size: size.into(),
            max_batch_tokens: tokens.into(),
            max_running: running as usize,
            max_output_tokens: config.max_output_tokens,
            step_time: config.step_time,
            arrivals: ArrivalQueue::new(config.arrivals),
            head: None,
            running: Vec::new(),
            step: 0,
            now: 0.0,
            sequences: 0,
            outcome: OracleOutcome::default(),
        })
    }

    /// Takes more requests, in order of arrival.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the column and row; nothing was taken then.
    pub fn push(&mut self, columns: &Columns<'_>) -> Result<()> {
        columns.validate(u32::MAX)?;
        self.arrivals.push(columns, false);
        Ok(())
    }

    /// Says that no more requests will come.
    pub fn close(&mut self) {
        self.arrivals.close();
    }

    /// Does at most so many steps.
    pub fn advance(&mut self, max_steps: u64) -> Progress {
        for _ in 0..max_steps {
            if !self.arrivals.is_ready() {
                return Progress::NeedsInput;
            }
            self.next_head();
            if self.running.is_empty() && self.head.is_none() {
                match self.arrivals.next_arrival() {
                    Some(arrival) => self.now = self.now.max(arrival),
                    None if self.arrivals.is_closed() => return Progress::Done,
                    None => return Progress::NeedsInput,
                }
                continue;
            }
            self.take_step();
        }
        Progress::Running
    }

    /// What it came to so far.
    #[must_use]
    pub fn outcome(&self) -> OracleOutcome {
        let steps = self.outcome.steps.max(1);
        OracleOutcome { time: self.now, mean_batch: self.sequences as f64 / steps as f64, ..self.outcome }
    }

    fn blocks(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.block_size)
    }

    /// Takes the next request that the pool can ever hold.
    fn next_head(&mut self) {
        while self.head.is_none() {
            let Some(pending) = self.arrivals.pop(self.now) else { return };
            let output = u64::from(pending.output_tokens.min(self.max_output_tokens));
            let job = Job { session: pending.session, prompt: pending.prompt_tokens.into(), output };
            if self.blocks(job.prompt + job.output - 1) > self.num_blocks {
                self.outcome.refused += 1;
                self.arrivals.answered(job.session, self.now);
            } else {
                self.head = Some(job);
            }
        }
    }

    /// Decodes first, then prompts in order, then admissions: the order of the scheduler.
    fn take_step(&mut self) {
        let mut budget = self.max_batch_tokens;
        for running in self.running.iter_mut().filter(|running| running.prefill_left == 0) {
            running.sampled += 1;
            budget -= 1;
        }
        self.prefill(&mut budget);
        self.admit(&mut budget);
        let (mut kv_tokens, mut held) = (0, 0);
        for running in &self.running {
            kv_tokens += running.length();
            held += self.blocks(running.length());
        }
        self.outcome.peak_blocks = self.outcome.peak_blocks.max(held);
        self.sequences += self.running.len() as u64;
        self.outcome.steps += 1;
        self.step += 1;
        self.now += self.step_time.seconds(self.max_batch_tokens - budget, kv_tokens, 0);
        let (now, arrivals, finished) = (self.now, &mut self.arrivals, &mut self.outcome.finished);
        self.running.retain(|running| {
            let goes_on = running.sampled < running.job.output;
            if !goes_on {
                *finished += 1;
                arrivals.answered(running.job.session, now);
            }
            goes_on
        });
    }

    fn prefill(&mut self, budget: &mut u64) {
        let mut settled = Vec::new();
        for (position, running) in self.running.iter_mut().enumerate() {
            let chunk = running.prefill_left.min(*budget);
            if chunk > 0 {
                running.prefill_left -= chunk;
                *budget -= chunk;
                if running.prefill_left == 0 {
                    settled.push(position);
                }
            }
        }
        // Their end is known only now: put them where it belongs.
        let moved: Vec<Running> =
            settled.into_iter().rev().map(|position| self.running.remove(position)).collect();
        for running in moved {
            self.insert(Running { finish: self.step + running.job.output - 1, sampled: 1, ..running });
        }
    }

    /// Admits in order of arrival while the future peak fits.
    fn admit(&mut self, budget: &mut u64) {
        while *budget > 0 && self.running.len() < self.max_running {
            self.next_head();
            let Some(job) = self.head.filter(|&job| self.fits(job)) else { return };
            self.head = None;
            let chunk = job.prompt.min(*budget);
            *budget -= chunk;
            let left = job.prompt - chunk;
            let finish = self.step + left.div_ceil(self.max_batch_tokens) + job.output - 1;
            self.insert(Running { job, finish, prefill_left: left, sampled: u64::from(left == 0) });
        }
    }

    fn insert(&mut self, running: Running) {
        let position = self.running.partition_point(|other| other.finish <= running.finish);
        self.running.insert(position, running);
    }

    /// Whether the pool holds the running set and the job until the last of them is done.
    ///
    /// Memory only falls when a request ends, so the peaks are at the ends: going from the last end to the
    /// first, each adds one sequence to those that are still there.
    fn fits(&self, job: Job) -> bool {
        let job = Running { job, finish: self.step + job.output - 1, prefill_left: 0, sampled: 1 };
        let place = self.running.partition_point(|other| other.finish <= job.finish);
        let (sooner, later) = self.running.split_at(place);
        let capacity = self.num_blocks * self.block_size;
        let (mut tokens, mut count) = (0, 0);
        for last in later.iter().rev().chain(std::iter::once(&job)).chain(sooner.iter().rev()) {
            tokens += last.full_length();
            count += 1;
            let ahead = last.finish.saturating_sub(self.step);
            // Rounding up to blocks adds at most block_size - 1 to each.
            let at_most = tokens + count * (ahead + self.block_size - 1);
            if at_most > capacity && !self.fits_at(&job, last.finish, ahead) {
                return false;
            }
        }
        true
    }

    /// Blocks of everything that ends at `finish` or later, rounded up one by one.
    fn fits_at(&self, job: &Running, finish: u64, ahead: u64) -> bool {
        let at_finish = |running: &Running| {
            if running.finish >= finish { self.blocks(running.full_length() + ahead) } else { 0 }
        };
        self.running.iter().map(at_finish).sum::<u64>() + at_finish(job) <= self.num_blocks
    }
}
