//! The `learned` policy: how soon a prefix is likely to be used again, learned from the stream itself.
//!
//! Each finished request leaves a *record* of where its prompt ended. A later prompt that passes through that
//! end is its continuation, and gives one observation: after how many requests it came. Records that were not
//! continued yet are observations too (censored ones), so what eviction took away early still counts. The
//! hazard of a class is estimated from both (Kaplan-Meier over logarithmic ages, shrunk towards all classes
//! together), and the value of keeping a block of that class at that age is the best ratio, over all
//! horizons, of expected reuse to expected time in residence.
//!
//! Classes are (turn of the conversation, prompt length), and one for prefixes that many requests branch
//! from. There are no constants to set per workload; with nothing seen yet every class falls with age in the
//! same way, which is LRU.

use hashbrown::HashTable;
use std::sync::{Arc, LazyLock};

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
const RECORDS_PER_STEP: usize = 256;
/// Bits of the filter that tells most prefixes that are no record's end.
const FILTER_BITS: usize = 1 << 18;
/// Observations that the assumption for an unseen stream counts for.
const INITIAL_WEIGHT: f64 = 4.0;
/// Observations that the estimate over all classes counts for in each class.
const SHRINKAGE: f64 = 5.0;
/// Continuations of one end after which it counts as a branching point.
const MIN_BRANCHES: u32 = 3;

/// Where a finished request's prompt ended.
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
    /// Digest of the whole prompt, if there is one. A next turn passes through it whatever became of the answer.
    end: Option<u64>,
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
    /// The same of a pin that has inserted nothing.
    pub(super) const fn of_look(self) -> Self {
        Self { is_request: false, ..self }
    }

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
    /// Slot of the latest record of each end. Digests are hashes already.
    latest: HashTable<u32>,
    filter: Filter,
    num_requests: u64,
    estimate: Estimate,
    values: Arc<[[f32; NUM_BUCKETS]; NUM_CLASSES]>,
}

/// Which digests may be a record's end.
struct Filter(Box<[u64]>);

impl Filter {
    fn new() -> Self {
        Self(vec![0; FILTER_BITS / 64].into_boxed_slice())
    }

    fn position(digest: u64) -> (usize, u64) {
        let bit = digest as usize % FILTER_BITS;
        (bit / 64, 1 << (bit % 64))
    }

    fn insert(&mut self, digest: u64) {
        let (word, mask) = Self::position(digest);
        self.0[word] |= mask;
    }

    #[inline]
    fn may_have(&self, digest: u64) -> bool {
        let (word, mask) = Self::position(digest);
        self.0[word] & mask != 0
    }
}

/// An estimate in progress, a bounded piece per finished request: first the records are counted, then the
/// classes get their values one by one.
struct Estimate {
    /// Records counted.
    position: usize,
    /// Whether all are.
    is_counted: bool,
    /// Classes done, once all records are counted.
    num_classes: usize,
    /// Continued at an age of that bucket.
    continued: Box<Histogram>,
    /// Last seen at an age of that bucket, continued or not.
    last_seen: Box<Histogram>,
    /// The filter without the ends that were forgotten.
    filter: Filter,
}

impl Estimate {
    fn new() -> Self {
        let empty = || Box::new([[0.0; NUM_BUCKETS]; NUM_CLASSES]);
        let (continued, last_seen) = (empty(), empty());
        Self { position: 0, is_counted: false, num_classes: 0, continued, last_seen, filter: Filter::new() }
    }

    /// Hazards of a class, shrunk towards those of all chains together.
    fn hazards(&self, class: usize) -> [f64; NUM_BUCKETS] {
        let chains = ..NUM_CHAIN_CLASSES;
        let together = (sum(&self.continued[chains]), sum(&self.last_seen[chains]));
        let prior = hazards(&together.0, &together.1, INITIAL_WEIGHT, &initial_hazards());
        hazards(&self.continued[class], &self.last_seen[class], SHRINKAGE, &prior)
    }
}

/// What a block is worth by class and time of release, at one moment.
pub(super) struct Values {
    now: u64,
    table: Arc<[[f32; NUM_BUCKETS]; NUM_CLASSES]>,
}

impl Values {
    /// The value of a block of this class that was released at `stamp`.
    #[inline]
    pub(super) fn of(&self, class: usize, stamp: u64) -> f32 {
        let age = self.now.saturating_sub(stamp);
        let (bucket, values) = (bucket_of(age), &self.table[class]);
        let Some(next) = values.get(bucket + 1) else { return values[bucket] };
        let share = ((age as f64 - STARTS[bucket]) / width_of(bucket)).clamp(0.0, 1.0);
        values[bucket] + (next - values[bucket]) * share as f32
    }
}

impl Learner {
    pub(super) fn new() -> Self {
        let estimate = Estimate::new();
        let values = Arc::new(std::array::from_fn(|class| values(&estimate.hazards(class))));
        Self {
            records: Vec::new(),
            next: 0,
            latest: HashTable::new(),
            filter: Filter::new(),
            num_requests: 1,
            estimate,
            values,
        }
    }

    /// The latest record that ended there.
    #[inline]
    fn find(&self, digest: u64) -> Option<usize> {
        if !self.filter.may_have(digest) {
            return None;
        }
        self.latest
            .find(digest, |&slot| self.records[slot as usize].digest == digest)
            .map(|&slot| slot as usize)
    }

    /// Finished requests so far: the policy's time.
    pub(super) fn now(&self) -> u64 {
        self.num_requests
    }

    /// What blocks are worth now.
    pub(super) fn values(&self) -> Values {
        Values { now: self.num_requests, table: Arc::clone(&self.values) }
    }

    /// Places a prompt: `digests` are those of its whole-block prefixes, shortest first, `matched` that of what
    /// was found resident.
    pub(super) fn look_up(&self, digests: &[u64], num_tokens: usize, matched: u64) -> History {
        let end = digests.last().copied();
        let mut history = History { turn: 1, digest: matched, end, ..History::default() };
        let latest =
            |(depth, digest): (usize, &u64)| self.find(*digest).map(|slot| (depth + 1, self.records[slot]));
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
        if let Some(slot) = history.predecessor.and_then(|digest| self.find(digest)) {
            let record = &mut self.records[slot];
            record.num_continued += 1;
            record.gap.get_or_insert(self.num_requests.saturating_sub(record.time));
        }
    }

    /// The request ended.
    pub(super) fn finish(&mut self, history: &History, num_blocks: u32) {
        if !history.is_request {
            return;
        }
        if num_blocks == 0 {
            self.num_requests += 1;
            return;
        }
        let digest = history.end.unwrap_or(history.digest);
        let num_continued = self.find(digest).map_or(0, |slot| self.records[slot].num_continued);
        let class = if num_continued >= MIN_BRANCHES { SHARED_CLASS } else { history.class };
        let (turn, time) = (history.turn, self.num_requests);
        self.remember(Record { digest, class, turn, num_continued, time, gap: None });
        self.num_requests += 1;
        self.step();
    }

    fn remember(&mut self, record: Record) {
        let slot = self.next as u32;
        self.next = (self.next + 1) % MAX_RECORDS;
        let Self { records, latest, filter, estimate, .. } = self;
        if let Some(old) = records.get(slot as usize) {
            if let Ok(entry) = latest.find_entry(old.digest, |&other| other == slot) {
                entry.remove();
            }
            records[slot as usize] = record;
        } else {
            records.push(record);
        }
        if let Ok(entry) =
            latest.find_entry(record.digest, |&other| records[other as usize].digest == record.digest)
        {
            entry.remove();
        }
        latest.insert_unique(record.digest, slot, |&other| records[other as usize].digest);
        filter.insert(record.digest);
        estimate.filter.insert(record.digest);
    }

    /// A bounded piece of the next estimate.
    fn step(&mut self) {
        let estimate = &mut self.estimate;
        if !estimate.is_counted {
            let end = (estimate.position + RECORDS_PER_STEP).min(self.records.len());
            for record in &self.records[estimate.position..end] {
                let class = record.class as usize;
                let age = record.gap.unwrap_or(self.num_requests.saturating_sub(record.time));
                estimate.last_seen[class][bucket_of(age)] += 1.0;
                if record.gap.is_some() {
                    estimate.continued[class][bucket_of(age)] += 1.0;
                }
                estimate.filter.insert(record.digest);
            }
            estimate.position = end;
            estimate.is_counted = end == self.records.len();
            return;
        }
        let class = estimate.num_classes;
        Arc::make_mut(&mut self.values)[class] = values(&estimate.hazards(class));
        estimate.num_classes += 1;
        if estimate.num_classes == NUM_CLASSES {
            self.filter = std::mem::replace(&mut self.estimate, Estimate::new()).filter;
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

/// The bucket of an age: its octave, and a third of that.
#[inline]
fn bucket_of(age: u64) -> usize {
    if age == 0 {
        return 0;
    }
    let octave = age.ilog2();
    // 16 bits of the mantissa, against the cube roots of 2 and 4.
    let mantissa = (u128::from(age) << 16 >> octave) as u32;
    let third = usize::from(mantissa >= 82_571) + usize::from(mantissa >= 104_033);
    (octave as usize * 3 + third + 1).min(NUM_BUCKETS - 1)
}

/// Age at which each bucket begins, and the last ends.
static STARTS: LazyLock<[f64; NUM_BUCKETS + 1]> = LazyLock::new(|| {
    std::array::from_fn(|bucket| if bucket == 0 { 0.0 } else { ((bucket - 1) as f64 / 3.0).exp2() })
});

fn width_of(bucket: usize) -> f64 {
    STARTS[bucket + 1] - STARTS[bucket]
}

fn sum(histograms: &[[f64; NUM_BUCKETS]]) -> [f64; NUM_BUCKETS] {
    std::array::from_fn(|bucket| histograms.iter().map(|histogram| histogram[bucket]).sum())
}

/// What is assumed of a stream of which nothing was seen: the same falling rate for everything.
fn initial_hazards() -> [f64; NUM_BUCKETS] {
    std::array::from_fn(|bucket| 0.02 * width_of(bucket) / (1.0 + STARTS[bucket]))
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
    // Both are differences of running sums: what survives, and how long it stayed, up to each bucket's start.
    let (mut surviving, mut residence) = ([1.0; NUM_BUCKETS], [0.0; NUM_BUCKETS]);
    for bucket in 1..NUM_BUCKETS {
        let before = surviving[bucket - 1];
        surviving[bucket] = before * (1.0 - hazards[bucket - 1]);
        residence[bucket] = residence[bucket - 1] + width_of(bucket - 1) * (before + surviving[bucket]) / 2.0;
    }
    let best_from = |age: usize| {
        let horizons = surviving[age..].iter().zip(&residence[age..]).skip(1);
        let ratio = |(left, until): (&f64, &f64)| (surviving[age] - left) / (until - residence[age]);
        horizons.map(ratio).fold(0.0, f64::max) as f32
    };
    let mut values: [f32; NUM_BUCKETS] = std::array::from_fn(best_from);
    let last = NUM_BUCKETS - 1;
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
            learner.finish(&history, 1);
        }
        let values = learner.values();
        let (short, long) = (class_of(5, 1000) as usize, class_of(1, 10_000) as usize);
        assert!(values.of(short, learner.now() - 10) > 3.0 * values.of(long, learner.now() - 10));
        assert!(values.of(short, learner.now() - 10) > values.of(short, learner.now() - 1000));
    }
}
