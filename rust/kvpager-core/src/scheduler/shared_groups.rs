//! What branches share of further groups: blocks of their own by a reference, those of the index by a use more.
//!
//! A block is there once, whoever refers to it; but each branch pays for it as if it were there for that branch alone,
//! since it will leave it for one of its own while others stay. So the promises of a set cover every reference to a block of a
//! further group but one, and who is left alone with a block has it for what is promised to it.

use super::core::Core;
use super::group_blocks::{GroupBlock, GroupBlocks, LayerBlocks, Whose};
use super::sequence::Sequence;
use crate::block_pool::Reservation;
use crate::ids::BlockHandle;
use crate::{Error, Result};
use hashbrown::HashSet;
use std::ops::Range;

impl GroupBlocks {
    /// Its blocks in columns before `end`.
    pub(super) fn before(&self, end: usize) -> impl Iterator<Item = &GroupBlock> {
        self.blocks.iter().take(end.saturating_sub(self.first as usize))
    }

    /// Takes over what another one has in columns from `first` to `end`.
    fn take_after(&mut self, other: &Self, first: u32, end: usize) {
        self.clear();
        self.first = other.first.max(first);
        let skipped = (self.first - other.first) as usize;
        other.before(end).skip(skipped).for_each(|&block| self.push_back(block));
    }
}

impl LayerBlocks {
    /// Takes over what another sequence has in columns before `end`; of group `i` not before column `firsts(i)`.
    pub(super) fn take_after(&mut self, other: &Self, firsts: impl Fn(usize) -> u32, end: usize) {
        for (number, (group, other)) in self.rest.iter_mut().zip(&other.rest).enumerate() {
            group.take_after(other, firsts(number), end);
        }
    }

    /// The blocks of further groups that it holds, with those to spare.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockHandle> {
        let all = self.rest.iter().flat_map(|group| &group.blocks);
        let held = all.filter(|block| block.whose != Whose::Guest).map(|block| block.block);
        held.chain(self.spare.iter().copied())
    }

    /// The sequence's own blocks of further groups.
    pub(super) fn own(&self) -> impl Iterator<Item = BlockHandle> {
        let all = self.rest.iter().flat_map(|group| &group.blocks);
        all.filter(|block| block.whose == Whose::Own).map(|block| block.block)
    }

    /// Blocks of the index that it uses.
    pub(super) fn used(&self) -> impl Iterator<Item = BlockHandle> {
        let all = self.rest.iter().flat_map(|group| &group.blocks);
        all.filter(|block| matches!(block.whose, Whose::Attached | Whose::Guest)).map(|block| block.block)
    }
}

impl Sequence {
    /// Whether the blocks of a first group that sees all tokens are in `blocks`.
    pub(super) fn keeps_first(&self) -> bool {
        self.layers.as_ref().is_none_or(|layers| layers.keeps_first)
    }

    /// Its own blocks of all groups in some columns.
    pub(super) fn own_blocks_in(&self, columns: Range<usize>) -> impl Iterator<Item = BlockHandle> {
        let first = if self.keeps_first() { columns.clone() } else { 0..0 };
        let first = self.blocks.get(first).unwrap_or_default().iter().copied();
        let groups = self.layers.iter().flat_map(|layers| &layers.rest);
        let rest = groups.flat_map(move |group| {
            let skipped = columns.start.saturating_sub(group.first as usize);
            group.before(columns.end).skip(skipped)
        });
        first.chain(rest.filter(|block| block.whose == Whose::Own).map(|block| block.block))
    }

    /// The blocks of all groups in columns before `end` that are its own, and those of further groups that are the
    /// index's.
    pub(super) fn blocks_before(&self, end: usize) -> (Vec<BlockHandle>, Vec<BlockHandle>) {
        let (mut own, mut used) = (Vec::new(), Vec::new());
        if self.keeps_first() {
            own.extend_from_slice(&self.blocks[(self.num_indexed as usize).min(end)..end]);
        }
        let groups = self.layers.iter().flat_map(|layers| &layers.rest);
        for block in groups.flat_map(|group| group.before(end)) {
            match block.whose {
                Whose::Own => own.push(block.block),
                Whose::Attached | Whose::Guest => used.push(block.block),
                Whose::Published => {}
            }
        }
        (own, used)
    }

    /// Blocks that left its windows and wait for its next growth.
    pub(super) fn num_spare(&self) -> u32 {
        self.layers.as_ref().map_or(0, |layers| layers.spare.len() as u32)
    }

    /// Takes at most so many of them.
    pub(super) fn take_spare(&mut self, count: u32) -> Vec<BlockHandle> {
        let Some(layers) = &mut self.layers else { return Vec::new() };
        layers.spare.split_off(layers.spare.len().saturating_sub(count as usize))
    }

    /// Gives it blocks that another one of its set took out of its own.
    pub(super) fn give_spare(&mut self, blocks: Vec<BlockHandle>) {
        if let Some(layers) = &mut self.layers {
            layers.spare.extend(blocks);
        }
    }
}

/// References of sequences to blocks of their own in further groups, beyond one for each block.
pub(super) fn num_duplicates(set: &[&Sequence]) -> u32 {
    if set.len() < 2 {
        return 0;
    }
    let mut seen = HashSet::<_, foldhash::fast::RandomState>::default();
    let all = set.iter().flat_map(|branch| &branch.layers).flat_map(|layers| layers.own());
    all.filter(|&block| !seen.insert(block)).count() as u32
}

impl Core {
    /// Gives a branch references to the first `shared` columns of a sequence, with uses of what the index has of further
    /// groups. `promise` pays for those, and with `num_spare` blocks that the branch has to spare for the rest. False, and
    /// nothing has changed, if that is too little and no more is to be had.
    pub(super) fn share_blocks(
        &self,
        position: usize,
        shared: usize,
        promise: &mut Reservation,
        num_spare: usize,
    ) -> Result<bool> {
        let sequence = &self.running[position];
        let (own, used) = sequence.blocks_before(shared);
        if sequence.layers.is_some() {
            let paid = sequence.num_blocks_in(0..shared) - self.num_spared(shared);
            let promised = used.len().max(paid.saturating_sub(num_spare));
            let short = (promised as u32).saturating_sub(promise.num_blocks());
            // What is promised already is there, also when the quota was lowered since.
            match if short > 0 { promise.grow(short) } else { Ok(()) } {
                Ok(()) => {}
                Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.pool.retain(&own)?;
        if let Some(index) = &self.index {
            index.use_again(&used, promise)?;
        }
        Ok(true)
    }

    /// Takes back what `share_blocks` has given.
    pub(super) fn unshare_blocks(
        &self,
        position: usize,
        shared: usize,
        promise: &mut Reservation,
    ) -> Result<()> {
        let (own, used) = self.running[position].blocks_before(shared);
        self.pool.release(&own)?;
        let Some(index) = &self.index else { return Ok(()) };
        used.into_iter().try_for_each(|block| index.leave_attached(block, promise).map(|_| ()))
    }

    /// Further groups of a branch with the first `shared` columns of a sequence.
    pub(super) fn shared_layers(&self, position: usize, shared: usize) -> Option<Box<LayerBlocks>> {
        let sequence = &self.running[position];
        let prompt = sequence.progress.prompt_tokens;
        let mut layers = self.new_layers(prompt, prompt + sequence.request.max_tokens)?;
        if shared > 0 {
            layers.take_after(sequence.layers.as_deref()?, |_| 0, shared);
        }
        Some(layers)
    }
}
