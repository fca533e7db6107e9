//! One running sequence: its tokens, its blocks and what is promised to it.

use super::group_blocks::LayerBlocks;
use super::open_steps::PlannedRow;
use super::request::{FinishReason, FinishedRequest, Progress, Request, WaitingRequest, account};
use super::special::Special;
use crate::Result;
use crate::block_pool::Reservation;
use crate::ids::{BlockHandle, SequenceId};
use crate::prefix_index::ChainPin;
use std::sync::Arc;

/// The tail of a sequence that is on the host: its blocks from `Sequence::blocks.len()` on.
pub(super) struct Parked {
    /// Host blocks, last first: a longer tail is added at the end.
    pub(super) blocks: Vec<BlockHandle>,
    /// When its pause began.
    pub(super) since: f64,
}

impl Parked {
    pub(super) const fn new(now: f64) -> Self {
        Self { blocks: Vec::new(), since: now }
    }
}

/// Sequences in order of id. Boxed: when one ends, those behind it move up.
pub(super) type Sequences = Vec<Box<Sequence>>;

pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// As submitted, but for its `prompt`, which has moved to `tokens`.
    pub(super) request: Request,
    /// Prompt, then what was sampled.
    pub(super) tokens: Vec<u32>,
    /// Leading tokens whose KV is written and committed.
    pub(super) num_computed: u32,
    /// Tokens after those that open steps compute.
    pub(super) in_flight: u32,
    /// Tokens after those that the step computes which is being planned.
    pub(super) num_planned: u32,
    /// Tokens that open steps sample, not known yet.
    pub(super) num_pending: u32,
    /// The step that samples the last of them, and its place among the samples there.
    pub(super) sampled_in: u64,
    pub(super) source: i32,
    /// Logical to physical. `blocks[..num_indexed]` belong to the index and are held by `pin`; the rest is ours.
    pub(super) blocks: Vec<BlockHandle>,
    pub(super) num_indexed: u32,
    /// In models with more than one full layer group: the other groups' blocks, and where each group begins.
    pub(super) layers: Option<Box<LayerBlocks>>,
    /// Deepest indexed node of our tokens; `None` if the request takes no part in reuse.
    pub(super) pin: Option<ChainPin>,
    pub(super) reservation: Reservation,
    /// Row of the table arena; means nothing while it is parked.
    pub(super) row: u32,
    /// Its tail on the host, if it was taken back.
    pub(super) parked: Option<Box<Parked>>,
    /// Tokens of its output that the forecast knows of.
    pub(super) known_age: u32,
    /// When it last came back.
    pub(super) resumed_at: f64,
    /// Set when the sequence has ended and waits for its removal, which no open step may see.
    pub(super) ending: Option<FinishReason>,
    /// Whether a token was sampled since its admission; only then may it be a victim.
    pub(super) has_sampled: bool,
    pub(super) progress: Progress,
    /// Leading blocks that other sequences may have as well, without the index.
    pub(super) num_shared: u32,
    /// Whether it may be a branch of a set.
    pub(super) is_branch: bool,
    /// What few sequences have.
    pub(super) special: Option<Box<Special>>,
}

impl Sequence {
    /// Whether it ended with what was asked for.
    pub(super) const fn is_done(&self) -> bool {
        matches!(self.ending, Some(FinishReason::Stop | FinishReason::Length))
    }

    /// A sequence of which nothing is computed yet.
    pub(super) const fn new(
        id: SequenceId,
        request: Request,
        tokens: Vec<u32>,
        blocks: Vec<BlockHandle>,
        reservation: Reservation,
        row: u32,
    ) -> Self {
        Self {
            id,
            request,
            tokens,
            num_computed: 0,
            in_flight: 0,
            num_planned: 0,
            num_pending: 0,
            sampled_in: 0,
            source: -1,
            blocks,
            num_indexed: 0,
            layers: None,
            pin: None,
            reservation,
            row,
            parked: None,
            known_age: 0,
            resumed_at: 0.0,
            ending: None,
            has_sampled: false,
            progress: Progress::NONE,
            num_shared: 0,
            is_branch: false,
            special: None,
        }
    }

    /// Tokens that are known, or will be when the open steps end, and are in no step. Drafts that are in one may be
    /// more than what will be known.
    pub(super) fn remaining(&self) -> u32 {
        (self.tokens.len() as u32 + self.num_pending).saturating_sub(self.frontier())
    }

    /// Position of the first token that is in no step.
    pub(super) const fn frontier(&self) -> u32 {
        self.num_computed + self.in_flight
    }

    /// Leading tokens whose KV is in its blocks when all planned steps have run.
    pub(super) const fn num_written(&self) -> u32 {
        self.frontier() + self.num_planned
    }

    /// Whether planning has to look closer.
    pub(super) const fn is_special(&self) -> bool {
        self.in_flight > 0 || self.is_branch || self.special.is_some()
    }

    /// Whether the step that is being planned computes its last token, so that the next one is sampled.
    pub(super) fn samples(&self) -> bool {
        self.num_planned > 0 && self.num_planned == self.remaining()
    }

    /// What is planned of it goes into the step that opens now.
    pub(super) fn enter_step(&mut self, position: usize, num_samples: u32, num_drafts: u32) -> PlannedRow {
        let num_tokens = std::mem::take(&mut self.num_planned);
        self.in_flight += num_tokens;
        self.num_pending += u32::from(num_samples > 0);
        PlannedRow { id: self.id, position: position as u32, num_tokens, num_samples, num_drafts }
    }

    /// The token at a position: known, or -1 and where its sample is in the previous step.
    pub(super) fn token_at(&self, position: u32) -> (i32, i32) {
        match self.tokens.get(position as usize) {
            Some(&token) => (token as i32, -1),
            None => (-1, self.source),
        }
    }

    /// Slot of a position that it has a block for. What it writes next is in its last block, nearly always, and is found
    /// there without a division.
    pub(super) fn slot(&self, position: u32, block_size: u32) -> i64 {
        let slot = |block: BlockHandle, offset: u32| {
            i64::from(block.id().0) * i64::from(block_size) + i64::from(offset)
        };
        let offset = (position + block_size).wrapping_sub(self.blocks.len() as u32 * block_size);
        match self.blocks.last() {
            Some(&last) if offset < block_size => slot(last, offset),
            _ => slot(self.blocks[(position / block_size) as usize], position % block_size),
        }
    }

    /// What an open step computes of it, one token and the one after, has been committed.
    #[inline]
    pub(super) fn take_decode(&mut self, token: u32) {
        self.in_flight -= 1;
        self.num_pending -= 1;
        self.progress.steps += 1;
        self.num_computed += 1;
        self.ending = self.push_token(token);
    }

    /// What an open step computes of it has been committed.
    pub(super) fn leave_step(&mut self, planned: &PlannedRow) {
        self.in_flight -= planned.num_tokens;
        self.num_pending -= u32::from(planned.num_samples > 0);
        self.progress.steps += 1;
    }

    /// One more pin of what it has pinned.
    pub(super) fn pin_again(&self) -> Result<Option<ChainPin>> {
        self.pin.as_ref().map(ChainPin::again).transpose()
    }

    /// Whether a full block of it is not in the index, which it takes part in.
    pub(super) fn has_block_to_index(&self, block_size: u32) -> bool {
        self.num_computed >= (self.num_indexed + 1) * block_size && self.pin.is_some()
    }

    pub(super) fn num_outputs(&self) -> u32 {
        self.tokens.len() as u32 - self.progress.prompt_tokens
    }

    /// Adds a sampled token; the reason if it ends the sequence.
    #[inline]
    pub(super) fn push_token(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        self.has_sampled = true;
        let num_outputs = self.num_outputs();
        let stops = !self.request.stop_token_ids.is_empty() && self.stops_at(token, num_outputs);
        if stops {
            return Some(FinishReason::Stop);
        }
        (num_outputs >= self.request.max_tokens).then_some(FinishReason::Length)
    }

    fn stops_at(&self, token: u32, num_outputs: u32) -> bool {
        num_outputs >= self.request.min_tokens && self.request.stop_token_ids.contains(&token)
    }

    pub(super) fn account(&self, reason: FinishReason, detail: Option<Arc<str>>) -> FinishedRequest {
        let numbers = (self.num_outputs(), self.progress.queue_steps.unwrap_or(0));
        account(self.id, &self.request.tenant, self.progress, numbers, reason, detail)
    }

    /// The request that goes back to the queue with all its tokens, and with the branches that it carries; the blocks are
    /// released by then. It counts as one more preemption unless its tail had been taken back before.
    pub(super) fn into_waiting(self, is_new: bool) -> WaitingRequest {
        let mut progress = self.progress;
        progress.preemptions += u64::from(is_new);
        progress.lost_tokens = self.num_computed;
        progress.known_once = progress.known_once.max(self.num_computed);
        let mut request = self.request;
        request.prompt = self.tokens;
        let branches = self.special.map_or(Vec::new(), |special| special.branches);
        WaitingRequest { id: self.id, request, progress, bypassed: 0, blocked_since: None, branches }
    }
}
