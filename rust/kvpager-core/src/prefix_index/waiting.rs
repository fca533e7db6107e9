//! Who waits for a lock that long work takes again and again.
//!
//! Between two pieces of work a lock is free for an instant, and whoever sleeps on it would find it taken again when it
//! wakes. So those who have to wait are counted, and the worker steps aside while there are any. Nobody counts who gets the
//! lock at once.

use crate::sync::{AtomicU32, Ordering};
use std::sync::{LockResult, PoisonError};
use std::time::{Duration, Instant};

/// Longer than a thread takes to wake on a machine that has a processor for it.
const MAX_ASIDE: Duration = Duration::from_micros(200);

/// How many wait.
pub(super) struct Waiting(AtomicU32);

impl Default for Waiting {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Waiting {
    /// Takes a lock that is not free.
    #[cold]
    pub(super) fn count<G>(&self, lock: impl FnOnce() -> LockResult<G>) -> G {
        // Relaxed: a hint to the worker.
        self.0.fetch_add(1, Ordering::Relaxed);
        let guard = lock().unwrap_or_else(PoisonError::into_inner);
        self.0.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Steps aside until somebody who waits has got the lock, which the caller does not have, or for as long as it may
    /// take a sleeping thread to wake.
    #[inline]
    pub(super) fn let_in(&self) {
        // Relaxed: as above.
        let num_waiting = self.0.load(Ordering::Relaxed);
        if num_waiting > 0 {
            self.step_aside(num_waiting);
        }
    }

    #[cold]
    fn step_aside(&self, num_waiting: u32) {
        if cfg!(shuttle) {
            // Schedules are drawn, not timed.
            return;
        }
        let start = Instant::now();
        while self.0.load(Ordering::Relaxed) >= num_waiting && start.elapsed() < MAX_ASIDE {
            std::thread::yield_now();
        }
    }
}
