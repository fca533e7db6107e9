//! Notices a `fork`: threads and their half-done operations do not survive one, so a pool made before it is
//! refused in the child.

use crate::error::wrong_state;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between this process and the one that loaded the module.
static FORKS: AtomicU32 = AtomicU32::new(0);

#[cfg(unix)]
extern "C" fn count_fork() {
    // Relaxed: the child has one thread at this moment.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Starts watching. Called once, when the module is loaded.
pub(crate) fn watch() {
    // SAFETY: `count_fork` only touches an atomic, which is allowed in a forked child, and the module is never
    // unloaded.
    #[cfg(unix)]
    unsafe {
        libc::pthread_atfork(None, None, Some(count_fork));
    }
}

/// The process that an object belongs to.
#[derive(Clone, Copy)]
pub(crate) struct Home(u32);

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Refuses with `WrongStateError` in a child of the object's process.
    pub(crate) fn check(self) -> PyResult<()> {
        // Relaxed: only a fork changes it.
        if self.0 == FORKS.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(wrong_state(
            "this belongs to a parent process; make pools, indexes and schedulers after the fork, or start processes with `spawn`",
        ))
    }
}
