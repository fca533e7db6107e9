//! Paused requests: they keep their blocks until somebody else needs them, and their place in time.
//!
//! A paused request that never ran, or was forced out, waits outside the queue. One that runs is *halted*: it
//! keeps row, blocks and reservation but is not planned. Its clock stands still, so it counts as younger than
//! everybody who is not paused, and whoever of the same quota is short of blocks takes them.

use super::compartments::compartment_of;
use super::core::Core;
use super::queue::Place;
use super::request::WaitingRequest;
use super::sequence::Sequence;
use super::tenant::Tenant;
use crate::ids::SequenceId;
use crate::{Error, Result};

/// A paused request without blocks.
pub(super) struct PausedRequest {
    pub(super) waiting: WaitingRequest,
    since_step: u64,
}

/// A paused sequence with its blocks.
pub(super) struct Halted {
    pub(super) sequence: Box<Sequence>,
    since_step: u64,
}

impl Core {
    /// Pauses a request with all its branches. A running one is halted by the next step that may.
    pub(super) fn note_pause(&mut self, id: SequenceId) {
        if let Some(waiting) = self.queue.remove_set(id) {
            self.paused.insert(waiting.id, PausedRequest { waiting, since_step: self.last_step.0 });
            return;
        }
        for id in self.sets.members(id) {
            if (self.position(id).is_some() || self.is_parked(id)) && !self.pausing.contains(&id) {
                self.pausing.push(id);
            }
        }
    }

    /// Goes on with a paused request where it stood.
    pub(super) fn note_resume(&mut self, id: SequenceId) {
        let Self { pausing, sets, .. } = self;
        pausing.retain(|&other| !sets.are_one(other, id));
        let step = self.last_step.0;
        if let Some(PausedRequest { mut waiting, since_step }) = self.remove_paused(id) {
            for one in std::iter::once(&mut waiting.progress)
                .chain(waiting.branches.iter_mut().map(|b| &mut b.progress))
            {
                one.paused_steps += step - since_step;
            }
            self.queue.push(waiting);
        }
        for Halted { mut sequence, since_step } in self.take_halted(id) {
            let paused_steps = step - since_step;
            sequence.progress.paused_steps += paused_steps;
            if let Some(special) = &mut sequence.special {
                special.branches.iter_mut().for_each(|branch| branch.progress.paused_steps += paused_steps);
            }
            self.insert_running(sequence);
        }
    }

    /// The paused request without blocks that an id is of.
    fn remove_paused(&mut self, id: SequenceId) -> Option<PausedRequest> {
        let key = self.sets.members(id).into_iter().find(|id| self.paused.contains_key(id))?;
        self.paused.remove(&key)
    }

    /// Takes a paused request without blocks out, alone.
    pub(super) fn take_paused(&mut self, id: SequenceId) -> Option<WaitingRequest> {
        let PausedRequest { waiting, since_step } = self.remove_paused(id)?;
        let (gone, rest) = waiting.take_out(id);
        if let Some(waiting) = rest {
            self.paused.insert(waiting.id, PausedRequest { waiting, since_step });
        }
        gone
    }

    /// Takes a paused sequence out, with the others of its set.
    fn take_halted(&mut self, id: SequenceId) -> Vec<Halted> {
        let Self { halted, sets, .. } = self;
        halted.extract_if(.., |other| sets.are_one(other.sequence.id, id)).collect()
    }

    fn is_parked(&self, id: SequenceId) -> bool {
        self.parked.iter().any(|sequence| sequence.id == id)
    }

    /// Halts the running sequences that are to pause.
    pub(super) fn halt_paused(&mut self) {
        let pausing = std::mem::take(&mut self.pausing);
        // A set is halted whole.
        let waits = |&id: &SequenceId| match self.position(id) {
            Some(position) => self.running[position].in_flight > 0,
            None => self.is_parked(id),
        };
        let waiting: Vec<_> = pausing.iter().copied().filter(waits).collect();
        for id in pausing {
            match self.position(id) {
                Some(_) if waiting.iter().any(|&other| self.sets.are_one(other, id)) => self.pausing.push(id),
                Some(position) if self.running[position].ending.is_none() => {
                    let sequence = self.running.remove(position);
                    // Whoever waits may have its place and its blocks now.
                    self.queue.note_change(compartment_of(id));
                    self.halted.push(Halted { sequence, since_step: self.last_step.0 });
                }
                // When its tail is back from the host.
                None if self.is_parked(id) => self.pausing.push(id),
                _ => {}
            }
        }
    }

    /// Makes those give something up who yield to any request that runs or could run: what is kept after a request's
    /// end, then paused requests. False if there are none, or if enough is on its way.
    pub(super) fn yield_room(&mut self, tenant: &Tenant, short: &Error) -> Result<bool> {
        if self.is_coming(tenant, short) {
            return Ok(false);
        }
        if self.release_kept(tenant, short)? {
            return Ok(true);
        }
        match short {
            Error::OutOfBlocks { .. } | Error::OverQuota { .. } => {
                self.force_out_paused(tenant.compartment, tenant.index, short)
            }
            _ => Ok(false),
        }
    }

    /// Takes the blocks of one paused request, for a tenant that is short of them: its own youngest, else of the
    /// tenant most above its guarantee. False if there is none to take from.
    fn force_out_paused(&mut self, compartment: usize, tenant: usize, short: &Error) -> Result<bool> {
        let mut best: Option<(u64, usize)> = None;
        for (i, halted) in self.halted.iter().enumerate() {
            if compartment_of(halted.sequence.id) != compartment {
                continue;
            }
            let owner = &halted.sequence.request.tenant;
            let above = if owner.index == tenant {
                u64::MAX
            } else if matches!(short, Error::OverQuota { .. }) {
                continue;
            } else {
                let account = self.pool.account_stats(owner.account)?;
                account.committed.saturating_sub(account.guaranteed)
            };
            if above > 0 && best.is_none_or(|(most, _)| above >= most) {
                best = Some((above, i));
            }
        }
        match best {
            Some((_, i)) => self.force_out(i).map(|()| true),
            None => Ok(false),
        }
    }

    /// Takes the row of a paused request if its compartment has none left and somebody there could run with it.
    pub(super) fn free_paused_row(&mut self, compartment: usize) -> Result<()> {
        let is_own = |halted: &Halted| compartment_of(halted.sequence.id) == compartment;
        let Some(last) = self.halted.iter().rposition(is_own) else { return Ok(()) };
        let has_next = self.next_tenant(compartment, self.last_step.0).is_some();
        if has_next && self.num_rows_left(compartment) == 0 {
            self.force_out(last)?;
        }
        Ok(())
    }

    /// Takes as many places of paused requests as the head of a tenant's queue is short of, the youngest pause first;
    /// none if the head would not have its places even with all of them. Those that open steps will give back count
    /// as there.
    pub(super) fn free_paused_places(&mut self, tenant: usize, head: Place) -> Result<()> {
        if self.halted.is_empty() {
            return Ok(());
        }
        let Some(waiting) = self.queue.get(tenant, head) else { return Ok(()) };
        let (wanted, compartment) = (waiting.num_sequences() as usize, waiting.request.tenant.compartment);
        if self.num_rows_left(compartment) >= wanted {
            return Ok(());
        }
        let is_own = |halted: &Halted| compartment_of(halted.sequence.id) == compartment;
        let places_of = |halted: &Halted| 1 + halted.sequence.num_unsplit() as usize;
        let num_paused =
            |core: &Self| core.halted.iter().filter(|halted| is_own(halted)).map(places_of).sum::<usize>();
        let num_halted = self.halted.iter().filter(|halted| is_own(halted)).count();
        let own = &self.compartments[compartment];
        let most = own.bounds.max_running as usize;
        let running = self.running_of(compartment).len() + self.parked_of(compartment).len();
        let others = running + own.num_unforked as usize + num_halted - num_paused(self);
        if others + wanted > most {
            return Ok(());
        }
        while others + num_paused(self) + wanted > most
            && let Some(last) = self.halted.iter().rposition(is_own)
        {
            self.force_out(last)?;
        }
        Ok(())
    }

    /// Takes the blocks of all paused sequences; returns of how many.
    pub(super) fn force_out_all(&mut self) -> Result<u32> {
        let count = self.halted.len() as u32;
        while !self.halted.is_empty() {
            self.force_out(self.halted.len() - 1)?;
        }
        Ok(count)
    }

    fn force_out(&mut self, halted: usize) -> Result<()> {
        let Halted { sequence, since_step } = &self.halted[halted];
        let (id, since_step) = (sequence.id, *since_step);
        let mut set = Vec::new();
        for Halted { mut sequence, .. } in self.take_halted(id) {
            self.strip(&mut sequence)?;
            self.num_forced_out += 1;
            set.push(sequence.into_waiting(true));
        }
        if let Some(waiting) = WaitingRequest::gather(set) {
            self.paused.insert(waiting.id, PausedRequest { waiting, since_step });
        }
        Ok(())
    }
}
