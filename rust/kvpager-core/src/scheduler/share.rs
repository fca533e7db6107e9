//! Computing equal prefixes once, also where their requests overlap in time.
//!
//! Blocks become matchable when the step that wrote them is committed. A request whose next block another one of
//! its namespace computes in the step that is being planned waits for that step instead of computing the block
//! again: in the queue, where it holds nothing, or, while it prefills, without a chunk. A prefilling sequence looks
//! further at each chunk's boundary. Only requests of one namespace wait for each other, so nobody learns of a
//! foreign one by it, and nobody waits for a sequence that does not run in this very step.

use super::core::Core;
use super::group_blocks::find_groups;
use super::request::Request;
use super::scopes::Reach;
use super::sequence::Sequence;
use crate::ids::BlockHandle;
use crate::prefix_index::ChainPin;
use crate::{Error, Result};
use std::sync::Arc;

/// Steps that a request waits for others' chunks in its life. Each of them brings it a chunk further, so this is no
/// tuning value: it bounds the wait if something unforeseen keeps the chunks from arriving.
const MAX_WAIT_STEPS: u32 = 256;

impl Core {
    /// Whether a request that has the first `num_blocks` blocks of its tokens had better wait for this step's end.
    pub(super) fn should_wait(
        &self,
        pin: Option<&ChainPin>,
        request: &Request,
        tokens: &[u32],
        num_blocks: usize,
        waited: u32,
    ) -> bool {
        let (Some(pin), true) = (pin, waited < MAX_WAIT_STEPS) else { return false };
        let block_size = self.config.block_size as usize;
        let (start, end) = (num_blocks * block_size, (num_blocks + 1) * block_size);
        // The last token is always computed, so a block that has it is of no use.
        end < tokens.len()
            && self.in_flight.iter().any(|&id| {
                let Ok(position) = self.running.binary_search_by_key(&id, |other| other.id) else {
                    return false;
                };
                let other = &self.running[position];
                other.pin.as_ref().is_some_and(|own| own.last() == pin.last())
                    && (other.num_computed as usize) < end
                    && end <= other.num_written() as usize
                    && other.tokens[start..end] == tokens[start..end]
                    && other.tokens[..start] == tokens[..start]
                    && other.request.items_before(end) == request.items_before(end)
            })
    }

    /// Before a chunk of a prefilling sequence: takes over what has become matchable since. True if it should get
    /// no chunk now, because another one computes its next block in this step.
    pub(super) fn catch_up(&mut self, position: usize) -> Result<bool> {
        self.take_over(position)?;
        let sequence = &self.running[position];
        let num_blocks = (sequence.num_computed / self.config.block_size) as usize;
        let waited = sequence.progress.share_waits;
        let tokens = &sequence.tokens[..=sequence.num_common()];
        let waits = self.should_wait(sequence.pin.as_ref(), &sequence.request, tokens, num_blocks, waited);
        self.running[position].progress.share_waits += u32::from(waits);
        Ok(waits)
    }

    /// Moves a sequence forward over blocks that others have computed.
    fn take_over(&mut self, position: usize) -> Result<()> {
        let block_size = self.config.block_size as usize;
        let sequence = &self.running[position];
        let (Some(index), Some(pin)) = (&self.index, &sequence.pin) else { return Ok(()) };
        let have = sequence.num_indexed as usize;
        let next = have * block_size..(have + 1) * block_size;
        let is_behind = sequence.num_computed as usize >= next.end || next.end > sequence.num_common();
        if is_behind {
            return Ok(());
        }
        let block = sequence.request.keys(index, next.start, &sequence.tokens[next])?;
        if !index.leads_further(pin, &block)? {
            return Ok(());
        }
        self.scratch.clear();
        let tokens = &sequence.tokens[..sequence.num_common()];
        let request = &sequence.request;
        let found = find_groups(Some(index), request, Reach::All, tokens, &self.config, &mut self.scratch);
        let found = match found {
            Ok(Some(found)) => found,
            Ok(None) | Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::Refused { .. }) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        // What the sequence has indexed stays; a block that it has begun gives way to the full one.
        let is_longer = self.scratch.len() > have && self.scratch.len() >= sequence.blocks.len();
        if !is_longer || self.scratch[..have] != sequence.blocks[..have] {
            return Ok(());
        }
        if self.config.is_grouped() {
            self.adopt_groups(position, found)
        } else {
            self.adopt(position, found)
        }
    }

    /// [`Core::adopt`] in models with layer groups: it goes on from what every group has there, if there is room to hold
    /// that beside what it has until the one is traded for the other.
    fn adopt_groups(&mut self, position: usize, pin: ChainPin) -> Result<()> {
        let sequence = &self.running[position];
        let (Some(index), Some(layers)) = (&self.index, &sequence.layers) else { return Ok(()) };
        let (tenant, keeps_first) = (Arc::clone(&sequence.request.tenant), layers.keeps_first);
        // What it leaves is promised to it again, unless an open step may still read that.
        let room = self.num_group_blocks(0, self.scratch.len()) + layers.num_used();
        let mut promise = match self.pool.reserve(tenant.account, room as u32) {
            Ok(promise) => promise,
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        self.keep_within_limit(&tenant)?;
        let prompt = sequence.progress.prompt_tokens;
        let mut new = self.new_layers(prompt, prompt + sequence.request.max_tokens);
        match self.use_found(new.as_deref_mut(), &mut promise) {
            Ok(true) => {}
            // It went, or the scope that it is of has no room to hold it.
            Ok(false) | Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        let sequence = &mut self.running[position];
        let row = sequence.row;
        let (own, used) = sequence.take_blocks();
        for block in used {
            if !index.leave_attached(block, &mut sequence.reservation)? {
                index.leave_all_attached(&[block], tenant.account)?;
            }
        }
        promise.move_to(promise.num_blocks(), &mut sequence.reservation)?;
        for block in own {
            match &mut new {
                Some(new) if self.pool.is_exclusive(block)? => new.spare.push(block),
                // Other branches have it as well.
                _ => self.pool.release(&[block])?,
            }
        }
        sequence.blocks.extend_from_slice(&self.scratch);
        let end = self.scratch.len() as u32;
        let gained = end * self.config.block_size - sequence.num_computed;
        note_found(sequence, gained);
        sequence.num_computed += gained;
        (sequence.num_indexed, sequence.pin) = (end, Some(pin));
        self.tables.clear_row(row);
        self.group_tables.iter_mut().for_each(|tables| tables.clear_row(row));
        for block in self.scratch.iter().filter(|_| keeps_first) {
            self.tables.append(row, block.id());
        }
        self.begin_rows(new.as_deref_mut(), row);
        self.running[position].layers = new;
        self.slide(position, true)
    }

    /// Gives a sequence the blocks in `scratch` and the pin that holds them, instead of those it has.
    fn adopt(&mut self, position: usize, pin: ChainPin) -> Result<()> {
        let block_size = self.config.block_size;
        let sequence = &mut self.running[position];
        let have = sequence.num_indexed as usize;
        let own: Vec<BlockHandle> = sequence.blocks.split_off(have);
        for (column, &block) in self.scratch.iter().enumerate().skip(have) {
            if column < have + own.len() {
                self.tables.replace(sequence.row, column as u32, block.id());
            } else {
                self.tables.append(sequence.row, block.id());
            }
            sequence.blocks.push(block);
        }
        let gained = self.scratch.len() as u32 * block_size - sequence.num_computed;
        note_found(sequence, gained);
        sequence.num_indexed = self.scratch.len() as u32;
        sequence.num_computed += gained;
        sequence.pin = Some(pin);
        let spared = (self.scratch.len() - have - own.len()) as u32;
        let promised = sequence.reservation.num_blocks();
        sequence.reservation.shrink(spared.min(promised))?;
        self.pool.release(&own)
    }
}

/// Counts prompt tokens that came from the index after the admission, and that it did not have before it was taken back.
pub(super) fn note_found(sequence: &mut Sequence, gained: u32) {
    let progress = &mut sequence.progress;
    let end = progress.prompt_tokens.min(sequence.num_computed + gained);
    progress.cached_tokens += end.saturating_sub(sequence.num_computed.max(progress.known_once));
}
