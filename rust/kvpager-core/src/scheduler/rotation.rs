//! When parked sequences come back.
//!
//! * The oldest sequence of all comes back by force, whatever it takes from others: it always gets on.
//! * Others come back, oldest first, when there is room for them and a little more.
//! * One whose pause has reached `max_token_gap` comes back at the cost of another. That draws on a token bucket of
//!   seconds of copying; when it is empty, the pause goes on and progress wins.
//! * Paused requests give their blocks before anybody is called.
//! * One that its quota, as it is by now, will never let back ends with reason `capacity`.

use super::compartments::{self, compartment_of, range_of};
use super::core::Core;
use super::preempt::{Asker, Room};
use super::request::FinishReason;
use super::scopes::TenantScope;
use super::sequence::Sequence;
use super::swap::MIN_TAIL_BLOCKS;
use crate::{Error, Result};
use std::sync::Arc;

/// Share of time that rotation may copy for.
const SHARE: f64 = 0.02;
/// Seconds of copying that may be spent at once.
const BURST: f64 = 20.0;
/// Share of `max_token_gap` for which a sequence that came back is left alone.
const RESIDENCY: f64 = 0.6;
/// Share of the pool that stays free after a return that is not due.
const RETURN_SHARE: f64 = 0.03;

/// The token bucket, and the pace of the steps.
#[derive(Debug)]
pub(super) struct Rotation {
    /// Part of the scheduler that its compartment is.
    part: f64,
    seconds: f64,
    last: f64,
    /// Seconds between the last two steps.
    pace: f64,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { part: 1.0, seconds: BURST, last: f64::NEG_INFINITY, pace: 0.0 }
    }
}

impl Rotation {
    /// A step begins.
    pub(super) fn note(&mut self, now: f64) {
        if self.last.is_finite() {
            self.pace = now - self.last;
            self.seconds = (self.seconds + self.part * SHARE * self.pace).min(self.part * BURST);
        }
        self.last = now;
    }

    pub(super) fn set_part(&mut self, part: f64) {
        self.part = part;
        self.seconds = self.seconds.min(part * BURST);
    }

    fn spend(&mut self, seconds: f64) -> bool {
        let granted = self.seconds >= seconds;
        if granted {
            self.seconds -= seconds;
        }
        granted
    }
}

/// Blocks that stay free after a return that is not due.
fn return_slack(room: compartments::Room) -> u32 {
    MIN_TAIL_BLOCKS.max((RETURN_SHARE * room.capacity as f64) as u32)
}

impl Core {
    /// Brings back whom of a compartment there is room for, and makes room for whom it is time for. Before anybody
    /// grows.
    pub(super) fn return_parked(&mut self, compartment: usize) -> Result<()> {
        let mut owed = std::mem::take(&mut self.compartments[compartment].owed);
        let mut position = range_of(&self.parked, compartment).start;
        while let Some(sequence) = self.parked.get(position) {
            let id = sequence.id;
            if compartment_of(id) != compartment || !self.has_row(compartment) {
                break;
            }
            if self.has_moved(sequence) || sequence.ending.is_some() {
                // This very step takes its tail out, and it comes back in a later one; or it has ended.
                position += 1;
                continue;
            }
            let need = self.blocks_to_return(sequence);
            let room = self.room_of(compartment)?;
            let called = self.compartments[compartment].called;
            let first = self.is_oldest(id) || called == Some(id);
            let is_due = first || (called.is_none() && self.is_due(position) && self.pay(position, need));
            let slack = if is_due { 0 } else { owed + return_slack(room) };
            let mut short = Error::OutOfBlocks { needed: need.into(), available: 0, capacity: 0 };
            if u64::from(need + slack) <= room.uncommitted {
                match self.unpark(position)? {
                    Some(error) => short = error,
                    None => {
                        self.uncall(id);
                        continue;
                    }
                }
            }
            // Before anybody gives something up for it.
            let lacks_quota = matches!(short, Error::OverQuota { .. });
            if (is_due || lacks_quota) && !self.can_ever_return(&self.parked[position])? {
                self.parked[position].ending = Some(FinishReason::Capacity);
                position += 1;
                continue;
            }
            if !self.kept.is_empty() {
                let tenant = Arc::clone(&self.parked[position].request.tenant);
                if self.release_kept(&tenant, &short)? {
                    continue;
                }
            }
            if !self.halted.is_empty() && self.take_from_paused(position, is_due, &short)? {
                if self.open.is_empty() {
                    continue;
                }
                // What it had comes free when the open steps have closed.
                owed += if is_due { need } else { 0 };
                position += 1;
                continue;
            }
            if is_due {
                self.call(position, &short)?;
                owed += need;
            }
            position += 1;
        }
        Ok(())
    }

    /// Whether a parked sequence could come back if nobody else had anything, as quotas are by now.
    fn can_ever_return(&self, sequence: &Sequence) -> Result<bool> {
        let need = sequence.num_held() as u32 + self.blocks_to_return(sequence);
        Ok(need <= self.reach_of(sequence)?)
    }

    fn unpark(&mut self, position: usize) -> Result<Option<Error>> {
        let mut sequence = self.parked.remove(position);
        let short = self.swap_in(&mut sequence)?;
        let list = if short.is_none() { &mut self.running } else { &mut self.parked };
        let position = list.partition_point(|other| other.id < sequence.id);
        list.insert(position, sequence);
        Ok(short)
    }

    /// Makes a paused request give its blocks to a parked sequence. One that is itself to pause when it is back takes them
    /// only when it is due: nobody else is admitted before. False if there is none, or none is needed.
    fn take_from_paused(&mut self, position: usize, is_due: bool, short: &Error) -> Result<bool> {
        let sequence = &self.parked[position];
        let pauses = self.pausing.contains(&sequence.id);
        let tenant = Arc::clone(&sequence.request.tenant);
        let is_wanted = is_due || !pauses && self.may_be_enough(&tenant, short);
        Ok(is_wanted && self.yield_room(&tenant, short)?)
    }

    /// Whether a sequence that is called now comes back just before its pause is too long: its blocks are free one
    /// step later, and its token comes at the end of that.
    fn is_due(&self, position: usize) -> bool {
        let (Some(host), Some(parked)) = (&self.host, &self.parked[position].parked) else { return false };
        let rotation = &self.compartments[compartment_of(self.parked[position].id)].rotation;
        self.now - parked.since + 2.0 * rotation.pace >= host.config.max_token_gap
    }

    /// Takes the time that moving so many blocks in, and as many out, costs from the bucket.
    fn pay(&mut self, position: usize, num_blocks: u32) -> bool {
        let Some(host) = &self.host else { return false };
        let seconds = 2.0 * host.config.swap_seconds(num_blocks);
        let id = self.parked[position].id;
        self.own(id).rotation.spend(seconds)
    }

    /// Takes from others what a parked sequence needs; it comes back in the next step.
    fn call(&mut self, position: usize, short: &Error) -> Result<()> {
        let Some(host) = &self.host else { return Ok(()) };
        let sequence = &self.parked[position];
        let tenant = &sequence.request.tenant;
        let need = u64::from(self.blocks_to_return(sequence));
        let asker = Asker {
            id: sequence.id,
            tenant: tenant.index,
            account: tenant.account,
            has_guests: tenant.scope() != TenantScope::Private,
            short,
            residency: Some(RESIDENCY * host.config.max_token_gap),
        };
        let id = asker.id;
        let uncommitted = self.room_of(compartment_of(id))?.uncommitted;
        let missing = need.saturating_sub(uncommitted).max(1) as u32;
        if self.make_room(&asker, missing)? != Room::None {
            self.own(id).called.get_or_insert(id);
        }
        Ok(())
    }
}
