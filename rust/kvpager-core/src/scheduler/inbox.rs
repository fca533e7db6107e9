//! The way in from any thread: a lock-free queue, its bound, and the set of ids that have not ended.

use super::compartments::{base_id, compartment_of};
use super::limits::{Places, QueueLimits};
use super::request::{Deadline, FinishReason, WaitingRequest};
use crate::ids::SequenceId;
use crate::sync::{AtomicBool, Ordering};
use crossbeam_queue::SegQueue;
use hashbrown::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks of the live set; each is held for one hash-set operation.
const NUM_SHARDS: usize = 16;

/// What other threads ask of the engine thread.
#[derive(Debug)]
pub(super) enum Message {
    Submit(Box<WaitingRequest>),
    End(SequenceId, FinishReason),
    Pause(SequenceId),
    Resume(SequenceId),
    Drain(Deadline),
    /// The number of a session.
    CloseSession(u64),
}

/// Messages on their way to the engine thread.
#[derive(Debug)]
pub(super) struct Inbox {
    messages: SegQueue<Message>,
    /// Whose last message about pausing that is on its way says to pause.
    pausing: Mutex<HashSet<u64, foldhash::fast::RandomState>>,
    /// By compartment.
    next_ids: Mutex<Vec<u64>>,
    /// What waits, of all tenants.
    pub(super) places: Places,
    /// No request is accepted any more.
    is_draining: AtomicBool,
    /// Of live requests with several samples: how many, by the first id.
    samples: Mutex<HashMap<u64, u32, foldhash::fast::RandomState>>,
    live: [Mutex<HashSet<u64, foldhash::fast::RandomState>>; NUM_SHARDS],
}

impl Inbox {
    pub(super) fn new(limits: QueueLimits) -> Self {
        Self {
            messages: SegQueue::new(),
            pausing: Mutex::new(HashSet::default()),
            next_ids: Mutex::new(vec![1]),
            places: Places::new(limits),
            is_draining: AtomicBool::new(false),
            samples: Mutex::new(HashMap::default()),
            live: std::array::from_fn(|_| Mutex::new(HashSet::default())),
        }
    }

    /// Accepts nothing from now on.
    pub(super) fn close(&self) {
        // Relaxed: a submit that runs beside it may be before or after it.
        self.is_draining.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    fn next_ids(&self) -> MutexGuard<'_, Vec<u64>> {
        self.next_ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A compartment more, with ids of its own.
    pub(super) fn add_compartment(&self) {
        let mut next_ids = self.next_ids();
        let base = base_id(next_ids.len());
        next_ids.push(base + 1);
    }

    /// A new id of a compartment, live from now on.
    pub(super) fn issue_id(&self, compartment: usize) -> SequenceId {
        self.issue_ids(compartment, 1)
    }

    /// The first of `n` new ids in a row, live from now on.
    pub(super) fn issue_ids(&self, compartment: usize, n: u32) -> SequenceId {
        let first = {
            let next = &mut self.next_ids()[compartment];
            std::mem::replace(next, *next + u64::from(n))
        };
        for id in first..first + u64::from(n) {
            self.shard(id, |live| live.insert(id));
        }
        if n > 1 {
            self.samples.lock().unwrap_or_else(PoisonError::into_inner).insert(first, n);
        }
        SequenceId(first)
    }

    /// The ids of a request that have not ended: of one with several samples, named by the first id, all of them.
    pub(super) fn live_ids(&self, id: SequenceId) -> Vec<SequenceId> {
        let n = self.samples.lock().unwrap_or_else(PoisonError::into_inner).get(&id.0).copied().unwrap_or(1);
        let ids = (id.0..id.0 + u64::from(n)).map(SequenceId);
        let live: Vec<_> = ids.filter(|&id| self.is_live(id)).collect();
        if live.is_empty() && n > 1 {
            self.samples.lock().unwrap_or_else(PoisonError::into_inner).remove(&id.0);
        }
        live
    }

    /// Forgets a request with several samples once all of them have ended.
    pub(super) fn forget_samples(&self, id: SequenceId, branch: u32) {
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.is_empty() {
            return;
        }
        let first = id.0 - u64::from(branch);
        let Some(&n) = samples.get(&first) else { return };
        if (first..first + u64::from(n)).all(|id| !self.is_live(SequenceId(id))) {
            samples.remove(&first);
        }
    }

    /// Whether the id was ever issued.
    pub(super) fn was_issued(&self, id: SequenceId) -> bool {
        let compartment = compartment_of(id);
        let next_ids = self.next_ids();
        id.0 != base_id(compartment) && next_ids.get(compartment).is_some_and(|&next| id.0 < next)
    }

    /// Whether the id was issued and has not ended.
    pub(super) fn is_live(&self, id: SequenceId) -> bool {
        self.shard(id.0, |live| live.contains(&id.0))
    }

    /// Ends an id; false if it had ended before.
    pub(super) fn end_id(&self, id: SequenceId) -> bool {
        self.shard(id.0, |live| live.remove(&id.0))
    }

    pub(super) fn push(&self, message: Message) {
        match message {
            // Pushed under the lock: the set says what the last of them says.
            Message::Pause(id) => {
                let mut pausing = self.pausing();
                pausing.insert(id.0);
                self.messages.push(message);
            }
            Message::Resume(id) => {
                let mut pausing = self.pausing();
                pausing.remove(&id.0);
                self.messages.push(message);
            }
            _ => self.messages.push(message),
        }
    }

    /// The next message; the engine thread takes them until there is none.
    pub(super) fn pop(&self) -> Option<Message> {
        let message = self.messages.pop();
        if let Some(Message::Pause(id)) = message {
            self.pausing().remove(&id.0);
        }
        message
    }

    /// Whether what is on its way pauses a request.
    pub(super) fn is_pausing(&self, id: SequenceId) -> bool {
        self.pausing().contains(&id.0)
    }

    fn pausing(&self) -> MutexGuard<'_, HashSet<u64, foldhash::fast::RandomState>> {
        self.pausing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    fn shard<R>(&self, id: u64, act: impl FnOnce(&mut HashSet<u64, foldhash::fast::RandomState>) -> R) -> R {
        let shard = &self.live[id as usize % NUM_SHARDS];
        // A panic cannot leave a hash set of integers half changed in a way that matters here.
        act(&mut shard.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
