//! What is promised to the branches of a set, which is theirs together.
//!
//! Branches that share a last block need copies of it for all of them but one, and which one that is shows when they write
//! it. So the promise of a copy may be with a branch that does not need it in the end, while another one has used what it
//! needs later. What a branch is short of it takes from what another one has too much; what is given back is what the set
//! has too much.

use super::branches::{Known, blocks_of_set};
use super::core::Core;
use super::sequence::Sequence;
use crate::Result;
use crate::ids::SequenceId;
use hashbrown::HashSet;

/// Copies that sequences make of last blocks that they share: each of those who share one but the last to write it.
pub(super) fn num_copies<'a>(branches: impl Iterator<Item = &'a Sequence>) -> u32 {
    let mut seen = HashSet::new();
    let tails =
        branches.filter(|branch| branch.shares_tail()).filter_map(|branch| branch.blocks.last().copied());
    tails.filter(|&tail| !seen.insert(tail)).count() as u32
}

impl Core {
    /// Blocks that the policy promises to a sequence, with those that it carries, beyond those that it has.
    fn num_missing(&self, sequence: &Sequence) -> u32 {
        let of = |known: Known<'_>| self.config.policy.blocks_to_reserve(&self.config, known.asked(0));
        blocks_of_set(&self.config, sequence.known(), of).saturating_sub(sequence.blocks.len() as u32)
    }

    /// What is promised to a sequence beyond that.
    fn surplus(&self, sequence: &Sequence) -> u32 {
        sequence.reservation.num_blocks().saturating_sub(self.num_missing(sequence))
    }

    /// What is promised to sequences of a set beyond what they need (positive), or what they lack.
    fn surplus_of_all(&self, branches: &[&Sequence]) -> i64 {
        let promised = branches.iter().map(|branch| i64::from(branch.reservation.num_blocks()));
        let missing = branches.iter().map(|branch| i64::from(self.num_missing(branch)));
        promised.sum::<i64>() - missing.sum::<i64>() - i64::from(num_copies(branches.iter().copied()))
    }

    /// Gives back what is promised to a sequence and nobody of its set needs: the block of a copy that was not made.
    pub(super) fn trim_promise(&mut self, position: usize) -> Result<()> {
        let sequence = &self.running[position];
        let mut excess = self.surplus(sequence);
        if self.sets.is_branch(sequence.id) {
            let set: Vec<_> = self.running_set(sequence).collect();
            excess = excess.min(self.surplus_of_all(&set).max(0) as u32);
        }
        self.running[position].reservation.shrink(excess)
    }

    /// Takes what a sequence is short of from what others of its set have too much; returns what is left.
    pub(super) fn borrow_promise(&mut self, position: usize, mut count: u32) -> Result<u32> {
        let id = self.running[position].id;
        if count == 0 || !self.sets.is_branch(id) {
            return Ok(count);
        }
        for lender in self.sets.members(id) {
            let Some(from) = self.position(lender).filter(|&from| from != position) else { continue };
            let part = self.surplus(&self.running[from]).min(count);
            if part > 0 {
                let part_of_it = self.running[from].reservation.split(part)?;
                self.add_promise(id, part_of_it)?;
                count -= part;
            }
        }
        Ok(count)
    }

    /// Leaves what is promised to a sequence that ends with those of its set that need it.
    pub(super) fn leave_promise(&mut self, sequence: &mut Sequence) -> Result<()> {
        if !self.sets.is_branch(sequence.id) || sequence.reservation.num_blocks() == 0 {
            return Ok(());
        }
        let members = self.sets.members(sequence.id);
        let others: Vec<_> = members.into_iter().filter(|&id| id != sequence.id).collect();
        let set: Vec<_> = others.iter().filter_map(|&id| self.find(id)).collect();
        let lacking = (-self.surplus_of_all(&set)).max(0) as u32;
        let part = lacking.min(sequence.reservation.num_blocks());
        match set.first().map(|heir| heir.id) {
            Some(heir) if part > 0 => {
                let part = sequence.reservation.split(part)?;
                self.add_promise(heir, part)
            }
            _ => Ok(()),
        }
    }

    fn add_promise(&mut self, id: SequenceId, mut part: crate::block_pool::Reservation) -> Result<()> {
        let halted = self.halted.iter_mut().map(|halted| &mut halted.sequence);
        let mut all = self.running.iter_mut().chain(&mut self.parked).chain(halted);
        match all.find(|sequence| sequence.id == id) {
            Some(sequence) => part.move_to(part.num_blocks(), &mut sequence.reservation),
            None => Ok(()),
        }
    }
}
