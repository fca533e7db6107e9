//! Tenants: who owns requests and is charged for them.

use super::limits::Places;
use crate::ids::{AccountId, NamespaceId};

/// A tenant of one scheduler. Requests carry it as a handle; it never comes from a request's own fields.
#[derive(Debug)]
pub struct Tenant {
    /// The name that its operator gave it.
    pub name: String,
    /// Position in the scheduler's list.
    pub(super) index: usize,
    /// Which scheduler made it.
    pub(super) scheduler: u64,
    /// The pool account that its blocks are charged to.
    pub account: AccountId,
    /// Its private namespace in the index, if the scheduler has one.
    pub namespace: Option<NamespaceId>,
    /// Share of service: a tenant of weight 2 gets twice the tokens of one of weight 1 while both wait.
    pub weight: f64,
    /// What of it waits.
    pub(super) places: Places,
}

impl Tenant {
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
}
