//! What a run is judged by: distributions, never means alone.

use super::active::Active;
use crate::block_pool::PoolStats;
use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// Prompt lengths up to which a latency belongs to a class; longer ones are in the last.
pub(super) const CONTEXT_CLASSES: [u32; 5] = [1 << 10, 1 << 12, 1 << 14, 1 << 16, u32::MAX];

/// Percent of the blocks that a device may lack.
const SHORTAGES: [u64; 3] = [1, 5, 10];

/// Points of the timeline before every other one is dropped.
const MAX_POINTS: usize = 2048;

/// A distribution of whole numbers to three figures.
pub(super) struct Quantiles {
    histogram: Histogram<u64>,
    /// Numbers recorded, whatever their weights.
    count: u64,
    /// Exact, unlike the histogram's classes.
    max: u64,
    scale: f64,
}

impl Quantiles {
    /// `scale` turns a recorded number into the unit that is reported.
    pub(super) fn new(scale: f64) -> Self {
        // Three figures and automatic size: the constructor fails for more than five figures only.
        #[expect(clippy::expect_used, reason = "three figures are in the accepted range")]
        let histogram = Histogram::new(3).expect("three significant figures are valid");
        Self { histogram, count: 0, max: 0, scale }
    }

    pub(super) fn record(&mut self, value: u64, weight: u64) {
        // A resizing histogram refuses nothing below 2^63.
        let _ = self.histogram.record_n(value.min(1 << 62), weight);
        self.count += 1;
        self.max = self.max.max(value);
    }

    /// Records seconds in microseconds.
    pub(super) fn record_seconds(&mut self, seconds: f64) {
        self.record((seconds * 1e6).round() as u64, 1);
    }

    pub(super) fn mean(&self) -> f64 {
        self.histogram.mean() * self.scale
    }

    pub(super) fn report(&self) -> Value {
        self.report_at_least(0)
    }

    /// The same when the largest is known to be at least `max`, between what was recorded.
    fn report_at_least(&self, max: u64) -> Value {
        let at =
            |share: f64| round(self.histogram.value_at_quantile(share).min(self.max) as f64 * self.scale);
        json!({
            "count": self.count,
            "mean": round(self.mean()),
            "p50": at(0.5),
            "p90": at(0.9),
            "p99": at(0.99),
            "p999": at(0.999),
            "max": round(self.max.max(max) as f64 * self.scale),
        })
    }
}

/// Six significant decimals are more than a histogram has.
pub(super) fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// Latencies of a set of requests.
pub(super) struct Latencies {
    queue_wait: Quantiles,
    first_token: Quantiles,
    per_token: Quantiles,
    worst_gap: Quantiles,
}

impl Latencies {
    pub(super) fn new() -> Self {
        let seconds = || Quantiles::new(1e-6);
        Self { queue_wait: seconds(), first_token: seconds(), per_token: seconds(), worst_gap: seconds() }
    }

    pub(super) fn record(&mut self, request: &Active) {
        if let Some(started) = request.started {
            self.queue_wait.record_seconds(started - request.arrival);
        }
        if request.sampled > 0 {
            self.first_token.record_seconds(request.first_token - request.arrival);
        }
        if request.sampled > 1 {
            let decode = request.last_token - request.first_token;
            self.per_token.record_seconds(decode / f64::from(request.sampled - 1));
            self.worst_gap.record_seconds(request.worst_gap);
        }
    }

    pub(super) fn report(&self) -> Value {
        json!({
            "queue_wait": self.queue_wait.report(),
            "time_to_first_token": self.first_token.report(),
            "time_per_output_token": self.per_token.report(),
            "worst_gap": self.worst_gap.report(),
        })
    }
}

/// What one step held.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepMemory {
    pub(super) num_sequences: u64,
    /// Blocks of the sequences in the batch, each counting what it shares.
    pub(super) unshared_blocks: u64,
    /// Positions of those blocks that hold no token.
    pub(super) unused_slots: u64,
    /// Blocks that one contiguous range of prompt and maximum output for each sequence would take.
    pub(super) contiguous_blocks: u64,
}

/// Memory over time, each state weighted by how long it lasted.
pub(super) struct MemoryOverTime {
    held: Quantiles,
    cached: Quantiles,
    reserved: Quantiles,
    free: Quantiles,
    batch: Quantiles,
    unshared: Quantiles,
    contiguous: Quantiles,
    held_time: f64,
    time: f64,
    unused_slots: f64,
    slots: f64,
    points: Vec<(f64, PoolStats, u64)>,
    stride: u64,
    steps: u64,
    /// Times that the held blocks rose above what a device that is short by `SHORTAGES` has.
    overruns: [u64; SHORTAGES.len()],
    /// Steps in which more was held than the device has: what admission promises never to be.
    over_capacity: u64,
    last_held: u64,
}

impl MemoryOverTime {
    pub(super) fn new() -> Self {
        let count = || Quantiles::new(1.0);
        Self {
            held: count(),
            cached: count(),
            reserved: count(),
            free: count(),
            batch: count(),
            unshared: count(),
            contiguous: count(),
            held_time: 0.0,
            time: 0.0,
            unused_slots: 0.0,
            slots: 0.0,
            points: Vec::new(),
            stride: 1,
            steps: 0,
            overruns: [0; SHORTAGES.len()],
            over_capacity: 0,
            last_held: 0,
        }
    }

    pub(super) fn record(
        &mut self,
        now: f64,
        seconds: f64,
        pool: PoolStats,
        step: StepMemory,
        block_size: u32,
    ) {
        let weight = ((seconds * 1e6) as u64).max(1);
        self.held.record(pool.held, weight);
        self.cached.record(pool.cached, weight);
        self.reserved.record(pool.reserved, weight);
        self.free.record(pool.free, weight);
        self.batch.record(step.num_sequences, weight);
        // A sequence that waits for its swapped tail is in no batch, and holds what is left of it.
        self.unshared.record(step.unshared_blocks.max(pool.held), weight);
        self.contiguous.record(step.contiguous_blocks.max(pool.held), weight);
        self.held_time += pool.held as f64 * seconds;
        self.time += seconds;
        self.unused_slots += step.unused_slots as f64 * seconds;
        self.slots += (step.unshared_blocks * u64::from(block_size)) as f64 * seconds;
        for (count, percent) in self.overruns.iter_mut().zip(SHORTAGES) {
            let limit = pool.capacity * (100 - percent) / 100;
            *count += u64::from(self.last_held <= limit && pool.held > limit);
        }
        let committed = pool.held + pool.reserved + pool.quarantined;
        self.over_capacity += u64::from(committed > pool.capacity);
        self.last_held = pool.held;
        if self.steps.is_multiple_of(self.stride) {
            self.push_point(now, pool, step.num_sequences);
        }
        self.steps += 1;
    }

    fn push_point(&mut self, now: f64, pool: PoolStats, num_sequences: u64) {
        self.points.push((now, pool, num_sequences));
        if self.points.len() > MAX_POINTS {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.stride *= 2;
        }
    }

    /// Held blocks on average over the time that steps took.
    pub(super) fn mean_held(&self) -> f64 {
        if self.time > 0.0 { self.held_time / self.time } else { 0.0 }
    }

    pub(super) fn batch_report(&self) -> Value {
        self.batch.report()
    }

    /// The pool's own peak is between two steps: what is held never was more.
    pub(super) fn report(&self, peak_held: u64) -> Value {
        json!({
            "held": self.held.report_at_least(peak_held),
            "cached": self.cached.report(),
            "reserved": self.reserved.report(),
            "free": self.free.report(),
            "held_if_nothing_were_shared": self.unshared.report_at_least(peak_held),
            "contiguous_reservation": self.contiguous.report_at_least(peak_held),
            "internal_waste": if self.slots > 0.0 { round(self.unused_slots / self.slots) } else { 0.0 },
        })
    }

    /// Steps in which more was promised or held than the device has.
    pub(super) fn over_capacity(&self) -> u64 {
        self.over_capacity
    }

    /// How often an engine that counts on the whole pool would have run out on a device that is short of it.
    pub(super) fn overrun_report(&self) -> Value {
        let rows = SHORTAGES.iter().zip(self.overruns);
        rows.map(|(percent, count)| (format!("{percent}%"), json!(count)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }

    /// Columns of a plot: seconds, blocks by state, sequences in the batch.
    pub(super) fn timeline(&self) -> Value {
        let column =
            |of: &dyn Fn(&(f64, PoolStats, u64)) -> Value| self.points.iter().map(of).collect::<Value>();
        json!({
            "time": column(&|point| json!(round(point.0))),
            "held": column(&|point| json!(point.1.held)),
            "cached": column(&|point| json!(point.1.cached)),
            "reserved": column(&|point| json!(point.1.reserved)),
            "free": column(&|point| json!(point.1.free)),
            "batch": column(&|point| json!(point.2)),
        })
    }
}
