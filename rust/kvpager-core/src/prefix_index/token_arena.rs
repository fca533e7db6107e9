//! The tokens of every indexed block, in one array addressed by block id.
//!
//! A row never moves: splitting a node or letting its tail go costs nothing here, and a match reads rows
//! without following a pointer. This is the only file of the index with `unsafe` code.

use crate::error::{Error, Result};
use crate::ids::BlockId;
use std::cell::UnsafeCell;

/// `num_blocks` rows of `block_size` token ids.
///
/// The row of a block belongs to whoever holds the lock of the tree that has the block indexed: readers under
/// the shared lock, the writer under the exclusive one. The pool hands a block to one owner at a time, and
/// lets it be indexed once, so two trees never have the same row; the block's way from one tree to another
/// goes through the pool (evict, then allocate), whose release and acquire order the accesses.
pub(super) struct TokenArena {
    words: Box<[UnsafeCell<u32>]>,
    block_size: usize,
}

// SAFETY: rows are shared only under the discipline stated on the type: no row is written while another
// thread may read it.
unsafe impl Sync for TokenArena {}

impl TokenArena {
    /// Refuses rows that take more than the machine's memory: the system may promise more than it has, and end the
    /// process when the pages are written.
    pub(super) fn check_memory(num_blocks: u32, block_size: usize) -> Result<()> {
        let num_bytes = num_bytes(num_blocks, block_size);
        match physical_memory().filter(|&memory| num_bytes as u64 > memory) {
            Some(memory) => Err(too_many(num_blocks, block_size, &format!("the machine's {memory}"))),
            None => Ok(()),
        }
    }

    /// An arena of zeroed rows. Every page is written here, so that none is faulted in by an insertion.
    pub(super) fn new(num_blocks: u32, block_size: usize) -> Result<Self> {
        Self::check_memory(num_blocks, block_size)?;
        let num_words = num_bytes(num_blocks, block_size) / size_of::<u32>();
        let mut words = Vec::new();
        words.try_reserve_exact(num_words).map_err(|_| too_many(num_blocks, block_size, "there is"))?;
        // `vec![0; n]` would take lazily zeroed pages.
        words.resize(num_words, std::hint::black_box(0u32));
        let words = words.into_boxed_slice();
        let raw = Box::into_raw(words) as *mut [UnsafeCell<u32>];
        // SAFETY: `UnsafeCell<u32>` has the layout of `u32` (repr(transparent)), so the slice has the layout it
        // was allocated with; the pointer comes from `Box::into_raw` and is not used again.
        let words = unsafe { Box::from_raw(raw) };
        Ok(Self { words, block_size })
    }

    fn row_range(&self, block: BlockId) -> std::ops::Range<usize> {
        let start = block.0 as usize * self.block_size;
        start..start + self.block_size
    }

    /// The tokens of an indexed block.
    ///
    /// # Safety
    /// The caller holds the lock (shared or exclusive) of the tree that has `block` indexed, for as long as
    /// it uses the slice.
    #[inline]
    pub(super) unsafe fn row(&self, block: BlockId) -> &[u32] {
        let cells = &self.words[self.row_range(block)];
        // SAFETY: the caller's lock keeps writers of this row out; the layout is that of `u32`.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<u32>(), cells.len()) }
    }

    /// The tokens of `num_blocks` indexed blocks with consecutive ids.
    ///
    /// # Safety
    /// As [`TokenArena::row`], for each of the blocks.
    #[inline]
    pub(super) unsafe fn rows(&self, first: BlockId, num_blocks: usize) -> &[u32] {
        let start = first.0 as usize * self.block_size;
        let cells = &self.words[start..start + num_blocks * self.block_size];
        // SAFETY: the caller's lock keeps writers of these rows out; the layout is that of `u32`.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<u32>(), cells.len()) }
    }

    /// Writes the tokens of a block that is being indexed.
    ///
    /// # Safety
    /// The caller holds the exclusive lock of the tree into which it inserts `block`, the pool has accepted
    /// the block as indexed, and no tree has it yet.
    #[inline]
    pub(super) unsafe fn write_row(&self, block: BlockId, tokens: &[u32]) {
        let cells = &self.words[self.row_range(block)];
        assert_eq!(cells.len(), tokens.len(), "a row is one block of tokens");
        // SAFETY: in bounds (both have the same length); the block is in no tree, so nobody reads the row.
        unsafe {
            std::ptr::copy_nonoverlapping(tokens.as_ptr(), UnsafeCell::raw_get(cells.as_ptr()), tokens.len());
        }
    }
}

fn num_bytes(num_blocks: u32, block_size: usize) -> usize {
    (num_blocks as usize).saturating_mul(block_size).saturating_mul(size_of::<u32>())
}

fn too_many(num_blocks: u32, block_size: usize, there_is: &str) -> Error {
    Error::invalid(format!(
        "the token ids of {num_blocks} blocks of {block_size} take {} bytes, more than {there_is}",
        num_bytes(num_blocks, block_size)
    ))
}

/// Bytes of the machine's memory, where the system says so.
fn physical_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
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
