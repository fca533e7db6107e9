//! Admission: the next request of the tenant that is served next, if what its policy asks for is there.

use super::core::Core;
use super::inbox::Inbox;
use super::limits::note_admission;
use super::phases::Phase;
use super::policy::{AdmissionRequest, AdmissionRoom, Trajectory};
use super::queue::Place;
use super::request::{FinishReason, WaitingRequest};
use super::samples::extra_blocks;
use super::scopes::{look_up, peek};
use super::sequence::Sequence;
use crate::block_pool::Reservation;
use crate::prefix_index::ChainPin;
use crate::{Error, Result};

/// Requests behind a blocked head that are looked at.
const BYPASS_DEPTH: usize = 64;
/// Steps between two looks at how far the running sequences have got.
const REFRESH_STEPS: u64 = 32;

impl Core {
    /// Admits until the budget, the running places or the room are used up.
    pub(super) fn admit(&mut self, inbox: &Inbox, budget: &mut u32) -> Result<()> {
        let mut growth = None;
        self.free_paused_row()?;
        if self.has_place(*budget) && self.queue.next_tenant().is_some() {
            self.refresh_forecast();
        }
        while self.has_place(*budget) {
            let Some(tenant) = self.queue.next_tenant() else { break };
            let Some(head) = self.queue.head(tenant) else { break };
            if !self.try_admit(tenant, head, inbox, budget, &mut growth)?
                && !self.end_if_hopeless(tenant, head, inbox)?
            {
                self.admit_behind(tenant, inbox, budget, &mut growth)?;
            }
        }
        Ok(())
    }

    /// Ends a head that quotas, as they are by now, will never let in.
    fn end_if_hopeless(&mut self, tenant: usize, head: Place, inbox: &Inbox) -> Result<bool> {
        let Some(waiting) = self.queue.get(tenant, head) else { return Ok(false) };
        let need = self.config.lifetime_blocks(waiting.progress.prompt_tokens, waiting.request.max_tokens);
        if need <= self.pool.reachable(waiting.request.tenant.account)? && !self.is_published_full(waiting)? {
            return Ok(false);
        }
        if let Some(waiting) = self.queue.remove(head.1) {
            self.end_waiting(waiting, FinishReason::Capacity, inbox);
        }
        Ok(true)
    }

    fn has_place(&self, budget: u32) -> bool {
        budget > 0 && self.num_rows_left() > 0
    }

    /// Lets small requests pass a head that does not fit, as many and for as long as the limits say; after
    /// that, what becomes free is kept for the head.
    fn admit_behind(
        &mut self,
        tenant: usize,
        inbox: &Inbox,
        budget: &mut u32,
        growth: &mut Option<Trajectory>,
    ) -> Result<()> {
        let present = (self.last_step.0, self.now);
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
            if passed == allowance || !self.has_place(*budget) {
                break;
            }
            if self.try_admit(tenant, place, inbox, budget, growth)? {
                passed += 1;
            }
        }
        self.places = places;
        if let Some(head) = self.queue.block(tenant, present) {
            head.bypassed += passed;
        }
        Ok(())
    }

    /// Admits one request if what it needs is there, or comes from those who must yield to it.
    fn try_admit(
        &mut self,
        tenant: usize,
        place: Place,
        inbox: &Inbox,
        budget: &mut u32,
        growth: &mut Option<Trajectory>,
    ) -> Result<bool> {
        loop {
            match self.try_promise(tenant, place, inbox, budget, growth)? {
                Ok(()) => return Ok(true),
                Err(short) => {
                    if !self.yield_room(tenant, &short)? {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Admits one request if what it needs can be promised to it, and plans its first chunk. Otherwise it
    /// keeps nothing; the error says what is short.
    fn try_promise(
        &mut self,
        tenant: usize,
        place: Place,
        inbox: &Inbox,
        budget: &mut u32,
        growth: &mut Option<Trajectory>,
    ) -> Result<std::result::Result<(), Error>> {
        let Some(waiting) = self.queue.get(tenant, place) else { return Ok(Err(nothing_there())) };
        let request = &waiting.request;
        if self.num_rows_left() < request.n as usize {
            return Ok(Err(nothing_there()));
        }
        self.scratch.clear();
        self.phases.lap(Phase::Admission);
        if let Some(short) = self.surely_short(waiting, growth)? {
            self.phases.lap(Phase::LookUp);
            return Ok(Err(short));
        }
        let found = look_up(self.index.as_ref(), request, &mut self.scratch);
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
        if self.should_wait(pin.as_ref(), request, &request.prompt, num_found, waited) {
            self.is_chunk_awaited = true;
            self.queue.note_share_wait(tenant, place);
            return Ok(Err(nothing_there()));
        }
        let reservation = match self.promise(waiting, self.scratch.len(), growth)? {
            Ok(reservation) => reservation,
            Err(short) => return Ok(Err(short)),
        };
        self.keep_within_limit(&request.tenant)?;
        let Some(row) = self.tables.take_row() else { return Ok(Err(nothing_there())) };
        let Some(waiting) = self.queue.pop(tenant, place) else { return Ok(Err(nothing_there())) };
        note_admission(&waiting, &inbox.places, self.last_step.0);
        if let Some(growth) = growth {
            self.add_growth(growth, &waiting);
        }
        let sequence = self.start(waiting, pin, reservation, row);
        let position = self.insert_running(sequence);
        self.plan_chunk(position, budget)?;
        Ok(Ok(()))
    }

    /// What a request would be short of, if it can be told without pinning its prefix: a pin of a request that
    /// stays in the queue costs time and makes its prefix look used.
    fn surely_short(
        &self,
        waiting: &WaitingRequest,
        growth: &mut Option<Trajectory>,
    ) -> Result<Option<Error>> {
        if self.promise(waiting, 0, growth)?.is_ok() {
            return Ok(None);
        }
        let found = peek(self.index.as_ref(), &waiting.request)?;
        Ok(self.promise(waiting, found, growth)?.err())
    }

    /// Reserves what a request needs that has its first `num_found` blocks; the error says what is short.
    fn promise(
        &self,
        waiting: &WaitingRequest,
        num_found: usize,
        growth: &mut Option<Trajectory>,
    ) -> Result<std::result::Result<Reservation, Error>> {
        let request = &waiting.request;
        let asked = AdmissionRequest {
            prompt_tokens: waiting.progress.prompt_tokens,
            known_tokens: request.prompt.len() as u32,
            max_tokens: request.max_tokens,
            pinned_blocks: num_found as u32,
        };
        let samples = extra_blocks(&self.config, request, waiting.progress.prompt_tokens);
        let need = self.config.policy.blocks_to_reserve(&self.config, asked) + samples;
        if self.config.policy.overcommits() && !(self.running.is_empty() && self.parked.is_empty()) {
            let mut with_request = *growth.get_or_insert_with(|| self.growth_of_running());
            self.add_growth(&mut with_request, waiting);
            let stats = self.pool.stats();
            let room = AdmissionRoom {
                uncommitted_blocks: stats.capacity - stats.held - stats.reserved - stats.quarantined,
                capacity_blocks: stats.capacity,
                growth: with_request,
            };
            let leave = self.config.policy.blocks_to_leave(room);
            if u64::from(need) + leave + self.held_back() > room.uncommitted_blocks {
                return Ok(Err(Error::OutOfBlocks {
                    needed: u64::from(need) + leave,
                    available: room.uncommitted_blocks,
                    capacity: room.capacity_blocks,
                }));
            }
        }
        match self.pool.reserve(request.tenant.account, need) {
            Ok(reservation) => Ok(Ok(reservation)),
            Err(short @ (Error::OutOfBlocks { .. } | Error::OverQuota { .. })) => Ok(Err(short)),
            Err(error) => Err(error),
        }
    }

    /// A sequence whose first blocks are the matched ones in `scratch`.
    fn start(
        &mut self,
        mut waiting: WaitingRequest,
        pin: Option<ChainPin>,
        reservation: Reservation,
        row: u32,
    ) -> Sequence {
        let known_age = waiting.num_outputs();
        let pinned = self.scratch.len() as u32;
        let matched_tokens = pinned * self.config.block_size;
        for block in &self.scratch {
            self.tables.append(row, block.id());
        }
        let progress = &mut waiting.progress;
        if progress.queue_steps.is_none() {
            progress.queue_steps = Some(progress.waited(self.last_step.0 - 1));
            progress.cached_tokens = matched_tokens;
        }
        self.recomputed_tokens +=
            u64::from(std::mem::take(&mut progress.lost_tokens).saturating_sub(matched_tokens));
        let mut tokens = std::mem::take(&mut waiting.request.prompt);
        let longest = progress.prompt_tokens + waiting.request.max_tokens;
        let mut blocks = Vec::with_capacity(self.config.blocks_for(longest) as usize);
        tokens.reserve_exact(longest as usize - tokens.len());
        blocks.extend_from_slice(&self.scratch);
        let mut sequence = Sequence::new(waiting.id, waiting.request, tokens, blocks, reservation, row);
        sequence.num_computed = matched_tokens;
        if sequence.request.n > 1 {
            self.num_unforked += sequence.request.n - 1;
            sequence.special_mut().is_unforked = true;
        }
        sequence.num_indexed = pinned;
        sequence.pin = pin;
        sequence.known_age = known_age;
        sequence.resumed_at = self.now;
        sequence.progress = waiting.progress;
        sequence
    }

    /// Blocks that stalled and parked sequences wait for.
    fn held_back(&self) -> u64 {
        let parked = self.parked.iter().map(|sequence| u64::from(self.blocks_to_return(sequence)));
        u64::from(self.owed) + parked.sum::<u64>()
    }

    /// Adds a waiting request to a forecast.
    fn add_growth(&self, growth: &mut Trajectory, waiting: &WaitingRequest) {
        if self.config.policy.forecasts() {
            let held = self.config.blocks_for(waiting.request.prompt.len() as u32) as f32;
            let age = waiting.num_outputs();
            let most = waiting.request.max_tokens - age;
            growth.add(&self.lengths, held, age, most, self.config.block_size as f32);
        }
    }

    /// What the sequences that run will grow by.
    fn growth_of_running(&self) -> Trajectory {
        let mut growth = Trajectory::default();
        if self.config.policy.forecasts() {
            for sequence in self.running.iter().chain(&self.parked) {
                let age = sequence.num_outputs();
                let held = sequence.tokens.len() as f32 / self.config.block_size as f32;
                let most = sequence.request.max_tokens - age;
                growth.add(&self.lengths, held, age, most, self.config.block_size as f32);
            }
        }
        growth
    }

    /// Teaches the forecast how far the running sequences have got, and works it out again.
    pub(super) fn refresh_forecast(&mut self) {
        if !self.config.policy.forecasts() || self.last_step.0 < self.refreshed_at + REFRESH_STEPS {
            return;
        }
        self.refreshed_at = self.last_step.0;
        for sequence in self.running.iter_mut().chain(&mut self.parked) {
            let age = sequence.num_outputs();
            self.lengths.expose(std::mem::replace(&mut sequence.known_age, age), age);
        }
        let ages = self.running.iter().chain(&self.parked).map(Sequence::num_outputs);
        self.lengths.rebuild(ages);
    }
}

/// The request, the row or the chunk that was looked for is not there yet; no room helps.
fn nothing_there() -> Error {
    Error::WrongState("no such request, no free row, or a chunk to wait for".to_owned())
}
