//! When a running sequence cannot grow: the youngest that may be a victim gives blocks back.
//!
//! Rules (they are what makes every request end):
//! * the oldest sequence is never a victim, and may take from anybody younger;
//! * others take only from younger ones that sampled a token since their admission or return, and never from the
//!   oldest of another tenant or from a tenant within its guarantee;
//! * who is parked in part gives more before another is touched;
//! * what this step has moved already is left alone;
//! * a sequence that finds no victim stalls for a step and keeps what it has.

use super::compartments::{Coming, compartment_of, range_of};
use super::core::Core;
use super::host_tier::Overflow;
use super::inbox::Inbox;
use super::request::{FinishReason, FinishedRequest, WaitingRequest};
use super::scopes::TenantScope;
use super::sequence::{Sequence, Sequences};
use super::swap::MIN_TAIL_BLOCKS;
use crate::ids::{AccountId, SequenceId, StepId};
use crate::{Error, Result};
use hashbrown::HashSet;
use std::sync::Arc;

/// Who needs room, and what is short.
pub(super) struct Asker<'a> {
    pub(super) id: SequenceId,
    pub(super) tenant: usize,
    pub(super) account: AccountId,
    /// Whether guests of other tenants are charged to its account.
    pub(super) has_guests: bool,
    pub(super) short: &'a Error,
    /// Seconds since its return below which a running sequence is no victim; `None` for growth, where age counts.
    pub(super) residency: Option<f64>,
}

/// Where a victim is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Parked(usize),
    Running(usize),
}

/// Who gives first: of the tenant most above its guarantee, who is parked in part, who has run for a while since its
/// last return, who was a victim before, and then the one with most blocks, or, to be computed again, the youngest.
type Rank = (u64, bool, bool, bool, u64);

/// What asking for room came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Something is free now.
    Now,
    /// Something will be, when the step has closed.
    Later,
    /// Nobody may be a victim.
    None,
}

impl Core {
    /// Gives a running sequence room for `num_tokens` more positions, if need be by preempting others. False:
    /// it has to stall.
    pub(super) fn grow_or_preempt(&mut self, mut position: usize, num_tokens: u32) -> Result<bool> {
        let end = self.running[position].frontier() + num_tokens;
        loop {
            let short = match self.grow(position, end)? {
                Ok(()) => return Ok(true),
                Err(short) => short,
            };
            let id = self.running[position].id;
            let tenant = Arc::clone(&self.running[position].request.tenant);
            if self.yield_room(&tenant, &short)? {
                continue;
            }
            if !self.config.policy.overcommits() {
                return Ok(false);
            }
            let sequence = &self.running[position];
            let tenant = &sequence.request.tenant;
            let columns = self.config.blocks_for(end).saturating_sub(sequence.blocks.len() as u32);
            // The copy of a shared last block needs one too, in each group.
            let copy = u32::from(sequence.shares_tail());
            let missing = ((columns + copy) * self.config.layer_groups.len() as u32).max(1);
            let asker = Asker {
                id,
                tenant: tenant.index,
                account: tenant.account,
                has_guests: tenant.scope() != TenantScope::Private,
                short: &short,
                residency: None,
            };
            let room = self.make_room(&asker, missing)?;
            position = self.position_of(id, position);
            match room {
                Room::Now => {}
                Room::Later => return Ok(false),
                Room::None => {
                    if self.sets.is_branch(id) {
                        self.end_set_beyond_reach(id)?;
                    } else if self.config.grown_blocks(end) > self.reach_of(&self.running[position])? {
                        self.running[position].ending = Some(FinishReason::Capacity);
                    }
                    return Ok(false);
                }
            }
        }
    }

    /// Where a running sequence is now that was at `position` before others were taken out.
    pub(super) fn position_of(&self, id: SequenceId, position: usize) -> usize {
        match self.running.get(position) {
            Some(sequence) if sequence.id == id => position,
            _ => self.running.partition_point(|sequence| sequence.id < id),
        }
    }

    /// Takes `num_blocks` blocks from victims, unless as many are on their way already.
    pub(super) fn make_room(&mut self, asker: &Asker<'_>, num_blocks: u32) -> Result<Room> {
        let mut answer = Room::None;
        let tail = num_blocks.max(MIN_TAIL_BLOCKS);
        let newest = self.open.back().map(|open| open.id);
        while !self.promise_coming(asker, num_blocks) {
            if let Some(victim) = self.victim(asker, true)?
                && self.swaps_rather(victim, tail)?
                && self.park(victim, tail)?
            {
                answer = Room::Later;
                continue;
            }
            let Some(victim) = self.victim(asker, false)? else {
                if answer == Room::None && self.has_victim_in_flight(asker) {
                    // With nothing planned ahead, there is one in the step after.
                    self.own(asker.id).is_pressed = true;
                }
                return Ok(answer);
            };
            let sequence = self.of(victim);
            let (id, account) = (sequence.id, sequence.request.tenant.account);
            let held = self.num_held_by_set(sequence);
            self.drop_victim(victim)?;
            match newest {
                // An open step may read what it had.
                Some(step) if held > 0 => {
                    self.note_coming(compartment_of(id), step, account, held as u32);
                    answer = Room::Later;
                }
                _ => return Ok(Room::Now),
            }
        }
        Ok(Room::Later)
    }

    /// Whether somebody is no victim only because of what is in flight.
    fn has_victim_in_flight(&self, asker: &Asker<'_>) -> bool {
        let compartment = compartment_of(asker.id);
        let forced = self.is_oldest(asker.id);
        let is_due =
            |other: &Sequence| asker.residency.is_none_or(|seconds| self.now - other.resumed_at >= seconds);
        let may_give = |other: &Sequence| {
            let is_own = self.sets.are_one(other.id, asker.id);
            other.in_flight > 0 && !is_own && (forced || other.has_sampled && is_due(other))
        };
        self.running_of(compartment).iter().any(|other| may_give(other))
    }

    /// Counts on blocks that come free when this step or an open one closes, if there are enough for this asker.
    fn promise_coming(&mut self, asker: &Asker<'_>, num_blocks: u32) -> bool {
        let own_only = matches!(asker.short, Error::OverQuota { .. });
        let counts = |coming: &&mut Coming| !own_only || coming.account == asker.account;
        let own = &mut self.compartments[compartment_of(asker.id)];
        if own.coming.iter_mut().filter(counts).map(|coming| coming.left).sum::<u32>() < num_blocks {
            return false;
        }
        let mut missing = num_blocks;
        for coming in own.coming.iter_mut().filter(counts) {
            let taken = missing.min(coming.left);
            coming.left -= taken;
            missing -= taken;
        }
        own.owed += num_blocks;
        true
    }

    /// Notes blocks of a compartment that come free when a step closes.
    pub(super) fn note_coming(
        &mut self,
        compartment: usize,
        step: StepId,
        account: AccountId,
        num_blocks: u32,
    ) {
        let coming = &mut self.compartments[compartment].coming;
        match coming.iter_mut().find(|coming| (coming.step, coming.account) == (step, account)) {
            Some(coming) => {
                coming.num_blocks += num_blocks;
                coming.left += num_blocks;
            }
            None => coming.push(Coming { step, account, num_blocks, left: num_blocks }),
        }
    }

    /// Who gives blocks next: to the host tier, where age does not count, or everything.
    fn victim(&self, asker: &Asker<'_>, swaps: bool) -> Result<Option<Victim>> {
        let compartment = compartment_of(asker.id);
        let oldest = self.oldest(compartment);
        let forced = self.is_oldest(asker.id);
        let spared = [Some(asker.id), oldest, self.compartments[compartment].called.filter(|_| !forced)];
        let is_spared = |id| spared.iter().flatten().any(|&spared| self.sets.are_one(spared, id));
        let age = self.sets.eldest(asker.id);
        let may_give = |sequence: &Sequence| {
            let is_due = asker.residency.is_none_or(|seconds| self.now - sequence.resumed_at >= seconds);
            let is_younger = || self.sets.eldest(sequence.id) > age;
            let eligible = forced || sequence.has_sampled && is_due && (swaps || is_younger());
            let is_planned = sequence.num_planned > 0 && sequence.special.is_some();
            eligible && sequence.in_flight == 0 && !is_planned && !self.has_moved(sequence)
        };
        let mut best: Option<(Rank, Victim)> = None;
        for position in range_of(&self.running, compartment) {
            let sequence = &self.running[position];
            let gives = if sequence.is_branch {
                // A set gives as a whole, and everything.
                !swaps && self.leads(sequence) && self.running_set(sequence).all(may_give)
            } else {
                may_give(sequence)
            };
            if gives && !is_spared(sequence.id) {
                self.consider(Victim::Running(position), asker, swaps, &mut best)?;
            }
        }
        for position in range_of(&self.parked, compartment) {
            let sequence = &self.parked[position];
            if sequence.num_held() > 0 && !is_spared(sequence.id) {
                self.consider(Victim::Parked(position), asker, swaps, &mut best)?;
            }
        }
        Ok(best.map(|(_, victim)| victim))
    }

    /// Takes a candidate if its tenant may give to the asker, and is at least as far above its guarantee.
    fn consider(
        &self,
        victim: Victim,
        asker: &Asker<'_>,
        swaps: bool,
        best: &mut Option<(Rank, Victim)>,
    ) -> Result<()> {
        let sequence = self.of(victim);
        let tenant = &sequence.request.tenant;
        let above = if tenant.index == asker.tenant {
            u64::MAX
        } else {
            let forced = self.is_oldest(asker.id);
            let is_protected = !forced && self.is_oldest_of_tenant(sequence);
            // Its guests may wait for what it has: the oldest gets on.
            let is_theirs = matches!(asker.short, Error::OverQuota { .. }) && !(forced && asker.has_guests);
            if is_theirs || is_protected {
                return Ok(());
            }
            let account = self.pool.account_stats(tenant.account)?;
            account.committed.saturating_sub(account.guaranteed)
        };
        let was_victim = sequence.progress.preemptions > 0;
        let rested = self.now - sequence.resumed_at >= 0.5;
        let merit = if swaps { sequence.num_held() as u64 } else { self.sets.eldest(sequence.id).0 };
        let rank = (above, sequence.parked.is_some(), swaps && rested, swaps && was_victim, merit);
        if above > 0 && best.is_none_or(|(most, _)| rank > most) {
            *best = Some((rank, victim));
        }
        Ok(())
    }

    fn of(&self, victim: Victim) -> &Sequence {
        match victim {
            Victim::Parked(position) => &self.parked[position],
            Victim::Running(position) => &self.running[position],
        }
    }

    /// The oldest sequence of a compartment that has blocks.
    pub(super) fn oldest(&self, compartment: usize) -> Option<SequenceId> {
        let ids = [self.running_of(compartment).first(), self.parked_of(compartment).first()];
        ids.into_iter().flatten().map(|sequence| sequence.id).min()
    }

    /// Whether a sequence, or a branch of its set, is the oldest of its compartment that has blocks.
    pub(super) fn is_oldest(&self, id: SequenceId) -> bool {
        self.oldest(compartment_of(id)).is_some_and(|oldest| self.sets.are_one(oldest, id))
    }

    /// The running sequences of a set.
    pub(super) fn running_set(&self, sequence: &Sequence) -> impl Iterator<Item = &Sequence> {
        let members = self.sets.members(sequence.id).into_iter();
        members.filter_map(|id| self.position(id)).map(|position| &*self.running[position])
    }

    /// Whether a running sequence is the first of its set.
    pub(super) fn leads(&self, sequence: &Sequence) -> bool {
        self.running_set(sequence).next().is_some_and(|first| first.id == sequence.id)
    }

    /// Blocks that a sequence holds with the others of its set, each counted once.
    pub(super) fn num_held_by_set(&self, sequence: &Sequence) -> usize {
        if !self.sets.is_branch(sequence.id) {
            return sequence.num_held();
        }
        let mut blocks = HashSet::<_, foldhash::fast::RandomState>::default();
        for branch in self.running_set(sequence) {
            if branch.keeps_first() {
                blocks.extend(branch.blocks.iter().copied());
            }
            blocks.extend(branch.layers.iter().flat_map(|layers| layers.blocks()));
        }
        blocks.len()
    }

    fn is_oldest_of_tenant(&self, sequence: &Sequence) -> bool {
        let tenant = sequence.request.tenant.index;
        let has_older = |list: &[Box<Sequence>]| {
            let mut older = list.iter().take_while(|other| other.id < sequence.id);
            older.any(|other| other.request.tenant.index == tenant)
        };
        let compartment = compartment_of(sequence.id);
        !has_older(self.running_of(compartment)) && !has_older(self.parked_of(compartment))
    }

    /// Whether this step copies blocks of the sequence already.
    pub(super) fn has_moved(&self, sequence: &Sequence) -> bool {
        self.swaps.moved.contains(&sequence.id) || self.copies.concern(sequence.id)
    }

    fn remove(&mut self, victim: Victim) -> Box<Sequence> {
        match victim {
            Victim::Parked(position) => self.parked.remove(position),
            Victim::Running(position) => {
                let mut sequence = self.running.remove(position);
                // What this step had planned of it does not run.
                sequence.num_planned = 0;
                sequence
            }
        }
    }

    /// Takes everything from a running sequence.
    pub(super) fn drop_running(&mut self, position: usize) -> Result<()> {
        self.drop_victim(Victim::Running(position))
    }

    /// Takes everything from a victim, and from the others of its set.
    fn drop_victim(&mut self, victim: Victim) -> Result<()> {
        let sequence = self.remove(victim);
        let mut set = self.with_set(sequence);
        if self.config.overflow == Overflow::Refuse {
            set.iter_mut().for_each(|sequence| sequence.ending = Some(FinishReason::Capacity));
        }
        self.preempt_all(set)
    }

    /// Whether moving the tail out and back costs less than computing the victim again.
    fn swaps_rather(&self, victim: Victim, tail: u32) -> Result<bool> {
        let Some(host) = &self.host else { return Ok(false) };
        let sequence = self.of(victim);
        let costs_less = match self.config.overflow {
            Overflow::Recompute | Overflow::Refuse => return Ok(false),
            Overflow::Swap => true,
            Overflow::Auto => {
                let kept = sequence.columns_before_tail(tail);
                let tokens = (sequence.blocks.len() - kept) as u32 * self.config.block_size;
                let moved = sequence.num_blocks_in(kept..sequence.blocks.len()) as u32;
                2.0 * host.config.swap_seconds(moved) <= host.config.recompute_seconds(tokens)
            }
        };
        let least = tail.min(sequence.num_held() as u32);
        Ok(costs_less && host.has_room(sequence.request.tenant.index, least)?)
    }

    /// Moves a tail of the victim out. False, and nothing has changed, if that cannot be.
    fn park(&mut self, victim: Victim, tail: u32) -> Result<bool> {
        let mut sequence = self.remove(victim);
        let left = self.swap_out(&mut sequence, tail)?;
        if left.is_some() && matches!(victim, Victim::Running(_)) {
            sequence.progress.preemptions += 1;
            self.num_preemptions += 1;
            self.free_row(sequence.row, compartment_of(sequence.id));
        }
        if let Some(num_blocks) = left {
            let account = sequence.request.tenant.account;
            self.note_coming(compartment_of(sequence.id), self.last_step, account, num_blocks);
        }
        let list = if sequence.parked.is_some() { &mut self.parked } else { &mut self.running };
        let position = list.partition_point(|other| other.id < sequence.id);
        list.insert(position, sequence);
        Ok(left.is_some())
    }

    /// A sequence, and the others of its set that have not ended, out of where they ran.
    pub(super) fn with_set(&mut self, sequence: Box<Sequence>) -> Sequences {
        let id = sequence.id;
        let mut set = vec![sequence];
        if set[0].is_branch {
            let Self { running, parked, sets, .. } = self;
            let is_other = |other: &mut Box<Sequence>| other.ending.is_none() && sets.are_one(other.id, id);
            set.extend(running.extract_if(.., is_other).chain(parked.extract_if(.., is_other)));
        }
        // What this step had planned of them does not run.
        set.iter_mut().for_each(|sequence| sequence.num_planned = 0);
        set
    }

    /// Takes everything from a sequence and the others of its set; they go back to their place in the queue with their
    /// tokens, as one, or end. What is cached of them may be matched again when they resume.
    pub(super) fn preempt(&mut self, sequence: Box<Sequence>) -> Result<()> {
        let set = self.with_set(sequence);
        self.preempt_all(set)
    }

    fn preempt_all(&mut self, set: Sequences) -> Result<()> {
        let mut waiting = Vec::new();
        for mut sequence in set {
            if let Some(reason) = sequence.ending {
                let branches = self.take_branches(&mut sequence);
                branches.into_iter().for_each(|branch| self.refuse_branch(branch, reason));
                self.deadlines.remove(sequence.id, sequence.request.deadline, sequence.progress.arrival());
                self.sets.leave(sequence.id);
                self.report_refused(&sequence.account(reason, None), sequence.request.n);
                self.strip(&mut sequence)?;
                continue;
            }
            let was_parked = sequence.parked.is_some();
            self.num_preemptions += u64::from(!was_parked);
            self.strip(&mut sequence)?;
            waiting.push(sequence.into_waiting(!was_parked));
        }
        if let Some(waiting) = WaitingRequest::gather(waiting) {
            self.queue.push(waiting);
        }
        Ok(())
    }

    fn refuse_branch(&mut self, branch: WaitingRequest, reason: FinishReason) {
        self.deadlines.remove(branch.id, branch.request.deadline, branch.progress.arrival());
        self.sets.leave(branch.id);
        let n = branch.request.n;
        self.report_refused(&branch.account(reason, self.last_step.0), n);
    }

    /// [`Core::report_end`] in two halves: the ids end when the step is planned.
    fn report_refused(&mut self, account: &FinishedRequest, n: u32) {
        for branch in 0..n {
            let ended = account.of_sample(branch);
            self.refused.push((ended.id, ended.branch));
            self.ended.push(ended);
        }
    }

    /// Ends the ids of what this step has refused.
    pub(super) fn end_refused(&mut self, inbox: &Inbox) {
        while let Some((id, branch)) = self.refused.pop() {
            if !inbox.end_id(id) && branch > 0 {
                // Aborted by its own id before.
                let ended = self.ended.iter_mut().filter(|ended| ended.id == id);
                ended.for_each(|ended| ended.reason = FinishReason::Aborted);
            }
            inbox.forget_samples(id, branch);
        }
    }

    /// Takes row and blocks, here and on the host, from a sequence that is out of where it ran.
    pub(super) fn strip(&mut self, sequence: &mut Sequence) -> Result<()> {
        let was_parked = sequence.parked.is_some();
        self.uncall(sequence.id);
        if let (Some(host), Some(parked)) = (&mut self.host, sequence.parked.take()) {
            host.leave(parked.blocks);
        }
        self.release_device(sequence, was_parked)
    }
}
