//! What a branch set needs, and how it waits: as one entry of the queue, its eldest branch with the others inside.

use super::config::SchedulerConfig;
use super::policy::AdmissionRequest;
use super::request::{Request, WaitingRequest};
use super::samples;
use super::sequence::Sequence;
use crate::ids::SequenceId;

/// A branch as far as its blocks are concerned.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) prompt_tokens: u32,
    pub(super) request: &'a Request,
}

impl<'a> Known<'a> {
    pub(super) fn of_waiting(waiting: &'a WaitingRequest) -> Self {
        let (tokens, request) = (&waiting.request.prompt, &waiting.request);
        Self { tokens, prompt_tokens: waiting.progress.prompt_tokens, request }
    }

    pub(super) fn of_sequence(sequence: &'a Sequence) -> Self {
        let (tokens, request) = (&sequence.tokens, &sequence.request);
        Self { tokens, prompt_tokens: sequence.progress.prompt_tokens, request }
    }

    pub(super) const fn asked(self, pinned_blocks: u32) -> AdmissionRequest {
        AdmissionRequest {
            prompt_tokens: self.prompt_tokens,
            known_tokens: self.tokens.len() as u32,
            max_tokens: self.request.max_tokens,
            pinned_blocks,
        }
    }
}

/// Whole blocks at the head of both that each can share: the last known token of either is always computed.
pub(super) fn common_blocks(a: &[u32], b: &[u32], block_size: u32) -> u32 {
    let most = a.len().min(b.len()).saturating_sub(1);
    let equal = a.iter().zip(b).take(most).take_while(|(a, b)| a == b).count();
    equal as u32 / block_size
}

/// Blocks of branches together, `blocks_of` one by itself: what they have in common counts once in a first group that sees all
/// tokens, and for each of them in further groups. In order of their tokens each has most in common with the one before.
pub(super) fn blocks_of_set(
    config: &SchedulerConfig,
    mut branches: Vec<Known<'_>>,
    blocks_of: impl Fn(Known<'_>) -> u32,
) -> u32 {
    if !config.keeps_first() {
        return branches.into_iter().map(blocks_of).sum();
    }
    branches.sort_unstable_by_key(|branch| branch.tokens);
    let shared = branches
        .windows(2)
        .map(|pair| common_blocks(pair[0].tokens, pair[1].tokens, config.block_size))
        .sum::<u32>();
    branches.into_iter().map(blocks_of).sum::<u32>() - shared
}

impl WaitingRequest {
    /// One entry of the queue of what waits; `None` of nothing.
    pub(super) fn gather(waiting: Vec<Self>) -> Option<Self> {
        let mut all = Vec::with_capacity(waiting.len());
        for mut one in waiting {
            all.append(&mut one.branches);
            all.push(one);
        }
        all.sort_unstable_by_key(|one| one.id);
        let mut all = all.into_iter();
        let mut eldest = all.next()?;
        eldest.branches = all.collect();
        Some(eldest)
    }

    /// Takes one branch out: it, and what is left.
    pub(super) fn take_out(mut self, id: SequenceId) -> (Option<Self>, Option<Self>) {
        let since = (self.bypassed, self.blocked_since);
        let mut all = std::mem::take(&mut self.branches);
        all.push(self);
        let gone = all.iter().position(|one| one.id == id).map(|place| all.swap_remove(place));
        let mut rest = Self::gather(all);
        if let Some(rest) = &mut rest {
            (rest.bypassed, rest.blocked_since) = since;
        }
        (gone, rest)
    }

    /// The eldest, then the others.
    pub(super) fn ids(&self) -> impl Iterator<Item = SequenceId> {
        std::iter::once(self.id).chain(self.branches.iter().map(|branch| branch.id))
    }

    /// Sequences that it becomes.
    pub(super) fn num_sequences(&self) -> u32 {
        self.request.n + self.branches.len() as u32
    }

    pub(super) fn known(&self) -> Vec<Known<'_>> {
        std::iter::once(self).chain(&self.branches).map(Known::of_waiting).collect()
    }

    /// Leading tokens that may come from elsewhere: all that its branches have in common. The last one is always computed.
    pub(super) fn num_common(&self, block_size: u32) -> u32 {
        num_common(&self.request.prompt, &self.branches, block_size)
    }

    /// Blocks that it is promised if its first `num_found` are there, and are spared.
    pub(super) fn blocks_to_promise(&self, config: &SchedulerConfig, num_found: u32) -> u32 {
        let num_found = num_found.min(self.num_common(config.block_size) / config.block_size);
        let of = |known: Known<'_>| config.policy.blocks_to_reserve(config, known.asked(0));
        let samples = samples::extra_blocks(config, &self.request, self.progress.prompt_tokens);
        blocks_of_set(config, self.known(), of) + samples - num_found
    }

    /// Blocks that it has at once at most.
    pub(super) fn lifetime_blocks(&self, config: &SchedulerConfig) -> u32 {
        let samples = samples::extra_life(config, &self.request, self.progress.prompt_tokens);
        blocks_of_set(config, self.known(), |known| life_of(config, known)) + samples
    }
}

/// Blocks of a branch over its life.
pub(super) fn life_of(config: &SchedulerConfig, known: Known<'_>) -> u32 {
    config.lifetime_blocks(known.prompt_tokens, known.request.max_tokens)
}

pub(super) fn num_common(tokens: &[u32], branches: &[WaitingRequest], block_size: u32) -> u32 {
    let common = branches.iter().map(|branch| common_blocks(tokens, &branch.request.prompt, block_size));
    common.min().map_or(tokens.len() as u32 - 1, |blocks| blocks * block_size)
}
