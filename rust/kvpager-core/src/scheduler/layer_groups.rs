//! Layer groups: which blocks of a sequence each of them needs, and how many over its life.
//!
//! Layers that keep the same tokens are one group with a block table row of its own. All groups draw blocks of equal
//! bytes from one pool, so what a sequence is promised over its groups is one number. A group that does not see all
//! tokens lets go of the blocks before the first position that its next query sees.

use super::config::SchedulerConfig;
use crate::geometry::Span;

/// Most layer groups: more than any model has, and few enough that a step's work per sequence is bounded.
pub(super) const MAX_GROUPS: usize = 64;

/// Most homes that the index keeps for each block. Homes are small beside blocks; this bounds them for windows that are
/// tiny beside the model's length.
const MAX_HOMES_PER_BLOCK: u32 = 16;

/// What is wrong with a model's groups, in words.
pub(super) fn problem(groups: &[Span]) -> Option<String> {
    if groups.is_empty() || groups.len() > MAX_GROUPS {
        return Some(format!(
            "layer_groups has {}, must have 1 to {MAX_GROUPS}",
            crate::count_of(groups.len(), "group")
        ));
    }
    let is_wrong = |span: &Span| span.window().is_some_and(|window| !(1..=i32::MAX as u64).contains(&window));
    groups.iter().position(is_wrong).map(|i| {
        format!(
            "layer_groups[{i}] sees {}, must see 1 to {}",
            crate::count(groups[i].window().unwrap_or(0), "token"),
            i32::MAX
        )
    })
}

impl SchedulerConfig {
    /// Whether anything but one group that sees all tokens is to be kept.
    pub(super) fn is_grouped(&self) -> bool {
        *self.layer_groups != [Span::Full]
    }

    /// Whether the first group keeps all its blocks: those are in [`Sequence::blocks`](super::sequence::Sequence), and the
    /// index finds prefixes by them. Else it finds them by homes, and the first group is one like the others.
    pub(super) fn keeps_first(&self) -> bool {
        self.layer_groups[0] == Span::Full
    }

    /// The groups whose blocks are in [`LayerBlocks::rest`](super::group_blocks::LayerBlocks).
    pub(super) fn rest_groups(&self) -> &[Span] {
        &self.layer_groups[usize::from(self.keeps_first())..]
    }

    /// Homes that the index keeps for each block, if it needs any: so many that the blocks of the longest sequence's
    /// windows have the whole path to them.
    pub(super) fn homes_per_block(&self) -> Option<u32> {
        let columns = self.blocks_for(self.max_model_tokens);
        let blocks: u32 =
            self.layer_groups.iter().map(|&span| self.peak_blocks(span, self.max_model_tokens, 1)).sum();
        (!self.keeps_first()).then(|| columns.div_ceil(blocks.max(1)).clamp(1, MAX_HOMES_PER_BLOCK))
    }

    /// Most tokens between the first that is not committed and the last that is planned, while a prompt is computed.
    fn prefill_ahead(&self) -> u32 {
        let chunk = if self.max_prefill_chunk == 0 { u32::MAX } else { self.max_prefill_chunk };
        chunk.min(self.max_batch_tokens).saturating_mul(self.max_open_steps)
    }

    /// Most blocks that a group has at once while `num_tokens` positions are computed, `ahead` of them at most beyond
    /// the first that is not committed.
    fn peak_blocks(&self, span: Span, num_tokens: u32, ahead: u32) -> u32 {
        span.peak_blocks(u64::from(num_tokens), u64::from(ahead), u64::from(self.block_size)) as u32
    }

    /// Most blocks that a group of a sequence has at once from now on, while its prompt is computed or after it.
    pub(super) fn group_peak(&self, span: Span, prompt_tokens: u32, total: u32, is_prefill: bool) -> u32 {
        let after = self.peak_blocks(span, total, self.max_open_steps);
        if !is_prefill {
            return after;
        }
        // Tokens after the prompt may be planned before it is committed.
        let prefilled = total.min(prompt_tokens.saturating_add(self.max_open_steps - 1));
        after.max(self.peak_blocks(span, prefilled, self.prefill_ahead()))
    }

    /// Blocks of a request over its life, in all groups: most that it has at once. The last sampled token is
    /// returned, never computed, and needs no slot. This is the one place that says so; admission and growth both
    /// use it.
    #[must_use]
    pub fn lifetime_blocks(&self, prompt_tokens: u32, max_tokens: u32) -> u32 {
        let total = prompt_tokens + max_tokens - 1;
        self.layer_groups.iter().map(|&span| self.group_peak(span, prompt_tokens, total, true)).sum()
    }

    /// Blocks that a request has at once at most, in all groups, until its `known_tokens` are computed. Those are more
    /// than its prompt if it ran before; it still has no more than over its life then: see `promised_end`.
    #[must_use]
    pub fn known_blocks(&self, known_tokens: u32, prompt_tokens: u32, max_tokens: u32) -> u32 {
        let total = prompt_tokens + max_tokens - 1;
        let of = |&span: &Span| {
            let known = self.peak_blocks(span, known_tokens, self.prefill_ahead());
            if span == Span::Full {
                known
            } else {
                known.min(self.group_peak(span, prompt_tokens, total, true))
            }
        };
        self.layer_groups.iter().map(of).sum()
    }

    /// Blocks that a sequence has of further groups at most when its prompt is computed.
    pub(super) fn rest_after(&self, prompt_tokens: u32) -> u32 {
        self.rest_groups().iter().map(|&span| self.peak_blocks(span, prompt_tokens, 1)).sum()
    }

    /// Blocks of all groups when `num_tokens` tokens are computed one by one.
    pub(super) fn grown_blocks(&self, num_tokens: u32) -> u32 {
        let of = |&span: &Span| self.peak_blocks(span, num_tokens, self.max_open_steps);
        self.layer_groups.iter().map(of).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(groups: &[Span], block_size: u32) -> SchedulerConfig {
        let layer_groups = groups.into();
        SchedulerConfig {
            block_size,
            layer_groups,
            max_batch_tokens: 7,
            max_running: 1,
            ..SchedulerConfig::default()
        }
    }

    #[test]
    fn a_query_sees_its_window_and_itself() {
        let seen = |span: Span, position| span.first_visible(position);
        assert_eq!([0, 2, 3, 9].map(|p| seen(Span::Sliding(3), p)), [0, 0, 1, 7]);
        assert_eq!([0, 2, 3, 9].map(|p| seen(Span::Chunked(3), p)), [0, 0, 3, 9]);
        assert_eq!([0, 2, 3, 9].map(|p| seen(Span::Sliding(1), p)), [0, 2, 3, 9]);
        assert_eq!(seen(Span::Full, 9), 0);
    }

    /// The bound is what a sequence touches at most, over every place of its chunks: not less, and not more.
    #[test]
    fn the_promise_of_a_window_is_exact() {
        for block_size in 1..6 {
            for span in [Span::Sliding(1), Span::Sliding(5), Span::Chunked(4), Span::Chunked(5)] {
                let config = config(&[span], block_size);
                let total = 60;
                let mut most = 0;
                for done in 0..total {
                    let end = (done + config.prefill_ahead()).min(total);
                    let first = span.first_visible(done) / block_size;
                    most = most.max(config.blocks_for(end) - first);
                }
                assert_eq!(config.lifetime_blocks(total, 1), most, "{span:?}, blocks of {block_size}");
            }
        }
    }

    #[test]
    fn groups_without_tokens_or_without_end_are_refused() {
        assert!(problem(&[]).is_some_and(|text| text.contains("0 groups")));
        assert!(problem(&[Span::Full, Span::Sliding(0)]).is_some_and(|text| text.contains("[1] sees 0")));
        assert!(problem(&[Span::Chunked(1 << 40)]).is_some());
        assert!(problem(&[Span::Sliding(4096), Span::Full]).is_none());
    }
}
