//! Waiting for blocks, with the interpreter released.

use crate::error::invalid;
use kvpager_core::AccountId;
use kvpager_core::block_pool::BlockPool;
use pyo3::prelude::*;
use std::time::{Duration, Instant};

/// Longest time between two looks at the signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest sleep between two looks at the pool.
const MAX_SLEEP: Duration = Duration::from_millis(2);

/// A timeout in seconds; `None` waits for ever.
pub(crate) fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else { return Ok(None) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(invalid(format!("timeout is {seconds}, must be 0 or more seconds")));
    }
    // What is too long for a clock is for ever.
    Ok(Duration::try_from_secs_f64(seconds).ok().and_then(|wait| Instant::now().checked_add(wait)))
}

fn available(pool: &BlockPool, account: Option<AccountId>) -> kvpager_core::Result<u64> {
    account.map_or_else(
        || {
            let stats = pool.stats();
            Ok(stats.capacity.saturating_sub(stats.held + stats.reserved + stats.quarantined))
        },
        |account| pool.available(account),
    )
}

/// Waits until `count` blocks are uncommitted, looking at the pool more and more rarely. Nothing is taken, and
/// nobody wakes the waiter: the pool has no lock to wait on.
fn wait_until(
    pool: &BlockPool,
    account: Option<AccountId>,
    count: u64,
    until: Instant,
) -> kvpager_core::Result<bool> {
    let mut sleep = Duration::from_micros(50);
    loop {
        if available(pool, account)? >= count {
            return Ok(true);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        std::thread::sleep(sleep.min(left));
        sleep = (sleep * 2).min(MAX_SLEEP);
    }
}

/// Waits in slices, between which signal handlers run; one that raises ends the wait.
pub(crate) fn wait(
    py: Python<'_>,
    pool: &BlockPool,
    account: Option<AccountId>,
    count: u64,
    deadline: Option<Instant>,
) -> PyResult<bool> {
    use crate::error::IntoPyResult;
    loop {
        let slice = Instant::now() + SIGNAL_INTERVAL;
        let until = deadline.map_or(slice, |deadline| deadline.min(slice));
        if py.detach(|| wait_until(pool, account, count, until)).py()? {
            return Ok(true);
        }
        py.check_signals()?;
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Ok(false);
        }
    }
}
