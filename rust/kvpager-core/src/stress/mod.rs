//! Many threads work on pools at once, while an owner map sees what must not be.
//!
//! A run is a series of *rounds*. Each makes a fresh pool, lets every worker do drawn operations, and brings all of
//! them to a standstill a few times, where everything is checked; at its end all is given back, and all of it is
//! taken once more. Rounds differ in the size of the pool and in what they leave out.
//!
//! What is seen while threads work: a block in two hands, a generation handed out twice, a block handed out although
//! a step that may read it is open, a call refused that may not be, a call accepted that must be refused, a panic.
//!
//! Idea and limits: `docs/notes/stress.md`.
//!
//! # Examples
//! ```
//! use kvpager_core::stress::{Stress, StressConfig};
//! use std::time::Duration;
//!
//! let mut stress = Stress::new(StressConfig::new((2, 64, 2), "all", 0, None)?);
//! while stress.is_sound() && stress.num_rounds() < 3 {
//!     stress.advance(Duration::from_millis(50));
//! }
//! assert!(stress.is_sound());
//! # Ok::<(), kvpager_core::Error>(())
//! ```

mod generate;
mod indexed;
mod operation;
mod probes;
mod report;
mod rounds;
mod settings;
mod shadow;
mod shrink;
mod worker;
mod world;

pub use report::Latencies;
pub use settings::{MIXES, Mix, StressConfig, fault_names};

use self::report::Violation;
use self::rounds::{Bench, RoundResult, Source, THREAD_NAME};
use self::settings::Round;
use self::shrink::History;
use crate::block_pool::faults;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longest time of a round.
const ROUND_TIME: Duration = Duration::from_millis(250);

/// A run.
pub struct Stress {
    config: StressConfig,
    num_rounds: u64,
    num_operations: u64,
    num_checks: u64,
    working: Duration,
    benches: Vec<Bench>,
    latencies: Latencies,
    violations: Vec<Violation>,
    history: Option<History>,
}

impl std::fmt::Debug for Stress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stress").field("config", &self.config).finish_non_exhaustive()
    }
}

type Run = fn(Round, &mut [Bench], Instant, Duration) -> (RoundResult, Option<History>);

macro_rules! runs {
    ($fault:expr, $($name:ident),+) => {
        match $fault {
            $(faults::$name => round_and_history::<{ faults::$name }>,)+
            _ => round_and_history::<{ faults::NONE }>,
        }
    };
}

/// How rounds are run with a fault. The fault is a constant of the pool's type.
fn run_with(fault: u8) -> Run {
    runs!(
        fault,
        SAME_GENERATION,
        EARLY_PERMIT,
        BLIND_SUMMARY,
        BLIND_RETAIN,
        BLIND_EVICT,
        BLIND_RELEASE,
        KEEP_CAPACITY,
        SKIP_QUARANTINE,
        LOSE_LATE_PUSH,
        LEND_GUARANTEES,
        LEAK_RESERVATION,
        LEAK_MAGAZINE,
        TORN_QUOTA,
        KEEP_PARTIAL,
        TORN_REFERENCES
    )
}

fn round_and_history<const F: u8>(
    round: Round,
    benches: &mut [Bench],
    until: Instant,
    shrink_time: Duration,
) -> (RoundResult, Option<History>) {
    let result = rounds::run::<F>(round, benches, until, Source::Drawn);
    let history = result.violations.first().map(|first| {
        let until = Instant::now() + shrink_time;
        shrink::shrink::<F>(round, benches, first, until)
    });
    (result, history)
}

impl Stress {
    /// A run that has not begun.
    #[must_use]
    pub fn new(config: StressConfig) -> Self {
        Self {
            config,
            num_rounds: 0,
            num_operations: 0,
            num_checks: 0,
            working: Duration::ZERO,
            benches: (0..config.threads).map(|_| Bench::new()).collect(),
            latencies: Latencies::new(),
            violations: Vec::new(),
            history: None,
        }
    }

    /// Runs a round, for at most so long, unless something is wrong already. What is wrong is run again until its
    /// history is small, which takes some more seconds.
    pub fn advance(&mut self, time: Duration) {
        if !self.is_sound() {
            return;
        }
        let round = Round::new(&self.config, self.num_rounds);
        let begin = Instant::now();
        let until = begin + time.min(ROUND_TIME);
        let quiet = (self.config.fault != faults::NONE).then(QuietPanics::begin);
        let run = run_with(self.config.fault);
        let (result, history) = run(round, &mut self.benches, until, self.config.shrink_time);
        drop(quiet);
        self.working += begin.elapsed().min(ROUND_TIME);
        self.num_rounds += 1;
        self.num_checks += result.checks;
        self.violations = result.violations;
        self.history = history;
        for bench in &mut self.benches {
            self.num_operations += std::mem::take(&mut bench.num_operations);
            self.latencies.add(&bench.latencies);
            bench.latencies.clear();
        }
    }

    /// Whether nothing is wrong so far.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.violations.is_empty()
    }

    /// Rounds so far.
    #[must_use]
    pub const fn num_rounds(&self) -> u64 {
        self.num_rounds
    }

    /// Operations so far, over all threads; skipped ones do not count.
    #[must_use]
    pub const fn num_operations(&self) -> u64 {
        self.num_operations
    }

    /// What was found so far.
    #[must_use]
    pub fn report(&self) -> Value {
        let (latency, by_operation) = self.latencies.to_json();
        let seen = |violation: &Violation| json!({"text": violation.text, "thread": violation.seen_by.map(|(thread, _)| thread)});
        json!({
            "ok": self.is_sound(),
            "seed": self.config.seed,
            "operations": self.num_operations,
            "rounds": self.num_rounds,
            "wall_time": self.working.as_secs_f64(),
            "latency_ns": latency,
            "latency_by_operation_ns": by_operation,
            "checks": self.num_checks,
            "violations": self.violations.iter().map(seen).collect::<Vec<_>>(),
            "history": self.history.as_ref().map(History::to_json),
        })
    }
}

type Hook = Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Sync + Send>;

/// While a fault is planted, the pool may panic on purpose, again and again; that is reported once, not printed each
/// time.
struct QuietPanics(std::sync::Arc<Hook>);

impl QuietPanics {
    fn begin() -> Self {
        let before: std::sync::Arc<Hook> = std::sync::Arc::new(std::panic::take_hook());
        let others = std::sync::Arc::clone(&before);
        std::panic::set_hook(Box::new(move |info| {
            let thread = std::thread::current();
            if !thread.name().is_some_and(|name| name.starts_with(THREAD_NAME)) {
                others(info);
            }
        }));
        Self(before)
    }
}

impl Drop for QuietPanics {
    fn drop(&mut self) {
        let before = std::sync::Arc::clone(&self.0);
        std::panic::set_hook(Box::new(move |info| before(info)));
    }
}
