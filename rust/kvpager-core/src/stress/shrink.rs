//! Makes a failing history small enough to read, by running parts of it again.
//!
//! A history is run again in one of two ways, and the report says which:
//!
//! * *in order*: one thread does the operations of all workers in the order in which they began. It always comes to
//!   the same end, so a history that fails is a proof, and so is each smaller one.
//! * *at once*: a fault that only an interleaving shows needs threads, and no one can force the interleaving from
//!   outside of the pool. Then every worker repeats its operations on a thread of its own for some milliseconds; a
//!   smaller history is kept if it fails in one of a few runs, and the report says in how many of its last runs the
//!   smallest one failed.
//!
//! If it never fails again, the last operations of each worker are reported as they were recorded.

use super::operation::Op;
use super::report::Violation;
use super::rounds::{Bench, Record, Source, THREAD_NAME, run, run_in_order};
use super::settings::Round;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Time of one run at once, and how many a history gets to fail in.
const RUN_TIME: Duration = Duration::from_millis(40);
const NUM_TRIES: usize = 4;
/// Runs of the smallest history, to say how often it fails.
const NUM_FINAL_RUNS: usize = 20;
/// Times over that a small history is done in order, and how long that may take at least.
const REPEATS: [usize; 6] = [1, 2, 4, 16, 64, 256];
const PROMOTION_TIME: Duration = Duration::from_secs(1);
/// Last operations of a worker that are run again at once: more and more of them.
const TAILS: [usize; 3] = [48, 384, 3072];
/// Operations of a worker that are shown where nothing failed again.
const NUM_SHOWN: usize = 12;

/// The smallest failing history that was found.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// `in_order`, `at_once` or `recorded`.
    way: &'static str,
    round: Round,
    operations: Vec<(usize, Op)>,
    /// What the history shows; the first finding, if it is only recorded.
    text: String,
    /// Runs of it, and how many of them failed.
    runs: usize,
    failures: usize,
}

impl History {
    pub(super) fn to_json(&self) -> Value {
        let round = &self.round;
        let tenants: Vec<_> = (0..round.tenants)
            .map(|tenant| {
                let (guaranteed, limit) = round.quota(tenant);
                json!({"guaranteed": guaranteed, "limit": limit})
            })
            .collect();
        let operation = |(thread, op): &(usize, Op)| json!({"thread": thread, "operation": op.to_string()});
        json!({
            "way": self.way,
            "text": self.text,
            "blocks": round.blocks,
            "tenants": tenants,
            "max_open_steps": round.max_open_steps,
            "runs": self.runs,
            "failures": self.failures,
            "operations": self.operations.iter().map(operation).collect::<Vec<_>>(),
        })
    }
}

/// Finds a small history that fails as a round did, whose operations are in its benches.
pub(super) fn shrink<const F: u8>(
    round: Round,
    benches: &[Bench],
    violation: &Violation,
    until: Instant,
) -> History {
    let programs = recorded(benches, violation);
    // A thread of its own, so that its panics are told from others'.
    let thread = std::thread::Builder::new().name(format!("{THREAD_NAME}shrink"));
    let shrunk = std::thread::scope(|scope| {
        let work = || in_order::<F>(round, benches, until).or_else(|| at_once::<F>(round, &programs, until));
        thread.spawn_scoped(scope, work).ok().and_then(|thread| thread.join().ok()).flatten()
    });
    shrunk.unwrap_or_else(|| as_recorded(round, &programs, violation))
}

/// Each worker's operations up to the violation, if a worker saw it.
fn recorded(benches: &[Bench], violation: &Violation) -> Vec<Vec<Op>> {
    let end = violation
        .seen_by
        .and_then(|(thread, at)| benches[thread].records.get(at))
        .map_or(u32::MAX, |record| record.begin);
    let program = |bench: &Bench| {
        bench.records.iter().take_while(|record| record.begin <= end).map(|record| record.op).collect()
    };
    benches.iter().map(program).collect()
}

fn as_recorded(round: Round, programs: &[Vec<Op>], violation: &Violation) -> History {
    let last = |(thread, program): (usize, &Vec<Op>)| {
        let from = program.len().saturating_sub(NUM_SHOWN);
        program[from..].iter().map(move |op| (thread, *op)).collect::<Vec<_>>()
    };
    let operations = programs.iter().enumerate().flat_map(last).collect();
    let text = violation.text.clone();
    History { way: "recorded", round, operations, text, runs: 0, failures: 0 }
}

/// Runs all recorded operations in order: as they began, and as they ended; then those alone that were not refused,
/// since a call that comes at another moment may be refused for want of room, and what built on it is skipped then.
fn in_order<const F: u8>(round: Round, benches: &[Bench], until: Instant) -> Option<History> {
    let mut all: Vec<(usize, Record)> = benches
        .iter()
        .enumerate()
        .flat_map(|(thread, bench)| bench.records.iter().map(move |record| (thread, *record)))
        .collect();
    let history = |all: &[(usize, Record)]| all.iter().map(|(thread, record)| (*thread, record.op)).collect();
    for _ in 0..2 {
        all.sort_by_key(|(thread, record)| (record.begin, *thread));
        let by_begin = smallest_in_order::<F>(round, history(&all), until);
        if by_begin.is_some() {
            return by_begin;
        }
        all.sort_by_key(|(thread, record)| (record.end, *thread));
        let by_end = smallest_in_order::<F>(round, history(&all), until);
        if by_end.is_some() {
            return by_end;
        }
        all.retain(|(_, record)| !record.was_refused);
    }
    None
}

/// Makes a history smaller that fails in order; `None` if it does not fail.
fn smallest_in_order<const F: u8>(
    round: Round,
    mut history: Vec<(usize, Op)>,
    until: Instant,
) -> Option<History> {
    let violation = run_in_order::<F>(round, &history)?;
    cut_tail(&mut history, &violation);
    let mut smallest = Smallest { round, history, violation, until };
    smallest.reduce(&mut |round, history| run_in_order::<F>(round, history));
    let Smallest { round, history, violation, .. } = smallest;
    Some(History { way: "in_order", round, operations: history, text: violation.text, runs: 1, failures: 1 })
}

/// What comes after the operation that saw the violation is not needed.
fn cut_tail(history: &mut Vec<(usize, Op)>, violation: &Violation) {
    if let Some((_, at)) = violation.seen_by {
        history.truncate(at + 1);
    }
}

fn at_once<const F: u8>(round: Round, programs: &[Vec<Op>], until: Instant) -> Option<History> {
    let mut benches: Vec<Bench> = programs.iter().map(|_| Bench::new()).collect();
    let mut run_once = |round: Round, history: &[(usize, Op)]| {
        let mut programs = vec![Vec::new(); round.threads];
        history.iter().for_each(|(thread, op)| programs[*thread].push(*op));
        let benches = &mut benches[..round.threads];
        run::<F>(round, benches, Instant::now() + RUN_TIME, Source::Again(&programs)).violations.pop()
    };
    let mut fails = |round: Round, history: &[(usize, Op)]| {
        (0..NUM_TRIES).take_while(|_| Instant::now() < until).find_map(|_| run_once(round, history))
    };
    let (history, violation) = TAILS.iter().find_map(|tail| {
        let history = tails(programs, *tail);
        fails(round, &history).map(|violation| (history, violation))
    })?;
    let mut smallest = Smallest { round, history, violation, until };
    smallest.reduce(&mut fails);
    let Smallest { round, history, violation, .. } = smallest;
    // Small as it is, it may fail in order too, done once or a few times over: then it is a proof.
    let until = until.max(Instant::now() + PROMOTION_TIME);
    let repeated =
        REPEATS.iter().find_map(|times| smallest_in_order::<F>(round, history.repeat(*times), until));
    if repeated.is_some() {
        return repeated;
    }
    let failures = (0..NUM_FINAL_RUNS).filter(|_| run_once(round, &history).is_some()).count();
    let text = violation.text;
    Some(History { way: "at_once", round, operations: history, text, runs: NUM_FINAL_RUNS, failures })
}

fn tails(programs: &[Vec<Op>], tail: usize) -> Vec<(usize, Op)> {
    let last = |(thread, program): (usize, &Vec<Op>)| {
        let from = program.len().saturating_sub(tail);
        program[from..].iter().map(move |op| (thread, *op)).collect::<Vec<_>>()
    };
    programs.iter().enumerate().flat_map(last).collect()
}

type Fails<'a> = dyn FnMut(Round, &[(usize, Op)]) -> Option<Violation> + 'a;

/// A failing history that gets smaller.
struct Smallest {
    round: Round,
    history: Vec<(usize, Op)>,
    violation: Violation,
    until: Instant,
}

impl Smallest {
    fn reduce(&mut self, fails: &mut Fails<'_>) {
        self.drop_threads(fails);
        self.drop_parts(fails);
        self.smaller_counts(fails);
        self.fewer_blocks(fails);
        self.drop_parts(fails);
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Keeps a smaller history if it fails.
    fn keep(&mut self, fails: &mut Fails<'_>, round: Round, history: Vec<(usize, Op)>) -> bool {
        match fails(round, &history) {
            Some(violation) => {
                *self = Self { round, history, violation, until: self.until };
                true
            }
            None => false,
        }
    }

    fn drop_threads(&mut self, fails: &mut Fails<'_>) {
        for thread in 0..self.round.threads {
            if self.is_over() {
                return;
            }
            let rest: Vec<_> = self.history.iter().filter(|(other, _)| *other != thread).copied().collect();
            if rest.len() < self.history.len() && !rest.is_empty() {
                self.keep(fails, self.round, rest);
            }
        }
    }

    /// Leaves out halves, quarters, …, single operations, as long as what is left fails (delta debugging).
    fn drop_parts(&mut self, fails: &mut Fails<'_>) {
        let mut part = self.history.len().div_ceil(2);
        while part > 0 {
            let (mut at, mut dropped) = (0, false);
            while at < self.history.len() && !self.is_over() {
                let end = (at + part).min(self.history.len());
                let rest = [&self.history[..at], &self.history[end..]].concat();
                if self.keep(fails, self.round, rest) {
                    dropped = true;
                } else {
                    at = end;
                }
            }
            if self.is_over() {
                return;
            }
            part = if dropped && part == 1 { 1 } else { part / 2 };
        }
    }

    fn fewer_blocks(&mut self, fails: &mut Fails<'_>) {
        for blocks in [1, 2, 4, 8, 16, 25, 64, 256] {
            if blocks >= self.round.blocks || self.is_over() {
                return;
            }
            let round = Round { blocks, ..self.round };
            if self.keep(fails, round, self.history.clone()) {
                return;
            }
        }
    }

    fn smaller_counts(&mut self, fails: &mut Fails<'_>) {
        for at in 0..self.history.len() {
            let (thread, op) = self.history[at];
            let Some(smaller) = op.with_count(1).filter(|smaller| *smaller != op) else { continue };
            if self.is_over() {
                return;
            }
            let mut history = self.history.clone();
            history[at] = (thread, smaller);
            self.keep(fails, self.round, history);
        }
    }
}
