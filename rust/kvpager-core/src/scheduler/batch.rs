//! What a step hands the model: arrays that Rust owns and does not reuse while anybody still holds one.

use super::request::FinishedRequest;
use crate::block_tables::TableChange;
use crate::ids::StepId;
use std::sync::Arc;

/// Sequence id of a padding row.
pub const PADDING_SEQUENCE: u64 = u64::MAX;
/// Slot of a token that is written nowhere.
pub const NO_SLOT: i64 = -1;

/// The arrays of one step. S sequences (padding rows included), T tokens, R logit rows.
#[derive(Debug, Default)]
pub struct BatchArrays {
    /// `[S]`, decodes first, then prefill chunks, then padding.
    pub sequence_ids: Vec<u64>,
    /// `[S+1]` token ranges of the sequences.
    pub query_start: Vec<i32>,
    /// `[T]` token ids, flattened.
    pub token_ids: Vec<i32>,
    /// `[T]` positions in their sequences.
    pub positions: Vec<i32>,
    /// `[T]` where a token id is -1: its index in the previous step's samples; else -1.
    pub token_source: Vec<i32>,
    /// `[R]` rows of the T whose logits are needed, one for each sequence that samples.
    pub sample_rows: Vec<i32>,
    /// `[T]` where each new K and V goes; -1 for padding.
    pub slot_mapping: Vec<i64>,
    /// `[S]` tokens visible to the last query, this step's included; 0 for padding.
    pub context_lens: Vec<i32>,
    /// `[S]` rows in the table arena.
    pub table_rows: Vec<i32>,
    /// `[n]` changed entries of the arena since the last batch: (row, column, block id).
    pub table_changes: Vec<TableChange>,
    /// `[C]` (from, to) block ids, to be copied before the forward pass.
    pub block_copies: Vec<[i32; 2]>,
    /// `[n]` (device, host) block ids.
    pub swap_out: Vec<[i32; 2]>,
    /// `[n]` (host, device) block ids.
    pub swap_in: Vec<[i32; 2]>,
    /// `[Z]` block ids to be zeroed before their first write.
    pub block_zeros: Vec<i32>,
    /// Of the layer groups after the first.
    pub groups: Vec<GroupArrays>,
    /// Requests that ended outside a commit since the last batch.
    pub finished: Vec<FinishedRequest>,
}

/// What differs from row to row of sequences that compute their last token.
pub(super) struct DecodeRow {
    pub(super) id: u64,
    pub(super) table_row: i32,
    /// Its last token; -1, with its `source`, if that is not sampled yet.
    pub(super) token: i32,
    pub(super) source: i32,
    pub(super) position: i32,
    pub(super) slot: i64,
}

/// Where [`DecodeRow`]s are written, column by column, all of one length.
pub(super) struct DecodeColumns<'a> {
    ids: &'a mut [u64],
    table_rows: &'a mut [i32],
    tokens: &'a mut [i32],
    sources: &'a mut [i32],
    positions: &'a mut [i32],
    slots: &'a mut [i64],
}

impl DecodeColumns<'_> {
    #[inline]
    pub(super) fn set(&mut self, place: usize, row: &DecodeRow) {
        self.ids[place] = row.id;
        self.table_rows[place] = row.table_row;
        self.tokens[place] = row.token;
        self.sources[place] = row.source;
        self.positions[place] = row.position;
        self.slots[place] = row.slot;
    }
}

/// What a layer group after the first has of its own; the other arrays hold for all groups.
#[derive(Debug, Default)]
pub struct GroupArrays {
    /// `[T]` as `BatchArrays::slot_mapping`.
    pub slot_mapping: Vec<i64>,
    /// `[n]` as `BatchArrays::table_changes`, of the group's arena.
    pub table_changes: Vec<TableChange>,
}

impl BatchArrays {
    /// Empties what is appended to. The columns of decodes stay as they are: `begin_decodes` gives them their length, so
    /// that nothing is filled in which is written right after.
    fn clear(&mut self) {
        for group in &mut self.groups {
            group.slot_mapping.clear();
            group.table_changes.clear();
        }
        self.query_start.clear();
        self.sample_rows.clear();
        self.context_lens.clear();
        self.table_changes.clear();
        self.block_copies.clear();
        self.swap_out.clear();
        self.swap_in.clear();
        self.block_zeros.clear();
        self.finished.clear();
        self.query_start.push(0);
    }

    /// Places for up to `most` sequences of a new batch that compute their last token, to be filled from the first on;
    /// `end_decodes` says how many were. Only what differs from row to row is written one by one.
    pub(super) fn begin_decodes(&mut self, most: usize) -> DecodeColumns<'_> {
        fn column<T: Clone>(values: &mut Vec<T>, most: usize, value: T) -> &mut [T] {
            values.resize(most, value);
            &mut values[..most]
        }
        DecodeColumns {
            ids: column(&mut self.sequence_ids, most, 0),
            table_rows: column(&mut self.table_rows, most, 0),
            tokens: column(&mut self.token_ids, most, 0),
            sources: column(&mut self.token_source, most, -1),
            positions: column(&mut self.positions, most, 0),
            slots: column(&mut self.slot_mapping, most, NO_SLOT),
        }
    }

    /// The first `count` places have a sequence each.
    pub(super) fn end_decodes(&mut self, count: usize) {
        self.sequence_ids.truncate(count);
        self.token_ids.truncate(count);
        self.positions.truncate(count);
        self.token_source.truncate(count);
        self.slot_mapping.truncate(count);
        self.table_rows.truncate(count);
        self.query_start.extend(1..=count as i32);
        self.sample_rows.extend(0..count as i32);
        self.context_lens.extend(self.positions.iter().map(|position| position + 1));
    }

    /// Adds one sequence with `tokens` from `start` on, whose blocks are found by `block_of(logical block)`.
    pub(super) fn push_sequence(
        &mut self,
        id: u64,
        row: u32,
        tokens: &[u32],
        start: u32,
        block_size: u32,
        block_of: impl Fn(usize) -> u32,
    ) {
        let end = start + tokens.len() as u32;
        push_slots(&mut self.slot_mapping, start..end, block_size, block_of);
        self.token_ids.extend(tokens.iter().map(|&token| token as i32));
        self.positions.extend((start..end).map(|p| p as i32));
        self.token_source.resize(self.token_ids.len(), -1);
        self.finish_row(id, row, end as i32);
    }

    /// Adds rows that touch nothing until there are `num_sequences`: one token, slot -1, context length 0.
    pub(super) fn pad(&mut self, num_sequences: usize, padding_row: u32) {
        while self.sequence_ids.len() < num_sequences {
            self.token_ids.push(0);
            self.positions.push(0);
            self.token_source.push(-1);
            self.slot_mapping.push(NO_SLOT);
            self.finish_row(PADDING_SEQUENCE, padding_row, 0);
        }
        for group in &mut self.groups {
            group.slot_mapping.resize(self.token_ids.len(), NO_SLOT);
        }
    }

    fn finish_row(&mut self, id: u64, row: u32, context_len: i32) {
        self.sequence_ids.push(id);
        self.query_start.push(self.token_ids.len() as i32);
        self.context_lens.push(context_len);
        self.table_rows.push(row as i32);
    }
}

/// Adds the slots of some positions, whose blocks are found by `block_of(logical block)`.
pub(super) fn push_slots(
    slots: &mut Vec<i64>,
    positions: std::ops::Range<u32>,
    block_size: u32,
    block_of: impl Fn(usize) -> u32,
) {
    let mut position = positions.start;
    while position < positions.end {
        let block = i64::from(block_of((position / block_size) as usize));
        let stop = positions.end.min((position / block_size + 1) * block_size);
        let base = block * i64::from(block_size) - i64::from(position - position % block_size);
        slots.extend((position..stop).map(|p| base + i64::from(p)));
        position = stop;
    }
}

/// One planned step.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The step; `commit` and `abandon` name it.
    pub step_id: StepId,
    /// Its arrays. Their memory is reused only when every clone of this is gone.
    pub arrays: Arc<BatchArrays>,
}

/// Batch memory that goes round: allocated until there is one set more than the caller holds at once.
#[derive(Debug, Default)]
pub(super) struct BatchMemory {
    buffers: Vec<Arc<BatchArrays>>,
}

impl BatchMemory {
    /// Cleared arrays that nobody else holds; `Arc::get_mut` of them works until they are shared.
    pub(super) fn take(&mut self) -> Arc<BatchArrays> {
        let free = self.buffers.iter_mut().position(|buffer| Arc::get_mut(buffer).is_some());
        let mut shared = free.map(|i| self.buffers.swap_remove(i)).unwrap_or_default();
        if let Some(arrays) = Arc::get_mut(&mut shared) {
            arrays.clear();
        }
        shared
    }

    /// Remembers arrays for reuse, once the caller's clones are gone.
    pub(super) fn give_back(&mut self, arrays: Arc<BatchArrays>) {
        self.buffers.push(arrays);
    }
}
