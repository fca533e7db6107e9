//! The `learned` policy: how soon a prefix is likely to be used again, learned from the stream itself.
//!
//! Each finished request leaves a *record* of where its prefix ended. A later prompt that passes through that
//! end is its continuation, and gives one observation: after how many requests it came. Records that were not
//! continued yet are observations too (censored ones), so what eviction took away early still counts. The
//! hazard of a class is estimated from both (Kaplan-Meier over logarithmic ages, shrunk towards all classes
//! together), and the value of keeping a block of that class at that age is the best ratio, over all
//! horizons, of expected reuse to expected time in residence.
//!
//! Classes are (turn of the conversation, prompt length), and one for prefixes that many requests branch
//! from. There are no constants to set per workload; with nothing seen yet every class falls with age in the
//! same way, which is LRU.

use std::collections::HashMap;

/// Classes of a continued prefix: turns by lengths.
const NUM_CHAIN_CLASSES: usize = 16;
/// The class of prefixes that several different requests continued.
const SHARED_CLASS: u8 = 16;
/// All classes.
pub(super) const NUM_CLASSES: usize = 17;
/// Logarithmic age buckets, three an octave; the first is "less than one request".
const NUM_BUCKETS: usize = 48;
/// Records remembered.
const MAX_RECORDS: usize = 16_384;
/// Records looked at per finished request, so that no call does the whole estimate.
const RECORDS_PER_STEP: usize = 512;
/// Observations that the estimate over all classes counts for in each class.
const SHRINKAGE: f64 = 5.0;
/// Continuations of one end after which it counts as a branching point.
const MIN_BRANCHES: u32 = 3;

/// Digest of the empty prefix.
pub(super) const EMPTY: u64 = 0;

/// Where a finished request's prefix ended.
#[derive(Clone, Copy, Debug)]
struct Record {
    digest: u64,
    class: u8,
    turn: u16,
    /// Requests that continued this end so far, over all records of it.
    num_continued: u32,
    /// The request count when it was released.
    time: u64,
    /// Requests until the first continuation.
    gap: Option<u64>,
}

/// What the policy knows of a pinned prefix.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct History {
    /// Digest of the pinned prefix.
    pub(super) digest: u64,
    /// Digest of the record that the prompt continues.
    predecessor: Option<u64>,
    /// Class of the blocks below the branching point.
    pub(super) class: u8,
    turn: u16,
    /// Blocks down to the branching point.
    pub(super) num_shared: u32,
    /// Whether something was inserted, that is, whether this was a request and not only a look.
    is_request: bool,
}

impl History {
    /// The class of a node that ends at this depth.
    pub(super) fn class_at(&self, num_blocks: u32) -> u8 {
        if num_blocks <= self.num_shared { SHARED_CLASS } else { self.class }
    }
}

type Histogram = [[f64; NUM_BUCKETS]; NUM_CLASSES];

/// Records, and what was estimated from them.
pub(super) struct Learner {
    records: Vec<Record>,
    /// Slot that the next record overwrites once all are in use.
    next: usize,
    /// Record of each end, the latest one.
    by_digest: HashMap<u64, u32>,
    num_requests: u64,
    estimate: Estimate,
    values: Box<[[f32; NUM_BUCKETS]; NUM_CLASSES]>,
}

/// What a block is worth by class and time of release, at one moment.
pub(super) struct Values {
    now: u64,
    table: Box<[[f32; NUM_BUCKETS]; NUM_CLASSES]>,
}

impl Values {
    /// The value of a block of this class that was released at `stamp`.
    #[inline]
    pub(super) fn of(&self, class: usize, stamp: u64) -> f32 {
        self.table[class][bucket_of(self.now.saturating_sub(stamp))]
    }
}

/// An estimate in progress: a pass over the records, then over the classes.
struct Estimate {
    position: usize,
    /// Continued at an age of that bucket.
    continued: Box<Histogram>,
    /// Last seen at an age of that bucket, continued or not.
    last_seen: Box<Histogram>,
}

impl Estimate {
    fn new() -> Self {
        let empty = || Box::new([[0.0; NUM_BUCKETS]; NUM_CLASSES]);
        Self { position: 0, continued: empty(), last_seen: empty() }
    }
}

impl Learner {
    pub(super) fn new() -> Self {
        let mut learner = Self {
            records: Vec::new(),
            next: 0,
            by_digest: HashMap::new(),
            num_requests: 1,
            estimate: Estimate::new(),
            values: Box::new([[0.0; NUM_BUCKETS]; NUM_CLASSES]),
        };
        learner.conclude();
        learner
    }

    /// Finished requests so far: the policy's time.
    pub(super) fn now(&self) -> u64 {
        self.num_requests
    }

    /// What blocks are worth now.
    pub(super) fn values(&self) -> Values {
        Values { now: self.num_requests, table: self.values.clone() }
    }

    /// Places a prompt: `digests` are those of its whole-block prefixes, shortest first.
    pub(super) fn look_up(&self, digests: &[u64], num_tokens: usize, num_matched: usize) -> History {
        let mut history = History { turn: 1, ..History::default() };
        if let Some(digest) = num_matched.checked_sub(1).and_then(|last| digests.get(last)) {
            history.digest = *digest;
        }
        let latest = |(depth, digest): (usize, &u64)| {
            self.by_digest.get(digest).map(|&slot| (depth + 1, self.records[slot as usize]))
        };
        if let Some((depth, record)) = digests.iter().enumerate().rev().find_map(latest) {
            history.predecessor = Some(record.digest);
            if record.num_continued + 1 >= MIN_BRANCHES {
                history.num_shared = depth as u32;
            } else {
                history.turn = record.turn.saturating_add(1);
            }
        }
        history.class = class_of(history.turn, num_tokens);
        history
    }

    /// The pinned prompt inserted something: it counts as a request, and as a continuation of its predecessor.
    pub(super) fn begin(&mut self, history: &mut History) {
        if std::mem::replace(&mut history.is_request, true) {
            return;
        }
        let slot = history.predecessor.and_then(|digest| self.by_digest.get(&digest).copied());
        if let Some(slot) = slot {
            let record = &mut self.records[slot as usize];
            record.num_continued += 1;
            record.gap.get_or_insert(self.num_requests.saturating_sub(record.time));
        }
    }

    /// The request ended at its history's digest.
    pub(super) fn finish(&mut self, history: &History) {
        if !history.is_request {
            return;
        }
        if history.digest == EMPTY {
            self.num_requests += 1;
            return;
        }
        let known =
            self.by_digest.get(&history.digest).map(|&slot| self.records[slot as usize].num_continued);
        let num_continued = known.unwrap_or(0);
        let class = if num_continued >= MIN_BRANCHES { SHARED_CLASS } else { history.class };
        let (digest, turn, time) = (history.digest, history.turn, self.num_requests);
        self.remember(Record { digest, class, turn, num_continued, time, gap: None });
        self.num_requests += 1;
        self.step();
    }

    fn remember(&mut self, record: Record) {
        let slot = self.next;
        self.next = (self.next + 1) % MAX_RECORDS;
        match self.records.get_mut(slot) {
            None => self.records.push(record),
            Some(old) => {
                if self.by_digest.get(&old.digest) == Some(&(slot as u32)) {
                    self.by_digest.remove(&old.digest);
                }
                *old = record;
            }
        }
        self.by_digest.insert(record.digest, slot as u32);
    }

    /// A bounded piece of the next estimate.
    fn step(&mut self) {
        let Estimate { position, continued, last_seen } = &mut self.estimate;
        let end = (*position + RECORDS_PER_STEP).min(self.records.len());
        for record in &self.records[*position..end] {
            let class = record.class as usize;
            let age = record.gap.unwrap_or(self.num_requests.saturating_sub(record.time));
            last_seen[class][bucket_of(age)] += 1.0;
            if record.gap.is_some() {
                continued[class][bucket_of(age)] += 1.0;
            }
        }
        *position = end;
        if end == self.records.len() {
            self.conclude();
        }
    }

    /// Turns the counts into values and begins anew.
    fn conclude(&mut self) {
        let Estimate { continued, last_seen, .. } = std::mem::replace(&mut self.estimate, Estimate::new());
        let chains = ..NUM_CHAIN_CLASSES;
        let prior = hazards(&sum(&continued[chains]), &sum(&last_seen[chains]), 4.0, &initial_hazards());
        for class in 0..NUM_CLASSES {
            let hazards = hazards(&continued[class], &last_seen[class], SHRINKAGE, &prior);
            self.values[class] = values(&hazards);
        }
    }
}

/// Class of a chain by its turn (1, 2, 3 to 4, more) and prompt length (under 2k, 8k, 32k tokens, more).
fn class_of(turn: u16, num_tokens: usize) -> u8 {
    let turn = match turn {
        0 | 1 => 0,
        2 => 1,
        3 | 4 => 2,
        _ => 3,
    };
    let length = match num_tokens {
        0..2048 => 0,
        2048..8192 => 1,
        8192..32_768 => 2,
        _ => 3,
    };
    turn * 4 + length
}

fn bucket_of(age: u64) -> usize {
    if age == 0 {
        return 0;
    }
    (((age as f64).log2() * 3.0) as usize + 1).min(NUM_BUCKETS - 1)
}

/// Age at which a bucket begins.
fn start_of(bucket: usize) -> f64 {
    if bucket == 0 { 0.0 } else { ((bucket - 1) as f64 / 3.0).exp2() }
}

fn sum(histograms: &[[f64; NUM_BUCKETS]]) -> [f64; NUM_BUCKETS] {
    std::array::from_fn(|bucket| histograms.iter().map(|histogram| histogram[bucket]).sum())
}

/// What is assumed of a stream of which nothing was seen: the same falling rate for everything.
fn initial_hazards() -> [f64; NUM_BUCKETS] {
    std::array::from_fn(|b| 0.02 * (start_of(b + 1) - start_of(b)).min(1000.0) / 1000.0)
}

/// Probability of a continuation within each bucket, given none before, with `weight` observations of `prior`.
fn hazards(
    continued: &[f64; NUM_BUCKETS],
    last_seen: &[f64; NUM_BUCKETS],
    weight: f64,
    prior: &[f64; NUM_BUCKETS],
) -> [f64; NUM_BUCKETS] {
    let mut at_risk: f64 = last_seen.iter().sum();
    std::array::from_fn(|b| {
        // Those last seen in the bucket without a continuation were at risk for half of it.
        let exposed = at_risk + weight - 0.5 * (last_seen[b] - continued[b]);
        at_risk -= last_seen[b];
        ((continued[b] + weight * prior[b]) / exposed.max(1e-9)).min(0.95)
    })
}

/// For each age, the best ratio over all horizons of expected reuse to expected time in residence.
fn values(hazards: &[f64; NUM_BUCKETS]) -> [f32; NUM_BUCKETS] {
    let last = NUM_BUCKETS - 1;
    let best_from = |age: usize| {
        let (mut surviving, mut residence, mut best) = (1.0, 0.0, 0.0f64);
        for (bucket, hazard) in hazards.iter().enumerate().take(last).skip(age) {
            let next = surviving * (1.0 - hazard);
            residence += (start_of(bucket + 1) - start_of(bucket)) * (surviving + next) / 2.0;
            surviving = next;
            best = best.max((1.0 - surviving) / residence);
        }
        best as f32
    };
    let mut values: [f32; NUM_BUCKETS] = std::array::from_fn(best_from);
    values[last] = values[last - 1] / 2.0;
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_an_unseen_stream_is_ordered_by_age_alone() {
        let learner = Learner::new();
        for class in 0..NUM_CLASSES {
            assert_eq!(learner.values[class], learner.values[0]);
        }
        assert!(learner.values[0].windows(2).all(|pair| pair[0] >= pair[1]), "{:?}", learner.values[0]);
    }

    #[test]
    fn test_what_is_continued_becomes_worth_more_than_what_is_not() {
        let mut learner = Learner::new();
        // Short prompts are always continued after 20 requests, long ones never.
        for request in 0..2_000u64 {
            let is_short = request % 2 == 0;
            let before = if is_short && request >= 20 { request - 19 } else { u64::MAX };
            let num_tokens = if is_short { 1000 } else { 10_000 };
            let mut history = learner.look_up(&[before, request + 1], num_tokens, 0);
            learner.begin(&mut history);
            history.digest = request + 1;
            learner.finish(&history);
        }
        let values = learner.values();
        let (short, long) = (class_of(5, 1000) as usize, class_of(1, 10_000) as usize);
        assert!(values.of(short, learner.now() - 10) > 3.0 * values.of(long, learner.now() - 10));
        assert!(values.of(short, learner.now() - 10) > values.of(short, learner.now() - 1000));
    }
}
