//! Requests that the scheduler has, by their id.

use super::arrivals::Pending;
use crate::SequenceId;
use std::collections::VecDeque;

/// A submitted request, as its client sees it.
#[derive(Clone, Debug)]
pub(super) struct Active {
    pub(super) number: u64,
    pub(super) tenant: u32,
    pub(super) session: u64,
    pub(super) prompt_tokens: u32,
    /// Output tokens that it will have, and that it asked for.
    pub(super) output_tokens: u32,
    pub(super) max_tokens: u32,
    pub(super) arrival: f64,
    /// When the step that first computed for it began.
    pub(super) started: Option<f64>,
    pub(super) sampled: u32,
    /// Tokens that steps computed for it, again or for the first time.
    pub(super) computed: u64,
    pub(super) first_token: f64,
    pub(super) last_token: f64,
    pub(super) worst_gap: f64,
}

impl Active {
    pub(super) fn new(pending: &Pending, max_output_tokens: u32) -> Self {
        Self {
            number: pending.number,
            tenant: pending.tenant,
            session: pending.session,
            prompt_tokens: pending.prompt_tokens,
            output_tokens: pending.output_tokens.min(max_output_tokens),
            max_tokens: max_output_tokens,
            arrival: pending.arrival,
            started: None,
            sampled: 0,
            computed: 0,
            first_token: 0.0,
            last_token: 0.0,
            worst_gap: 0.0,
        }
    }

    /// Tokens computed for nothing: more than its length needed, or all of them if it did not end as wanted.
    pub(super) fn lost_tokens(&self, cached_tokens: u32, as_wanted: bool) -> u64 {
        // The last sampled token is returned, never computed.
        let needed = u64::from(self.prompt_tokens.saturating_sub(cached_tokens))
            + u64::from(self.sampled.saturating_sub(1));
        if as_wanted { self.computed.saturating_sub(needed) } else { self.computed }
    }

    /// Counts a token that came at `now`.
    pub(super) fn sample(&mut self, now: f64) {
        if self.sampled == 0 {
            self.first_token = now;
        } else {
            self.worst_gap = self.worst_gap.max(now - self.last_token);
        }
        self.last_token = now;
        self.sampled += 1;
    }
}

/// A table by sequence id; ids rise, so it is a queue with holes.
#[derive(Default)]
pub(super) struct ActiveTable {
    first: u64,
    entries: VecDeque<Option<Active>>,
    count: usize,
}

impl ActiveTable {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn insert(&mut self, id: SequenceId, active: Active) {
        if self.count == 0 {
            self.entries.clear();
            self.first = id.0;
        }
        while self.first + (self.entries.len() as u64) < id.0 {
            self.entries.push_back(None);
        }
        self.entries.push_back(Some(active));
        self.count += 1;
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Active> {
        self.entries.get_mut(id.checked_sub(self.first)? as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Active> {
        let active = self.entries.get_mut(id.0.checked_sub(self.first)? as usize)?.take()?;
        self.count -= 1;
        while let Some(None) = self.entries.front() {
            self.entries.pop_front();
            self.first += 1;
        }
        Some(active)
    }
}
