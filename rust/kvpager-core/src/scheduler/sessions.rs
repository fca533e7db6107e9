//! Sessions: the blocks of a conversation stay where they are between its turns.
//!
//! When a turn ends, what the index has of it is *kept* (`kept.rs`) until the next turn. Gone means cached: the next turn
//! finds what is left of it.

use super::Scheduler;
use super::inbox::Message;
use super::request::Request;
use super::retention::Retention;
use super::tenant::Tenant;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::{Error, Result};
use std::sync::Arc;

/// Numbers sessions.
static NEXT_SESSION: AtomicU64 = AtomicU64::new(0);

/// A conversation whose blocks are kept between turns: the handle that its turns are submitted with.
#[derive(Debug)]
pub struct Session {
    /// Whose it is.
    pub tenant: Arc<Tenant>,
    /// What of its last turn is kept, and how long without another.
    pub(super) retention: Retention,
    pub(super) number: u64,
    is_open: AtomicBool,
}

impl Session {
    /// Whether it takes turns: it has not been closed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        // Relaxed: a turn that is submitted beside the closing may be before or after it.
        self.is_open.load(Ordering::Relaxed)
    }
}

/// Checks the session of a request.
pub(super) fn check_session(request: &Request) -> Result<()> {
    let Some(session) = &request.session else { return Ok(()) };
    let refused = |text: String| Err(Error::invalid(format!("a turn of a session {text}")));
    if !Arc::ptr_eq(&session.tenant, &request.tenant) {
        return refused(format!(
            "of tenant {:?} is submitted for tenant {:?}",
            session.tenant.name, request.tenant.name
        ));
    }
    if request.n != 1 {
        return refused(format!("has one sequence, not n = {}", request.n));
    }
    if !request.reuse {
        return refused("takes part in reuse: reuse must be true".to_owned());
    }
    if session.is_open() { Ok(()) } else { refused("that was closed".to_owned()) }
}

impl Scheduler {
    /// Opens a session: the blocks of each turn stay, until the limit has passed without another or somebody needs
    /// them. From any thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a limit that is none, a tenant of another scheduler or of a shared scope, or a
    /// scheduler without an index; [`Error::Refused`] if the scheduler is being drained.
    pub fn open_session(
        &self,
        tenant: &Arc<Tenant>,
        retention: impl Into<Retention>,
    ) -> Result<Arc<Session>> {
        let retention = retention.into();
        retention.check()?;
        if tenant.scheduler != self.id {
            return Err(Error::invalid(format!("tenant {:?} is of another scheduler", tenant.name)));
        }
        if self.index.is_none() || tenant.scope() != super::TenantScope::Private {
            return Err(Error::invalid(format!(
                "tenant {:?}, of {} scope: a session keeps blocks in a prefix index, as a tenant of private scope",
                tenant.name,
                tenant.scope().name()
            )));
        }
        if self.inbox.is_draining() {
            return Err(Error::refused("the scheduler is being drained and accepts nothing"));
        }
        Ok(Arc::new(Session {
            tenant: Arc::clone(tenant),
            retention,
            // Relaxed: a number, unique by itself.
            number: NEXT_SESSION.fetch_add(1, Ordering::Relaxed),
            is_open: AtomicBool::new(true),
        }))
    }

    /// Closes a session: it takes no turn any more, and what it keeps becomes cached in the next step; a turn that
    /// runs goes on. False if it was closed before. From any thread.
    pub fn close_session(&self, session: &Session) -> bool {
        let was_open = session.is_open.swap(false, Ordering::Relaxed);
        if was_open {
            self.inbox.push(Message::CloseSession(session.number));
        }
        was_open
    }
}
