//! Branch sets: the sequences of one request that go on side by side, its samples or beams and what was forked from them.
//!
//! The branches of a set run together or not at all: a step computes the next token of each of them or of none, and
//! blocks are taken from all of them at once. So beams stay of one length, and what branches share stays shared. Each
//! ends by itself.

use crate::ids::{SequenceId, StepId};
use hashbrown::HashMap;

/// One set.
#[derive(Debug)]
struct BranchSet {
    /// Those that have not ended, in order of id.
    members: Vec<SequenceId>,
    /// The last step that was to compute a token of each.
    planned_in: StepId,
}

/// Which sequences are branches of one set. A set of one is none.
#[derive(Debug, Default)]
pub(super) struct BranchSets {
    /// By member: the number of its set, which is the id that the set began with.
    numbers: HashMap<SequenceId, SequenceId, foldhash::fast::RandomState>,
    sets: HashMap<SequenceId, BranchSet, foldhash::fast::RandomState>,
}

impl BranchSets {
    fn set(&self, id: SequenceId) -> Option<&BranchSet> {
        self.sets.get(self.numbers.get(&id)?)
    }

    /// Makes a sequence a branch of the set of another one, which begins one if it is in none.
    pub(super) fn join(&mut self, id: SequenceId, other: SequenceId) {
        let number = *self.numbers.entry(other).or_insert(other);
        let new = || BranchSet { members: vec![other], planned_in: StepId(0) };
        let set = self.sets.entry(number).or_insert_with(new);
        if let Err(place) = set.members.binary_search(&id) {
            set.members.insert(place, id);
        }
        self.numbers.insert(id, number);
    }

    /// A branch has ended.
    pub(super) fn leave(&mut self, id: SequenceId) {
        let Some(number) = self.numbers.remove(&id) else { return };
        let Some(set) = self.sets.get_mut(&number) else { return };
        set.members.retain(|&member| member != id);
        if let [last] = set.members[..] {
            self.numbers.remove(&last);
            self.sets.remove(&number);
        }
    }

    /// The set that a sequence is of, in order of id: itself if it is in none.
    pub(super) fn members(&self, id: SequenceId) -> Vec<SequenceId> {
        self.set(id).map_or_else(|| vec![id], |set| set.members.clone())
    }

    pub(super) fn is_branch(&self, id: SequenceId) -> bool {
        self.numbers.contains_key(&id)
    }

    /// Who stands for a sequence where age counts: the oldest branch of its set.
    pub(super) fn eldest(&self, id: SequenceId) -> SequenceId {
        self.set(id).map_or(id, |set| set.members[0])
    }

    /// Whether two sequences are one, or branches of one set.
    pub(super) fn are_one(&self, a: SequenceId, b: SequenceId) -> bool {
        a == b || self.numbers.get(&a).is_some_and(|number| self.numbers.get(&b) == Some(number))
    }

    /// The members of each set.
    pub(super) fn all(&self) -> impl Iterator<Item = &[SequenceId]> {
        self.sets.values().map(|set| &set.members[..])
    }

    /// Whether a step comes to a set for the first time.
    pub(super) fn begin_plan(&mut self, id: SequenceId, step: StepId) -> bool {
        let set = self.numbers.get(&id).and_then(|number| self.sets.get_mut(number));
        set.is_some_and(|set| std::mem::replace(&mut set.planned_in, step) != step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_ends_with_its_last_but_one_branch() {
        let mut sets = BranchSets::default();
        let ids = [7, 3, 9].map(SequenceId);
        sets.join(ids[0], ids[1]);
        sets.join(ids[2], ids[0]);
        assert_eq!(sets.members(ids[2]), [3, 7, 9].map(SequenceId));
        assert!(sets.are_one(ids[0], ids[2]) && !sets.are_one(ids[0], SequenceId(8)));
        // Its number outlives who had it.
        sets.leave(ids[1]);
        assert_eq!((sets.eldest(ids[2]), sets.is_branch(ids[1])), (ids[0], false));
        assert!(sets.begin_plan(ids[0], StepId(4)) && !sets.begin_plan(ids[2], StepId(4)));
        sets.leave(ids[0]);
        assert_eq!((sets.members(ids[2]), sets.is_branch(ids[2])), (vec![ids[2]], false));
        assert!(sets.sets.is_empty() && sets.numbers.is_empty());
    }
}
