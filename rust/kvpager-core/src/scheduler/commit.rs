//! The end of a step: `commit` takes the sampled tokens, `abandon` says that it did not happen.

use super::core::{Core, OpenStep};
use super::inbox::Inbox;
use super::phases::Phase;
use super::request::{FinishReason, FinishedRequest};
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
        self.check_commit(self.open_step(step_id)?, token_start, tokens)?;
        self.drain_inbox(inbox)?;
        let planned = self.close_step()?;
        let mut outcome = CommitOutcome::default();
        let block_size = self.config.block_size;
        let mut any_ended = false;
        for (row, &position) in planned.iter().enumerate() {
            let position = position as usize;
            let sampled = &tokens[token_start[row] as usize..token_start[row + 1] as usize];
            let sequence = &mut self.running[position];
            self.computed_tokens += u64::from(sequence.num_planned);
            sequence.num_computed += std::mem::take(&mut sequence.num_planned);
            sequence.progress.steps += 1;
            if sequence.ending.is_some() {
                outcome.dropped_tokens += sampled.len() as u64;
                any_ended = true;
                continue;
            }
            if let Some(&token) = sampled.first() {
                sequence.ending = sequence.push_token(token as u32);
                any_ended |= sequence.ending.is_some();
            }
            if sequence.num_computed / block_size > sequence.num_indexed {
                self.index_full_blocks(position)?;
            }
        }
        self.spare_planned = planned;
        self.dropped_tokens += outcome.dropped_tokens;
        outcome.finished.append(&mut self.ended);
        if any_ended {
            self.remove_ended(inbox, &mut outcome.finished, None)?;
        }
        self.phases.lap(Phase::Commit);
        self.phases.end_step();
        Ok(outcome)
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
        self.open_step(step_id)?;
        self.drain_inbox(inbox)?;
        let planned = self.close_step()?;
        for &position in &planned {
            let sequence = &mut self.running[position as usize];
            sequence.num_planned = 0;
            if fail && sequence.ending.is_none() {
                sequence.ending = Some(FinishReason::Error);
            }
        }
        self.spare_planned = planned;
        self.preempt_moved()?;
        let mut outcome = CommitOutcome::default();
        outcome.finished.append(&mut self.ended);
        self.remove_ended(inbox, &mut outcome.finished, Some(&Arc::from(reason)))?;
        self.phases.end_step();
        Ok(outcome)
    }

    fn close_step(&mut self) -> Result<Vec<u32>> {
        let Some(open) = self.open.take() else { return Ok(Vec::new()) };
        self.pool.close_step(open.epoch)?;
        if let Some(host) = &mut self.host {
            host.close_step()?;
        }
        self.moved = open.moved;
        if std::mem::take(&mut self.is_chunk_awaited) {
            self.queue.note_change();
        }
        Ok(open.planned)
    }

    /// Nobody knows what an abandoned step has moved: whoever it was to move is computed again.
    fn preempt_moved(&mut self) -> Result<()> {
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
                "token_start has {} entries; step {} has {} sequences and needs {}",
                token_start.len(),
                open.id,
                open.num_rows,
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
        for row in 0..open.num_rows {
            let given = i64::from(token_start[row + 1]) - i64::from(token_start[row]);
            let sequence = open.planned.get(row).map(|&position| &self.running[position as usize]);
            let wanted = i64::from(sequence.is_some_and(super::sequence::Sequence::samples));
            if given != wanted {
                return Err(Error::invalid(format!(
                    "{given} tokens for sequence {row} of step {}, which samples {wanted}",
                    open.id
                )));
            }
        }
        match tokens.iter().position(|&token| token < 0) {
            Some(i) => Err(Error::invalid(format!("tokens[{i}] is {}, must be at least 0", tokens[i]))),
            None => Ok(()),
        }
    }

    /// Makes the full, written blocks of a sequence matchable. Content that the index already has is kept
    /// once: our copy is given up for the resident block, and the table points there.
    fn index_full_blocks(&mut self, position: usize) -> Result<()> {
        let Some(index) = &self.index else { return Ok(()) };
        let sequence = &mut self.running[position];
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
        let extended = index.extend_chain(pin, tokens, &mut sequence.blocks[from..to])?;
        sequence.num_indexed += extended.num_indexed as u32;
        if extended.num_duplicates > 0 {
            let changed = |(i, old): (usize, &BlockHandle)| {
                (sequence.blocks[from + i] != *old).then_some((from + i, sequence.blocks[from + i]))
            };
            for (column, block) in self.scratch.iter().enumerate().filter_map(changed) {
                self.tables.replace(sequence.row, column as u32, block.id());
            }
        }
        Ok(())
    }
}
