//! What is promised to the branches of a set, which is theirs together.
//!
//! Branches that share a last block need copies of it for all of them but one, and which one that is shows when they write
//! it. So the promise of a copy may be with a branch that does not need it in the end, while another one has used what it
//! needs later. In further groups a branch lets go of blocks that others keep, and is paid for its next one by what those
//! were promised. So what counts is the sum over the set: what a branch is short of it takes from what the others do not
//! need, and what is given back is what the set has too much.

use super::core::{Core, Draw};
use super::samples::extra_blocks;
use super::sequence::Sequence;
use super::shared_groups::num_duplicates;
use super::waiting_sets::{Known, blocks_of_set};
use crate::Result;
use crate::block_pool::Reservation;
use crate::ids::{BlockHandle, SequenceId};
use hashbrown::HashSet;

/// Copies that sequences make of last blocks of the first group that they share: each of those who share one but the last
/// to write it. Those of further groups are paid by each branch.
pub(super) fn num_copies<'a>(branches: impl Iterator<Item = &'a Sequence>) -> u32 {
    let mut seen = HashSet::new();
    let tails = branches.filter(|branch| branch.shares_tail() && branch.keeps_first());
    tails.filter_map(|branch| branch.blocks.last().copied()).filter(|&tail| !seen.insert(tail)).count() as u32
}

impl Sequence {
    /// Blocks that are promised to it.
    const fn num_promised(&self) -> u32 {
        self.reservation.num_blocks()
    }

    /// Blocks that it has beside those that wait to be written next.
    fn num_in_use(&self) -> u32 {
        self.num_held() as u32 - self.num_spare()
    }
}

impl Core {
    /// Blocks that the policy promises to a sequence, with those that it carries: those that it has included.
    fn need(&self, sequence: &Sequence) -> u32 {
        if sequence.layers.is_some() {
            return self.blocks_to_keep(sequence);
        }
        let of = |known: Known<'_>| self.config.policy.blocks_to_reserve(&self.config, known.asked(0));
        blocks_of_set(&self.config, sequence.known(), of)
    }

    /// Blocks that the policy promises to a sequence beyond those that it has.
    fn num_missing(&self, sequence: &Sequence) -> u32 {
        self.need(sequence).saturating_sub(sequence.num_in_use())
    }

    /// What is promised to sequences of a set, or theirs to spare, beyond what they need (positive), or what they lack.
    fn surplus_of_all(&self, set: &[&Sequence]) -> i64 {
        let (mut have, mut lack) = (0, num_copies(set.iter().copied()) + num_duplicates(set));
        for branch in set {
            have += branch.num_promised() + branch.num_spare();
            lack += self.num_missing(branch);
        }
        i64::from(have) - i64::from(lack)
    }

    /// What a running sequence has too much, alone or with the others of its set.
    fn surplus(&self, sequence: &Sequence) -> u32 {
        let surplus = if sequence.is_branch && self.sets.is_branch(sequence.id) {
            self.surplus_of_all(&self.running_set(sequence).collect::<Vec<_>>())
        } else {
            self.surplus_of_all(&[sequence])
        };
        surplus.max(0) as u32
    }

    /// Gives back what is promised to a sequence, or its to spare, and nobody of its set needs: the block of a copy that was
    /// not made, the room of a chunk after its prompt; under policies that promise what is known only, all that it will not
    /// need for that.
    pub(super) fn settle_promise(&mut self, position: usize) -> Result<()> {
        let sequence = &self.running[position];
        let promised = sequence.num_promised();
        if promised + sequence.num_spare() == 0 {
            return Ok(());
        }
        let excess = self.surplus(sequence);
        let sequence = &mut self.running[position];
        let part = excess.min(promised);
        sequence.reservation.shrink(part)?;
        let Some(layers) = &mut sequence.layers else { return Ok(()) };
        let kept = layers.spare.len().saturating_sub((excess - part) as usize);
        self.pool.release(&layers.spare[kept..])?;
        layers.spare.truncate(kept);
        Ok(())
    }

    /// Gives a sequence that is to draw `count` blocks what others of its set do not need; returns how much more is to be
    /// promised. In further groups it leaves what it is promised itself where others are paid by it.
    pub(super) fn borrow_promise(&mut self, position: usize, count: u32, what: Draw) -> Result<u32> {
        let sequence = &self.running[position];
        let at_hand = sequence.num_promised() + sequence.num_spare();
        let is_branch = sequence.is_branch && self.sets.is_branch(sequence.id);
        if !is_branch {
            // What its samples will need of further groups is left.
            let prompt = sequence.progress.prompt_tokens;
            let is_grouped = sequence.layers.is_some();
            let kept = if is_grouped { extra_blocks(&self.config, &sequence.request, prompt) } else { 0 };
            return Ok(count.saturating_sub(at_hand.saturating_sub(kept)));
        }
        if sequence.layers.is_none() && at_hand >= count {
            return Ok(0);
        }
        let set: Vec<_> = self.running_set(sequence).collect();
        let have = set.iter().map(|branch| branch.num_promised() + branch.num_spare()).sum::<u32>();
        // What it draws, the set needs no more.
        let needed = match what {
            Draw::Growth => count.min(self.num_missing(sequence)),
            Draw::Copies => count,
        };
        let free = (self.surplus_of_all(&set) + i64::from(needed)).max(0);
        let own = if sequence.layers.is_none() { at_hand } else { 0 };
        let part = i64::from(count.min(have)).min(free.max(i64::from(own))) as u32;
        self.gather_promise(position, part.saturating_sub(at_hand))?;
        Ok(count - part)
    }

    /// Moves so much of what others of its set are promised, or have to spare, to a sequence.
    pub(super) fn gather_promise(&mut self, position: usize, mut count: u32) -> Result<()> {
        let id = self.running[position].id;
        for lender in self.sets.members(id) {
            let Some(from) = self.position(lender).filter(|&from| from != position && count > 0) else {
                continue;
            };
            let lender = &mut self.running[from];
            if lender.num_promised() + lender.num_spare() == 0 {
                continue;
            }
            let part = lender.reservation.num_blocks().min(count);
            count -= part;
            let promise = lender.reservation.split(part)?;
            let spare = lender.take_spare(count);
            count -= spare.len() as u32;
            self.hand_over(id, promise, spare)?;
        }
        Ok(())
    }

    /// Leaves what is promised to a sequence that ends, or is its to spare, with those of its set that need it.
    pub(super) fn leave_promise(&mut self, sequence: &mut Sequence) -> Result<()> {
        if !self.sets.is_branch(sequence.id) || sequence.num_promised() + sequence.num_spare() == 0 {
            return Ok(());
        }
        let members = self.sets.members(sequence.id);
        let others: Vec<_> = members.into_iter().filter(|&id| id != sequence.id).collect();
        let set: Vec<_> = others.iter().filter_map(|&id| self.find(id)).collect();
        let lacking = (-self.surplus_of_all(&set)).max(0) as u32;
        let Some(heir) = set.first().map(|heir| heir.id).filter(|_| lacking > 0) else { return Ok(()) };
        let part = lacking.min(sequence.num_promised());
        let promise = sequence.reservation.split(part)?;
        let spare = sequence.take_spare(lacking - part);
        self.hand_over(heir, promise, spare)
    }

    fn hand_over(&mut self, id: SequenceId, mut promise: Reservation, spare: Vec<BlockHandle>) -> Result<()> {
        let halted = self.halted.iter_mut().map(|halted| &mut halted.sequence);
        let mut all = self.running.iter_mut().chain(&mut self.parked).chain(halted);
        let Some(heir) = all.find(|sequence| sequence.id == id) else { return self.pool.release(&spare) };
        heir.give_spare(spare);
        promise.move_to(promise.num_blocks(), &mut heir.reservation)
    }

    /// Blocks of a set, each of the first group counted once, if each of its branches has as many in all as `need` says.
    pub(super) fn need_of_set(&self, set: &[&Sequence], need: impl Fn(&Sequence) -> u32) -> u32 {
        let mut firsts = HashSet::<_, foldhash::fast::RandomState>::default();
        let mut total = num_copies(set.iter().copied());
        for branch in set {
            let first = if branch.keeps_first() { branch.blocks.len() as u32 } else { 0 };
            firsts.extend(branch.blocks.iter().take(first as usize).copied());
            total += need(branch).max(branch.num_in_use()) - first;
        }
        total + firsts.len() as u32
    }

    /// Whether what the branches of a set refer to in further groups is paid for.
    pub(super) fn is_paid(&self, set: &[SequenceId]) -> bool {
        let set: Vec<_> = set.iter().filter_map(|&id| self.find(id)).collect();
        let have = set.iter().map(|branch| branch.num_promised() + branch.num_spare()).sum::<u32>();
        have >= num_duplicates(&set)
    }
}
