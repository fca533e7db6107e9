//! Who is next: per-tenant queues in priority order, tenants by weighted service.

use super::request::{Progress, WaitingRequest};
use super::tenant::Tenant;
use crate::ids::SequenceId;
use hashbrown::HashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Every so many steps a blocked head is looked at without a change of ours: somebody else may share the pool.
const RECHECK_STEPS: u64 = 32;

/// Place in a tenant's queue: step of arrival, shifted by the priority, then id. It does not change while the
/// request waits, so ageing costs nothing.
pub(super) type Place = (i64, SequenceId);

/// What the head of a tenant's queue waits for that other tenants take too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    Nothing,
    /// Room of the pool that is promised to nobody.
    Room,
    /// Places for all sequences of a set.
    Places,
}

struct TenantQueue {
    tenant: Arc<Tenant>,
    waiting: BTreeMap<Place, WaitingRequest>,
    /// Computed tokens, and blocks x steps held, over weight.
    service: f64,
    num_running: u32,
    /// Value of its compartment's change counter, and step, at which its head did not fit; it is not looked at again
    /// before a change.
    blocked_at: Option<(u64, u64)>,
    /// Step that last admitted requests of it, and the prompt tokens that those have to compute.
    admitted: (u64, u64),
    short: Short,
}

impl TenantQueue {
    /// There is another head, or the same one in another state.
    fn look_again(&mut self) {
        (self.blocked_at, self.short) = (None, Short::Nothing);
    }

    fn is_active(&self) -> bool {
        self.num_running > 0 || !self.waiting.is_empty()
    }

    /// Its service, with the prompts that a step has admitted by now and is yet to charge.
    fn due(&self, step: u64) -> f64 {
        let admitted = if self.admitted.0 == step { self.admitted.1 } else { 0 };
        self.service + admitted as f64 / self.tenant.weight
    }
}

/// The waiting requests of all tenants.
pub(super) struct Queue {
    /// Steps of waiting that make up for one class of priority.
    ageing_steps: u32,
    tenants: Vec<TenantQueue>,
    places: HashMap<SequenceId, (usize, Place), foldhash::fast::RandomState>,
    /// By compartment: grows whenever room or matchable blocks may have appeared.
    changes: Vec<u64>,
}

impl Queue {
    pub(super) fn new(ageing_steps: u32) -> Self {
        Self { ageing_steps, tenants: Vec::new(), places: HashMap::default(), changes: vec![0] }
    }

    fn place_of(&self, waiting: &WaitingRequest) -> Place {
        (self.key(waiting.request.priority, &waiting.progress), waiting.id)
    }

    /// What orders a tenant's requests: less is sooner.
    pub(super) fn key(&self, priority: i32, progress: &Progress) -> i64 {
        let class = i64::from(priority).saturating_mul(i64::from(self.ageing_steps));
        class.saturating_add_unsigned(progress.arrival_step + progress.paused_steps)
    }

    pub(super) fn add_tenant(&mut self, tenant: Arc<Tenant>) {
        debug_assert_eq!(tenant.index, self.tenants.len());
        self.tenants.push(TenantQueue {
            tenant,
            waiting: BTreeMap::new(),
            service: 0.0,
            num_running: 0,
            admitted: (0, 0),
            blocked_at: None,
            short: Short::Nothing,
        });
    }

    pub(super) fn num_tenants(&self) -> usize {
        self.tenants.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Queues a request. A tenant that was idle re-enters at the least service of the active ones, so that
    /// idleness saves nothing up.
    pub(super) fn push(&mut self, waiting: WaitingRequest) {
        let index = waiting.request.tenant.index;
        if !self.tenants[index].is_active() {
            self.forget_credit(index);
        }
        self.insert(waiting);
    }

    /// A tenant has not been kept waiting by others: what it got less than they did is not made up for.
    fn forget_credit(&mut self, index: usize) {
        let compartment = self.tenants[index].tenant.compartment;
        let is_peer = |&(number, other): &(usize, &TenantQueue)| {
            number != index && other.tenant.compartment == compartment && other.is_active()
        };
        let peers = self.tenants.iter().enumerate().filter(is_peer);
        let floor = peers.map(|(_, other)| other.service).fold(f64::INFINITY, f64::min);
        if floor.is_finite() {
            let queue = &mut self.tenants[index];
            queue.service = queue.service.max(floor);
        }
    }

    /// The head of a tenant waits for room of its own limit, which others leave it.
    pub(super) fn note_limited(&mut self, tenant: usize) {
        self.note_short(tenant, Short::Nothing);
        self.forget_credit(tenant);
    }

    fn insert(&mut self, waiting: WaitingRequest) {
        let index = waiting.request.tenant.index;
        let place = self.place_of(&waiting);
        self.places.extend(waiting.ids().map(|id| (id, (index, place))));
        let queue = &mut self.tenants[index];
        if queue.waiting.first_key_value().is_none_or(|(head, _)| place < *head) {
            queue.look_again();
        }
        queue.waiting.insert(place, waiting);
    }

    /// Takes a waiting request out, wherever it stands; the other branches of its set stay.
    pub(super) fn remove(&mut self, id: SequenceId) -> Option<WaitingRequest> {
        let (gone, rest) = self.remove_set(id)?.take_out(id);
        if let Some(rest) = rest {
            self.insert(rest);
        }
        gone
    }

    /// Who stands in the queue for a request that waits: the eldest branch of its set.
    pub(super) fn entry_of(&self, id: SequenceId) -> Option<SequenceId> {
        self.places.get(&id).map(|(_, place)| place.1)
    }

    /// Takes a waiting request out with all its branches.
    pub(super) fn remove_set(&mut self, id: SequenceId) -> Option<WaitingRequest> {
        let (index, place) = *self.places.get(&id)?;
        let queue = &mut self.tenants[index];
        queue.look_again();
        let waiting = queue.waiting.remove(&place)?;
        waiting.ids().for_each(|id| {
            self.places.remove(&id);
        });
        Some(waiting)
    }

    /// Ids of all waiting requests.
    pub(super) fn ids(&self) -> Vec<SequenceId> {
        self.places.keys().copied().collect()
    }

    /// The tenant of a compartment that is served next: least service among those whose head may fit. None that is
    /// ahead of a tenant whose head waits for room: each time that small requests take what a large one waits for, they
    /// would gain. But one whose head `is_guaranteed` its room takes none that others wait for.
    pub(super) fn next_tenant(
        &self,
        compartment: usize,
        step: u64,
        is_guaranteed: impl Fn(&WaitingRequest) -> bool,
    ) -> Option<usize> {
        if self.is_empty() {
            // Most steps.
            return None;
        }
        let may_fit = |queue: &TenantQueue| {
            let is_unchanged = |(at, since)| at == self.changes[compartment] && step < since + RECHECK_STEPS;
            !queue.waiting.is_empty() && !queue.blocked_at.is_some_and(is_unchanged)
        };
        let own = || {
            let all = self.tenants.iter().enumerate();
            all.filter(move |(_, queue)| queue.tenant.compartment == compartment)
        };
        let least = |short: Short| {
            let waits = own().filter(move |(_, queue)| queue.short == short);
            waits.map(|(_, queue)| queue.due(step)).fold(f64::INFINITY, f64::min)
        };
        let (room, places) = (least(Short::Room), least(Short::Places));
        let may_pass = |queue: &TenantQueue| {
            let due = queue.due(step);
            let is_sure = || queue.waiting.first_key_value().is_some_and(|(_, head)| is_guaranteed(head));
            due <= places && (due <= room || is_sure())
        };
        own()
            .filter(|(_, queue)| may_fit(queue) && may_pass(queue))
            .min_by(|(_, a), (_, b)| a.due(step).total_cmp(&b.due(step)))
            .map(|(index, _)| index)
    }

    /// A step has admitted a request of a tenant that has so many prompt tokens to compute.
    pub(super) fn note_admitted(&mut self, tenant: usize, step: u64, num_tokens: u32) {
        let queue = &mut self.tenants[tenant];
        let before = if queue.admitted.0 == step { queue.admitted.1 } else { 0 };
        queue.admitted = (step, before + u64::from(num_tokens));
    }

    /// Place of the request at the head of a tenant's queue.
    pub(super) fn head(&self, tenant: usize) -> Option<Place> {
        self.tenants[tenant].waiting.first_key_value().map(|(place, _)| *place)
    }

    pub(super) fn get(&self, tenant: usize, place: Place) -> Option<&WaitingRequest> {
        self.tenants[tenant].waiting.get(&place)
    }

    /// The request waits for a chunk of another one.
    pub(super) fn note_share_wait(&mut self, tenant: usize, place: Place) {
        if let Some(waiting) = self.tenants[tenant].waiting.get_mut(&place) {
            waiting.progress.share_waits += 1;
        }
    }

    /// Takes a request out: it was admitted.
    pub(super) fn pop(&mut self, tenant: usize, place: Place) -> Option<WaitingRequest> {
        let queue = &mut self.tenants[tenant];
        let is_head = queue.waiting.first_key_value().is_some_and(|(head, _)| *head == place);
        let waiting = queue.waiting.remove(&place)?;
        queue.num_running += 1;
        if is_head {
            queue.look_again();
        }
        waiting.ids().for_each(|id| {
            self.places.remove(&id);
        });
        Some(waiting)
    }

    /// What the head of a tenant waits for.
    pub(super) fn note_short(&mut self, tenant: usize, short: Short) {
        self.tenants[tenant].short = short;
    }

    /// Service of a tenant so far.
    pub(super) fn service(&self, tenant: usize) -> f64 {
        self.tenants[tenant].service
    }

    /// The head did not fit: its tenant waits for a change. Returns the head, to note who passes it.
    pub(super) fn block(&mut self, tenant: usize, present: (u64, f64)) -> Option<&mut WaitingRequest> {
        let queue = &mut self.tenants[tenant];
        queue.blocked_at = Some((self.changes[queue.tenant.compartment], present.0));
        let mut head = queue.waiting.first_entry()?;
        head.get_mut().blocked_since.get_or_insert(present);
        Some(head.into_mut())
    }

    /// Places of the requests behind the head, at most `depth`.
    pub(super) fn behind_head(&self, tenant: usize, depth: usize, places: &mut Vec<Place>) {
        places.clear();
        places.extend(self.tenants[tenant].waiting.keys().skip(1).take(depth));
    }

    /// Room or matchable blocks may have appeared for a compartment.
    pub(super) fn note_change(&mut self, compartment: usize) {
        self.changes[compartment] += 1;
    }

    pub(super) fn add_compartment(&mut self) {
        self.changes.push(0);
    }

    /// A sequence of the tenant runs that was not in the queue.
    pub(super) fn note_start(&mut self, tenant: usize) {
        self.tenants[tenant].num_running += 1;
    }

    /// A running sequence of the tenant ended or was preempted.
    pub(super) fn note_end(&mut self, tenant: usize) {
        self.tenants[tenant].num_running -= 1;
        self.note_change(self.tenants[tenant].tenant.compartment);
    }

    /// Charges service to a tenant.
    pub(super) fn charge(&mut self, tenant: usize, service: u64) {
        let queue = &mut self.tenants[tenant];
        queue.service += service as f64 / queue.tenant.weight;
    }
}
