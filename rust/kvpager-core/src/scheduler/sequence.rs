//! One running sequence: its tokens, its blocks and what is promised to it.

use super::request::{FinishReason, FinishedRequest};
use super::tenant::Tenant;
use crate::block_pool::Reservation;
use crate::ids::{BlockHandle, SequenceId};
use crate::prefix_index::Pin;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) tenant: Arc<Tenant>,
    /// Prompt, then what was sampled.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_tokens: u32,
    pub(super) max_tokens: u32,
    pub(super) min_tokens: u32,
    pub(super) stop_token_ids: Vec<u32>,
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
    pub(super) cached_tokens: u32,
    pub(super) steps: u64,
    pub(super) queue_steps: u64,
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
        self.tokens.len() as u32 - self.prompt_tokens
    }

    /// Adds a sampled token; the reason if it ends the sequence.
    pub(super) fn push_token(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.num_outputs() >= self.min_tokens && self.stop_token_ids.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (self.num_outputs() >= self.max_tokens).then_some(FinishReason::Length)
    }

    pub(super) fn account(&self, reason: FinishReason, detail: Option<Arc<str>>) -> FinishedRequest {
        FinishedRequest {
            id: self.id,
            tenant: Arc::clone(&self.tenant),
            reason,
            detail,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: self.num_outputs(),
            steps: self.steps,
            queue_steps: self.queue_steps,
            preemptions: 0,
        }
    }
}
