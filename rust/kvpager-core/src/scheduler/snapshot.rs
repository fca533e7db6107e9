//! All counts at one moment: read between two turns of the engine's thread, and again if one came in between.
//!
//! Every call that changes the core counts twice, when it enters and when it leaves. A reader that finds the same even
//! number before and after its reading was alone. The engine's thread pays two stores, and never waits for a reader.

use super::core::Core;
use super::{Scheduler, SchedulerStats};
use crate::block_pool::{AccountStats, PoolStats};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::{Error, Result};
use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Readings that are tried one after the other before there is a pause between them.
const READINGS_AT_ONCE: u32 = 1000;

const PAUSE: Duration = Duration::from_micros(100);

/// Seconds after which a reading is taken that a turn may have crossed. On a machine that others keep busy, a thread
/// that has lost its processor in a turn gets it back long before.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// The counts of a scheduler, its pool and its tenants.
#[derive(Clone, Debug)]
pub struct SchedulerSnapshot {
    /// Whether no step, commit or other change came in between.
    pub is_exact: bool,
    /// Blocks by state.
    pub pool: PoolStats,
    /// Counts of the scheduler.
    pub scheduler: SchedulerStats,
    /// Name and blocks of each tenant, in the order of their making.
    pub tenants: Vec<(String, AccountStats)>,
}

/// The engine's thread inside the core.
pub(super) struct Turn<'a> {
    core: MutexGuard<'a, Core>,
    turns: &'a AtomicU64,
}

impl Deref for Turn<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Release: whoever reads this number sees what the turn has changed. Only the holder of the core writes it.
        self.turns.store(self.turns.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

impl Scheduler {
    /// Counts of one moment between two turns of the engine's thread. From any thread; waits for a turn to end, and
    /// nobody waits for it. Changes that others make in the same pool are not seen as turns.
    ///
    /// # Errors
    /// Never for a scheduler's own accounts.
    pub fn snapshot(&self) -> Result<SchedulerSnapshot> {
        self.exact_within(LONGEST_WAIT)
    }

    fn exact_within(&self, longest: Duration) -> Result<SchedulerSnapshot> {
        let begin = Instant::now();
        for _ in 0..READINGS_AT_ONCE {
            let snapshot = self.read_once()?;
            if snapshot.is_exact {
                return Ok(snapshot);
            }
            std::thread::yield_now();
        }
        loop {
            let snapshot = self.read_once()?;
            if snapshot.is_exact || begin.elapsed() >= longest {
                return Ok(snapshot);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// One reading, which a turn may have crossed: [`SchedulerSnapshot::is_exact`] says so.
    ///
    /// # Errors
    /// Never for a scheduler's own accounts.
    pub fn read_once(&self) -> Result<SchedulerSnapshot> {
        // Acquire: the counts are read after this number.
        let before = self.turns.load(Ordering::Acquire);
        let names = self.tenants.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let mut tenants = Vec::with_capacity(names.len());
        for tenant in names {
            tenants.push((tenant.name.clone(), self.pool.account_stats(tenant.account)?));
        }
        let (pool, scheduler) = (self.pool.stats(), self.stats());
        // Acquire fence: and before this one, which pairs with the fence of `enter`.
        fence(Ordering::Acquire);
        let is_exact = before.is_multiple_of(2) && self.turns.load(Ordering::Relaxed) == before;
        Ok(SchedulerSnapshot { is_exact, pool, scheduler, tenants })
    }

    /// Lets a thread into the core.
    pub(super) fn enter(&self) -> Result<Turn<'_>> {
        let core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::WouldBlock) => {
                return Err(Error::WrongState(
                    "another thread is in this scheduler: one engine thread calls step, commit and abandon"
                        .to_owned(),
                ));
            }
            Err(TryLockError::Poisoned(_)) => {
                return Err(Error::WrongState(
                    "an internal fault ended this scheduler; make a new one".to_owned(),
                ));
            }
        };
        self.turns.store(self.turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // Release fence: a reader that sees a change of this turn sees that the turn began.
        fence(Ordering::Release);
        Ok(Turn { core, turns: &self.turns })
    }
}

#[cfg(test)]
mod tests {
    use super::super::SchedulerConfig;
    use super::*;
    use crate::block_pool::{BlockPool, PoolConfig};

    #[test]
    fn a_snapshot_waits_for_a_turn_that_has_lost_its_processor() {
        let pool = BlockPool::new(PoolConfig { num_blocks: 8, ..PoolConfig::default() }).unwrap();
        let scheduler = Scheduler::new(pool, None, SchedulerConfig::default()).unwrap();
        let turn = scheduler.enter().unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| scheduler.exact_within(Duration::from_secs(60)).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            drop(turn);
            assert!(reader.join().unwrap().is_exact);
        });
    }
}
