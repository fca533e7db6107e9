//! Which request ends next because its time is over. Requests without a deadline are not in here.

use super::request::Deadline;
use crate::ids::SequenceId;
use std::collections::BTreeSet;

/// A moment, as the scheduler counts: the last step planned, and seconds on the clock of the steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    pub(super) step: u64,
    pub(super) seconds: f64,
}

impl Deadline {
    /// The last step and the last second (as a key) for who arrived then.
    fn ends(self, arrival: Moment) -> (Option<u64>, Option<u64>) {
        let steps = self.steps.map(|steps| arrival.step.saturating_add(steps));
        (steps, self.seconds.map(|seconds| key(arrival.seconds + seconds)))
    }

    /// Whether both are counted in the same ways: in steps, in seconds, in both or in none.
    pub(super) fn counts_as(self, other: Self) -> bool {
        let ways = |deadline: Self| (deadline.steps.is_some(), deadline.seconds.is_some());
        ways(self) == ways(other)
    }

    /// The later, in each way that both are counted in, of this one, counted from `now`, and of `other`, counted from
    /// `since`. It is counted from `now`.
    pub(super) fn or_later(self, now: Moment, other: Self, since: Moment) -> Self {
        let later_step =
            |(own, other): (u64, u64)| own.max(since.step.saturating_add(other).saturating_sub(now.step));
        let later_time = |(own, other): (f64, f64)| own.max(since.seconds + other - now.seconds);
        Self {
            steps: self.steps.zip(other.steps).map(later_step),
            seconds: self.seconds.zip(other.seconds).map(later_time),
        }
    }

    /// Whether it has passed for who arrived then.
    pub(super) fn has_passed(self, arrival: Moment, now: Moment) -> bool {
        let (step, time) = self.ends(arrival);
        step.is_some_and(|last| last <= now.step) || time.is_some_and(|last| last <= key(now.seconds))
    }
}

/// A key that orders as the number does.
const fn key(time: f64) -> u64 {
    let bits = time.to_bits();
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}

/// The deadlines of live requests, or of others that have ids.
#[derive(Debug)]
pub(super) struct Deadlines<Id = SequenceId> {
    /// (last step in which it may run, id).
    steps: BTreeSet<(u64, Id)>,
    /// (last time as a key, id).
    times: BTreeSet<(u64, Id)>,
}

impl<Id> Default for Deadlines<Id> {
    fn default() -> Self {
        Self { steps: BTreeSet::new(), times: BTreeSet::new() }
    }
}

impl<Id: Ord + Copy> Deadlines<Id> {
    pub(super) fn insert(&mut self, id: Id, deadline: Deadline, arrival: Moment) {
        let (step, time) = deadline.ends(arrival);
        self.steps.extend(step.map(|last| (last, id)));
        self.times.extend(time.map(|last| (last, id)));
    }

    pub(super) fn remove(&mut self, id: Id, deadline: Deadline, arrival: Moment) {
        let (step, time) = deadline.ends(arrival);
        if let Some(last) = step {
            self.steps.remove(&(last, id));
        }
        if let Some(last) = time {
            self.times.remove(&(last, id));
        }
    }

    /// Takes out a request whose deadline has passed.
    pub(super) fn pop_passed(&mut self, now: Moment) -> Option<Id> {
        let pop = |set: &mut BTreeSet<(u64, Id)>, limit| {
            set.first().is_some_and(|&(last, _)| last <= limit).then(|| set.pop_first())?
        };
        let passed = pop(&mut self.steps, now.step).or_else(|| pop(&mut self.times, key(now.seconds)));
        passed.map(|(_, id)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_the_times_do() {
        let times = [f64::NEG_INFINITY, -1e300, -2.0, -0.5, 0.0, 1e-9, 3.0, 1e300];
        assert!(times.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
    }

    #[test]
    fn whoever_is_due_comes_out_once() {
        let mut deadlines = Deadlines::<SequenceId>::default();
        let deadline = |steps, seconds| Deadline { steps, seconds };
        let at = |step, seconds| Moment { step, seconds };
        let arrival = at(5, 10.0);
        deadlines.insert(SequenceId(1), deadline(Some(3), None), arrival);
        deadlines.insert(SequenceId(2), deadline(None, Some(1.5)), arrival);
        deadlines.insert(SequenceId(3), deadline(Some(1), None), arrival);
        deadlines.remove(SequenceId(3), deadline(Some(1), None), arrival);
        assert_eq!(deadlines.pop_passed(at(7, 11.0)), None);
        assert_eq!(deadlines.pop_passed(at(7, 11.5)), Some(SequenceId(2)));
        assert_eq!(deadlines.pop_passed(at(8, 11.5)), Some(SequenceId(1)));
        assert_eq!(deadlines.pop_passed(at(u64::MAX, 1e300)), None);
    }
}
