//! The blocks of a sequence in models with more than one full layer group.
//!
//! The blocks of a first group that sees all tokens are in [`Sequence::blocks`], those of all others here. If the first
//! group lets blocks go as well it is one of the others: `Sequence::blocks` then only counts columns, and names the
//! index's homes of those that are indexed.
//!
//! Every group of a sequence ends at the same block and begins where its own window does. A block that leaves the
//! window is *spare*: no query sees it any more, those of open steps included, because they come after what is
//! committed. So it is overwritten by the next growth of any group, without a call to the pool, and what is promised to
//! a sequence circulates in it.

use super::config::SchedulerConfig;
use super::core::{Core, Draw};
use super::request::Request;
use super::scopes::{Reach, TenantScope, find, look_at};
use super::sequence::Sequence;
use super::tails::{Keeper, TailBlock};
use super::tenant::Tenant;
use crate::block_pool::Reservation;
use crate::block_tables::BlockTables;
use crate::geometry::Span;
use crate::ids::{AccountId, BlockHandle};
use crate::prefix_index::{ChainPin, PrefixIndex};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;

/// What stands in `Sequence::blocks` for a column that has no block there, and no home.
pub(super) const NO_BLOCK: BlockHandle = BlockHandle::from_bits(0);

/// What `Sequence::blocks` does not say.
#[derive(Debug)]
pub(super) struct LayerBlocks {
    /// Whether `Sequence::blocks` has the blocks of the first group.
    pub(super) keeps_first: bool,
    /// The other groups, in order.
    pub(super) rest: Box<[GroupBlocks]>,
    /// Blocks that left a window, for the next growth.
    pub(super) spare: Vec<BlockHandle>,
}

/// The blocks of one group but the first.
#[derive(Debug)]
pub(super) struct GroupBlocks {
    /// Leading blocks that it has let go.
    pub(super) first: u32,
    /// Those after them.
    pub(super) blocks: VecDeque<GroupBlock>,
    /// How many of those another account pays for.
    num_guests: usize,
}

/// A block of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupBlock {
    pub(super) block: BlockHandle,
    pub(super) whose: Whose,
}

/// Whose a block of a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// The sequence's own.
    Own,
    /// The index's, and the sequence pays for its use.
    Attached,
    /// The index's, of a shared scope, which pays.
    Guest,
    /// It was the sequence's to use, and is kept by what it published.
    Published,
}

impl GroupBlock {
    pub(super) const fn own(block: BlockHandle) -> Self {
        Self { block, whose: Whose::Own }
    }

    pub(super) const fn in_tail(self, column: usize) -> TailBlock {
        let keeper = match self.whose {
            Whose::Own => Keeper::Own,
            Whose::Attached | Whose::Guest | Whose::Published => Keeper::Use,
        };
        TailBlock { column, block: self.block, keeper }
    }
}

impl LayerBlocks {
    /// No blocks, with room for as many as each group has at once.
    pub(super) fn new(keeps_first: bool, capacities: impl Iterator<Item = usize>) -> Self {
        let group = |most| GroupBlocks { first: 0, blocks: VecDeque::with_capacity(most), num_guests: 0 };
        Self { keeps_first, rest: capacities.map(group).collect(), spare: Vec::new() }
    }

    /// Blocks in all groups when there are so many columns; spare ones, and those that other accounts pay for, left out.
    pub(super) fn num_held(&self, num_columns: usize) -> usize {
        let of = |group: &GroupBlocks| group.blocks.len() - group.num_guests;
        let first = if self.keeps_first { num_columns } else { 0 };
        first + self.rest.iter().map(of).sum::<usize>()
    }

    /// Blocks of further groups that are the index's.
    pub(super) fn num_used(&self) -> usize {
        let blocks = self.rest.iter().flat_map(|group| &group.blocks);
        blocks.filter(|block| block.whose != Whose::Own).count()
    }

    /// The first column of each group that it has not let go, in order.
    pub(super) fn firsts(&self) -> impl Iterator<Item = u32> {
        self.keeps_first.then_some(0).into_iter().chain(self.rest.iter().map(|group| group.first))
    }
}

impl GroupBlocks {
    pub(super) fn push_back(&mut self, block: GroupBlock) {
        self.num_guests += usize::from(block.whose == Whose::Guest);
        self.blocks.push_back(block);
    }

    /// Lets its first block go.
    pub(super) fn pop_front(&mut self) {
        if let Some(block) = self.blocks.pop_front() {
            self.num_guests -= usize::from(block.whose == Whose::Guest);
            self.first += 1;
        }
    }

    /// Puts another block of the sequence's own to the place of one.
    pub(super) fn replace(&mut self, logical: u32, block: GroupBlock) {
        debug_assert!(self.blocks[(logical - self.first) as usize].whose == Whose::Own);
        self.blocks[(logical - self.first) as usize] = block;
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.num_guests = 0;
    }

    /// The block of so many positions; the caller knows that the group has it.
    pub(super) fn block(&self, logical: u32) -> BlockHandle {
        self.blocks[(logical - self.first) as usize].block
    }

    /// The same, if the group has it.
    pub(super) fn get(&self, logical: u32) -> Option<BlockHandle> {
        self.blocks.get(logical.checked_sub(self.first)? as usize).map(|block| block.block)
    }

    /// Takes the blocks after the first `num_kept`.
    pub(super) fn split_off(&mut self, num_kept: usize) -> VecDeque<GroupBlock> {
        let taken = self.blocks.split_off(num_kept);
        self.num_guests -= taken.iter().filter(|block| block.whose == Whose::Guest).count();
        taken
    }
}

impl Sequence {
    /// Blocks that it holds, in all groups.
    pub(super) fn num_held(&self) -> usize {
        let num_blocks = self.blocks.len();
        self.layers.as_ref().map_or(num_blocks, |layers| layers.num_held(num_blocks) + layers.spare.len())
    }

    /// Whether tokens of it are known that no committed step has computed, besides the next one.
    pub(super) fn is_prefill(&self) -> bool {
        self.tokens.len() as u32 - self.num_computed > 1
    }

    /// Takes its blocks when it ends: its own, which go back to the pool, and those of further groups that are the
    /// index's. Those of the first group that are the index's are its pin's.
    pub(super) fn take_blocks(&mut self) -> (Vec<BlockHandle>, Vec<BlockHandle>) {
        let Some(layers) = self.layers.take() else {
            let own = self.blocks.split_off(self.num_indexed as usize);
            self.blocks.clear();
            return (own, Vec::new());
        };
        let first_own = if layers.keeps_first { self.num_indexed as usize } else { self.blocks.len() };
        let mut own = self.blocks.split_off(first_own);
        self.blocks.clear();
        let mut attached = Vec::new();
        for block in layers.rest.iter().flat_map(|group| &group.blocks) {
            match block.whose {
                Whose::Own => own.push(block.block),
                Whose::Attached | Whose::Guest => attached.push(block.block),
                Whose::Published => {}
            }
        }
        own.extend_from_slice(&layers.spare);
        (own, attached)
    }
}

impl Core {
    /// No blocks of a sequence of `longest` tokens; `None` if the model has one full group.
    pub(super) fn new_layers(&self, prompt_tokens: u32, longest: u32) -> Option<Box<LayerBlocks>> {
        let config = &self.config;
        let most = |&span| config.group_peak(span, prompt_tokens, longest, true) as usize;
        let new = || LayerBlocks::new(config.keeps_first(), config.rest_groups().iter().map(most));
        config.is_grouped().then(|| Box::new(new()))
    }

    /// Makes the rows of a sequence matchable whose blocks are full and written, if no group's blocks stand for them: as far
    /// as the index has homes for them.
    pub(super) fn index_homes(&mut self, position: usize) -> Result<()> {
        let sequence = &mut self.running[position];
        let (Some(index), Some(pin)) = (&self.index, &mut sequence.pin) else { return Ok(()) };
        let block_size = self.config.block_size as usize;
        let from = sequence.num_indexed as usize;
        let to = sequence.num_computed as usize / block_size;
        let tokens = &sequence.tokens[from * block_size..to * block_size];
        let tokens = sequence.request.keys(index, from * block_size, tokens)?;
        self.scratch.clear();
        index.extend_homes(pin, &tokens, &mut self.scratch)?;
        let end = from + self.scratch.len();
        sequence.blocks[from..end].copy_from_slice(&self.scratch);
        sequence.num_indexed = end as u32;
        self.attach_blocks(position, from, end)
    }

    /// Of the blocks that a look-up found, those that a request need not have promised: of further groups it pays for
    /// each of them.
    pub(super) fn num_spared(&self, num_found: usize) -> usize {
        if self.config.keeps_first() { num_found } else { 0 }
    }

    /// Begins with what further groups have in the index after the first group's blocks in `scratch`. False, and
    /// nothing is used, if something went since it was looked up.
    pub(super) fn use_found(
        &self,
        layers: Option<&mut LayerBlocks>,
        promise: &mut Reservation,
    ) -> Result<bool> {
        let (Some(layers), Some(index)) = (layers, &self.index) else { return Ok(true) };
        index.use_attached(&self.scratch, 0, promise, |used| {
            let whose = if used.is_guest { Whose::Guest } else { Whose::Attached };
            layers.rest[used.group].push_back(GroupBlock { block: used.block, whose });
        })
    }

    /// Blocks after the first `start` that further groups need after a prefix of `end`.
    pub(super) fn num_group_blocks(&self, start: usize, end: usize) -> usize {
        let block_size = self.config.block_size;
        let of = |span: &Span| {
            let first = span.first_visible(end as u32 * block_size) / block_size;
            end.saturating_sub(start.max(first as usize))
        };
        self.config.rest_groups().iter().map(of).sum()
    }

    /// Holds what further groups need, from block `start` on, after a prefix of the first group's blocks. `None` if there is
    /// no room for that, or something went since it was looked up.
    pub(super) fn hold_groups(
        &self,
        blocks: &[BlockHandle],
        start: usize,
        tenant: &Tenant,
    ) -> Result<Option<HeldGroups>> {
        let Some(index) = &self.index else { return Ok(None) };
        let mut held = HeldGroups { index: Arc::clone(index), account: tenant.account, blocks: Vec::new() };
        let needed = self.num_group_blocks(start, blocks.len());
        if needed == 0 {
            return Ok(Some(held));
        }
        let mut promise = match self.pool.reserve(tenant.account, needed as u32) {
            Ok(promise) => promise,
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        self.keep_within_limit(tenant)?;
        let is_there =
            index.use_attached(blocks, start, &mut promise, |used| held.blocks.push(used.block))?;
        Ok(is_there.then_some(held))
    }

    /// Writes what a new sequence begins with into the tables of further groups.
    pub(super) fn begin_rows(&mut self, layers: Option<&mut LayerBlocks>, row: u32) {
        let Some(layers) = layers else { return };
        for group in &mut layers.rest {
            group.first = (self.scratch.len() - group.blocks.len()) as u32;
        }
        self.write_rows(Some(&*layers), row);
    }

    /// Attaches the blocks of further groups to those of the first one from `from` to `to`, which are the index's by
    /// now. Where a group has let its block go, or another sequence's is there, nothing changes.
    pub(super) fn attach_blocks(&mut self, position: usize, from: usize, to: usize) -> Result<()> {
        let sequence = &mut self.running[position];
        let (Some(index), Some(layers), Some(pin)) = (&self.index, &mut sequence.layers, &sequence.pin)
        else {
            return Ok(());
        };
        let tenant = &sequence.request.tenant;
        let (account, is_public) = (tenant.account, tenant.scope() == TenantScope::Public);
        for (number, group) in layers.rest.iter_mut().enumerate() {
            for logical in from.max(group.first as usize)..to {
                let block = &mut group.blocks[logical - group.first as usize];
                if block.whose == Whose::Own
                    && index.attach(
                        (pin.last(), sequence.blocks[logical]),
                        number,
                        block.block,
                        account,
                        is_public,
                    )?
                {
                    block.whose = Whose::Attached;
                }
            }
        }
        Ok(())
    }

    /// Keeps what every further group needs after the blocks that a sequence has published. Returns what is kept.
    pub(super) fn publish_groups(
        &self,
        sequence: &mut Sequence,
        pin: Option<&ChainPin>,
    ) -> Result<Vec<BlockHandle>> {
        let mut kept = Vec::new();
        if sequence.request.tenant.scope() != TenantScope::Public || !sequence.is_done() {
            return Ok(kept);
        }
        let (Some(index), Some(layers), Some(pin)) = (&self.index, &mut sequence.layers, pin) else {
            return Ok(kept);
        };
        let namespace = pin.last();
        let indexed = &sequence.blocks[..sequence.num_indexed as usize];
        for (number, group) in layers.rest.iter_mut().enumerate() {
            for logical in index.needed_blocks(number, indexed.len()) {
                let place = logical.checked_sub(group.first as usize);
                let own = place.and_then(|place| group.blocks.get_mut(place));
                let own = own.filter(|block| block.whose == Whose::Attached);
                let (first, promise) = ((namespace, indexed[logical]), &mut sequence.reservation);
                let published = index.publish_attached(first, number, own.is_some(), promise)?;
                if let (Some(block), Some(_)) = (own, published) {
                    block.whose = Whose::Published;
                }
                kept.extend(published);
            }
        }
        Ok(kept)
    }

    /// `Core::grow` over all groups, all or nothing: spare blocks first, then what is promised.
    pub(super) fn grow_groups(
        &mut self,
        position: usize,
        num_tokens: u32,
    ) -> Result<std::result::Result<(), Error>> {
        let end = self.config.blocks_for(num_tokens) as usize;
        let num_groups = self.config.layer_groups.len();
        let sequence = &self.running[position];
        let columns = sequence.blocks.len()..end;
        let total = columns.len() * num_groups;
        if let Err(short) = self.draw_blocks(position, total, Draw::Growth)? {
            return Ok(Err(short));
        }
        let sequence = &mut self.running[position];
        let Some(layers) = &mut sequence.layers else { return Ok(Ok(())) };
        let keeps_first = layers.keeps_first;
        for (number, blocks) in columns.zip(self.scratch.chunks_exact(num_groups)) {
            debug_assert_eq!(number, sequence.blocks.len());
            sequence.blocks.push(if keeps_first { blocks[0] } else { NO_BLOCK });
            if keeps_first {
                self.tables.append(sequence.row, blocks[0].id());
            }
            let tables = rest_tables(&mut self.tables, &mut self.group_tables, keeps_first);
            let others = layers.rest.iter_mut().zip(tables);
            for ((group, tables), &block) in others.zip(&blocks[usize::from(keeps_first)..]) {
                group.blocks.push_back(GroupBlock::own(block));
                tables.append(sequence.row, block.id());
            }
        }
        let account = sequence.request.tenant.account;
        self.note_drawn(account);
        Ok(Ok(()))
    }
}

/// The tables of the groups in [`LayerBlocks::rest`].
pub(super) fn rest_tables<'a>(
    first: &'a mut BlockTables,
    others: &'a mut [BlockTables],
    keeps_first: bool,
) -> impl Iterator<Item = &'a mut BlockTables> {
    (!keeps_first).then_some(first).into_iter().chain(others)
}

/// Pins what the index has, in all groups, of whole blocks of a request's `tokens`.
pub(super) fn find_groups(
    index: Option<&Arc<PrefixIndex>>,
    request: &Request,
    reach: Reach,
    tokens: &[u32],
    config: &SchedulerConfig,
    blocks: &mut Vec<BlockHandle>,
) -> Result<Option<ChainPin>> {
    let Some(index) = index else { return Ok(None) };
    let block_size = config.block_size as usize;
    let mut tokens = tokens;
    if config.is_grouped() && look_at(index, request, reach, tokens, blocks)? {
        // What some group can't use any more is not pinned even for a moment: with a step open, its capacity would come
        // back only when that closes, and a request that takes all there is would be short of it at every look.
        tokens = &tokens[..index.usable_blocks(blocks) * block_size];
        blocks.clear();
    }
    let mut pin = find(index, request, reach, tokens, blocks)?;
    while config.is_grouped() && pin.is_some() {
        let usable = index.usable_blocks(blocks);
        if usable == blocks.len() {
            break;
        }
        blocks.clear();
        // The shorter prefix is pinned before the longer one is let go.
        pin = find(index, request, reach, &tokens[..usable * block_size], blocks)?;
    }
    Ok(pin)
}

/// Blocks of further groups that are held with a kept prefix, until this is dropped.
pub(super) struct HeldGroups {
    index: Arc<PrefixIndex>,
    account: AccountId,
    blocks: Vec<BlockHandle>,
}

impl HeldGroups {
    pub(super) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }
}

impl Drop for HeldGroups {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            let left = self.index.leave_all_attached(&self.blocks, self.account);
            debug_assert!(left.is_ok(), "what is held can be left: {left:?}");
        }
    }
}
