//! A bounded crew of threads that runs numbered jobs.
//!
//! The caller works too, so a size of 1 starts no thread. Jobs are taken from one counter. If another thread is
//! using the crew, the call runs its jobs alone instead of waiting; results never depend on who ran a job. A
//! forked child finds its crew gone and starts a new one.

use crate::sync::{AtomicBool, AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

/// Bytes from which moving them is shared: one core moves so many in the time that it takes to wake another.
const MOVED_BYTES_WORTH_THREADS: usize = 256 * 1024;

/// Jobs of each thread when memory is moved, so that unequal ones even out.
const JOBS_PER_MOVING_THREAD: usize = 4;

type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// Threads for attention; one for the process (see [`ThreadPool::global`]).
pub struct ThreadPool {
    /// Threads at work during a call, the caller included. At least 1.
    size: AtomicUsize,
    crew: Mutex<Crew>,
}

/// The started threads and the process that started them.
struct Crew {
    process: u32,
    shared: Arc<Shared>,
    workers: usize,
}

struct Shared {
    state: Mutex<State>,
    start: Condvar,
    done: Condvar,
    /// The next job to take. Reset under `state`'s lock before a round starts.
    next: AtomicUsize,
    /// Set when a job panicked in a worker.
    panicked: AtomicBool,
}

struct State {
    /// Grows by one a round; a worker that saw it has nothing to do until it grows again.
    round: u64,
    task: Option<Task>,
    /// Workers that take part in this round (those with a smaller index).
    taking_part: usize,
    /// Of those, the ones that are not done.
    running: usize,
    /// Workers with this index or a larger one end.
    limit: usize,
}

#[derive(Clone, Copy)]
struct Task {
    job: *const Job<'static>,
    num_jobs: usize,
}

// SAFETY: the pointer is used only during the round of `run`, which outlives it, and the job is `Sync`.
unsafe impl Send for Task {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Crew {
    fn new() -> Self {
        let state = State { round: 0, task: None, taking_part: 0, running: 0, limit: usize::MAX };
        let shared = Shared {
            state: Mutex::new(state),
            start: Condvar::new(),
            done: Condvar::new(),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        };
        Self { process: std::process::id(), shared: Arc::new(shared), workers: 0 }
    }

    /// Starts or ends workers until there are `workers`, or as many as the system grants.
    fn resize(&mut self, workers: usize) {
        if self.process != std::process::id() {
            // The threads stayed in the parent, and so may have locks: their state is left alone for ever.
            std::mem::forget(std::mem::replace(self, Self::new()));
        }
        if workers < self.workers {
            self.retire();
        }
        while self.workers < workers {
            let (shared, index) = (Arc::clone(&self.shared), self.workers);
            let name = format!("kvpager-{index}");
            if std::thread::Builder::new().name(name).spawn(move || shared.work(index)).is_err() {
                break;
            }
            self.workers += 1;
        }
    }

    /// Replaces the crew by an empty one whose old threads end by themselves.
    fn retire(&mut self) {
        lock(&self.shared.state).limit = 0;
        self.shared.start.notify_all();
        *self = Self::new();
    }

    fn run(&self, job: &Job<'_>, num_jobs: usize) {
        let taking_part = self.workers.min(num_jobs - 1);
        let pointer: *const Job<'_> = job;
        // SAFETY: only the lifetime changes. This function returns after `running` is 0, from when on no worker
        // uses the pointer.
        let pointer: *const Job<'static> = unsafe { std::mem::transmute(pointer) };
        let task = Task { job: pointer, num_jobs };
        {
            let mut state = lock(&self.shared.state);
            // Relaxed: workers read the counter after they took the lock.
            self.shared.next.store(0, Ordering::Relaxed);
            self.shared.panicked.store(false, Ordering::Relaxed);
            state.round += 1;
            state.task = Some(task);
            state.taking_part = taking_part;
            state.running = taking_part;
        }
        self.shared.start.notify_all();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.shared.take_jobs(job, num_jobs)));
        let mut state = lock(&self.shared.state);
        while state.running > 0 {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.task = None;
        drop(state);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        // Relaxed: set before the worker's last lock of `state`, which this thread took afterwards.
        assert!(!self.shared.panicked.load(Ordering::Relaxed), "a job panicked in a thread of the crew");
    }
}

impl Shared {
    fn take_jobs(&self, job: &Job<'_>, num_jobs: usize) {
        loop {
            // Relaxed: the counter only hands out numbers; what jobs wrote is published by the lock of `state`.
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= num_jobs {
                return;
            }
            job(index);
        }
    }

    fn work(&self, index: usize) {
        let mut seen = 0;
        while let Some(task) = self.wait_for_round(index, &mut seen) {
            // SAFETY: `Crew::run` keeps the job alive until this worker has lowered `running` below.
            let job = unsafe { &*task.job };
            if catch_unwind(AssertUnwindSafe(|| self.take_jobs(job, task.num_jobs))).is_err() {
                // Relaxed: published by the lock below; pairs with the load at the end of `Crew::run`.
                self.panicked.store(true, Ordering::Relaxed);
            }
            let mut state = lock(&self.state);
            state.running -= 1;
            if state.running == 0 {
                self.done.notify_all();
            }
        }
    }

    /// Blocks until a round in which this worker takes part; `None` when it should end.
    fn wait_for_round(&self, index: usize, seen: &mut u64) -> Option<Task> {
        let mut state = lock(&self.state);
        loop {
            if index >= state.limit {
                return None;
            }
            if state.round != *seen {
                *seen = state.round;
                if index < state.taking_part {
                    return state.task;
                }
            }
            state = self.start.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl ThreadPool {
    /// A pool of `size` threads, the caller included; they start when first needed.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self { size: AtomicUsize::new(size.max(1)), crew: Mutex::new(Crew::new()) }
    }

    /// The pool of this process; its first size is the number of cores it may use.
    pub fn global() -> &'static Self {
        static POOL: OnceLock<ThreadPool> = OnceLock::new();
        POOL.get_or_init(|| {
            Self::new(std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get))
        })
    }

    /// Threads that a call may use, the caller included.
    pub fn size(&self) -> usize {
        // Relaxed: a number without anything behind it.
        self.size.load(Ordering::Relaxed)
    }

    /// Sets the size; takes effect at the next call. Threads beyond it end: at once, or after the call that they
    /// are in.
    pub fn set_size(&self, size: usize) {
        // Relaxed: as in `size`.
        self.size.store(size.max(1), Ordering::Relaxed);
        self.let_go();
    }

    /// Ends the threads if there are more than the size allows; those that it allows start again when needed. Does
    /// nothing while a call uses them, which looks again when it is done.
    fn let_go(&self) {
        let Ok(mut crew) = self.crew.try_lock() else { return };
        if crew.process == std::process::id() && crew.workers >= self.size() {
            crew.retire();
        }
    }

    /// Calls `job(i)` once for each `i` in `0..num_jobs`, on at most `size` threads, and returns when all are
    /// done.
    ///
    /// # Panics
    /// When a job panics; the others are done by then.
    pub fn run(&self, num_jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        let size = self.size();
        if size > 1 && num_jobs > 1 {
            let crew = match self.crew.try_lock() {
                Ok(crew) => Some(crew),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(mut crew) = crew {
                crew.resize(size - 1);
                if crew.workers > 0 {
                    crew.run(job, num_jobs);
                    drop(crew);
                    if self.size() < size {
                        self.let_go();
                    }
                    return;
                }
            }
        }
        (0..num_jobs).for_each(job);
    }
}

impl ThreadPool {
    /// Whether moving so many bytes is worth more than one thread.
    pub(super) fn shares_move(&self, bytes: usize) -> bool {
        self.size() > 1 && bytes >= MOVED_BYTES_WORTH_THREADS
    }

    /// Calls `work(i)` once for each `i` in `0..num_items`, each of which moves `item_bytes`: on this thread alone
    /// where waking others would cost more than it saves.
    pub(super) fn run_moves(&self, num_items: usize, item_bytes: usize, work: &(dyn Fn(usize) + Sync)) {
        if !self.shares_move(num_items.saturating_mul(item_bytes)) {
            return (0..num_items).for_each(work);
        }
        let num_jobs = num_items.min(self.size() * JOBS_PER_MOVING_THREAD);
        self.run(num_jobs, &|job| {
            (num_items * job / num_jobs..num_items * (job + 1) / num_jobs).for_each(work);
        });
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let crew = self.crew.get_mut().unwrap_or_else(PoisonError::into_inner);
        if crew.process == std::process::id() {
            crew.retire();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_runs_exactly_once_whatever_the_size() {
        let pool = ThreadPool::new(1);
        for size in [1, 2, 5, 3, 1, 4] {
            pool.set_size(size);
            for num_jobs in [0, 1, 2, 7, 100] {
                let counts: Vec<_> = (0..num_jobs).map(|_| AtomicUsize::new(0)).collect();
                pool.run(num_jobs, &|index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn two_callers_at_once_both_finish() {
        let pool = ThreadPool::new(3);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(5, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 5);
    }

    #[test]
    fn threads_beyond_a_smaller_size_are_let_go_at_once_or_after_the_call_they_are_in() {
        let pool = ThreadPool::new(4);
        let workers = || lock(&pool.crew).workers;
        pool.run(8, &|_| ());
        assert_eq!(workers(), 3);
        pool.set_size(3);
        assert_eq!(workers(), 0);
        pool.run(8, &|_| ());
        assert_eq!(workers(), 2);
        pool.run(8, &|index| {
            if index == 0 {
                pool.set_size(1);
            }
        });
        assert_eq!(workers(), 0);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(2);
        let attempt = catch_unwind(AssertUnwindSafe(|| pool.run(8, &|index| assert_ne!(index, 3))));
        assert!(attempt.is_err());
        pool.run(8, &|_| ());
    }
}
