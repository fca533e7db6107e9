//! Admission: the next request of the tenant that is served next, if what its policy asks for is there.

use super::compartments::Room;
use super::core::Core;
use super::group_blocks::find_groups;
use super::inbox::Inbox;
use super::limits::note_admission;
use super::phases::Phase;
use super::policy::AdmissionRoom;
use super::queue::{Place, Short};
use super::request::{FinishReason, WaitingRequest};
use super::scopes::{Reach, peek};
use super::sequence::Sequence;
use crate::block_pool::Reservation;
use crate::prefix_index::ChainPin;
use crate::{Error, Result};
use std::sync::Arc;

/// Requests behind a blocked head that are looked at.
const BYPASS_DEPTH: usize = 64;

impl Core {
    /// Admits requests of a compartment until its budget, its running places or its room are used up.
    pub(super) fn admit(&mut self, compartment: usize, inbox: &Inbox, budget: &mut u32) -> Result<()> {
        self.free_paused_row(compartment)?;
        let step = self.last_step.0;
        if self.has_place(compartment, *budget) && self.next_tenant(compartment, step).is_some() {
            self.refresh_forecast(compartment);
        }
        while self.has_place(compartment, *budget) {
            let Some(tenant) = self.next_tenant(compartment, step) else { break };
            let Some(head) = self.queue.head(tenant) else { break };
            self.free_paused_places(tenant, head)?;
            let Err(short) = self.try_admit(tenant, head, inbox, budget)? else { continue };
            if self.end_if_hopeless(tenant, head, inbox)? || self.preempt_lower(tenant, head, &short)? {
                continue;
            }
            self.admit_behind(compartment, tenant, &short, inbox, budget)?;
        }
        Ok(())
    }

    /// The tenant of a compartment that is served next.
    pub(super) fn next_tenant(&self, compartment: usize, step: u64) -> Option<usize> {
        self.queue.next_tenant(compartment, step, |head| {
            let account = self.pool.account_stats(head.request.tenant.account);
            let left = account.map_or(0, |account| account.guaranteed.saturating_sub(account.committed));
            u64::from(head.blocks_to_promise(&self.config, 0)) <= left
        })
    }

    /// Ends a head that quotas, as they are by now, will never let in.
    fn end_if_hopeless(&mut self, tenant: usize, head: Place, inbox: &Inbox) -> Result<bool> {
        let Some(waiting) = self.queue.get(tenant, head) else { return Ok(false) };
        let need = waiting.lifetime_blocks(&self.config);
        let places = self.compartments[waiting.request.tenant.compartment].bounds.max_running;
        if waiting.num_sequences() <= places && self.is_within_reach(&waiting.request, need)? {
            return Ok(false);
        }
        if let Some(waiting) = self.queue.remove_set(head.1) {
            self.end_waiting(waiting, FinishReason::Capacity, inbox);
        }
        Ok(true)
    }

    fn has_place(&self, compartment: usize, budget: u32) -> bool {
        budget > 0 && self.num_rows_left(compartment) > 0
    }

    /// Lets small requests pass a head that does not fit, as many and for as long as the limits say; after
    /// that, what becomes free is kept for the head.
    fn admit_behind(
        &mut self,
        compartment: usize,
        tenant: usize,
        short: &Error,
        inbox: &Inbox,
        budget: &mut u32,
    ) -> Result<()> {
        let present = (self.last_step.0, self.now);
        self.note_what_is_short(compartment, tenant, short);
        let Some(head) = self.queue.block(tenant, present) else { return Ok(()) };
        let (since_step, since) = head.blocked_since.unwrap_or(present);
        let allowance = self.config.max_bypass.saturating_sub(head.bypassed);
        let is_over = present.0 - since_step >= self.config.max_bypass_steps
            || present.1 - since >= self.config.max_bypass_seconds;
        if allowance == 0 || is_over {
            return Ok(());
        }
        let mut places = std::mem::take(&mut self.places);
        self.queue.behind_head(tenant, BYPASS_DEPTH, &mut places);
        let mut passed = 0;
        for &place in &places {
            if passed == allowance || !self.has_place(compartment, *budget) {
                break;
            }
            if self.try_admit(tenant, place, inbox, budget)?.is_ok() {
                passed += 1;
            }
        }
        self.places = places;
        if let Some(head) = self.queue.block(tenant, present) {
            head.bypassed += passed;
        }
        Ok(())
    }

    /// What the head of a tenant waits for. What its own limit lacks, others leave it.
    fn note_what_is_short(&mut self, compartment: usize, tenant: usize, short: &Error) {
        let Some(head) = self.queue.head(tenant).and_then(|head| self.queue.get(tenant, head)) else {
            return;
        };
        let lacks_places = head.num_sequences() as usize > self.num_rows_left(compartment);
        let own = head.request.tenant.account;
        match *short {
            Error::OverQuota { account, limit, .. }
                if account == own && limit < u64::from(self.pool.num_blocks()) =>
            {
                self.queue.note_limited(tenant);
            }
            Error::OutOfBlocks { .. } => self.queue.note_short(tenant, Short::Room),
            _ if lacks_places => self.queue.note_short(tenant, Short::Places),
            _ => self.queue.note_short(tenant, Short::Nothing),
        }
    }

    /// Admits one request if what it needs is there, or comes from those who must yield to it; else says what is
    /// short.
    fn try_admit(
        &mut self,
        tenant: usize,
        place: Place,
        inbox: &Inbox,
        budget: &mut u32,
    ) -> Result<std::result::Result<(), Error>> {
        loop {
            match self.try_promise(tenant, place, inbox, budget, Reach::All)? {
                Ok(()) => return Ok(Ok(())),
                Err(short) => {
                    let Some(waiting) = self.queue.get(tenant, place) else { return Ok(Err(short)) };
                    let owner = Arc::clone(&waiting.request.tenant);
                    if !self.may_be_enough(&owner, &short) || !self.yield_room(&owner, &short)? {
                        return Ok(Err(short));
                    }
                }
            }
        }
    }

    /// Admits one request if what it needs can be promised to it, with what is found within `reach`, and plans its first
    /// chunk. Otherwise it keeps nothing; the error says what is short.
    fn try_promise(
        &mut self,
        tenant: usize,
        place: Place,
        inbox: &Inbox,
        budget: &mut u32,
        reach: Reach,
    ) -> Result<std::result::Result<(), Error>> {
        let Some(waiting) = self.queue.get(tenant, place) else { return Ok(Err(nothing_there())) };
        let request = &waiting.request;
        let compartment = request.tenant.compartment;
        if self.num_rows_left(compartment) < waiting.num_sequences() as usize {
            return Ok(Err(nothing_there()));
        }
        self.scratch.clear();
        self.phases.lap(Phase::Admission);
        if self.compartments[compartment].growth.is_none() {
            self.compartments[compartment].growth = Some(self.growth_of_running(compartment));
        }
        if let Some(short) = self.surely_short(waiting)? {
            self.phases.lap(Phase::LookUp);
            return Ok(Err(short));
        }
        let num_common = waiting.num_common(self.config.block_size) as usize;
        let known = &request.prompt[..num_common];
        let found = find_groups(self.index.as_ref(), request, reach, known, &self.config, &mut self.scratch);
        self.phases.lap(Phase::LookUp);
        let pin = match found {
            Ok(pin) => pin,
            Err(
                short @ (Error::OutOfBlocks { .. }
                | Error::OverQuota { .. }
                | Error::Refused { retryable: true, .. }),
            ) => return Ok(Err(short)),
            Err(error) => return Err(error),
        };
        let (num_found, waited) = (self.scratch.len(), waiting.progress.share_waits);
        if self.should_wait(pin.as_ref(), request, &request.prompt[..=num_common], num_found, waited) {
            self.compartments[compartment].is_chunk_awaited = true;
            self.queue.note_share_wait(tenant, place);
            return Ok(Err(nothing_there()));
        }
        let mut reservation = match self.promise(waiting, self.num_spared(num_found))? {
            Ok(reservation) => reservation,
            Err(short) => return Ok(Err(short)),
        };
        if self.tables.num_free_rows() == 0 {
            return Ok(Err(nothing_there()));
        }
        let (prompt_tokens, max_tokens) = (waiting.progress.prompt_tokens, waiting.request.max_tokens);
        let mut layers = self.new_layers(prompt_tokens, prompt_tokens + max_tokens);
        match self.use_found(layers.as_deref_mut(), &mut reservation) {
            Ok(true) => {}
            Ok(false) => return Ok(Err(nothing_there())),
            // A shared scope has no room to hold what it has of further groups: the tenant loses the hit.
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) if reach == Reach::All => {
                drop((pin, reservation));
                return self.try_promise(tenant, place, inbox, budget, Reach::Own);
            }
            Err(error) => return Err(error),
        }
        // Only now that what it found is in use, which is not to go for it.
        self.keep_within_limit(&request.tenant)?;
        let Some(row) = self.tables.take_row() else { return Ok(Err(nothing_there())) };
        let Some(waiting) = self.queue.pop(tenant, place) else { return Ok(Err(nothing_there())) };
        note_admission(&waiting, &inbox.places, self.last_step.0);
        if let Some(mut growth) = self.compartments[compartment].growth {
            self.add_growth(&mut growth, &waiting);
            self.compartments[compartment].growth = Some(growth);
        }
        self.begin_rows(layers.as_deref_mut(), row);
        let mut sequence = self.start(waiting, pin, reservation, row);
        sequence.layers = layers;
        self.copy_partial(&mut sequence)?;
        if let Some(session) = &sequence.request.session {
            // The turn holds what its session kept.
            self.kept.release_session(session.number);
        }
        self.queue.note_admitted(tenant, self.last_step.0, sequence.remaining());
        let position = self.insert_running(Box::new(sequence));
        self.plan_chunk(position, budget)?;
        Ok(Ok(()))
    }

    /// What a request would be short of, if it can be told without pinning its prefix: a pin of a request that
    /// stays in the queue costs time and makes its prefix look used.
    fn surely_short(&self, waiting: &WaitingRequest) -> Result<Option<Error>> {
        if self.promise(waiting, 0)?.is_ok() {
            return Ok(None);
        }
        let found = peek(self.index.as_ref(), &waiting.request)?;
        Ok(self.promise(waiting, self.num_spared(found))?.err())
    }

    /// Reserves what a request needs that is spared its first `num_found` blocks; the error says what is short.
    fn promise(
        &self,
        waiting: &WaitingRequest,
        num_found: usize,
    ) -> Result<std::result::Result<Reservation, Error>> {
        let request = &waiting.request;
        let need = waiting.blocks_to_promise(&self.config, num_found as u32);
        if let Some(short) = self.short_of_margin(waiting, need)? {
            return Ok(Err(short));
        }
        match self.pool.reserve(request.tenant.account, need) {
            Ok(reservation) => Ok(Ok(reservation)),
            Err(short @ (Error::OutOfBlocks { .. } | Error::OverQuota { .. })) => Ok(Err(short)),
            Err(error) => Err(error),
        }
    }

    /// What a request that takes `need` blocks would be short of, if the policy wants blocks to stay free for those
    /// that run.
    fn short_of_margin(&self, waiting: &WaitingRequest, need: u32) -> Result<Option<Error>> {
        let compartment = waiting.request.tenant.compartment;
        let is_alone = self.running_of(compartment).is_empty() && self.parked_of(compartment).is_empty();
        if !self.config.policy.overcommits() || is_alone {
            return Ok(None);
        }
        let mut growth = self.compartments[compartment].growth.unwrap_or_default();
        self.add_growth(&mut growth, waiting);
        let Room { capacity, uncommitted } = self.room_of(compartment)?;
        let room = AdmissionRoom { uncommitted_blocks: uncommitted, capacity_blocks: capacity, growth };
        let leave = self.config.policy.blocks_to_leave(room);
        let needed = u64::from(need) + leave;
        if needed + self.held_back(compartment) <= uncommitted {
            return Ok(None);
        }
        Ok(Some(match self.compartments[compartment].account {
            Some(account) => Error::OverQuota { account, needed, available: uncommitted, limit: capacity },
            None => Error::OutOfBlocks { needed, available: uncommitted, capacity },
        }))
    }

    /// A sequence whose first blocks are the matched ones in `scratch`.
    pub(super) fn start(
        &mut self,
        mut waiting: WaitingRequest,
        pin: Option<ChainPin>,
        reservation: Reservation,
        row: u32,
    ) -> Sequence {
        let known_age = waiting.num_outputs();
        let pinned = self.scratch.len() as u32;
        let matched_tokens = pinned * self.config.block_size;
        if self.config.keeps_first() {
            for block in &self.scratch {
                self.tables.append(row, block.id());
            }
        }
        let progress = &mut waiting.progress;
        if progress.queue_steps.is_none() {
            progress.queue_steps = Some(progress.waited(self.last_step.0 - 1));
            progress.cached_tokens = matched_tokens;
        }
        self.recomputed_tokens +=
            u64::from(std::mem::take(&mut progress.lost_tokens).saturating_sub(matched_tokens));
        let branches = std::mem::take(&mut waiting.branches);
        let mut tokens = std::mem::take(&mut waiting.request.prompt);
        let longest = progress.prompt_tokens + waiting.request.max_tokens;
        let mut blocks = Vec::with_capacity(self.config.blocks_for(longest) as usize);
        tokens.reserve_exact(longest as usize - tokens.len());
        blocks.extend_from_slice(&self.scratch);
        let mut sequence = Sequence::new(waiting.id, waiting.request, tokens, blocks, reservation, row);
        sequence.num_computed = matched_tokens;
        sequence.carry(branches, self.config.block_size);
        sequence.is_branch = self.sets.is_branch(sequence.id);
        self.own(sequence.id).num_unforked += sequence.num_unsplit();
        sequence.num_indexed = pinned;
        sequence.pin = pin;
        sequence.known_age = known_age;
        sequence.resumed_at = self.now;
        sequence.progress = waiting.progress;
        sequence
    }

    /// Blocks that stalled and parked sequences wait for.
    fn held_back(&self, compartment: usize) -> u64 {
        let parked =
            self.parked_of(compartment).iter().map(|sequence| u64::from(self.blocks_to_return(sequence)));
        u64::from(self.compartments[compartment].owed) + parked.sum::<u64>()
    }
}

/// The request, the row or the chunk that was looked for is not there yet; no room helps.
fn nothing_there() -> Error {
    Error::WrongState("no such request, no free row, or a chunk to wait for".to_owned())
}
