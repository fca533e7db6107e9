//! Requests that wait, tenant by tenant: some in the scheduler, with their tokens, the rest outside without.
//!
//! Each tenant has its own places in the scheduler. With one queue for all, a tenant with thousands of requests
//! would fill it, and others would wait outside behind them whatever the scheduler's fairness says.

use super::arrivals::{ArrivalQueue, Pending};
use std::collections::VecDeque;

/// Requests that wait outside at once, over all tenants; beyond that the trace is not read on.
const MAX_OUTSIDE: usize = 1 << 16;

/// Places of a tenant in the scheduler's queue, when there are many tenants.
const MIN_PLACES: u32 = 16;

pub(super) struct Waiting {
    /// Most requests of one tenant that wait in the scheduler.
    places: u32,
    /// Of each tenant: submitted and not started.
    submitted: Vec<u32>,
    /// Of each tenant: arrived, and not submitted for want of a place.
    outside: Vec<VecDeque<Pending>>,
    num_outside: usize,
}

impl Waiting {
    /// Queues of so many tenants that share about `queue_depth` places.
    pub(super) fn new(num_tenants: usize, queue_depth: u32) -> Self {
        Self {
            places: (queue_depth / num_tenants as u32).max(MIN_PLACES.min(queue_depth)),
            submitted: vec![0; num_tenants],
            outside: (0..num_tenants).map(|_| VecDeque::new()).collect(),
            num_outside: 0,
        }
    }

    /// Places of all tenants together.
    pub(super) fn max_submitted(&self) -> u32 {
        self.places * self.submitted.len() as u32
    }

    /// The next request that has arrived by `now` and has a place in the scheduler; `arrived` is told the time of
    /// each arrival on the way, in order.
    pub(super) fn next(
        &mut self,
        arrivals: &mut ArrivalQueue,
        now: f64,
        mut arrived: impl FnMut(f64),
    ) -> Option<Pending> {
        for (tenant, outside) in self.outside.iter_mut().enumerate() {
            if self.submitted[tenant] < self.places
                && let Some(pending) = outside.pop_front()
            {
                self.num_outside -= 1;
                return Some(pending);
            }
        }
        while arrivals.is_ready() && self.num_outside < MAX_OUTSIDE && self.any_place() {
            let pending = arrivals.pop(now)?;
            arrived(pending.arrival);
            let tenant = pending.tenant as usize;
            if self.submitted[tenant] < self.places {
                return Some(pending);
            }
            self.outside[tenant].push_back(pending);
            self.num_outside += 1;
        }
        None
    }

    fn any_place(&self) -> bool {
        self.submitted.iter().any(|&submitted| submitted < self.places)
    }

    /// A tenant's request was submitted.
    pub(super) fn submit(&mut self, tenant: u32) {
        self.submitted[tenant as usize] += 1;
    }

    /// A tenant's request started, or ended without.
    pub(super) fn leave(&mut self, tenant: u32) {
        self.submitted[tenant as usize] -= 1;
    }

    /// Whether a tenant has requests that wait.
    pub(super) fn is_backlogged(&self, tenant: usize) -> bool {
        self.submitted[tenant] > 0 || !self.outside[tenant].is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{Arrivals, Columns};

    #[test]
    fn a_tenant_without_places_keeps_nobody_else_outside() {
        let tenants: Vec<u32> = (0..50).map(|row| u32::from(row == 49)).collect();
        let starts = vec![0_u64; 51];
        let mut arrivals = ArrivalQueue::new(Arrivals::Saturate);
        let columns = Columns {
            arrival: &[0.0; 50],
            prompt_tokens: &[1; 50],
            output_tokens: &[1; 50],
            tenant: &tenants,
            session: &[0; 50],
            think_time: &[0.0; 50],
            hash_start: &starts,
            hash_ids: &[],
        };
        arrivals.push(&columns, false);
        arrivals.close();
        let mut waiting = Waiting::new(2, 32);
        let mut arrived = 0;
        let mut taken = Vec::new();
        while let Some(pending) = waiting.next(&mut arrivals, 0.0, |_| arrived += 1) {
            waiting.submit(pending.tenant);
            taken.push((pending.tenant, pending.number));
        }
        // 16 places of the first tenant, and the second tenant's only request, though it came last.
        let expected: Vec<_> = (0..16).map(|number| (0, number)).chain([(1, 49)]).collect();
        assert_eq!((arrived, taken), (50, expected));
        assert!(waiting.is_backlogged(0) && waiting.is_backlogged(1));
        waiting.leave(0);
        let next = waiting.next(&mut arrivals, 0.0, |_| ()).expect("one place is free");
        assert_eq!((next.tenant, next.number), (0, 16));
    }
}
