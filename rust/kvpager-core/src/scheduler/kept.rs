//! What stays held after its request's end: for a session until its next turn, or because the request asked for it.
//!
//! Such a prefix is *kept*. It counts as its tenant's, up to the tenant's bound for all that is kept, each block once.
//! It becomes cached when its limit has passed, and before a running request is preempted or a request is refused for
//! memory: the tenant's own first, the lowest priority first, then what was kept first. A tenant keeps what is its own:
//! what lies in a group's or a public scope is theirs to keep.

use super::deadlines::{Deadlines, Moment};
use super::group_blocks::HeldGroups;
use super::kept_paths::{Path, Paths};
use super::retention::Retention;
use super::tenant::Tenant;
use crate::ids::BlockHandle;
use crate::prefix_index::Pin;
use hashbrown::HashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What goes first: (priority, step in which it was kept, number).
type Rank = (i32, u64, u64);

/// A kept prefix.
pub(super) struct Kept {
    /// This and `groups` let go of what they hold when they are dropped.
    pub(super) pin: Pin,
    pub(super) groups: HeldGroups,
    /// The blocks of `pin`, or its homes.
    pub(super) path: Path,
    pub(super) owner: Arc<Tenant>,
    pub(super) retention: Retention,
    pub(super) since: Moment,
    /// The session that it is kept for.
    pub(super) session: Option<u64>,
    pub(super) is_salted: bool,
}

impl Kept {
    fn num_group_blocks(&self) -> u64 {
        self.groups.num_blocks() as u64
    }

    /// Takes over from a prefix with the same blocks: the higher priority, and the later end.
    fn outdo(&mut self, other: &Self) {
        let (own, before) = (&mut self.retention, &other.retention);
        own.priority = own.priority.max(before.priority);
        own.limit = own.limit.or_later(self.since, before.limit, other.since);
    }
}

/// What one tenant keeps.
struct OfTenant {
    order: BTreeMap<Rank, Kept>,
    paths: Paths,
    /// Whether the paths are of blocks; else of homes, which are none.
    has_blocks: bool,
    num_group_blocks: u64,
}

impl OfTenant {
    const fn new(has_blocks: bool) -> Self {
        Self { order: BTreeMap::new(), paths: Paths::new(), has_blocks, num_group_blocks: 0 }
    }

    fn num_blocks(&self) -> u64 {
        let of_paths = if self.has_blocks { self.paths.num_blocks() } else { 0 };
        of_paths + self.num_group_blocks
    }

    /// The number of what goes first of that which `may` go.
    fn first(&self, may: impl Fn(&Kept) -> bool) -> Option<u64> {
        self.order.iter().find(|(_, kept)| may(kept)).map(|(&(.., number), _)| number)
    }
}

/// All that is kept.
pub(super) struct KeptPrefixes {
    /// Whether the paths of prefixes are of blocks.
    has_blocks: bool,
    /// By position of the tenant.
    tenants: Vec<OfTenant>,
    /// By number: position of the tenant, and rank.
    places: HashMap<u64, (usize, Rank), foldhash::fast::RandomState>,
    /// By session: the number of what is kept for it.
    sessions: HashMap<u64, u64, foldhash::fast::RandomState>,
    deadlines: Deadlines<u64>,
    num_blocks: u64,
    /// The next number.
    next: u64,
    /// Purges of the index that were seen.
    num_purges: u64,
}

impl KeptPrefixes {
    /// Nothing, in a model whose first layer group keeps all its blocks, or does not.
    pub(super) fn new(keeps_first: bool) -> Self {
        Self {
            has_blocks: keeps_first,
            tenants: Vec::new(),
            places: HashMap::default(),
            sessions: HashMap::default(),
            deadlines: Deadlines::default(),
            num_blocks: 0,
            next: 0,
            num_purges: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Sessions that keep something.
    pub(super) fn num_sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Prefixes that are kept because their requests asked for it.
    pub(super) fn num_retained(&self) -> usize {
        self.places.len() - self.sessions.len()
    }

    /// Blocks that are kept, of all tenants.
    pub(super) const fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Lets go of what a session keeps, if it keeps anything.
    pub(super) fn release_session(&mut self, session: u64) {
        if let Some(&number) = self.sessions.get(&session) {
            self.release(number);
        }
    }

    pub(super) fn release_all(&mut self) {
        for tenant in 0..self.tenants.len() {
            while self.release_first(tenant, |_| true).is_some() {}
        }
    }

    /// Lets go of one prefix; returns how many blocks nobody keeps any more.
    fn release(&mut self, number: u64) -> u64 {
        let Some((tenant, rank)) = self.places.remove(&number) else { return 0 };
        let own = &mut self.tenants[tenant];
        let Some(kept) = own.order.remove(&rank) else { return 0 };
        let before = own.num_blocks();
        own.num_group_blocks -= kept.num_group_blocks();
        own.paths.remove(kept.path, number);
        kept.owner.note_kept(own.num_blocks());
        let num_blocks = before - own.num_blocks();
        self.num_blocks -= num_blocks;
        self.deadlines.remove(number, kept.retention.limit, kept.since);
        if let Some(session) = kept.session {
            self.sessions.remove(&session);
        }
        num_blocks
    }

    /// Lets go of what goes first of a tenant's, of that which `may` go; returns how many blocks nobody keeps any more.
    /// `None` if there is nothing.
    pub(super) fn release_first(&mut self, tenant: usize, may: impl Fn(&Kept) -> bool) -> Option<u64> {
        let first = self.tenants.get(tenant)?.first(may)?;
        Some(self.release(first))
    }

    pub(super) fn keep(&mut self, mut kept: Kept) {
        let tenant = kept.owner.index;
        if self.tenants.len() <= tenant {
            self.tenants.resize_with(tenant + 1, || OfTenant::new(self.has_blocks));
        }
        match kept.session {
            Some(session) => self.release_session(session),
            None => self.replace_equal(&mut kept),
        }
        let (number, limit) = (self.next, kept.retention.limit);
        self.next += 1;
        let rank = (kept.retention.priority, kept.since.step, number);
        self.deadlines.insert(number, limit, kept.since);
        self.places.insert(number, (tenant, rank));
        self.sessions.extend(kept.session.map(|session| (session, number)));
        let own = &mut self.tenants[tenant];
        let before = own.num_blocks();
        own.num_group_blocks += kept.num_group_blocks();
        own.paths.insert(kept.path.clone(), number);
        kept.owner.note_kept(own.num_blocks());
        self.num_blocks += own.num_blocks() - before;
        own.order.insert(rank, kept);
    }

    /// A prefix that is retained already is retained once: so there are never more of them than blocks, but for those
    /// whose ends are counted in other ways, which cannot be compared.
    fn replace_equal(&mut self, kept: &mut Kept) {
        let own = &self.tenants[kept.owner.index];
        let is_like = |number: &u64| {
            let rank = self.places.get(number).map(|&(_, rank)| rank);
            let other = rank.and_then(|rank| own.order.get(&rank));
            other.is_some_and(|other| {
                other.session.is_none() && other.retention.limit.counts_as(kept.retention.limit)
            })
        };
        let Some(number) = own.paths.equal_to(&kept.path).find(is_like) else { return };
        if let Some(other) = self.places.get(&number).and_then(|(_, rank)| own.order.get(rank)) {
            kept.outdo(other);
        }
        self.release(number);
    }

    /// Lets what a tenant keeps go, what goes first first, until it is at most so many blocks.
    pub(super) fn keep_within(&mut self, tenant: &Tenant) {
        while self.tenants[tenant.index].num_blocks() > u64::from(tenant.max_kept_blocks)
            && self.release_first(tenant.index, |_| true).is_some()
        {}
    }

    /// Lets go of what nobody finds any more because it was purged.
    pub(super) fn release_purged(&mut self, num_purges: u64) {
        if std::mem::replace(&mut self.num_purges, num_purges) != num_purges {
            for tenant in 0..self.tenants.len() {
                while self.release_first(tenant, |kept| kept.pin.is_purged()).is_some() {}
            }
        }
    }

    /// Lets go of what is past its time.
    pub(super) fn release_passed(&mut self, now: Moment) {
        while let Some(number) = self.deadlines.pop_passed(now) {
            self.release(number);
        }
    }

    /// The tenants that keep something, with what comes free of it if all goes: at most so many blocks of theirs that
    /// nobody else holds.
    pub(super) fn owners_alone(
        &self,
        is_held: impl Fn(&BlockHandle) -> bool,
    ) -> impl Iterator<Item = (&Tenant, u64)> {
        self.tenants.iter().filter_map(move |own| {
            let (_, kept) = own.order.first_key_value()?;
            let of_paths = if own.has_blocks { own.paths.num_blocks_alone(&is_held) } else { 0 };
            Some((&*kept.owner, of_paths + own.num_group_blocks))
        })
    }

    /// The tenants that keep something, with their blocks.
    pub(super) fn owners(&self) -> impl Iterator<Item = (&Tenant, u64)> {
        self.tenants.iter().filter_map(|own| {
            let (_, kept) = own.order.first_key_value()?;
            Some((&*kept.owner, own.num_blocks()))
        })
    }
}
