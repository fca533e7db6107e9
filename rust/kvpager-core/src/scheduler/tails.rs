//! The tail of a sequence: its last columns of blocks, in all layer groups.
//!
//! A *column* is the blocks of the same positions, one of each layer group that has not let its own go. A tail on the
//! host lies there column by column from the last to the first; where each group begins does not change meanwhile, so
//! which blocks a column has need not be remembered.

use super::core::Core;
use super::group_blocks::{GroupBlock, LayerBlocks, NO_BLOCK, rest_tables};
use super::samples;
use super::sequence::Sequence;
use crate::ids::BlockHandle;
use std::ops::Range;

/// What keeps a block of a tail on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeper {
    /// The sequence alone, or it and others by a reference each.
    Own,
    /// The pin of what the first group has in the index.
    Pin,
    /// A use of what a further group has in the index.
    Use,
}

/// A block that leaves the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct TailBlock {
    pub(super) column: usize,
    pub(super) block: BlockHandle,
    pub(super) keeper: Keeper,
}

impl Sequence {
    /// Blocks in some columns, in all groups.
    pub(super) fn num_blocks_in(&self, columns: Range<usize>) -> usize {
        self.firsts().map(|first| columns.end.saturating_sub(columns.start.max(first as usize))).sum()
    }

    /// Columns before the shortest tail of `num_blocks` blocks at least, or of all.
    pub(super) fn columns_before_tail(&self, num_blocks: u32) -> usize {
        let end = self.blocks.len();
        if self.layers.is_none() {
            return end.saturating_sub(num_blocks as usize);
        }
        let is_enough = |&start: &usize| self.num_blocks_in(start..end) >= num_blocks as usize;
        (0..=end).rev().find(is_enough).unwrap_or(0)
    }

    /// The first column of each group that it has not let go.
    fn firsts(&self) -> impl Iterator<Item = u32> {
        let layers = self.layers.as_deref();
        let only = layers.is_none().then_some(0);
        only.into_iter().chain(layers.into_iter().flat_map(LayerBlocks::firsts))
    }

    /// Takes the blocks from a column on, column by column, and what its groups keep to be written next.
    pub(super) fn take_tail(&mut self, from: usize) -> (Vec<TailBlock>, Vec<BlockHandle>) {
        let num_indexed = self.num_indexed as usize;
        let first_group = |(i, block): (usize, BlockHandle)| {
            let column = from + i;
            let keeper = if column < num_indexed { Keeper::Pin } else { Keeper::Own };
            TailBlock { column, block, keeper }
        };
        let mut tail: Vec<_> = self.blocks.drain(from..).enumerate().map(first_group).collect();
        self.num_indexed = self.num_indexed.min(from as u32);
        let Some(layers) = &mut self.layers else { return (tail, Vec::new()) };
        if !layers.keeps_first {
            tail.clear();
        }
        for group in &mut layers.rest {
            let kept = from.saturating_sub(group.first as usize).min(group.blocks.len());
            let start = group.first as usize + kept;
            tail.extend(group.split_off(kept).into_iter().enumerate().map(|(i, of)| of.in_tail(start + i)));
        }
        // Stable: the groups stay in order inside a column.
        tail.sort_by_key(|block| block.column);
        (tail, std::mem::take(&mut layers.spare))
    }

    /// Puts blocks back, column by column from the first that is missing.
    fn put_tail(&mut self, blocks: &[BlockHandle], end: usize) {
        let mut blocks = blocks.iter().copied();
        for column in self.blocks.len()..end {
            let Some(layers) = &mut self.layers else {
                self.blocks.extend(blocks.next());
                continue;
            };
            self.blocks.extend(if layers.keeps_first { blocks.next() } else { Some(NO_BLOCK) });
            for group in layers.rest.iter_mut().filter(|group| column >= group.first as usize) {
                group.blocks.extend(blocks.next().map(GroupBlock::own));
            }
        }
        debug_assert_eq!(blocks.len(), 0);
    }
}

impl Core {
    /// Columns that hold what a sequence has computed.
    pub(super) fn columns_written(&self, sequence: &Sequence) -> usize {
        self.config.blocks_for(sequence.num_written()) as usize
    }

    /// Device blocks that a parked sequence needs to run its next token.
    pub(super) fn blocks_to_return(&self, sequence: &Sequence) -> u32 {
        let known = self.config.blocks_for(sequence.tokens.len() as u32);
        let start = sequence.blocks.len();
        if sequence.layers.is_none() {
            return known.saturating_sub(start as u32);
        }
        // No group has more than `submit` found room for; what is computed fits that.
        let end = known.min(self.promised_end(sequence) / self.config.block_size) as usize;
        // What it is to split into must be there when its prompt is computed.
        let samples = samples::extra_blocks(&self.config, &sequence.request, sequence.progress.prompt_tokens);
        sequence.num_blocks_in(start..end.max(self.columns_written(sequence))) as u32 + samples
    }

    /// Gives a sequence that comes back the blocks in `scratch` for its tail, and fills its row.
    pub(super) fn begin_again(&mut self, sequence: &mut Sequence, row: u32) {
        sequence.row = row;
        sequence.put_tail(&self.scratch, self.columns_written(sequence));
        if sequence.layers.as_ref().is_none_or(|layers| layers.keeps_first) {
            for block in &sequence.blocks {
                self.tables.append(row, block.id());
            }
        }
        self.write_rows(sequence.layers.as_deref(), row);
    }

    /// Writes the blocks of further groups into their tables.
    pub(super) fn write_rows(&mut self, layers: Option<&LayerBlocks>, row: u32) {
        let Some(layers) = layers else { return };
        let tables = rest_tables(&mut self.tables, &mut self.group_tables, layers.keeps_first);
        for (group, tables) in layers.rest.iter().zip(tables) {
            tables.begin_at(row, group.first);
            group.blocks.iter().for_each(|block| tables.append(row, block.block.id()));
        }
    }
}
