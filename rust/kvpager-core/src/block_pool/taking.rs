//! Taking exclusively held blocks out of use: whole batches, checked before anything is touched.
//!
//! A batch is cut into runs, neighbours in one group, each once. The *plan* looks at all of them first, so a bad
//! handle anywhere is found before any block is touched, and remembers under which picture of its group each run
//! was good. Then each run is taken out by one exchange from that picture. Only when another thread changed a
//! group in between are runs looked at again, one by one; an error then gives back what was taken.

use super::groups::{Group, WIDTH, place};
use super::state::{Kind, State};
use super::{BlockPool, faults};
use crate::error::{HandleFault, Result};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;
use arrayvec::ArrayVec;

/// Runs of a plan at most: batches with more are taken out run by run.
const MAX_RUNS: usize = if cfg!(loom) { 2 } else { 128 };

/// Neighbours in one group, each once.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// The group before the handles were compared.
    pub(super) seen: Group,
    pub(super) group: u32,
    mask: u32,
    /// Whether the handles name neighbours in ascending order.
    ascending: bool,
}

/// How a run was found.
pub(super) struct Found {
    pub(super) run: Run,
    pub(super) len: usize,
    /// Whether all handles have their blocks' generation, and the account that was asked for.
    agrees: bool,
}

/// A batch of exclusive blocks of one account that was checked.
pub(super) struct Plan {
    pub(super) runs: ArrayVec<Run, MAX_RUNS>,
    pub(super) account: AccountId,
}

/// How a batch was taken out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// As planned.
    Planned,
    /// Run by run: the plan says nothing.
    Unplanned,
    /// Nothing was taken: some are shared.
    Shared,
}

/// What `take_out` does about blocks that are shared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// Says so and takes nothing.
    Release,
    /// Takes them out too if they have one reference, and refuses otherwise. All must be of this account.
    Exclusive(Option<AccountId>),
}

impl Rule {
    const fn account(self) -> Option<AccountId> {
        match self {
            Self::Release => None,
            Self::Exclusive(account) => account,
        }
    }
}

impl Run {
    pub(super) fn mask(self) -> u64 {
        u64::from(self.mask)
    }

    /// Where its handles' blocks are in the group, if they are neighbours in ascending order.
    pub(super) fn range(self) -> Option<std::ops::Range<usize>> {
        let first = self.mask.trailing_zeros() as usize;
        self.ascending.then(|| first..first + self.mask.count_ones() as usize)
    }

    pub(super) const fn len(self) -> usize {
        self.mask.count_ones() as usize
    }

    /// Its blocks that are exclusive.
    pub(super) fn exclusive(self) -> u64 {
        self.seen.exclusive() & self.mask()
    }
}

impl Plan {
    pub(super) const fn new() -> Self {
        Self { runs: ArrayVec::new_const(), account: AccountId(0) }
    }
}

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Takes the exclusive blocks of a batch out: they are off afterwards, and the caller's alone. On an error, or
    /// if some are shared, all is as before.
    pub(super) fn take_out(&self, plan: &mut Plan, blocks: &[BlockHandle], rule: Rule) -> Result<Taken> {
        let planned = FAULT != faults::KEEP_PARTIAL && self.plan(plan, blocks, rule)?;
        if planned && self.take_planned(plan) {
            Ok(Taken::Planned)
        } else {
            self.take_unplanned(blocks, rule)
        }
    }

    /// Takes exclusively held blocks out: off afterwards, `Held`, and the caller's alone.
    pub(super) fn detach(&self, blocks: &[BlockHandle], account: Option<AccountId>) -> Result<()> {
        match blocks {
            [block] if self.take_out_one(*block, account).is_some() => Ok(()),
            _ => self.take_out(&mut Plan::new(), blocks, Rule::Exclusive(account)).map(|_| ()),
        }
    }

    /// Checks a batch. True if all are exclusive and of one account, and the plan has them all.
    fn plan(&self, plan: &mut Plan, blocks: &[BlockHandle], rule: Rule) -> Result<bool> {
        let Some(first) = blocks.first() else { return Ok(true) };
        let of_first = self.state(self.checked_id(*first)?).account;
        plan.account = rule.account().unwrap_or(of_first);
        let (mut rest, mut simple) = (blocks, true);
        while !rest.is_empty() {
            let Found { run, len, agrees } = self.run(rest, Some(plan.account))?;
            let (members, others) = rest.split_at(len);
            if run.exclusive() != run.mask() || !agrees {
                if FAULT != faults::BLIND_RELEASE {
                    self.check_members(members, run, rule)?;
                }
                simple = false;
            }
            if plan.runs.is_full() {
                simple = false;
            } else {
                plan.runs.push(run);
            }
            rest = others;
        }
        Ok(simple && FAULT != faults::EARLY_PERMIT)
    }

    /// Takes out what was planned, all or nothing. False if a group has changed meanwhile.
    fn take_planned(&self, plan: &Plan) -> bool {
        for (i, run) in plan.runs.iter().enumerate() {
            // Every handle was good after `seen` was loaded. If the group is as seen, no block of it has been
            // claimed anew since, so none has changed hands.
            if !self.groups.try_take_out(run.group as usize, run.seen, run.mask()) {
                for taken in &plan.runs[..i] {
                    self.groups.restore(taken.group as usize, taken.mask());
                }
                return false;
            }
        }
        true
    }

    fn take_unplanned(&self, blocks: &[BlockHandle], rule: Rule) -> Result<Taken> {
        let mut start = 0;
        while start < blocks.len() {
            let taken = self.take_out_run(&blocks[start..], rule);
            if let Ok(len @ 1..) = taken {
                start += len;
                continue;
            }
            if FAULT != faults::KEEP_PARTIAL || taken.is_ok() {
                self.restore(&blocks[..start]);
            }
            return taken.map(|_| Taken::Shared);
        }
        Ok(Taken::Unplanned)
    }

    /// Takes the first run of a batch out and returns its length; 0 if some of it are shared.
    fn take_out_run(&self, blocks: &[BlockHandle], rule: Rule) -> Result<usize> {
        loop {
            let Found { run, len, agrees } = self.run(blocks, rule.account())?;
            let (group, exclusive) = (run.group as usize, run.exclusive());
            if (exclusive != run.mask() || !agrees) && FAULT != faults::BLIND_RELEASE {
                self.check_members(&blocks[..len], run, rule)?;
                if exclusive != run.mask() && rule == Rule::Release {
                    return Ok(0);
                }
            }
            // As in `take_planned`; otherwise look again.
            if exclusive != 0 && !self.groups.try_take_out(group, run.seen, exclusive) {
                continue;
            }
            if exclusive != run.mask() && rule != Rule::Release {
                self.take_out_single(&blocks[..len], group, exclusive)?;
            }
            return Ok(len);
        }
    }

    /// Takes one exclusive block out and returns its account, or does nothing if it is not that simple.
    #[inline]
    pub(super) fn take_out_one(&self, block: BlockHandle, account: Option<AccountId>) -> Option<AccountId> {
        let cell = self.states.get(block.id().0 as usize)?;
        let (group, bit) = place(block.id().0);
        loop {
            let seen = self.groups.load(group);
            // Acquire as in `state`.
            let word = cell.load(Ordering::Acquire);
            let of = State::account_of(word);
            let good = seen.exclusive() & bit != 0 && word >> 32 == block.to_bits() >> 32;
            if !good || account.is_some_and(|account| of != account) {
                return None;
            }
            // As in `take_planned`.
            if self.groups.try_take_out(group, seen, bit) {
                return Some(of);
            }
        }
    }

    /// The first run of a batch.
    #[inline]
    pub(super) fn run(&self, blocks: &[BlockHandle], wanted: Option<AccountId>) -> Result<Found> {
        let id = self.checked_id(blocks[0])?;
        let (group, bit) = place(id);
        let seen = self.groups.load(group);
        let (expected, checked) = State::pattern(wanted);
        let first = bit.trailing_zeros() as usize;
        let neighbours = &self.members(group)[first..];
        let len = neighbours.len().min(blocks.len());
        // Most batches are runs of neighbours: one look at the last of them, then no look at each one's place.
        if blocks[len - 1].id().0 == id + (len - 1) as u32 {
            let (mut places, mut differences) = (0, 0);
            for ((block, cell), wanted) in blocks[..len].iter().zip(neighbours).zip(id..) {
                // Acquire as in `state`.
                let word = cell.load(Ordering::Acquire);
                differences |= (word ^ (block.to_bits() >> 32 << 32 | expected)) & checked;
                places |= block.id().0 ^ wanted;
            }
            if places == 0 {
                let mask = ((1 << len) - 1) << first;
                let run = Run { seen, group: group as u32, mask, ascending: true };
                return Ok(Found { run, len, agrees: differences == 0 });
            }
        }
        Ok(self.scattered_run(blocks, wanted, group, seen))
    }

    /// The same for a run in any order.
    fn scattered_run(
        &self,
        blocks: &[BlockHandle],
        wanted: Option<AccountId>,
        group: usize,
        seen: Group,
    ) -> Found {
        let (first, members) = ((group * WIDTH) as u32, self.members(group));
        let (mut len, mut mask, mut differences) = (0, 0, 0);
        let (expected, checked) = State::pattern(wanted);
        for block in blocks {
            let offset = block.id().0.wrapping_sub(first);
            let Some(cell) = members.get(offset as usize) else { break };
            let bit = 1 << offset;
            if mask & bit != 0 {
                break;
            }
            // Acquire as in `state`.
            let word = cell.load(Ordering::Acquire);
            differences |= (word ^ (block.to_bits() >> 32 << 32 | expected)) & checked;
            mask |= bit;
            len += 1;
        }
        let run = Run { seen, group: group as u32, mask, ascending: false };
        Found { run, len, agrees: differences == 0 }
    }

    /// Checks handles of one group against their blocks.
    #[cold]
    pub(super) fn check_members(&self, members: &[BlockHandle], run: Run, rule: Rule) -> Result<()> {
        let (exclusive, shared) = (run.seen.exclusive(), run.seen.shared());
        for &block in members {
            let state = self.state(block.id().0);
            let (_, bit) = place(block.id().0);
            let wanted = rule.account().is_none_or(|account| state.account == account);
            if state.generation == block.generation() && exclusive & bit != 0 && wanted {
                continue;
            }
            let good = state.generation == block.generation() && shared & bit != 0 && state.is_referenced();
            if good && wanted && (rule == Rule::Release || state.references == 1) {
                continue;
            }
            // Off, but in this generation: another call, or an earlier place of this batch, has it.
            if state.generation == block.generation()
                && state.kind == Kind::Held
                && (exclusive | shared) & bit == 0
            {
                return Err(state.error(block, HandleFault::OverRelease));
            }
            return Err(state.fault(block));
        }
        Ok(())
    }

    /// Takes the shared members of a run out, each with its one reference. Whoever gets the word to `Dropped` owns
    /// the block.
    fn take_out_single(&self, members: &[BlockHandle], group: usize, exclusive: u64) -> Result<()> {
        for (i, &block) in members.iter().enumerate() {
            let (_, bit) = place(block.id().0);
            if exclusive & bit != 0 {
                continue;
            }
            let won = self.exchange(block, |state| match state.references {
                1 if state.is_referenced() => Ok(State { kind: Kind::Dropped, ..state }),
                _ => Err(state.fault(block)),
            });
            match won {
                Ok(state) => {
                    self.groups.take_out_shared(group, bit);
                    // Release as in `claim`.
                    let held = State::held(state.generation, state.account);
                    self.states[block.id().0 as usize].store(held.pack(), Ordering::Release);
                }
                Err(error) => {
                    let earlier =
                        members[..i].iter().map(|block| place(block.id().0).1).fold(0, |a, b| a | b);
                    self.groups.restore(group, exclusive | earlier);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Gives blocks that this call took out back to their holder.
    fn restore(&self, blocks: &[BlockHandle]) {
        for &block in blocks {
            let (group, bit) = place(block.id().0);
            self.groups.restore(group, bit);
        }
    }
}
