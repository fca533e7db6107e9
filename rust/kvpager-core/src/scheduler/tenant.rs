//! Tenants: who owns requests and is charged for them.

use super::limits::Places;
use super::scopes::{Scopes, TenantScope};
use crate::ids::{AccountId, NamespaceId};
use crate::prefix_index::Isolation;
use crate::sync::{AtomicU64, Ordering};

/// A tenant of one scheduler. Requests carry it as a handle; it never comes from a request's own fields.
#[derive(Debug)]
pub struct Tenant {
    /// The name that its operator gave it.
    pub name: String,
    /// Position in the scheduler's list.
    pub(super) index: usize,
    /// Whose bounds it shares: those of a strict tenant are its own.
    pub(super) compartment: usize,
    /// Which scheduler made it.
    pub(super) scheduler: u64,
    /// Running places of its own, if it is strict.
    pub(super) max_running: Option<u32>,
    /// The pool account that its blocks are charged to.
    pub account: AccountId,
    /// What it may observe of others.
    pub isolation: Isolation,
    /// Who may see what its requests leave in the index.
    pub(super) scope: TenantScope,
    /// Where its requests look up and insert, if the scheduler has an index.
    pub(super) scopes: Option<Scopes>,
    /// Share of service: a tenant of weight 2 gets twice the tokens of one of weight 1 while both wait.
    pub weight: f64,
    /// Most blocks of it that are kept after their requests' ends.
    pub(super) max_kept_blocks: u32,
    /// Blocks of it that are.
    pub(super) num_kept_blocks: AtomicU64,
    /// What of it waits.
    pub(super) places: Places,
}

impl Tenant {
    /// Running places of its own, if it is strict.
    #[must_use]
    pub const fn max_running(&self) -> Option<u32> {
        self.max_running
    }

    /// Requests of it that have not been admitted yet. From any thread.
    #[must_use]
    pub fn num_waiting(&self) -> u32 {
        self.places.num_requests()
    }

    /// Prompt tokens of those requests. From any thread.
    #[must_use]
    pub fn num_waiting_tokens(&self) -> u64 {
        self.places.num_tokens()
    }

    /// Requests of it that may wait at once, if it has a bound of its own. From any thread.
    #[must_use]
    pub fn max_waiting(&self) -> Option<u32> {
        Some(self.places.limits().max_requests).filter(|&bound| bound < u32::MAX)
    }

    /// Blocks of it that are kept for sessions and retentions. From any thread.
    #[must_use]
    pub fn num_kept_blocks(&self) -> u64 {
        // Relaxed: a number for people.
        self.num_kept_blocks.load(Ordering::Relaxed)
    }

    pub(super) fn note_kept(&self, num_blocks: u64) {
        self.num_kept_blocks.store(num_blocks, Ordering::Relaxed);
    }

    /// Who may see what its requests leave in the index.
    #[must_use]
    pub const fn scope(&self) -> TenantScope {
        self.scope
    }

    /// Where its requests insert, but for those with a salt; none if the scheduler has no index.
    #[must_use]
    pub fn namespace(&self) -> Option<NamespaceId> {
        self.scopes.as_ref().map(Scopes::namespace)
    }

    pub(super) const fn scopes(&self) -> Option<&Scopes> {
        self.scopes.as_ref()
    }
}
