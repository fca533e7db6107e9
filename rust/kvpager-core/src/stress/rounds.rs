//! Runs workers at once: a round of drawn operations, or a history again and again.

use super::generate::Generator;
use super::operation::Op;
use super::report::{Latencies, Violation};
use super::settings::Round;
use super::worker::{Outcome, Step, Worker};
use super::world::{Tally, World};
use crate::block_pool::{BlockPool, PoolConfig, Quota};
use crate::ids::{BlockHandle, BlockId};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, lock};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::time::Instant;

/// Names of the workers' threads begin so.
pub(super) const THREAD_NAME: &str = "kvpager-stress-";

/// Standstills of a round, at which everything is checked; one more comes when everything was given back.
const PHASES: usize = 4;
/// Operations between two looks at the clock.
const BETWEEN_LOOKS: usize = 64;

/// An operation that was done, and when it began and ended, in nanoseconds of its round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) begin: u32,
    pub(super) end: u32,
    pub(super) op: Op,
    pub(super) was_refused: bool,
}

/// What one worker needs in every round, made once.
pub(super) struct Bench {
    pub(super) records: Vec<Record>,
    pub(super) latencies: Latencies,
    pub(super) num_operations: u64,
}

impl Bench {
    pub(super) fn new() -> Self {
        Self { records: Vec::new(), latencies: Latencies::new(), num_operations: 0 }
    }

    /// Makes room for a round, so that its operations allocate nothing.
    fn start(&mut self, operations: usize, source: Source<'_>) {
        self.records.clear();
        if matches!(source, Source::Drawn) {
            self.records.reserve(operations + PHASES);
        }
    }

    /// Does an operation and counts it.
    fn time<const F: u8>(&mut self, worker: &mut Worker<'_, F>, op: Op) -> Step {
        let outcome = worker.execute(op)?;
        if outcome != Outcome::Skipped {
            self.num_operations += 1;
        }
        if outcome == Outcome::Done
            && let Some(family) = op.family()
        {
            self.latencies.record(family, worker.spent.as_nanos() as u64);
        }
        Ok(outcome)
    }
}

/// What the workers of a round tell each other besides the world.
struct Floor {
    barrier: Barrier,
    stop: AtomicBool,
    begin: Instant,
    until: Instant,
    tallies: Mutex<Vec<Tally>>,
    violations: Mutex<Vec<Violation>>,
    checks: AtomicU64,
}

impl Floor {
    fn new(threads: usize, until: Instant) -> Self {
        Self {
            barrier: Barrier::new(threads),
            stop: AtomicBool::new(false),
            begin: Instant::now(),
            until,
            tallies: Mutex::new(Vec::with_capacity(threads)),
            violations: Mutex::new(Vec::new()),
            checks: AtomicU64::new(0),
        }
    }

    fn report(&self, violation: Violation) {
        // Relaxed: it ends loops early and guards nothing.
        self.stop.store(true, Ordering::Relaxed);
        lock(&self.violations).push(violation);
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn is_over(&self) -> bool {
        self.is_stopped() || Instant::now() >= self.until
    }

    /// Runs a part of a worker's work; a panic of the pool is a violation too.
    fn attempt(&self, part: impl FnOnce() -> Result<(), Violation>) {
        let done = catch_unwind(AssertUnwindSafe(part));
        match done {
            Ok(Ok(())) => {}
            Ok(Err(violation)) => self.report(violation),
            Err(panic) => self.report(Violation::new(panic_text(&*panic))),
        }
    }

    /// All workers stand still; one of them checks, unless something is wrong already.
    fn standstill(&self, tally: Tally, check: impl FnOnce(Tally) -> Result<(), Violation>) {
        lock(&self.tallies).push(tally);
        if self.barrier.wait().is_leader() {
            let tally = lock(&self.tallies).drain(..).sum();
            if !self.is_stopped() {
                self.checks.fetch_add(1, Ordering::Relaxed);
                self.attempt(|| check(tally));
            }
        }
        self.barrier.wait();
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("the pool panicked: {}", text.unwrap_or_else(|| "without a text".into()))
}

/// What a round came to.
#[derive(Default)]
pub(super) struct RoundResult {
    pub(super) violations: Vec<Violation>,
    pub(super) checks: u64,
}

/// Where workers get their operations from.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// They are drawn, and recorded in the benches.
    Drawn,
    /// By worker: done again and again until the time is up.
    Again(&'a [Vec<Op>]),
}

/// Runs the workers of a round, with one bench each, on a fresh pool.
pub(super) fn run<const F: u8>(
    round: Round,
    benches: &mut [Bench],
    until: Instant,
    source: Source<'_>,
) -> RoundResult {
    let world = match World::<F>::new(round) {
        Ok(world) => world,
        Err(error) => {
            let violations = vec![Violation::new(format!("the pool cannot be made: {error}"))];
            return RoundResult { violations, checks: 0 };
        }
    };
    let floor = Floor::new(round.threads, until);
    std::thread::scope(|scope| {
        for (me, bench) in benches.iter_mut().enumerate() {
            let (world, floor) = (&world, &floor);
            let thread = std::thread::Builder::new().name(format!("{THREAD_NAME}{me}"));
            let started = thread.spawn_scoped(scope, move || work(world, me, bench, floor, source));
            started.unwrap_or_else(|error| panic!("no thread could be started: {error}"));
        }
    });
    let violations = std::mem::take(&mut *lock(&floor.violations));
    RoundResult { violations, checks: floor.checks.load(Ordering::Relaxed) }
}

fn work<const F: u8>(world: &World<F>, me: usize, bench: &mut Bench, floor: &Floor, source: Source<'_>) {
    bench.start(world.round.operations, source);
    let mut worker = Worker::new(world, me);
    let mut generator = Generator::new(world.round, me);
    for _ in 0..PHASES {
        floor.attempt(|| match source {
            Source::Drawn => draw(&mut worker, &mut generator, bench, floor),
            Source::Again(programs) => repeat(&mut worker, &programs[me], bench, floor),
        });
        floor.attempt(|| worker.close_steps());
        floor.standstill(worker.tally(), |tally| world.check(tally));
    }
    // Everybody goes through every standstill, whatever happened, so that nobody waits for one that left.
    if !floor.is_stopped() {
        floor.attempt(|| worker.give_everything_back());
    }
    floor.standstill(worker.tally(), |_| world.check_empty());
    floor.attempt(|| {
        drop(worker);
        Ok(())
    });
}

fn draw<const F: u8>(
    worker: &mut Worker<'_, F>,
    generator: &mut Generator,
    bench: &mut Bench,
    floor: &Floor,
) -> Result<(), Violation> {
    for i in 0..worker.world.round.operations.div_ceil(PHASES) {
        // Not before the first ones: a round does something, however late its threads get a processor.
        if i % BETWEEN_LOOKS == 0 && (floor.is_stopped() || (i > 0 && floor.is_over())) {
            break;
        }
        let op = generator.next(worker);
        let begin = floor.begin.elapsed().as_nanos() as u32;
        let at = bench.records.len();
        // The round's operations fit, see `Bench::start`. A call that panics is recorded before it is made.
        bench.records.push(Record { begin, end: u32::MAX, op, was_refused: false });
        let outcome = bench.time(worker, op);
        let outcome =
            outcome.map_err(|violation| Violation { seen_by: Some((worker.me, at)), ..violation })?;
        if outcome == Outcome::Skipped {
            bench.records.truncate(at);
            continue;
        }
        let end = begin.saturating_add(worker.spent.as_nanos() as u32);
        bench.records[at] = Record { begin, end, op, was_refused: outcome == Outcome::Refused };
    }
    Ok(())
}

/// Does a program again and again for a phase's share of the time.
fn repeat<const F: u8>(
    worker: &mut Worker<'_, F>,
    program: &[Op],
    bench: &mut Bench,
    floor: &Floor,
) -> Result<(), Violation> {
    let begin = Instant::now();
    let share = floor.until.saturating_duration_since(floor.begin) / PHASES as u32;
    let looks = BETWEEN_LOOKS.div_ceil(program.len().max(1));
    while !program.is_empty() && begin.elapsed() < share && !floor.is_stopped() {
        for _ in 0..looks {
            for (at, op) in program.iter().enumerate() {
                let done = bench.time(worker, *op);
                done.map_err(|violation| Violation { seen_by: Some((worker.me, at)), ..violation })?;
            }
        }
    }
    Ok(())
}

/// Runs a history by one thread in the order given, then checks as a round does. The same history always comes to
/// the same end: nothing is drawn, and the thread looks for blocks from the first one on.
pub(super) fn run_in_order<const F: u8>(round: Round, history: &[(usize, Op)]) -> Option<Violation> {
    let replayed = catch_unwind(AssertUnwindSafe(|| {
        look_from_the_first_block::<F>();
        let world = World::<F>::new(round).map_err(|error| Violation::new(error.to_string()))?;
        let mut workers: Vec<_> = (0..round.threads).map(|me| Worker::new(&world, me)).collect();
        for (at, &(thread, op)) in history.iter().enumerate() {
            let done = workers[thread].execute(op);
            done.map_err(|violation| Violation { seen_by: Some((thread, at)), ..violation })?;
        }
        workers.iter_mut().try_for_each(Worker::close_steps)?;
        world.check(workers.iter().map(Worker::tally).sum())?;
        workers.iter_mut().try_for_each(Worker::give_everything_back)?;
        world.check_empty()
    }));
    match replayed {
        Ok(done) => done.err(),
        Err(panic) => Some(Violation::new(panic_text(&*panic))),
    }
}

/// A thread remembers where it found blocks last, in whatever pool; a pool of one block leaves only one place.
fn look_from_the_first_block<const F: u8>() {
    let config = PoolConfig { num_blocks: 1, ..PoolConfig::default() };
    let mut block = [BlockHandle::new(0, BlockId(0))];
    let pool = BlockPool::<F>::with_fault(config);
    let made = pool.and_then(|pool| {
        let account = pool.add_account(Quota { guaranteed: 0, limit: 1 })?;
        pool.allocate(account, &mut block)
    });
    debug_assert!(made.is_ok(), "{made:?}");
}
