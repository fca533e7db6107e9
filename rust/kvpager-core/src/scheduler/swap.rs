//! Moving the tail of a sequence to the host tier, and back.
//!
//! A *parked* sequence keeps its head on the device, has no table row and is in no batch. Device blocks that a
//! step copies out, and host blocks that it copies in, leave their pools when that step has opened: both ends
//! stay as they are until it closes.
//!
//! Steps run in the order in which they were planned, so with several of them open a tail may be on its way back before
//! the step that copies it out has ended. What an open step writes is never copied out: who is in flight is no victim.

use super::core::Core;
use super::scopes::{Reach, find};
use super::sequence::{Parked, Sequence};
use super::tails::Keeper;
use crate::block_pool::StepEpoch;
use crate::ids::{AccountId, BlockHandle};
use crate::prefix_index::ChainPin;
use crate::{Error, Result};

/// Fewest blocks that a tail has: a copy of less is not worth its launch.
pub(super) const MIN_TAIL_BLOCKS: u32 = 32;

/// What the next batch moves, and what leaves the device pool when its step has opened.
#[derive(Default)]
pub(super) struct Swaps {
    /// (device, host), (host, device).
    pub(super) outgoing: Vec<[i32; 2]>,
    pub(super) incoming: Vec<[i32; 2]>,
    /// Sequences that the next step moves: if it fails, what they have is not known.
    pub(super) moved: Vec<crate::SequenceId>,
    /// Device blocks, pins of indexed ones, and uses of those of further groups, that the next step copies from.
    leaving: Vec<BlockHandle>,
    leaving_pins: Vec<ChainPin>,
    leaving_uses: Vec<(AccountId, BlockHandle)>,
    pub(super) num_swapped_out: u64,
    pub(super) num_swapped_in: u64,
}

impl Core {
    /// Moves the last `num_blocks` blocks of a sequence, or all it has, to the host tier. Returns how many leave the
    /// device; `None`, and nothing has changed, if its share of the tier is full.
    pub(super) fn swap_out(&mut self, sequence: &mut Sequence, num_blocks: u32) -> Result<Option<u32>> {
        let Some(host) = &self.host else { return Ok(None) };
        let keep = sequence.columns_before_tail(num_blocks);
        let written = self.columns_written(sequence).min(sequence.blocks.len());
        let mut copies = vec![BlockHandle::from_bits(0); sequence.num_blocks_in(keep..written)];
        if !host.allocate(sequence.request.tenant.index, &mut copies)? {
            return Ok(None);
        }
        if keep < sequence.num_indexed as usize && !self.shorten_pin(sequence, keep)? {
            if let Some(host) = &self.host {
                host.release(&copies)?;
            }
            return Ok(None);
        }
        let (tail, spare) = sequence.take_tail(keep);
        let parked = sequence.parked.get_or_insert_with(|| Box::new(Parked::new(self.now)));
        // The columns that are written come first.
        for (device, copy) in tail.iter().zip(&copies).rev() {
            self.swaps.outgoing.push([device.block.id().0 as i32, copy.id().0 as i32]);
            parked.blocks.push(*copy);
        }
        self.swaps.num_swapped_out += copies.len() as u64;
        self.swaps.moved.push(sequence.id);
        let account = sequence.request.tenant.account;
        for device in &tail {
            match device.keeper {
                Keeper::Own => self.swaps.leaving.push(device.block),
                Keeper::Use => self.swaps.leaving_uses.push((account, device.block)),
                Keeper::Pin => {}
            }
        }
        self.swaps.leaving.extend_from_slice(&spare);
        let promised = sequence.reservation.num_blocks();
        sequence.reservation.shrink(promised)?;
        Ok(Some((tail.len() + spare.len()) as u32))
    }

    /// Pins the first `num_blocks` of an indexed prefix instead of all of it; what it lets go stays cached, and
    /// is not evicted before the next step has closed. False if the index cannot.
    fn shorten_pin(&mut self, sequence: &mut Sequence, num_blocks: usize) -> Result<bool> {
        let (Some(index), Some(pin)) = (&self.index, &mut sequence.pin) else { return Ok(true) };
        let tokens = &sequence.tokens[..num_blocks * self.config.block_size as usize];
        self.scratch.clear();
        let shorter = match find(index, &sequence.request, Reach::All, tokens, &mut self.scratch) {
            Ok(Some(shorter)) => shorter,
            Ok(None) => return Ok(false),
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        if self.scratch[..] != sequence.blocks[..num_blocks] {
            return Ok(false);
        }
        self.swaps.leaving_pins.push(std::mem::replace(pin, shorter));
        Ok(true)
    }

    /// Brings the tail of a parked sequence back and gives it a row. `Ok(Some(error))` says what is short; the
    /// sequence is as before then.
    pub(super) fn swap_in(&mut self, sequence: &mut Sequence) -> Result<Option<Error>> {
        let Some(mut parked) = sequence.parked.take() else { return Ok(None) };
        match self.draw_return(sequence, parked.blocks.len()) {
            Ok(()) => {}
            Err(
                error @ (Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. }),
            ) => {
                sequence.parked = Some(parked);
                return Ok(Some(error));
            }
            Err(error) => return Err(error),
        }
        let Some(row) = self.tables.take_row() else {
            return Err(Error::WrongState("a running place has no table row".to_owned()));
        };
        self.begin_again(sequence, row);
        self.note_owner(sequence.request.tenant.account);
        let copies = parked.blocks.drain(..).rev();
        let host: Vec<BlockHandle> = copies.collect();
        let pairs = host.iter().zip(&self.scratch);
        self.swaps.incoming.extend(pairs.map(|(copy, device)| [copy.id().0 as i32, device.id().0 as i32]));
        self.swaps.num_swapped_in += host.len() as u64;
        self.swaps.moved.push(sequence.id);
        if let Some(tier) = &mut self.host {
            tier.leave(host);
        }
        sequence.has_sampled = false;
        sequence.resumed_at = self.now;
        Ok(None)
    }

    /// Promises what a parked sequence needs and draws its tail into `scratch`.
    fn draw_return(&mut self, sequence: &mut Sequence, tail: usize) -> Result<()> {
        if self.tables.num_free_rows() == 0 {
            return Err(Error::OutOfBlocks { needed: 1, available: 0, capacity: 0 });
        }
        let promised = sequence.reservation.num_blocks();
        let need = self.blocks_to_return(sequence);
        sequence.reservation.grow(need.saturating_sub(promised))?;
        self.keep_within_limit(&sequence.request.tenant)?;
        self.scratch.clear();
        self.scratch.resize(tail, BlockHandle::from_bits(0));
        let drawn = super::core::draw(self.index.as_deref(), &mut sequence.reservation, &mut self.scratch);
        if drawn.is_err() {
            sequence.reservation.shrink(sequence.reservation.num_blocks())?;
        }
        drawn
    }

    /// Opens the step that has just opened in the host tier's pool too, and lets go of what it copies from.
    pub(super) fn release_swapped(&mut self) -> Result<Option<StepEpoch>> {
        let Some(host) = &mut self.host else { return Ok(None) };
        let epoch = host.open_step()?;
        self.let_leaving_go()?;
        Ok(Some(epoch))
    }

    fn let_leaving_go(&mut self) -> Result<()> {
        self.swaps.leaving_pins.clear();
        self.pool.release(&self.swaps.leaving)?;
        self.swaps.leaving.clear();
        for (account, block) in self.swaps.leaving_uses.drain(..) {
            if let Some(index) = &self.index {
                index.leave_all_attached(&[block], account)?;
            }
        }
        Ok(())
    }

    /// The step that was to move blocks does not open: whoever it was to move is computed again.
    pub(super) fn cancel_moves(&mut self) -> Result<()> {
        self.swaps.outgoing.clear();
        self.swaps.incoming.clear();
        self.moved.append(&mut self.swaps.moved);
        self.preempt_moved()?;
        self.let_leaving_go()
    }
}
