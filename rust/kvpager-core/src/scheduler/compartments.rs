//! Compartments: who divides one set of bounds.
//!
//! A `strict` tenant is alone in its compartment, all others are in the common one. Each has its own running places
//! and table rows, tokens of a step, waiting places, request ids, and its own state wherever the scheduler remembers
//! something between requests: what a step plans for one compartment is a function of that compartment alone. What
//! strict tenants are given is taken out of the common compartment, so all of them together stay within the
//! scheduler's bounds.
//!
//! The ids of a compartment's requests have its number in front, so the lists that are kept in order of id are in
//! order of compartment, then age.

use super::config::SchedulerConfig;
use super::core::Core;
use super::limits::QueueLimits;
use super::policy::{LearnedLengths, Trajectory};
use super::rotation::Rotation;
use super::sequence::Sequence;
use crate::block_pool::Quota;
use crate::ids::{AccountId, SequenceId, StepId};
use crate::{Error, Result};
use std::ops::Range;

/// Bits of an id below its compartment's number.
const NUMBER_BITS: u32 = 40;

/// The compartment of all tenants that are not strict.
pub(super) const COMMON: usize = 0;

/// The compartment that an id is of.
pub(super) const fn compartment_of(id: SequenceId) -> usize {
    (id.0 >> NUMBER_BITS) as usize
}

/// The first id that a compartment may issue, less one.
pub(super) const fn base_id(compartment: usize) -> u64 {
    (compartment as u64) << NUMBER_BITS
}

/// What a `strict` tenant is given of the scheduler's bounds; `None` for the part that its blocks are of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Sequences of it that run at once.
    pub max_running: Option<u32>,
    /// Tokens of it in a step.
    pub max_batch_tokens: Option<u32>,
}

/// Bounds that are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) max_running: u32,
    pub(super) max_batch_tokens: u32,
    pub(super) queue: QueueLimits,
}

impl Bounds {
    pub(super) const fn all(config: &SchedulerConfig) -> Self {
        Self {
            max_running: config.max_running,
            max_batch_tokens: config.max_batch_tokens,
            queue: config.queue,
        }
    }

    /// What a strict tenant gets, of bounds that are all of the scheduler's, with `quota` of `num_blocks` blocks.
    pub(super) fn of_strict(self, share: Share, queue: QueueLimits, quota: Quota, num_blocks: u32) -> Self {
        let scaled = |whole: u64| {
            let part = u128::from(whole) * u128::from(quota.guaranteed) / u128::from(num_blocks);
            u64::try_from(part).unwrap_or(u64::MAX).max(1)
        };
        let or_scaled = |given: Option<u32>, whole: u32| given.unwrap_or(scaled(whole.into()) as u32);
        let all = self.queue;
        let max_requests = match queue.max_requests {
            u32::MAX if all.max_requests < u32::MAX => scaled(all.max_requests.into()) as u32,
            given => given,
        };
        let max_tokens = match queue.max_tokens {
            u64::MAX if all.max_tokens < u64::MAX => scaled(all.max_tokens),
            given => given,
        };
        Self {
            max_running: or_scaled(share.max_running, self.max_running),
            max_batch_tokens: or_scaled(share.max_batch_tokens, self.max_batch_tokens),
            queue: QueueLimits { max_requests, max_tokens },
        }
    }

    /// Checks that a tenant which is not strict finds something in the common bounds.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if strict tenants have all of one, or if it asks for a share.
    pub(super) fn check_common(self, tenant: &str, share: Share) -> Result<()> {
        if share != Share::default() {
            let given = [("max_running", share.max_running), ("max_batch_tokens", share.max_batch_tokens)];
            let given = given.iter().filter_map(|(name, value)| value.map(|value| format!("{name} {value}")));
            return Err(Error::invalid(format!(
                "tenant {tenant:?} is not strict, and these are shares of a strict tenant: {}",
                given.collect::<Vec<_>>().join(", ")
            )));
        }
        let QueueLimits { max_requests, max_tokens } = self.queue;
        if self.max_running == 0 || max_requests == 0 || max_tokens == 0 {
            return Err(Error::invalid(format!(
                "tenant {tenant:?}: strict tenants leave max_running {}, max_waiting {max_requests} and \
                 max_waiting_tokens {max_tokens}; at least 1 of each is needed",
                self.max_running
            )));
        }
        Ok(())
    }

    /// What is left of the common bounds after a strict tenant has got its own.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the bound that does not go round; `least` must be left of each.
    pub(super) fn less(self, tenant: &str, own: Self, least: u32) -> Result<Self> {
        let take = |name: &str, whole: u64, part: u64| {
            let unbounded = whole == u64::MAX;
            match whole.checked_sub(part).filter(|left| unbounded || *left >= u64::from(least)) {
                _ if unbounded => Ok(u64::MAX),
                Some(left) => Ok(left),
                None => Err(Error::invalid(format!(
                    "strict tenant {tenant:?} is to have {part} of {name}: {whole} are not given to other strict \
                     tenants, and {least} must be left"
                ))),
            }
        };
        let wide = |requests: u32| if requests == u32::MAX { u64::MAX } else { u64::from(requests) };
        let left = Self {
            max_running: take("max_running", self.max_running.into(), own.max_running.into())? as u32,
            max_batch_tokens: take(
                "max_batch_tokens",
                self.max_batch_tokens.into(),
                own.max_batch_tokens.into(),
            )? as u32,
            queue: QueueLimits {
                max_requests: take(
                    "max_waiting",
                    wide(self.queue.max_requests),
                    wide(own.queue.max_requests),
                )?
                .min(u32::MAX.into()) as u32,
                max_tokens: take("max_waiting_tokens", self.queue.max_tokens, own.queue.max_tokens)?,
            },
        };
        for (whose, bounds) in [("it has", own), ("others keep", left)] {
            if bounds.max_batch_tokens < bounds.max_running || (own.max_running == 0) {
                return Err(Error::invalid(format!(
                    "strict tenant {tenant:?}: {whose} max_batch_tokens {} and max_running {}: each running \
                     sequence, of which there must be 1 at least, decodes one token a step",
                    bounds.max_batch_tokens, bounds.max_running
                )));
            }
        }
        Ok(left)
    }
}

/// Blocks of an account that come free when a step closes: the one that is being planned, or an open one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming {
    pub(super) step: StepId,
    pub(super) account: AccountId,
    pub(super) num_blocks: u32,
    /// Those of them that nobody counts on in the step that is being planned.
    pub(super) left: u32,
}

/// The state of one compartment.
pub(super) struct Compartment {
    /// The account of its only tenant; `None` for the common one.
    pub(super) account: Option<AccountId>,
    pub(super) bounds: Bounds,
    /// Samples that running requests will become besides the first; each has a place already.
    pub(super) num_unforked: u32,
    /// Table rows that wait for a step to close.
    pub(super) num_retired: u32,
    pub(super) rotation: Rotation,
    /// The parked sequence that others have made room for.
    pub(super) called: Option<SequenceId>,
    /// Blocks that come free when a step closes, by step and account.
    pub(super) coming: Vec<Coming>,
    /// Blocks that stalled sequences count on in the next step.
    pub(super) owed: u32,
    /// The open step that what was released last waits for.
    pub(super) frees_at: Option<StepId>,
    /// Whether a waiting request was left in the queue for what a running one computes.
    pub(super) is_chunk_awaited: bool,
    /// Whether somebody found no victim because of what is in flight: the next step plans nothing ahead.
    pub(super) is_pressed: bool,
    /// The same, for the step that is being planned.
    pub(super) plans_ahead: bool,
    /// What `forecast` has learned.
    pub(super) lengths: LearnedLengths,
    /// Step in which the forecast was last worked out.
    pub(super) refreshed_at: u64,
    /// Growth of what runs, worked out once a step in which somebody asks.
    pub(super) growth: Option<Trajectory>,
}

impl Compartment {
    pub(super) fn new(account: Option<AccountId>, bounds: Bounds) -> Self {
        Self {
            account,
            bounds,
            num_unforked: 0,
            num_retired: 0,
            rotation: Rotation::default(),
            called: None,
            coming: Vec::new(),
            owed: 0,
            frees_at: None,
            is_chunk_awaited: false,
            is_pressed: false,
            plans_ahead: true,
            lengths: LearnedLengths::default(),
            refreshed_at: 0,
            growth: None,
        }
    }
}

/// Where a compartment's sequences are in a list in order of id.
pub(super) fn range_of(list: &[Box<Sequence>], compartment: usize) -> Range<usize> {
    let start = list.partition_point(|sequence| compartment_of(sequence.id) < compartment);
    let end = list.partition_point(|sequence| compartment_of(sequence.id) <= compartment);
    start..end
}

/// Blocks as one compartment has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) capacity: u64,
    /// Of those, the ones that nobody has or is promised.
    pub(super) uncommitted: u64,
}

impl Core {
    /// The compartment that a sequence is of.
    pub(super) fn own(&mut self, id: SequenceId) -> &mut Compartment {
        &mut self.compartments[compartment_of(id)]
    }

    /// The running sequences of a compartment.
    pub(super) fn running_of(&self, compartment: usize) -> &[Box<Sequence>] {
        &self.running[range_of(&self.running, compartment)]
    }

    /// Its sequences whose tails are on the host.
    pub(super) fn parked_of(&self, compartment: usize) -> &[Box<Sequence>] {
        &self.parked[range_of(&self.parked, compartment)]
    }

    /// Blocks that a compartment's tenants have between them: what strict tenants are given is theirs whether they
    /// use it or not.
    pub(super) fn room_of(&self, compartment: usize) -> Result<Room> {
        if let Some(account) = self.compartments[compartment].account {
            let stats = self.pool.account_stats(account)?;
            let uncommitted = stats.limit.saturating_sub(stats.committed);
            return Ok(Room { capacity: stats.limit, uncommitted });
        }
        let stats = self.pool.stats();
        let uncommitted = stats.capacity - stats.held - stats.reserved - stats.quarantined;
        let mut room = Room { capacity: stats.capacity, uncommitted };
        for account in self.compartments.iter().filter_map(|compartment| compartment.account) {
            let stats = self.pool.account_stats(account)?;
            room.capacity = room.capacity.saturating_sub(stats.limit);
            room.uncommitted = room.uncommitted.saturating_sub(stats.limit.saturating_sub(stats.committed));
        }
        Ok(room)
    }

    /// Rows of a compartment that nobody has, and no open step may read.
    fn num_rows_free(&self, compartment: usize) -> usize {
        let own = &self.compartments[compartment];
        let halted = self.halted.iter().filter(|halted| compartment_of(halted.sequence.id) == compartment);
        let taken = self.running_of(compartment).len()
            + halted.count()
            + (own.num_unforked + own.num_retired) as usize;
        (own.bounds.max_running as usize).saturating_sub(taken)
    }

    /// Rows for further sequences of a compartment; parked ones come back to theirs.
    pub(super) fn num_rows_left(&self, compartment: usize) -> usize {
        self.num_rows_free(compartment).saturating_sub(self.parked_of(compartment).len())
    }

    /// Whether a parked sequence finds a row; if not, one comes back when an open step closes.
    pub(super) fn has_row(&self, compartment: usize) -> bool {
        self.num_rows_free(compartment) > 0
    }

    /// Makes a compartment for a strict tenant out of the common one. Returns its number.
    pub(super) fn add_compartment(&mut self, account: AccountId, own: Bounds, left: Bounds) -> usize {
        self.compartments[COMMON].bounds = left;
        self.compartments.push(Compartment::new(Some(account), own));
        let whole = f64::from(self.config.max_batch_tokens);
        for compartment in &mut self.compartments {
            let part = f64::from(compartment.bounds.max_batch_tokens) / whole;
            compartment.rotation.set_part(part);
        }
        self.queue.add_compartment();
        self.compartments.len() - 1
    }

    /// Checks that what the common compartment has taken fits what will be left of it.
    pub(super) fn check_common_fits(&self, tenant: &str, left: Bounds) -> Result<()> {
        let most = self.compartments[COMMON].bounds.max_running as usize;
        let taken = most - self.num_rows_left(COMMON).min(most);
        if taken > left.max_running as usize {
            return Err(Error::WrongState(format!(
                "strict tenant {tenant:?} leaves {} running places to others, who have {taken}: add it before they \
                 run, or wait for them",
                left.max_running
            )));
        }
        Ok(())
    }
}
