//! The end of a step: `commit` takes the sampled tokens, `abandon` says that it did not happen.

use super::core::Core;
use super::inbox::Inbox;
use super::open_steps::{OpenStep, PlannedRow};
use super::phases::Phase;
use super::request::{FinishReason, FinishedRequest};
use super::sequence::Sequence;
use crate::block_pool::BlockPool;
use crate::ids::{BlockHandle, StepId};
use crate::{Error, Result};
use std::sync::Arc;

/// What the end of a step did.
#[derive(Debug, Default)]
pub struct CommitOutcome {
    /// Requests that ended.
    pub finished: Vec<FinishedRequest>,
    /// Tokens that came for sequences which had ended since the step was planned.
    pub dropped_tokens: u64,
}

impl Core {
    /// Takes the tokens of the open step. Everything is checked before anything changes.
    pub(super) fn commit(
        &mut self,
        inbox: &Inbox,
        step_id: StepId,
        token_start: &[i32],
        tokens: &[i32],
    ) -> Result<CommitOutcome> {
        self.phases.start();
        self.check_commit(self.oldest_step(step_id)?, token_start, tokens)?;
        self.drain_inbox(inbox)?;
        let Some(open) = self.close_step(0)? else { return Ok(CommitOutcome::default()) };
        if !open.copies.is_empty() {
            self.end_copies(&open.copies)?;
        }
        let mut outcome = CommitOutcome::default();
        let mut any_ended = false;
        let mut computed_tokens = open.num_decodes as u64;
        self.edges.clear();
        let (decodes, others) = open.rows.split_at(open.num_decodes);
        let (sampled, mut rest) = tokens.split_at(decodes.len());
        for (planned, &token) in decodes.iter().zip(sampled) {
            any_ended |= self.commit_decode(planned, token as u32, &mut outcome)?;
        }
        self.index_edges()?;
        for (planned, ends) in others.iter().zip(token_start[decodes.len()..].windows(2)) {
            let (sampled, behind) = rest.split_at((ends[1] - ends[0]) as usize);
            rest = behind;
            computed_tokens += u64::from(planned.num_tokens);
            any_ended |= self.commit_other(planned, sampled, inbox, &mut outcome)?;
        }
        self.computed_tokens += computed_tokens;
        self.spare_rows = open.rows;
        self.dropped_tokens += outcome.dropped_tokens;
        outcome.finished.append(&mut self.ended);
        if any_ended {
            self.remove_ended(inbox, &mut outcome.finished, None)?;
        }
        self.phases.lap(Phase::Commit);
        self.phases.end_step();
        Ok(outcome)
    }

    /// Takes the token of a decode: nearly all rows are one. True if its sequence has ended.
    #[inline]
    fn commit_decode(
        &mut self,
        planned: &PlannedRow,
        token: u32,
        outcome: &mut CommitOutcome,
    ) -> Result<bool> {
        let Some(position) = self.locate(planned) else {
            outcome.dropped_tokens += 1;
            return Ok(false);
        };
        let sequence = &mut self.running[position];
        if sequence.ending.is_some() {
            sequence.leave_step(planned);
            outcome.dropped_tokens += 1;
            return Ok(true);
        }
        sequence.take_decode(token);
        let is_ended = sequence.ending.is_some();
        if sequence.layers.is_some() {
            if sequence.has_block_to_index(self.config.block_size) {
                self.index_full_blocks(position, 1)?;
            }
            self.slide(position, false)?;
        } else if sequence.num_computed.is_multiple_of(self.config.block_size) && sequence.pin.is_some() {
            self.edges.push(position as u32);
        }
        Ok(is_ended)
    }

    /// Takes what a row brings that is no decode. True if a sequence has ended, or may have.
    fn commit_other(
        &mut self,
        planned: &PlannedRow,
        sampled: &[i32],
        inbox: &Inbox,
        outcome: &mut CommitOutcome,
    ) -> Result<bool> {
        let Some(position) = self.locate(planned) else {
            outcome.dropped_tokens += sampled.len() as u64;
            return Ok(false);
        };
        let sequence = &mut self.running[position];
        sequence.leave_step(planned);
        if sequence.ending.is_some() {
            outcome.dropped_tokens += sampled.len() as u64;
            return Ok(true);
        }
        let (num_dropped, is_split) = self.take_samples(position, planned, sampled, inbox)?;
        outcome.dropped_tokens += num_dropped;
        let sequence = &self.running[position];
        let (is_ended, is_grouped) = (sequence.ending.is_some(), sequence.layers.is_some());
        if sequence.has_block_to_index(self.config.block_size) {
            self.index_full_blocks(position, planned.num_tokens)?;
        }
        if is_grouped {
            self.slide(position, planned.num_tokens > 1)?;
        }
        Ok(is_ended || is_split)
    }

    /// Takes what a row brings that is no plain decode. Returns how many tokens were of no use, and whether the request
    /// became several samples.
    fn take_samples(
        &mut self,
        position: usize,
        planned: &PlannedRow,
        sampled: &[i32],
        inbox: &Inbox,
    ) -> Result<(u64, bool)> {
        if planned.num_drafts > 0 {
            return Ok((self.accept_drafts(position, planned, sampled), false));
        }
        self.running[position].num_computed += planned.num_tokens;
        let is_split = planned.num_samples > 1;
        if is_split {
            self.index_full_blocks(position, u32::MAX)?;
            self.slide(position, true)?;
            self.split_samples(position, sampled, inbox)?;
        }
        if let Some(&token) = sampled.first() {
            let sequence = &mut self.running[position];
            sequence.ending = sequence.push_token(token as u32);
        }
        Ok((0, is_split))
    }

    /// Ends the open step as if it had not run: nothing that it wrote becomes matchable, its sequences are at
    /// their last committed length. With `fail` they end. The caller says by this call that the device no
    /// longer runs the step.
    pub(super) fn abandon(
        &mut self,
        inbox: &Inbox,
        step_id: StepId,
        reason: &str,
        fail: bool,
    ) -> Result<CommitOutcome> {
        let place = self.find_open(step_id)?;
        self.drain_inbox(inbox)?;
        while self.open.len() > place {
            let Some(mut open) = self.close_step(self.open.len() - 1)? else { break };
            self.undo(&mut open)?;
            for row in open.rows.iter().filter(|_| fail) {
                if let Some(position) = self.locate(row) {
                    self.running[position].ending.get_or_insert(FinishReason::Error);
                }
            }
            self.moved.extend_from_slice(&open.moved);
        }
        self.preempt_moved()?;
        let mut outcome = CommitOutcome::default();
        outcome.finished.append(&mut self.ended);
        self.remove_ended(inbox, &mut outcome.finished, Some(&Arc::from(reason)))?;
        self.phases.end_step();
        Ok(outcome)
    }

    /// Nobody knows what an abandoned step has moved: whoever it was to move is computed again.
    pub(super) fn preempt_moved(&mut self) -> Result<()> {
        for id in std::mem::take(&mut self.moved) {
            let lists = [&mut self.running, &mut self.parked];
            let found = lists.into_iter().find_map(|list| {
                let position = list.binary_search_by_key(&id, |sequence| sequence.id).ok()?;
                list[position].ending.is_none().then(|| list.remove(position))
            });
            if let Some(sequence) = found {
                self.preempt(sequence)?;
            }
        }
        Ok(())
    }

    fn check_commit(&self, open: &OpenStep, token_start: &[i32], tokens: &[i32]) -> Result<()> {
        if token_start.len() != open.num_rows + 1 {
            return Err(Error::invalid(format!(
                "token_start has {}; step {} has {} and needs {}",
                crate::count_of(token_start.len(), "entry"),
                open.id,
                crate::count_of(open.num_rows, "sequence"),
                open.num_rows + 1
            )));
        }
        if token_start[0] != 0 || token_start[open.num_rows] as usize != tokens.len() {
            return Err(Error::invalid(format!(
                "token_start runs from {} to {}; it must run from 0 to the number of tokens, {}",
                token_start[0],
                token_start[open.num_rows],
                tokens.len()
            )));
        }
        // One for each decode: all of them at once; which one it was is looked for only then.
        let wrong = |ends: &[i32]| ends[1].wrapping_sub(ends[0]) ^ 1;
        let decodes = &token_start[..=open.num_decodes];
        let start = match decodes.windows(2).fold(0, |bits, ends| bits | wrong(ends)) {
            0 => open.num_decodes,
            _ => 0,
        };
        let mut any_drafts = false;
        for (row, planned) in open.rows.iter().enumerate().skip(start) {
            let given = i64::from(token_start[row + 1]) - i64::from(token_start[row]);
            let most = i64::from(planned.num_samples);
            any_drafts |= planned.num_drafts > 0;
            if given != most && !(most - i64::from(planned.num_drafts)..most).contains(&given) {
                return Err(wrong_count(open, row, given));
            }
        }
        let padding = &token_start[open.rows.len()..];
        if let Some(i) = padding.windows(2).position(|ends| ends[0] != ends[1]) {
            let given = i64::from(padding[i + 1]) - i64::from(padding[i]);
            return Err(wrong_count(open, open.rows.len() + i, given));
        }
        // All counts are right, so the ranges lie in the tokens.
        for (row, planned) in open.rows.iter().enumerate().filter(|_| any_drafts) {
            let range = token_start[row] as usize..token_start[row + 1] as usize;
            if planned.num_drafts > 0 {
                self.check_drafts(planned, &tokens[range])?;
            }
        }
        // The sign of all of them at once; which one it was is looked for only then.
        match tokens.iter().fold(0, |signs, &token| signs | token) {
            0.. => Ok(()),
            _ => {
                let i = tokens.iter().position(|&token| token < 0).unwrap_or_default();
                Err(Error::invalid(format!("tokens[{i}] is {}, must be 0 to {}", tokens[i], i32::MAX)))
            }
        }
    }

    /// Makes the full, written blocks of a sequence matchable. Content that the index already has is kept
    /// once: our copy is given up for the resident block, and the table points there. What could not be indexed
    /// when it filled up is tried again when the next block does, of which the last `num_tokens` tokens are part.
    pub(super) fn index_full_blocks(&mut self, position: usize, num_tokens: u32) -> Result<()> {
        let Some(index) = &self.index else { return Ok(()) };
        let sequence = &mut self.running[position];
        let is_late = sequence.num_computed % self.config.block_size >= num_tokens;
        if is_late || has_shared(&self.pool, sequence)? {
            return Ok(());
        }
        if !self.config.keeps_first() {
            return self.index_homes(position);
        }
        let Some(pin) = &mut sequence.pin else { return Ok(()) };
        let block_size = self.config.block_size as usize;
        let from = sequence.num_indexed as usize;
        let to = (sequence.num_computed as usize / block_size).min(sequence.blocks.len());
        if to <= from {
            return Ok(());
        }
        self.scratch.clear();
        self.scratch.extend_from_slice(&sequence.blocks[from..to]);
        let tokens = &sequence.tokens[from * block_size..to * block_size];
        let tokens = sequence.request.keys(index, from * block_size, tokens)?;
        let extended = index.extend_chain(pin, &tokens, &mut sequence.blocks[from..to])?;
        sequence.num_indexed += extended.num_indexed as u32;
        if extended.num_duplicates > 0 {
            let changed = |(i, old): (usize, &BlockHandle)| {
                (sequence.blocks[from + i] != *old).then_some((from + i, sequence.blocks[from + i]))
            };
            for (column, block) in self.scratch.iter().enumerate().filter_map(changed) {
                self.tables.replace(sequence.row, column as u32, block.id());
            }
        }
        self.attach_blocks(position, from, from + extended.num_indexed)
    }
}

/// The error for a row of a step that was given another number of tokens than it samples.
#[cold]
fn wrong_count(open: &OpenStep, row: usize, given: i64) -> Error {
    let planned = open.rows.get(row);
    let most = planned.map_or(0, |planned| planned.num_samples);
    let least = planned.map_or(0, |planned| planned.num_samples - planned.num_drafts);
    let whose = planned.map_or("padding".to_owned(), |planned| format!("sequence {}", planned.id));
    let wanted = match (least, most) {
        (1, 1) => "1 is".to_owned(),
        _ if least == most => format!("{most} are"),
        _ => format!("{least} to {most} are"),
    };
    let given = crate::count(given, "token");
    Error::invalid(format!("{given} for row {row} ({whose}) of step {}: {wanted} needed", open.id))
}

/// Whether other sequences refer to a full block of this one that is not indexed: the index takes only blocks that
/// are exclusively held.
pub(super) fn has_shared(pool: &BlockPool, sequence: &Sequence) -> Result<bool> {
    let columns = sequence.num_indexed as usize..(sequence.num_shared as usize).min(sequence.blocks.len());
    if columns.is_empty() {
        return Ok(false);
    }
    for block in sequence.own_blocks_in(columns) {
        if pool.num_references(block)? > 1 {
            return Ok(true);
        }
    }
    Ok(false)
}
