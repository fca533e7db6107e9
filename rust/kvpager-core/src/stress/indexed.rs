//! A worker as the index: it pins, unpins and evicts its own batches.

use super::report::Violation;
use super::worker::{Outcome, Place, Step, Worker, timed};
use crate::error::Error;
use crate::ids::AccountId;

impl<const F: u8> Worker<'_, F> {
    pub(super) fn index(&mut self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held) else { return Ok(Outcome::Skipped) };
        match timed!(self, self.world.pool.index_blocks(batch.blocks())) {
            Ok(()) => {
                self.batches[at as usize].place = Place::Pinned;
                Ok(Outcome::Done)
            }
            // Another worker may have references.
            Err(Error::InvalidHandle { .. }) if !self.world.shadow.never_shared(batch.blocks()) => {
                Ok(Outcome::Refused)
            }
            Err(error) => Err(Violation::new(format!("indexing held blocks failed: {error}"))),
        }
    }

    pub(super) fn unpin(&mut self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Pinned) else { return Ok(Outcome::Skipped) };
        let (account, count) = (AccountId(batch.tenant.into()), batch.blocks().len() as u32);
        match timed!(self, self.world.pool.unhold_cached(account, count)) {
            Ok(epoch) => {
                self.batches[at as usize].place = Place::Cached(epoch);
                Ok(Outcome::Done)
            }
            Err(error) => Err(Violation::new(format!("unpinning {count} blocks failed: {error}"))),
        }
    }

    pub(super) fn pin(&mut self, at: u8) -> Step {
        let batch = self.batches[at as usize];
        let Place::Cached(epoch) = batch.place else { return Ok(Outcome::Skipped) };
        if !epoch.is_none_or(|epoch| self.world.pool.epoch_closed(epoch)) {
            return Ok(Outcome::Skipped);
        }
        let (account, count) = (AccountId(batch.tenant.into()), batch.blocks().len() as u32);
        let asked = self.world.asks(batch.tenant, count.into());
        match timed!(self, self.world.pool.hold_cached(account, count)) {
            Ok(()) => {
                self.batches[at as usize].place = Place::Pinned;
                Ok(Outcome::Done)
            }
            Err(error) => {
                self.world.check_refusal(asked, &error)?;
                Ok(Outcome::Refused)
            }
        }
    }

    pub(super) fn evict(&mut self, at: u8) -> Step {
        let batch = self.batches[at as usize];
        let Place::Cached(epoch) = batch.place else { return Ok(Outcome::Skipped) };
        if !epoch.is_none_or(|epoch| self.world.pool.epoch_closed(epoch)) {
            return Ok(Outcome::Skipped);
        }
        self.world.shadow.giving_up(batch.blocks(), 0);
        self.batches[at as usize].place = Place::Nowhere;
        let done = timed!(self, self.world.pool.evict(batch.blocks()));
        Self::must("evicting cached blocks", done)?;
        self.remember_stale(batch.blocks()[0]);
        Ok(Outcome::Done)
    }

    pub(super) fn trade(&mut self, at: u8, cached: u8) -> Step {
        let (Some(own), Some(resident)) =
            (self.batch(at, Place::Held), self.batch(cached, Place::Cached(None)))
        else {
            return Ok(Outcome::Skipped);
        };
        let fits = own.tenant == resident.tenant && resident.blocks().len() <= own.blocks().len();
        if !fits || !self.world.shadow.never_shared(own.blocks()) {
            return Ok(Outcome::Skipped);
        }
        self.world.shadow.giving_up(own.blocks(), 0);
        let (account, count) = (AccountId(own.tenant.into()), resident.blocks().len() as u32);
        match timed!(self, self.world.pool.trade_held(account, own.blocks(), count)) {
            Ok(()) => {
                self.batches[at as usize].place = Place::Nowhere;
                self.batches[cached as usize].place = Place::Pinned;
                self.remember_stale(own.blocks()[0]);
                Ok(Outcome::Done)
            }
            Err(Error::WrongState(_)) if self.world.round.stepping > 0 => {
                self.world.shadow.held_again(own.blocks());
                Ok(Outcome::Refused)
            }
            Err(error) => Err(Violation::new(format!("trading held blocks failed: {error}"))),
        }
    }
}
