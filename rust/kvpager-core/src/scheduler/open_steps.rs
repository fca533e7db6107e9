//! Steps between their planning and their end, in order.
//!
//! A step may be planned while earlier ones run. A sequence that is *in flight* is in an open step; what it sampled
//! there is not known, so its next token is named by where it comes from. Blocks released meanwhile wait in the
//! pool's quarantine for the newest open step, and table rows wait here.

use super::core::Core;
use super::fork::Copy;
use crate::block_pool::StepEpoch;
use crate::block_tables::BlockTables;
use crate::ids::{SequenceId, StepId};
use crate::{Error, Result};

/// What a step computes of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedRow {
    pub(super) id: SequenceId,
    /// Where it stood in `running` then; most often it still does.
    pub(super) position: u32,
    pub(super) num_tokens: u32,
    /// Tokens that `commit` brings for it.
    pub(super) num_samples: u32,
    /// How many of them it may leave out, because the drafts were wrong.
    pub(super) num_drafts: u32,
}

/// A step between its planning and its end.
#[derive(Debug)]
pub(super) struct OpenStep {
    pub(super) id: StepId,
    pub(super) epoch: StepEpoch,
    /// The same step in the pool of the host tier.
    pub(super) host_epoch: Option<StepEpoch>,
    /// In the order of the batch, padding left out.
    pub(super) rows: Vec<PlannedRow>,
    /// How many of them, from the first on, are one token, and one that is sampled after it.
    pub(super) num_decodes: usize,
    /// Rows of the batch, padding included.
    pub(super) num_rows: usize,
    /// Sequences whose blocks it moves between the tiers.
    pub(super) moved: Vec<SequenceId>,
    /// Blocks that it copies.
    pub(super) copies: Vec<Copy>,
}

impl Core {
    /// Whether one more step may be open.
    pub(super) fn check_may_open(&self) -> Result<()> {
        let most = self.config.max_open_steps;
        match self.open.front() {
            Some(oldest) if self.open.len() >= most as usize => Err(Error::WrongState(format!(
                "step {} is open: commit or abandon it before the next one (max_open_steps is {most})",
                oldest.id
            ))),
            _ => Ok(()),
        }
    }

    /// The oldest open step, which must be `step_id`.
    pub(super) fn oldest_step(&self, step_id: StepId) -> Result<&OpenStep> {
        match self.open.front() {
            Some(open) if open.id == step_id => Ok(open),
            Some(open) if self.open.iter().any(|other| other.id == step_id) => Err(Error::WrongState(
                format!("step {step_id} is open after step {}: steps are committed in order", open.id),
            )),
            Some(open) => Err(Error::WrongState(format!(
                "step {step_id} is not open; the oldest open step is {}",
                open.id
            ))),
            None => Err(Error::WrongState(format!(
                "step {step_id} is not open; the last step, {}, has been closed",
                self.last_step
            ))),
        }
    }

    /// Where an open step stands among the open ones.
    pub(super) fn find_open(&self, step_id: StepId) -> Result<usize> {
        match self.open.iter().position(|open| open.id == step_id) {
            Some(place) => Ok(place),
            None => Err(self
                .oldest_step(step_id)
                .err()
                .unwrap_or_else(|| Error::WrongState(format!("step {step_id} is not open")))),
        }
    }

    /// Takes out and closes an open step.
    pub(super) fn close_step(&mut self, place: usize) -> Result<Option<OpenStep>> {
        let Some(open) = self.open.remove(place) else { return Ok(None) };
        self.pool.close_step(open.epoch)?;
        if let (Some(host), Some(epoch)) = (&self.host, open.host_epoch) {
            host.close_step(epoch)?;
        }
        for (number, compartment) in self.compartments.iter_mut().enumerate() {
            let num_coming = compartment.coming.len();
            compartment.coming.retain(|coming| coming.step != open.id);
            let frees = compartment.coming.len() < num_coming || compartment.frees_at == Some(open.id);
            if std::mem::take(&mut compartment.is_chunk_awaited) || frees {
                self.queue.note_change(number);
            }
        }
        let first_open = self.open.front().map_or(u64::MAX, |open| open.id.0);
        let (tables, group_tables) = (&mut self.tables, &mut self.group_tables);
        let compartments = &mut self.compartments;
        self.retired_rows.retain(|&(step, row, compartment)| {
            let stays = step.0 >= first_open;
            if !stays {
                clear_row(tables, group_tables, row);
                compartments[compartment].num_retired -= 1;
            }
            stays
        });
        Ok(Some(open))
    }

    /// Gives a table row back, once no open step reads it.
    pub(super) fn free_row(&mut self, row: u32, compartment: usize) {
        match self.open.back() {
            Some(newest) => {
                self.retired_rows.push((newest.id, row, compartment));
                self.compartments[compartment].num_retired += 1;
            }
            None => clear_row(&mut self.tables, &mut self.group_tables, row),
        }
    }

    /// Where the sequence of a planned row stands now; `None` if it has ended.
    pub(super) fn locate(&self, row: &PlannedRow) -> Option<usize> {
        let hint = row.position as usize;
        match self.running.get(hint) {
            Some(sequence) if sequence.id == row.id => Some(hint),
            _ => self.position(row.id),
        }
    }

    /// Takes a step that did not happen out of its sequences, and the copies that it was to make.
    pub(super) fn undo(&mut self, open: &mut OpenStep) -> Result<()> {
        for row in &open.rows {
            if let Some(position) = self.locate(row) {
                let sequence = &mut self.running[position];
                sequence.in_flight -= row.num_tokens;
                sequence.num_pending -= u32::from(row.num_samples > 0);
                sequence.sampled_in = 0;
            }
        }
        self.undo_copies(std::mem::take(&mut open.copies))
    }
}

/// Gives a row back in the first layer group's tables, and clears it in the others'.
fn clear_row(tables: &mut BlockTables, others: &mut [BlockTables], row: u32) {
    tables.free_row(row);
    others.iter_mut().for_each(|tables| tables.clear_row(row));
}
