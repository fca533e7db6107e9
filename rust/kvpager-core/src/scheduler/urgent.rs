//! Urgent requests: a head that does not fit may take the room of requests of a lower class, when that is asked for.
//!
//! Only of a lower *submitted* class of its own tenant, and never of one that has waited so long that it comes before
//! the urgent one by now; never of the oldest, which must get on.

use super::compartments::compartment_of;
use super::core::Core;
use super::queue::Place;
use super::sequence::Sequence;
use crate::{Error, Result};

impl Core {
    /// Preempts one request of a lower class than the head of a tenant, if all of those together have what the head is
    /// short of. False, and nothing has changed, otherwise.
    pub(super) fn preempt_lower(&mut self, tenant: usize, head: Place, short: &Error) -> Result<bool> {
        let missing = match *short {
            Error::OutOfBlocks { needed, available, .. } | Error::OverQuota { needed, available, .. } => {
                needed.saturating_sub(available)
            }
            _ => return Ok(false),
        };
        let Some(waiting) = self.queue.get(tenant, head) else { return Ok(false) };
        if !self.config.urgent_preempts || !self.open.is_empty() {
            return Ok(false);
        }
        let priority = waiting.request.priority;
        let oldest = self.oldest(waiting.request.tenant.compartment);
        // A set gives way as a whole.
        let is_lower = |sequence: &Sequence| {
            let request = &sequence.request;
            request.tenant.index == tenant
                && request.priority > priority
                && self.queue.key(request.priority, &sequence.progress) > head.0
                && sequence.has_sampled
                && sequence.special.is_none()
                && sequence.ending.is_none()
                && !oldest.is_some_and(|oldest| self.sets.are_one(oldest, sequence.id))
                && !self.has_moved(sequence)
        };
        let compartment = waiting.request.tenant.compartment;
        let gives = |sequence: &Sequence| {
            let of_set = || self.leads(sequence) && self.running_set(sequence).all(is_lower);
            if sequence.is_branch { of_set() } else { is_lower(sequence) }
        };
        let lower = self.running_of(compartment).iter().filter(|sequence| gives(sequence));
        let (mut blocks, mut victim) = (0, None);
        for sequence in lower {
            let promised =
                self.running_set(sequence).map(|branch| u64::from(branch.reservation.num_blocks()));
            blocks += self.num_held_by_set(sequence) as u64 + promised.sum::<u64>();
            victim = victim.max(Some((sequence.request.priority, sequence.id)));
        }
        let Some((_, id)) = victim.filter(|_| blocks >= missing) else { return Ok(false) };
        debug_assert_eq!(compartment_of(id), compartment);
        let Some(position) = self.position(id) else { return Ok(false) };
        self.drop_running(position)?;
        Ok(true)
    }
}
