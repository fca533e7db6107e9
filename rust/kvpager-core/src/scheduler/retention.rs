//! Retention: how long what a request leaves in the index stays held after its end, and what of it goes first.

use super::TenantScope;
use super::request::{Deadline, Request};
use crate::{Error, Result};

/// What of a request is kept after its end, for how long, and in which order it goes when room is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retention {
    /// How long from the end on; by default until somebody needs the room.
    pub limit: Deadline,
    /// Leading tokens that are kept, in whole blocks; `None` for all that the index has of it.
    pub num_tokens: Option<u32>,
    /// Lower goes first; of one priority, what was kept first.
    pub priority: i32,
}

impl From<Deadline> for Retention {
    fn from(limit: Deadline) -> Self {
        Self { limit, ..Self::default() }
    }
}

impl Retention {
    /// Checks the values.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a limit that is none, or for 0 tokens.
    pub fn check(self) -> Result<()> {
        if self.num_tokens == Some(0) {
            return Err(Error::invalid("a retention keeps 0 tokens, must be at least 1"));
        }
        self.limit.check_as("the end of the retention")
    }
}

/// Checks the retention of a request.
pub(super) fn check_retention(request: &Request, has_index: bool) -> Result<()> {
    let Some(retention) = request.retention else { return Ok(()) };
    let refused = |text: &str| Err(Error::invalid(format!("a request with a retention {text}")));
    if !has_index {
        return refused("needs a prefix index, the scheduler has none");
    }
    if !request.reuse {
        return refused("takes part in reuse: reuse must be true");
    }
    if request.session.is_some() {
        return refused("is no turn of a session, which keeps its blocks itself");
    }
    if request.tenant.scope() == TenantScope::Public {
        return refused("is of no public scope: what is published stays until it is withdrawn");
    }
    retention.check()
}
