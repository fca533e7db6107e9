//! One running sequence: its tokens, its blocks and what is promised to it.

use super::request::{FinishReason, FinishedRequest, Progress, Request, WaitingRequest, account};
use crate::block_pool::Reservation;
use crate::ids::{BlockHandle, SequenceId};
use crate::prefix_index::Pin;
use std::sync::Arc;

pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// As submitted, but for its `prompt`, which has moved to `tokens`.
    pub(super) request: Request,
    /// Prompt, then what was sampled.
    pub(super) tokens: Vec<u32>,
    /// Leading tokens whose KV is written and committed.
    pub(super) num_computed: u32,
    /// Tokens after those that the open step computes.
    pub(super) num_planned: u32,
    /// Logical to physical. `blocks[..num_indexed]` belong to the index and are held by `pin`; the rest is ours.
    pub(super) blocks: Vec<BlockHandle>,
    pub(super) num_indexed: u32,
    /// Deepest indexed node of our tokens; `None` if the request takes no part in reuse.
    pub(super) pin: Option<Pin>,
    pub(super) reservation: Reservation,
    pub(super) row: u32,
    /// Set when the sequence has ended and waits for its removal, which no open step may see.
    pub(super) ending: Option<FinishReason>,
    /// Whether a token was sampled since its admission; only then may it be a victim.
    pub(super) has_sampled: bool,
    pub(super) progress: Progress,
}

impl Sequence {
    /// Tokens that are known and not computed.
    pub(super) fn remaining(&self) -> u32 {
        self.tokens.len() as u32 - self.num_computed
    }

    /// Whether the open step computes its last known token, so that the next one is sampled.
    pub(super) fn samples(&self) -> bool {
        self.num_planned > 0 && self.num_planned == self.remaining()
    }

    pub(super) fn num_outputs(&self) -> u32 {
        self.tokens.len() as u32 - self.progress.prompt_tokens
    }

    /// Adds a sampled token; the reason if it ends the sequence.
    pub(super) fn push_token(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        self.has_sampled = true;
        if self.request.stop_token_ids.contains(&token) && self.num_outputs() >= self.request.min_tokens {
            return Some(FinishReason::Stop);
        }
        (self.num_outputs() >= self.request.max_tokens).then_some(FinishReason::Length)
    }

    pub(super) fn account(&self, reason: FinishReason, detail: Option<Arc<str>>) -> FinishedRequest {
        let numbers = (self.num_outputs(), self.progress.queue_steps.unwrap_or(0));
        account(self.id, &self.request.tenant, self.progress, numbers, reason, detail)
    }

    /// The request that goes back to the queue with all its tokens; the blocks are released by then.
    pub(super) fn into_waiting(self) -> WaitingRequest {
        let mut progress = self.progress;
        progress.preemptions += 1;
        progress.lost_tokens = self.num_computed;
        let mut request = self.request;
        request.prompt = self.tokens;
        WaitingRequest { id: self.id, request, progress, bypassed: 0, blocked_since: None }
    }
}
