//! What the workers of a round share: the pool, the owner map, mailboxes.

use super::report::Violation;
use super::settings::Round;
use super::shadow::Shadow;
use super::worker::Batch;
use crate::block_pool::{BlockPool, PoolConfig, Quota};
use crate::error::Error;
use crate::ids::{AccountId, BlockHandle, BlockId};
use crate::sync::{AtomicI64, Ordering};
use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use std::sync::Arc;

/// Batches that wait in a mailbox at most.
const MAILBOX: usize = 8;

/// What a worker has that no owner map shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) reserved: u64,
    pub(super) cached: u64,
    pub(super) stranded: u64,
}

impl std::iter::Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), |a, b| Self {
            reserved: a.reserved + b.reserved,
            cached: a.cached + b.cached,
            stranded: a.stranded + b.stranded,
        })
    }
}

/// Blocks that a tenant ever asked for, calls under way included, and those that it has given back, or was refused.
/// Both only grow, so the difference of a later and an earlier look bounds what it had in between.
#[derive(Default)]
struct Demand {
    asked: AtomicI64,
    given: AtomicI64,
}

/// A call that asks for blocks, as its tenant's demand was before.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    tenant: u8,
    count: i64,
    given_before: i64,
}

pub(super) struct World<const F: u8> {
    pub(super) pool: Arc<BlockPool<F>>,
    pub(super) shadow: Shadow,
    pub(super) round: Round,
    pub(super) mailboxes: Vec<ArrayQueue<Batch>>,
    /// By tenant, in plain rounds.
    demands: Vec<CachePadded<Demand>>,
}

impl<const F: u8> World<F> {
    pub(super) fn new(round: Round) -> Result<Self, Error> {
        let pool = BlockPool::with_fault(PoolConfig {
            num_blocks: round.blocks,
            max_accounts: u32::from(round.tenants),
            max_open_steps: round.max_open_steps,
        })?;
        for tenant in 0..round.tenants {
            let (guaranteed, limit) = round.quota(tenant);
            pool.add_account(Quota { guaranteed, limit })?;
        }
        Ok(Self {
            pool,
            shadow: Shadow::new(round.blocks),
            round,
            mailboxes: (0..round.threads).map(|_| ArrayQueue::new(MAILBOX)).collect(),
            demands: (0..round.tenants).map(|_| CachePadded::default()).collect(),
        })
    }

    /// A tenant is about to ask for blocks.
    pub(super) fn asks(&self, tenant: u8, count: i64) -> Asked {
        if !self.round.is_plain() {
            return Asked { tenant, count, given_before: 0 };
        }
        let Demand { asked, given } = &*self.demands[tenant as usize];
        // SeqCst, here and below: a call that the pool let another one feel must be seen to have asked.
        let given_before = given.load(Ordering::SeqCst);
        asked.fetch_add(count, Ordering::SeqCst);
        Asked { tenant, count, given_before }
    }

    /// A tenant has given blocks back.
    pub(super) fn gave(&self, tenant: u8, count: i64) {
        if self.round.is_plain() {
            self.demands[tenant as usize].given.fetch_add(count, Ordering::SeqCst);
        }
    }

    /// Whether a call may have been refused: not if all that its tenant can have had and asked for meanwhile fits.
    pub(super) fn check_refusal(&self, asked: Asked, error: &Error) -> Result<(), Violation> {
        let Asked { tenant, count, given_before } = asked;
        let (guaranteed, limit) = self.round.quota(tenant);
        let allowed = match error {
            Error::OverQuota { .. } => limit,
            Error::OutOfBlocks { .. } => guaranteed,
            Error::NeedsReclaim { .. } if self.round.weights.index > 0 => return Ok(()),
            _ => return Err(Violation::new(format!("tenant {tenant} got: {error}"))),
        };
        if !self.round.is_plain() {
            return Ok(());
        }
        let most = self.demands[tenant as usize].asked.load(Ordering::SeqCst) - given_before;
        if most <= i64::from(allowed) {
            return Err(Violation::new(format!(
                "tenant {tenant} of {guaranteed} guaranteed and at most {limit} blocks had and asked for {most} at the \
                 most and got: {error}"
            )));
        }
        self.gave(tenant, count);
        Ok(())
    }

    /// Checks everything while nothing moves and no step is open.
    pub(super) fn check(&self, tally: Tally) -> Result<(), Violation> {
        self.pool.check_invariants().map_err(|text| Violation::new(format!("at a standstill: {text}")))?;
        let stats = self.pool.stats();
        let in_hand = self.shadow.num_in_hand();
        let expected =
            (in_hand - tally.cached + tally.stranded, tally.cached, tally.reserved, tally.stranded, 0);
        let found = (stats.held, stats.cached, stats.reserved, stats.stranded, stats.quarantined);
        if found != expected {
            return Err(Violation::new(format!(
                "at a standstill, (held, cached, reserved, stranded, quarantined) are {found:?} and should be \
                 {expected:?}"
            )));
        }
        Ok(())
    }

    /// Checks that everything came back, and that all of it can be had.
    pub(super) fn check_empty(&self) -> Result<(), Violation> {
        self.check(Tally::default())?;
        let tenants = || (0..self.round.tenants).map(|tenant| AccountId(tenant.into()));
        for account in tenants() {
            let stats = self.pool.account_stats(account);
            if stats.as_ref().map_or(0, |stats| stats.committed) != 0 {
                return Err(Violation::new(format!(
                    "all was given back, and account {account} has {stats:?}"
                )));
            }
        }
        let refused = |error| Violation::new(format!("all was given back, and then: {error}"));
        for account in tenants() {
            let quota = Quota { guaranteed: 0, limit: self.round.blocks };
            self.pool.set_quota(account, quota).map_err(refused)?;
        }
        let mut all = vec![BlockHandle::new(0, BlockId(0)); self.round.blocks as usize];
        self.pool.allocate(AccountId(0), &mut all).map_err(refused)?;
        self.shadow.hand_out(0, &all)?;
        self.shadow.giving_up(&all, 0);
        self.pool.release(&all).map_err(refused)?;
        self.check(Tally::default())
    }
}
