//! Block tables: one arena of rows with stable addresses, and a log of changed entries for a device copy.
//!
//! A row is the block table of one sequence: entry `i` is the id of the block that holds its positions
//! `i * block_size ..`, and -1 past the end. The arena never moves, so views of it (a NumPy array, a captured
//! graph) stay valid for its life. Entries are written by the engine thread only.
//!
//! The last row is never handed out: all its entries stay -1, for the padding rows of a batch.

use crate::ids::BlockId;
use crate::memory::{Asked, bytes_of};
use crate::sync::{AtomicI32, Ordering};
use crate::{Error, Result};
use std::fmt::Display;
use std::sync::Arc;

/// What an entry holds past the end of its row.
pub const NO_BLOCK: i32 = -1;

/// The memory of the tables: `[num_rows, max_blocks]` i32, row-major. Shared with whoever reads it.
#[derive(Debug)]
pub struct TableArena {
    entries: Box<[AtomicI32]>,
    num_rows: usize,
    max_blocks: usize,
}

impl TableArena {
    /// `(num_rows, max_blocks)`, the padding row included.
    #[must_use]
    pub const fn shape(&self) -> (usize, usize) {
        (self.num_rows, self.max_blocks)
    }

    /// Address of entry (0, 0); valid, and never moving, as long as the arena lives.
    #[must_use]
    pub fn as_ptr(&self) -> *const i32 {
        self.entries.as_ptr().cast()
    }

    /// Block id at (`row`, `column`), or -1; `None` outside the arena.
    #[must_use]
    pub fn get(&self, row: usize, column: usize) -> Option<i32> {
        if column >= self.max_blocks {
            return None;
        }
        // Relaxed: a batch reaches its reader through the scheduler's return, which orders the entries.
        self.entries.get(row * self.max_blocks + column).map(|entry| entry.load(Ordering::Relaxed))
    }
}

/// One changed entry, for the device copy: (row, column, block id).
pub type TableChange = [i32; 3];

/// The rows of an engine's sequences. Owned by the engine thread.
#[derive(Debug)]
pub struct BlockTables {
    arena: Arc<TableArena>,
    free_rows: Vec<u32>,
    lengths: Vec<u32>,
    changes: Vec<TableChange>,
}

impl BlockTables {
    /// Tables for `num_rows` sequences at once, of `max_blocks` blocks each, plus the padding row.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a dimension is 0 or the arena does not fit 31-bit indices, [`Error::OutOfMemory`]
    /// if there is no room for it.
    pub fn new(num_rows: usize, max_blocks: usize) -> Result<Self> {
        let what = format_args!(
            "block tables of {} x {}",
            crate::count_of(num_rows, "row"),
            crate::count_of(max_blocks, "block")
        );
        Self::in_memory(num_rows, max_blocks, &Asked::new(what, Self::num_bytes(num_rows, max_blocks))?)
    }

    /// Bytes of tables for so many rows.
    pub(crate) const fn num_bytes(num_rows: usize, max_blocks: usize) -> usize {
        bytes_of::<AtomicI32>(num_rows.saturating_add(1).saturating_mul(max_blocks))
            .saturating_add(bytes_of::<(u32, u32)>(num_rows))
    }

    /// [`BlockTables::new`] with memory that was asked for together with other things.
    pub(crate) fn in_memory(
        num_rows: usize,
        max_blocks: usize,
        memory: &Asked<impl Display>,
    ) -> Result<Self> {
        let entries = num_rows.saturating_add(1).saturating_mul(max_blocks);
        if num_rows == 0 || max_blocks == 0 || entries > i32::MAX as usize {
            return Err(Error::invalid(format!(
                "block tables of {} x {}: both must be at least 1 and the arena at most {} entries",
                crate::count_of(num_rows, "row"),
                crate::count_of(max_blocks, "block"),
                i32::MAX
            )));
        }
        let arena = TableArena {
            entries: memory.array(entries, |_| AtomicI32::new(NO_BLOCK))?,
            num_rows: num_rows + 1,
            max_blocks,
        };
        Ok(Self {
            arena: Arc::new(arena),
            free_rows: memory.array(num_rows, |i| (num_rows - 1 - i) as u32)?.into_vec(),
            lengths: memory.array(num_rows, |_| 0)?.into_vec(),
            changes: Vec::new(),
        })
    }

    /// The memory that holds the entries.
    #[must_use]
    pub const fn arena(&self) -> &Arc<TableArena> {
        &self.arena
    }

    /// The row whose entries are all -1.
    #[must_use]
    pub fn padding_row(&self) -> u32 {
        self.lengths.len() as u32
    }

    /// Rows that no sequence has.
    #[must_use]
    pub fn num_free_rows(&self) -> usize {
        self.free_rows.len()
    }

    /// Hands out an empty row, or `None` if every row is taken.
    pub fn take_row(&mut self) -> Option<u32> {
        self.free_rows.pop()
    }

    /// Takes a row back and clears it. No open step may still read it.
    pub fn free_row(&mut self, row: u32) {
        self.clear_row(row);
        self.free_rows.push(row);
    }

    /// Clears a row. No open step may still read it.
    pub fn clear_row(&mut self, row: u32) {
        for column in 0..std::mem::take(&mut self.lengths[row as usize]) {
            self.forget(row, column);
        }
    }

    /// Makes an empty row begin at a column: entries before it stay -1.
    pub fn begin_at(&mut self, row: u32, column: u32) {
        debug_assert_eq!(self.lengths[row as usize], 0);
        self.lengths[row as usize] = column;
    }

    /// Takes an entry out that no query sees any more. No open step may still read it.
    pub fn forget(&mut self, row: u32, column: u32) {
        if self.arena.get(row as usize, column as usize) != Some(NO_BLOCK) {
            self.store(row, column, NO_BLOCK);
        }
    }

    /// Adds a block at the end of a row. The caller keeps rows within `max_blocks`.
    pub fn append(&mut self, row: u32, block: BlockId) {
        let column = self.lengths[row as usize];
        self.lengths[row as usize] += 1;
        self.store(row, column, block.0 as i32);
    }

    /// Overwrites an entry. No open step may still read it.
    pub fn replace(&mut self, row: u32, column: u32, block: BlockId) {
        debug_assert!(column < self.lengths[row as usize]);
        self.store(row, column, block.0 as i32);
    }

    /// Takes the entries from `length` on out of a row. No open step may still read it.
    pub fn truncate(&mut self, row: u32, length: u32) {
        let before = self.lengths[row as usize];
        self.lengths[row as usize] = before.min(length);
        for column in length..before {
            self.store(row, column, NO_BLOCK);
        }
    }

    /// Blocks in a row.
    #[must_use]
    pub fn len(&self, row: u32) -> u32 {
        self.lengths[row as usize]
    }

    /// Whether no row is taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.free_rows.len() == self.lengths.len()
    }

    /// Moves the changes since the last call into `log`, in the order they were made.
    pub fn drain_changes(&mut self, log: &mut Vec<TableChange>) {
        log.append(&mut self.changes);
    }

    fn store(&mut self, row: u32, column: u32, value: i32) {
        let index = row as usize * self.arena.max_blocks + column as usize;
        // Relaxed: see `TableArena::get`.
        self.arena.entries[index].store(value, Ordering::Relaxed);
        self.changes.push([row as i32, column as i32, value]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_row_is_cleared_and_handed_out_again() {
        let mut tables = BlockTables::new(2, 3).unwrap();
        let row = tables.take_row().unwrap();
        tables.append(row, BlockId(7));
        tables.append(row, BlockId(9));
        tables.replace(row, 0, BlockId(8));
        let arena = Arc::clone(tables.arena());
        let entries = |row| (0..3).map(|column| arena.get(row, column).unwrap()).collect::<Vec<_>>();
        assert_eq!(entries(row as usize), [8, 9, -1]);
        tables.free_row(row);
        assert_eq!(entries(row as usize), [-1, -1, -1]);
        assert_eq!(tables.take_row(), Some(row));
        assert_eq!(entries(tables.padding_row() as usize), [-1, -1, -1]);
        assert_eq!(arena.get(0, 3), None);
    }

    #[test]
    fn the_change_log_rebuilds_the_arena() {
        let mut tables = BlockTables::new(3, 4).unwrap();
        let (a, b) = (tables.take_row().unwrap(), tables.take_row().unwrap());
        for id in 0..4 {
            tables.append(a, BlockId(id));
        }
        tables.append(b, BlockId(30));
        tables.free_row(a);
        let mut log = Vec::new();
        tables.drain_changes(&mut log);
        let mut copy = vec![NO_BLOCK; 16];
        for [row, column, value] in log {
            copy[row as usize * 4 + column as usize] = value;
        }
        let original: Vec<i32> = (0..16).map(|i| tables.arena().get(i / 4, i % 4).unwrap()).collect();
        assert_eq!(copy, original);
    }

    #[test]
    fn a_size_that_overflows_is_refused() {
        assert!(BlockTables::new(0, 4).is_err());
        assert!(BlockTables::new(1 << 20, 1 << 20).is_err());
    }
}
