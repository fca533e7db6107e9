//! Windows that slide: what a group lets go, and how much a sequence needs from then on.

use super::core::Core;
use super::group_blocks::{GroupBlock, Whose, rest_tables};
use super::samples;
use super::sequence::Sequence;
use super::waiting_sets::{Known, blocks_of_set};
use crate::Result;
use crate::geometry::Span;

impl Core {
    /// Lets go of the blocks before the first position that the next query sees. What is committed does not come back,
    /// and later queries see no more, so no open step reads them: their table entries become -1. What other branches
    /// still refer to stays theirs. With `settles`, what is promised is looked at even if nothing was let go.
    pub(super) fn slide(&mut self, position: usize, settles: bool) -> Result<()> {
        let block_size = self.config.block_size;
        let sequence = &mut self.running[position];
        let Some(layers) = &mut sequence.layers else { return Ok(()) };
        let next = sequence.num_computed;
        let end = sequence.blocks.len() as u32;
        let first_of = |span: Span| (span.first_visible(next) / block_size).min(end);
        let (mut has_slid, mut has_left) = (false, false);
        let tables = rest_tables(&mut self.tables, &mut self.group_tables, layers.keeps_first);
        let groups = layers.rest.iter_mut().zip(tables).zip(self.config.rest_groups());
        for ((group, tables), &span) in groups {
            let first = first_of(span);
            while group.first < first
                && let Some(&GroupBlock { block, whose }) = group.blocks.front()
            {
                match &self.index {
                    Some(index) if whose != Whose::Own => {
                        if !index.leave_attached(block, &mut sequence.reservation)? {
                            break;
                        }
                        has_left = true;
                    }
                    _ if group.first < sequence.num_shared && self.pool.num_references(block)? > 1 => {
                        self.pool.release(&[block])?;
                    }
                    _ => layers.spare.push(block),
                }
                has_slid = true;
                tables.forget(sequence.row, group.first);
                group.pop_front();
            }
        }
        // To add up a set takes time; it changes only when something was let go.
        if has_slid || settles || !sequence.is_branch {
            self.settle_promise(position)?;
        }
        if has_left {
            // What was left behind is cached, and its room is promised still: more than before, in all.
            self.keep_within_limit(&self.running[position].request.tenant)?;
        }
        Ok(())
    }

    /// Blocks, held and promised, that a sequence with further groups has at once at most from now on, as far as its
    /// policy promises: with those that it will split into. A branch pays for each block of a further group, whoever
    /// else has it, so what it has as a guest counts as well: it may take over another branch's own.
    pub(super) fn blocks_to_keep(&self, sequence: &Sequence) -> u32 {
        let Some(layers) = &sequence.layers else { return sequence.num_held() as u32 };
        let held = layers.num_held(sequence.blocks.len()) as u32;
        if !sequence.branches().is_empty() {
            let of = |known: Known<'_>| self.config.policy.blocks_to_reserve(&self.config, known.asked(0));
            return blocks_of_set(&self.config, sequence.known(), of).max(held);
        }
        let num_columns = sequence.blocks.len();
        if sequence.request.n > 1 {
            let prompt = sequence.progress.prompt_tokens;
            return self.branch_blocks(sequence, num_columns)
                + samples::extra_blocks(&self.config, &sequence.request, prompt);
        }
        if sequence.is_branch && self.sets.is_branch(sequence.id) {
            return self.branch_blocks(sequence, num_columns);
        }
        match self.promised_peak(sequence) {
            Some(peak) if self.config.policy.overcommits() => peak.max(held),
            Some(peak) => peak,
            None => held,
        }
    }

    /// The same of a branch that has the first `num_columns` columns of a sequence.
    pub(super) fn branch_blocks(&self, sequence: &Sequence, num_columns: usize) -> u32 {
        let known = self.config.blocks_for(sequence.tokens.len() as u32) as usize;
        match self.promised_peak(sequence) {
            Some(peak) if !self.config.policy.overcommits() => peak,
            Some(peak) => peak.max(sequence.num_blocks_in(0..num_columns) as u32),
            None => sequence.num_blocks_in(0..num_columns.max(known)) as u32,
        }
    }

    /// Most blocks that the policy promises to a sequence from now on; `None` if it promises no more than there is.
    fn promised_peak(&self, sequence: &Sequence) -> Option<u32> {
        let config = &self.config;
        let (known, prompt) = (sequence.tokens.len() as u32, sequence.progress.prompt_tokens);
        let is_prefill = sequence.is_prefill();
        if !config.policy.overcommits() {
            let total = prompt + sequence.request.max_tokens - 1;
            let of = |&span| config.group_peak(span, prompt, total, is_prefill);
            return Some(config.layer_groups.iter().map(of).sum());
        }
        is_prefill.then(|| config.known_blocks(known, prompt, sequence.request.max_tokens))
    }

    /// Where a plan for a sequence must end so that no group has more than `submit` found room for.
    pub(super) fn promised_end(&self, sequence: &Sequence) -> u32 {
        let Some(layers) = &sequence.layers else { return u32::MAX };
        let config = &self.config;
        let prompt = sequence.progress.prompt_tokens;
        let total = prompt + sequence.request.max_tokens - 1;
        let is_prefill = sequence.is_prefill();
        let ends = layers.firsts().zip(&config.layer_groups).map(|(first, &span)| {
            let most = first.saturating_add(config.group_peak(span, prompt, total, is_prefill));
            most.saturating_mul(config.block_size)
        });
        ends.min().unwrap_or(u32::MAX)
    }
}
