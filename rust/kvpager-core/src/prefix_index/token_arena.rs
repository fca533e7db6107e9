//! The tokens of every indexed block, in one array addressed by block id.
//!
//! A row never moves: splitting a node or letting its tail go costs nothing here, and a match reads rows
//! without following a pointer. This is the only file of the index with `unsafe` code.

use crate::error::{Result, count};
use crate::ids::BlockId;
use crate::memory::Asked;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// `num_blocks` rows of `block_size` token ids.
///
/// The row of a block belongs to whoever holds the lock of the tree that has the block indexed: readers under
/// the shared lock, the writer under the exclusive one. The pool hands a block to one owner at a time, and
/// lets it be indexed once, so two trees never have the same row; the block's way from one tree to another
/// goes through the pool (evict, then allocate), whose release and acquire order the accesses.
pub(super) struct TokenArena {
    lines: Box<[Line]>,
    block_size: usize,
}

/// Tokens in a cache line.
const LINE: usize = 16;

/// A cache line: a block of 16 tokens has one to itself.
#[repr(C, align(64))]
struct Line([UnsafeCell<u32>; LINE]);

// SAFETY: rows are shared only under the discipline stated on the type: no row is written while another
// thread may read it.
unsafe impl Sync for TokenArena {}

impl TokenArena {
    /// Refuses rows that take more than the machine's memory: the system may promise more than it has, and end the
    /// process when the pages are written.
    pub(super) fn check_memory(num_blocks: u32, block_size: usize) -> Result<()> {
        asked(num_blocks, block_size).map(drop)
    }

    /// An arena of zeroed rows. Every page is written here, so that none is faulted in by an insertion.
    pub(super) fn new(num_blocks: u32, block_size: usize) -> Result<Self> {
        let num_lines = num_bytes(num_blocks, block_size).div_ceil(size_of::<Line>());
        let mut lines: Vec<Line> = asked(num_blocks, block_size)?.room(num_lines)?;
        ask_for_huge_pages(lines.spare_capacity_mut());
        // A zero that the compiler knew would make lazily zeroed pages of it.
        let zero = std::hint::black_box(0);
        lines.resize_with(num_lines, || Line(std::array::from_fn(|_| UnsafeCell::new(zero))));
        Ok(Self { lines: lines.into_boxed_slice(), block_size })
    }

    #[inline]
    fn words(&self) -> &[UnsafeCell<u32>] {
        // SAFETY: a line is its words and nothing else, so lines side by side are words side by side.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * LINE) }
    }

    fn range(&self, first: BlockId, num_blocks: usize) -> std::ops::Range<usize> {
        let start = first.0 as usize * self.block_size;
        start..start + num_blocks * self.block_size
    }

    /// The tokens of an indexed block.
    ///
    /// # Safety
    /// The caller holds the lock (shared or exclusive) of the tree that has `block` indexed, for as long as
    /// it uses the slice.
    #[inline]
    pub(super) unsafe fn row(&self, block: BlockId) -> &[u32] {
        let cells = &self.words()[self.range(block, 1)];
        // SAFETY: the caller's lock keeps writers of this row out; the layout is that of `u32`.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<u32>(), cells.len()) }
    }

    /// The tokens of `num_blocks` indexed blocks with consecutive ids.
    ///
    /// # Safety
    /// As [`TokenArena::row`], for each of the blocks.
    #[inline]
    pub(super) unsafe fn rows(&self, first: BlockId, num_blocks: usize) -> &[u32] {
        let cells = &self.words()[self.range(first, num_blocks)];
        // SAFETY: the caller's lock keeps writers of these rows out; the layout is that of `u32`.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<u32>(), cells.len()) }
    }

    /// Writes the tokens of blocks with consecutive ids that are being indexed.
    ///
    /// # Safety
    /// The caller holds the exclusive lock of the tree into which it inserts the blocks, the pool has accepted
    /// them as indexed, and no tree has them yet.
    #[inline]
    pub(super) unsafe fn write_rows(&self, first: BlockId, num_blocks: usize, tokens: &[u32]) {
        let cells = &self.words()[self.range(first, num_blocks)];
        assert_eq!(cells.len(), tokens.len(), "a row is one block of tokens");
        // SAFETY: in bounds (both have the same length); the blocks are in no tree, so nobody reads the rows.
        unsafe {
            std::ptr::copy_nonoverlapping(tokens.as_ptr(), UnsafeCell::raw_get(cells.as_ptr()), tokens.len());
        }
    }
}

/// Asks the system for pages of 2 MiB: matches read rows all over the arena, and miss the translations of small pages
/// oftener than the rows. A hint, which may do nothing.
fn ask_for_huge_pages(lines: &mut [MaybeUninit<Line>]) {
    const HUGE: usize = 2 << 20;
    let range = lines.as_mut_ptr_range();
    let start = (range.start as usize).next_multiple_of(HUGE);
    let end = range.end as usize / HUGE * HUGE;
    if start >= end {
        return;
    }
    // SAFETY: the range lies within `lines`, which is borrowed exclusively, and the advice does not change what
    // memory holds. A refusal leaves small pages.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE);
    }
}

fn num_bytes(num_blocks: u32, block_size: usize) -> usize {
    (num_blocks as usize).saturating_mul(block_size).saturating_mul(size_of::<u32>())
}

fn asked(num_blocks: u32, block_size: usize) -> Result<Asked<String>> {
    let what = format!("an array of the token ids of {} of {block_size}", count(num_blocks, "block"));
    Asked::new(what, num_bytes(num_blocks, block_size))
}

/// Whether two blocks hold the same tokens. The commonest size is compared without branches or a call: the
/// compiler makes vector instructions of it.
#[inline]
pub(super) fn same_tokens(a: &[u32], b: &[u32]) -> bool {
    match (<&[u32; 16]>::try_from(a), <&[u32; 16]>::try_from(b)) {
        (Ok(a), Ok(b)) => a.iter().zip(b).fold(0, |found, (x, y)| found | (x ^ y)) == 0,
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_rows_are_read_as_they_were_written_and_those_of_16_tokens_have_a_line_each() {
        for block_size in [1usize, 3, 16, 17, 64] {
            let arena = TokenArena::new(10, block_size).unwrap();
            let tokens: Vec<u32> = (0..10 * block_size as u32).collect();
            let (head, tail) = tokens.split_at(4 * block_size);
            // SAFETY: nobody else has the arena.
            unsafe {
                arena.write_rows(BlockId(4), 6, tail);
                arena.write_rows(BlockId(0), 4, head);
                assert_eq!(arena.rows(BlockId(0), 10), tokens);
                for (id, row) in tokens.chunks_exact(block_size).enumerate() {
                    assert_eq!(arena.row(BlockId(id as u32)), row, "block {id} of {block_size} tokens");
                }
                assert!(block_size != 16 || arena.row(BlockId(7)).as_ptr().addr().is_multiple_of(64));
            }
        }
    }
}
