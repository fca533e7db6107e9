//! Sessions: the blocks of a conversation stay where they are between its turns.
//!
//! When a turn ends, the session *keeps* the pin of its indexed blocks. They count as its tenant's, up to the tenant's
//! bound for them, and go, longest idle first, before a running request is preempted or a request is refused for
//! memory, and when the session's limit has passed. Gone means cached: the next turn finds what is left of them.

use super::Scheduler;
use super::core::Core;
use super::deadlines::{Deadlines, Moment};
use super::inbox::Message;
use super::request::{Deadline, Request};
use super::sequence::Sequence;
use super::tenant::Tenant;
use crate::prefix_index::ChainPin;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
use crate::{Error, Result};
use hashbrown::HashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers sessions.
static NEXT_SESSION: AtomicU64 = AtomicU64::new(0);

/// A conversation whose blocks are kept between turns: the handle that its turns are submitted with.
#[derive(Debug)]
pub struct Session {
    /// Whose it is.
    pub tenant: Arc<Tenant>,
    /// How long its blocks are kept without a turn.
    limit: Deadline,
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

/// What a session keeps between turns.
struct Kept {
    session: Arc<Session>,
    /// Drops the blocks when it goes.
    _pin: ChainPin,
    num_blocks: u32,
    since: Moment,
}

/// All that sessions keep.
#[derive(Default)]
pub(super) struct Sessions {
    /// By (when their idleness began, number).
    idle: BTreeMap<(u64, u64), Kept>,
    /// By number: when its idleness began.
    since: HashMap<u64, u64, foldhash::fast::RandomState>,
    deadlines: Deadlines<u64>,
}

impl Sessions {
    pub(super) fn len(&self) -> usize {
        self.idle.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty()
    }

    /// Lets go of what a session keeps, if it keeps anything.
    pub(super) fn release(&mut self, number: u64) {
        let Some(since) = self.since.remove(&number) else { return };
        if let Some(kept) = self.idle.remove(&(since, number)) {
            self.deadlines.remove(number, kept.session.limit, kept.since);
        }
    }

    fn keep(&mut self, kept: Kept) {
        let (number, since) = (kept.session.number, kept.since);
        self.release(number);
        self.deadlines.insert(number, kept.session.limit, since);
        self.since.insert(number, since.step);
        self.idle.insert((since.step, number), kept);
    }

    /// Lets a tenant's sessions go, longest idle first, until they keep at most so many blocks.
    fn keep_within(&mut self, tenant: &Tenant, most: u32) {
        let own = |kept: &Kept| kept.session.tenant.index == tenant.index;
        let kept = self.idle.iter().filter(|(_, kept)| own(kept));
        let kept: Vec<_> = kept.map(|(&(_, number), kept)| (number, kept.num_blocks)).collect();
        let mut total: u64 = kept.iter().map(|&(_, num_blocks)| u64::from(num_blocks)).sum();
        for (number, num_blocks) in kept {
            if total <= u64::from(most) {
                break;
            }
            total -= u64::from(num_blocks);
            self.release(number);
        }
    }

    pub(super) fn release_all(&mut self) {
        self.idle.clear();
        self.since.clear();
        self.deadlines = Deadlines::default();
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
    /// Opens a session: the blocks of its turns stay, until the limit has passed without one or somebody needs them.
    /// From any thread.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a limit that is none, a tenant of another scheduler or of a shared scope, or a
    /// scheduler without an index; [`Error::Refused`] if the scheduler is being drained.
    pub fn open_session(&self, tenant: &Arc<Tenant>, limit: Deadline) -> Result<Arc<Session>> {
        limit.check()?;
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
            limit,
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

impl Core {
    /// A sequence leaves the blocks that it has in the index: its session keeps them, if it is of one that goes on.
    pub(super) fn keep_for_session(&mut self, sequence: &Sequence, pin: ChainPin) {
        let Some(session) = &sequence.request.session else { return };
        if !session.is_open() || self.draining.is_some() || sequence.num_indexed == 0 {
            return;
        }
        let kept = Kept {
            session: Arc::clone(session),
            _pin: pin,
            num_blocks: sequence.num_indexed,
            since: self.moment(),
        };
        self.sessions.keep(kept);
        self.sessions.keep_within(&sequence.request.tenant, sequence.request.tenant.max_session_blocks);
    }

    /// Lets go of what sessions keep that have been idle for too long.
    pub(super) fn end_idle_sessions(&mut self) {
        while let Some(number) = self.sessions.deadlines.pop_passed(self.moment()) {
            self.sessions.release(number);
        }
    }

    /// Lets the session go that has been idle longest, of those whose blocks help a tenant that is short: its own, or,
    /// if the pool is short, of tenants above their guarantees. False if there is none.
    pub(super) fn release_session(&mut self, tenant: &Tenant, short: &Error) -> Result<bool> {
        let own_only = match short {
            Error::OutOfBlocks { .. } => false,
            Error::OverQuota { .. } => true,
            _ => return Ok(false),
        };
        let mut found = None;
        for (&(_, number), kept) in &self.sessions.idle {
            let owner = &kept.session.tenant;
            if owner.index == tenant.index {
                found = Some(number);
                break;
            }
            if found.is_some() || own_only || owner.compartment != tenant.compartment {
                continue;
            }
            let account = self.pool.account_stats(owner.account)?;
            if account.committed > account.guaranteed {
                found = Some(number);
            }
        }
        if let Some(number) = found {
            self.sessions.release(number);
        }
        Ok(found.is_some())
    }
}
