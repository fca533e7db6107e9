//! Calls that must be refused and change nothing.

use super::operation::Probe;
use super::report::Violation;
use super::worker::{Outcome, Place, Step, Worker};
use crate::error::Error;
use crate::ids::{BlockHandle, BlockId};

/// Most handles of a probe.
const MAX: usize = 66;

impl<const F: u8> Worker<'_, F> {
    pub(super) fn probe(&mut self, probe: Probe, at: u8) -> Step {
        match probe {
            Probe::ReleaseAgain => self.release_again(at),
            Probe::Stale => self.use_stale(at),
            Probe::StaleAtTheEnd => self.stale_at_the_end(at),
            Probe::NamedTwice => self.named_twice(at),
            Probe::NeverIssued => self.never_issued(at),
            Probe::EvictTwice => self.evict_twice(at),
        }
    }

    /// What a call that must be refused for its handles gave.
    fn refused<T>(what: &str, result: Result<T, Error>) -> Result<(), Violation> {
        match result {
            Err(Error::InvalidHandle { .. }) => Ok(()),
            Err(error) => Err(Violation::new(format!("{what} was refused for another reason: {error}"))),
            Ok(_) => Err(Violation::new(format!("{what} was accepted"))),
        }
    }

    fn release_again(&mut self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held) else { return Ok(Outcome::Skipped) };
        if !self.world.shadow.never_shared(batch.blocks()) {
            return Ok(Outcome::Skipped);
        }
        self.release(at)?;
        Self::refused("a second release", self.world.pool.release(batch.blocks()))?;
        Ok(Outcome::Done)
    }

    fn use_stale(&self, at: u8) -> Step {
        let Some(stale) = self.stale[at as usize % self.stale.len()] else { return Ok(Outcome::Skipped) };
        Self::refused("a check of a stale handle", self.world.pool.is_exclusive(stale))?;
        Self::refused("a retain of a stale handle", self.world.pool.retain(&[stale]))?;
        Self::refused("a release of a stale handle", self.world.pool.release(&[stale]))?;
        Ok(Outcome::Done)
    }

    fn stale_at_the_end(&self, at: u8) -> Step {
        let (Some(batch), Some(stale)) = (self.batch(at, Place::Held), self.stale[0]) else {
            return Ok(Outcome::Skipped);
        };
        // A failed release of a shared block drops references for a moment, and another worker's could end it.
        if !self.world.shadow.never_shared(batch.blocks()) {
            return Ok(Outcome::Skipped);
        }
        let mut handles = [stale; MAX];
        let count = batch.blocks().len();
        handles[..count].copy_from_slice(batch.blocks());
        let handles = &handles[..=count];
        Self::refused("a release with a stale handle", self.world.pool.release(handles))?;
        Self::refused("a retain with a stale handle", self.world.pool.retain(handles))?;
        Self::refused("indexing with a stale handle", self.world.pool.index_blocks(handles))?;
        match self.world.pool.is_exclusive(batch.blocks()[0]) {
            Ok(true) => {}
            other => {
                return Err(Violation::new(format!(
                    "a refused call left its block {other:?}, not exclusive"
                )));
            }
        }
        // The batch is whole: it can be retained and released.
        Self::must("retaining after a refused call", self.world.pool.retain(batch.blocks()))?;
        Self::must("releasing after a refused call", self.world.pool.release(batch.blocks()))?;
        Ok(Outcome::Done)
    }

    fn named_twice(&self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held) else { return Ok(Outcome::Skipped) };
        if !self.world.shadow.never_shared(batch.blocks()) {
            return Ok(Outcome::Skipped);
        }
        let mut handles = [batch.blocks()[0]; MAX];
        let count = batch.blocks().len();
        handles[..count].copy_from_slice(batch.blocks());
        Self::refused("a release of a block named twice", self.world.pool.release(&handles[..=count]))?;
        Self::must("retaining after a refused call", self.world.pool.retain(batch.blocks()))?;
        Self::must("releasing after a refused call", self.world.pool.release(batch.blocks()))?;
        Ok(Outcome::Done)
    }

    fn never_issued(&self, at: u8) -> Step {
        let beyond = BlockHandle::new(0, BlockId(self.world.pool.num_blocks()));
        Self::refused("a release of an id beyond the pool", self.world.pool.release(&[beyond]))?;
        Self::refused("a retain of an id beyond the pool", self.world.pool.retain(&[beyond]))?;
        if let Some(batch) = self.batch(at, Place::Held) {
            let held = batch.blocks()[0];
            let ahead = BlockHandle::new(held.generation().wrapping_add(1), held.id());
            Self::refused("a release of a generation to come", self.world.pool.release(&[ahead]))?;
            Self::refused("a retain of a generation to come", self.world.pool.retain(&[ahead]))?;
        }
        Ok(Outcome::Done)
    }

    fn evict_twice(&mut self, at: u8) -> Step {
        let batch = self.batches[at as usize];
        if !matches!(batch.place, Place::Cached(_)) {
            return Ok(Outcome::Skipped);
        }
        let mut handles = [batch.blocks()[0]; MAX];
        let count = batch.blocks().len();
        handles[..count].copy_from_slice(batch.blocks());
        Self::refused("an eviction of a block named twice", self.world.pool.evict(&handles[..=count]))?;
        Ok(Outcome::Done)
    }
}
