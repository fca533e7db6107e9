//! A ragged batch by its integer arrays alone: whose lengths and tables fit each other and the cache.

use super::Int32Matrix;
use crate::{Error, Result};

/// What says which positions of the cache a batch reads.
#[derive(Clone, Copy, Debug)]
pub struct BatchView<'a> {
    /// Rows of the query.
    pub num_tokens: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// `[rows, max_blocks]`; not looked at if absent (they are on a device).
    pub block_tables: Option<&'a Int32Matrix>,
    /// `[num_sequences]`: each sequence's row; the sequence's own index if absent.
    pub table_rows: Option<&'a [i32]>,
    /// `[num_sequences + 1]`: ranges of query tokens.
    pub query_start: &'a [i32],
    /// `[num_sequences]`: tokens in the cache, those of the query included.
    pub context_lens: &'a [i32],
}

impl BatchView<'_> {
    /// Checks ranges, lengths and the table entries that a query with this window may read.
    ///
    /// # Errors
    /// `InvalidArgument` for lengths, rows or block ids that do not fit.
    pub fn check(&self, window: Option<u32>) -> Result<()> {
        let mut blocks = Vec::new();
        for sequence in self.check_lengths()? {
            let first = sequence.context.saturating_sub(sequence.end - sequence.start);
            let low = window.map_or(0, |window| (first + 1).saturating_sub(window as usize));
            blocks.clear();
            self.row_blocks(sequence.row, low.min(sequence.context), sequence.context, &mut blocks)?;
        }
        Ok(())
    }

    /// Checks ranges and lengths; returns what each sequence reads.
    pub(super) fn check_lengths(&self) -> Result<Vec<Sequence>> {
        let num_sequences = self.context_lens.len();
        if self.query_start.len() != num_sequences + 1 {
            return Err(Error::invalid(format!(
                "query_start has {}, expected {} (one more than context_lens)",
                crate::count_of(self.query_start.len(), "entry"),
                num_sequences + 1
            )));
        }
        if let Some(rows) = self.table_rows.filter(|rows| rows.len() != num_sequences) {
            return Err(Error::invalid(format!(
                "table_rows has {}, expected {num_sequences} (as context_lens)",
                crate::count_of(rows.len(), "entry")
            )));
        }
        if self.query_start[0] != 0 {
            return Err(Error::invalid(format!("query_start[0] is {}, expected 0", self.query_start[0])));
        }
        (0..num_sequences).map(|index| self.check_sequence(index)).collect()
    }

    fn check_sequence(&self, index: usize) -> Result<Sequence> {
        let (start, end) = (self.query_start[index], self.query_start[index + 1]);
        if end < start || end as usize > self.num_tokens {
            return Err(Error::invalid(format!(
                "query_start[{}] is {end}, must be {start} to {}",
                index + 1,
                self.num_tokens
            )));
        }
        let (tokens, context) = ((end - start) as usize, self.context_lens[index]);
        if context < 0 || (context > 0 && tokens > context as usize) {
            return Err(Error::invalid(format!(
                "context_lens[{index}] is {context}, but the sequence has {}",
                crate::count_of(tokens, "query token")
            )));
        }
        let row = self.table_rows.map_or(index as i64, |rows| i64::from(rows[index]));
        let reads = tokens > 0 && context > 0;
        let num_rows = self.block_tables.map_or(usize::MAX, |tables| tables.shape()[0]);
        let row = usize::try_from(row).ok().filter(|row| *row < num_rows);
        match row {
            None if reads => Err(Error::invalid(format!(
                "sequence {index} has no table row: {} of {num_rows}",
                self.table_rows.map_or(index as i64, |rows| i64::from(rows[index]))
            ))),
            row => Ok(Sequence {
                index,
                start: start as usize,
                end: end as usize,
                context: if reads { context as usize } else { 0 },
                row: row.unwrap_or(0),
            }),
        }
    }

    /// Copies the ids of the blocks that hold positions `low..high` of a table row, each checked.
    pub(super) fn row_blocks(
        &self,
        row: usize,
        low: usize,
        high: usize,
        blocks: &mut Vec<u32>,
    ) -> Result<()> {
        let Some(tables) = self.block_tables else { return Ok(()) };
        let (num_blocks, block_size, columns) = (self.num_blocks, self.block_size, tables.shape()[1]);
        let last = high.div_ceil(block_size);
        if last > columns {
            return Err(Error::invalid(format!(
                "table row {row} has {}, {} need {} of {block_size}",
                crate::count_of(columns, "entry"),
                crate::count_of(high, "token"),
                crate::count_of(last, "block")
            )));
        }
        for column in low / block_size..last {
            let id = tables.get(row, column).unwrap_or(-1);
            if id < 0 || id as usize >= num_blocks {
                return Err(Error::invalid(format!(
                    "block_tables[{row}, {column}] is {id} inside the used range, must be {}",
                    super::blocks::ids_of(num_blocks)
                )));
            }
            blocks.push(id as u32);
        }
        Ok(())
    }
}

/// One sequence of the batch.
#[derive(Clone, Copy)]
pub(super) struct Sequence {
    pub(super) index: usize,
    /// Query tokens.
    pub(super) start: usize,
    pub(super) end: usize,
    /// Tokens in the cache; 0 if nothing is to be computed.
    pub(super) context: usize,
    /// Row of the block tables.
    pub(super) row: usize,
}
