//! Who arrives next: requests in trace order, and session turns that wait for an answer.

use super::columns::Columns;
use super::config::Arrivals;
use hashbrown::HashMap;
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

/// A request that has not been submitted.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    /// Its number in the trace.
    pub(super) number: u64,
    pub(super) arrival: f64,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) tenant: u32,
    pub(super) session: u64,
    pub(super) think_time: f64,
    pub(super) hash_ids: Box<[u64]>,
}

/// A session turn whose answer has come.
struct Turn(Pending);

impl Turn {
    fn key(&self) -> (f64, u64) {
        (self.0.arrival, self.0.number)
    }
}

impl PartialEq for Turn {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Turn {}

impl PartialOrd for Turn {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Turn {
    fn cmp(&self, other: &Self) -> Ordering {
        let ((a, i), (b, j)) = (self.key(), other.key());
        a.total_cmp(&b).then(i.cmp(&j))
    }
}

/// Requests in order of arrival.
pub(super) struct ArrivalQueue {
    arrivals: Arrivals,
    /// In trace order; arrival times rise.
    stream: VecDeque<Pending>,
    turns: BinaryHeap<Reverse<Turn>>,
    /// Sessions with a turn under way, and what waits for it.
    sessions: HashMap<u64, VecDeque<Pending>>,
    closed: bool,
    next_number: u64,
    last_arrival: f64,
    random: u64,
}

impl ArrivalQueue {
    pub(super) fn new(arrivals: Arrivals) -> Self {
        let random = if let Arrivals::Rate { seed, .. } = arrivals { seed } else { 0 };
        Self {
            arrivals,
            stream: VecDeque::new(),
            turns: BinaryHeap::new(),
            sessions: HashMap::new(),
            closed: false,
            next_number: 0,
            last_arrival: 0.0,
            random,
        }
    }

    /// Adds requests, with their hash ids or without.
    pub(super) fn push(&mut self, columns: &Columns<'_>, keep_ids: bool) {
        for row in 0..columns.arrival.len() {
            let arrival = self.arrival_of(columns.arrival[row]);
            self.stream.push_back(Pending {
                number: self.next_number,
                arrival,
                prompt_tokens: columns.prompt_tokens[row],
                output_tokens: columns.output_tokens[row],
                tenant: columns.tenant[row],
                session: columns.session[row],
                think_time: columns.think_time[row],
                hash_ids: if keep_ids { columns.ids(row).into() } else { Box::default() },
            });
            self.next_number += 1;
        }
    }

    fn arrival_of(&mut self, recorded: f64) -> f64 {
        self.last_arrival = match self.arrivals {
            // A trace may go back a little only where a reader allows it: the order of lines counts.
            Arrivals::Recorded { speed } => (recorded / speed).max(self.last_arrival),
            Arrivals::Rate { per_second, .. } => self.last_arrival + self.exponential() / per_second,
            Arrivals::Saturate => 0.0,
        };
        self.last_arrival
    }

    /// A draw with mean 1, from splitmix64.
    fn exponential(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        // 53 bits, never zero.
        let uniform = ((x >> 11) + 1) as f64 / (1u64 << 53) as f64;
        -uniform.ln()
    }

    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    /// Whether the next arrival is known: more input could only come later.
    pub(super) fn is_ready(&self) -> bool {
        self.closed || !self.stream.is_empty()
    }

    /// Whether no more requests will be pushed.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// When the next request arrives.
    pub(super) fn next_arrival(&self) -> Option<f64> {
        let stream = self.stream.front().map(|pending| pending.arrival);
        let turn = self.turns.peek().map(|Reverse(turn)| turn.0.arrival);
        match (stream, turn) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Takes the next request that has arrived by `now`. A turn whose session is busy is set aside until
    /// [`ArrivalQueue::answered`].
    pub(super) fn pop(&mut self, now: f64) -> Option<Pending> {
        loop {
            let turn = self.turns.peek().map(|Reverse(turn)| turn.0.arrival).filter(|&at| at <= now);
            let stream = self.stream.front().map(|pending| pending.arrival).filter(|&at| at <= now);
            match (turn, stream) {
                (Some(at), other) if other.is_none_or(|other| at <= other) => {
                    return self.turns.pop().map(|Reverse(turn)| turn.0);
                }
                (_, Some(_)) => {}
                _ => return None,
            }
            let pending = self.stream.pop_front()?;
            if pending.session == 0 {
                return Some(pending);
            }
            match self.sessions.get_mut(&pending.session) {
                Some(waiting) => {
                    waiting.push_back(pending);
                }
                None => {
                    self.sessions.insert(pending.session, VecDeque::new());
                    return Some(pending);
                }
            }
        }
    }

    /// A session's turn has ended at `now`: its next one follows after the think time.
    pub(super) fn answered(&mut self, session: u64, now: f64) {
        if session == 0 {
            return;
        }
        let Some(waiting) = self.sessions.get_mut(&session) else { return };
        match waiting.pop_front() {
            Some(mut next) => {
                let speed = if let Arrivals::Recorded { speed } = self.arrivals { speed } else { 1.0 };
                let pause = if self.arrivals == Arrivals::Saturate { 0.0 } else { next.think_time / speed };
                next.arrival = now + pause;
                self.turns.push(Reverse(Turn(next)));
            }
            None => {
                self.sessions.remove(&session);
            }
        }
    }
}
