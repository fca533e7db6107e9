//! Which blocks are free: one bit a block, and a summary bit for each word that may have any.
//!
//! Whoever claims `n` bits holds `n` free permits, which are published after the bits; so a claim cannot fail,
//! and a fruitless look means that another claimer made progress.

use crate::ids::BlockId;
use crate::sync::{AtomicU64, AtomicUsize, Ordering};
use crossbeam_utils::CachePadded;

const BITS: usize = 64;
/// Scan positions; threads spread over them so that they work on different words.
const NUM_HINTS: usize = 8;

#[derive(Debug)]
pub(super) struct Bitmap {
    words: Box<[AtomicU64]>,
    /// Bit w of word s: `words[64 * s + w]` may have a set bit. A hint: it may be set for an empty word, and may
    /// be clear for a moment while a bit is being set.
    summary: Box<[AtomicU64]>,
    hints: [CachePadded<AtomicUsize>; NUM_HINTS],
}

/// The hint that a thread uses, by an address on its stack: sticky, and free of thread-local storage.
fn hint_of_thread() -> usize {
    let here = 0u8;
    (std::ptr::from_ref(&here).addr() >> 16) % NUM_HINTS
}

impl Bitmap {
    /// All of `num_blocks` bits set.
    pub(super) fn new(num_blocks: usize) -> Self {
        let num_words = num_blocks.div_ceil(BITS);
        let full = |count: usize, i: usize| match count - i * BITS {
            left if left >= BITS => u64::MAX,
            left => (1 << left) - 1,
        };
        let words = (0..num_words).map(|i| AtomicU64::new(full(num_blocks, i))).collect();
        let summary = (0..num_words.div_ceil(BITS)).map(|i| AtomicU64::new(full(num_words, i))).collect();
        let hint = |i: usize| CachePadded::new(AtomicUsize::new(i * num_words / NUM_HINTS));
        Self { words, summary, hints: std::array::from_fn(hint) }
    }

    /// Claims `out.len()` bits. The caller holds that many free permits.
    pub(super) fn claim(&self, out: &mut [BlockId]) {
        let hint = &self.hints[hint_of_thread()];
        // Relaxed: only where to look first.
        let mut word = hint.load(Ordering::Relaxed) % self.words.len();
        let mut filled = 0;
        let mut fruitless = 0;
        while filled < out.len() {
            let claimed = self.claim_from(word, &mut out[filled..]);
            filled += claimed;
            if filled == out.len() {
                break;
            }
            fruitless = if claimed > 0 { 0 } else { fruitless + 1 };
            // After a round over the summary without luck, look at the words themselves: a thread may have
            // cleared a summary bit and not set it again yet, and nobody waits for it.
            word = if fruitless > self.summary.len() + 1 {
                (word + 1) % self.words.len()
            } else {
                self.next_word(word)
            };
        }
        hint.store(word, Ordering::Relaxed);
    }

    /// Claims up to `out.len()` bits of one word, lowest first, by one exchange a try.
    fn claim_from(&self, word: usize, out: &mut [BlockId]) -> usize {
        let cell = &self.words[word];
        let mut bits = cell.load(Ordering::Relaxed);
        while bits != 0 {
            let take = lowest(bits, out.len());
            // Acquire pairs with the Release of `set`: what the last owner did comes before what we do.
            match cell.compare_exchange_weak(bits, bits & !take, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    if bits == take {
                        self.note_empty(word);
                    }
                    let mut left = take;
                    let count = take.count_ones() as usize;
                    for slot in &mut out[..count] {
                        *slot = BlockId((word * BITS) as u32 + left.trailing_zeros());
                        left &= left - 1;
                    }
                    return count;
                }
                Err(now) => bits = now,
            }
        }
        0
    }

    /// Clears the summary bit of an emptied word, and sets it again if a bit came back meanwhile.
    fn note_empty(&self, word: usize) {
        let bit = 1 << (word % BITS);
        let cell = &self.summary[word / BITS];
        // AcqRel on both read-modify-writes of this word and in `set`: if our clear comes after a setter's
        // `fetch_or`, we read from it and see its bit below; if before, the setter sets it again.
        cell.fetch_and(!bit, Ordering::AcqRel);
        if self.words[word].load(Ordering::Acquire) != 0 {
            cell.fetch_or(bit, Ordering::AcqRel);
        }
    }

    /// The next word after `word` that the summary names, or just the next one.
    fn next_word(&self, word: usize) -> usize {
        let next = (word + 1) % self.words.len();
        let (first, offset) = (next / BITS, next % BITS);
        for i in 0..=self.summary.len() {
            let at = (first + i) % self.summary.len();
            let mut bits = self.summary[at].load(Ordering::Relaxed);
            if i == 0 {
                bits &= u64::MAX << offset;
            }
            if bits != 0 {
                return at * BITS + bits.trailing_zeros() as usize;
            }
        }
        next
    }

    /// Frees blocks. Consecutive ids of one word are set by one operation.
    pub(super) fn set(&self, ids: impl Iterator<Item = BlockId>) {
        let (mut word, mut mask) = (usize::MAX, 0u64);
        for id in ids {
            let (of, bit) = (id.0 as usize / BITS, 1u64 << (id.0 as usize % BITS));
            if of != word {
                self.set_mask(word, mask);
                (word, mask) = (of, 0);
            }
            mask |= bit;
        }
        self.set_mask(word, mask);
    }

    fn set_mask(&self, word: usize, mask: u64) {
        if mask == 0 {
            return;
        }
        // AcqRel: Release pairs with the Acquire of `claim_from`; see also `note_empty`.
        let before = self.words[word].fetch_or(mask, Ordering::AcqRel);
        debug_assert_eq!(before & mask, 0, "a free block was freed");
        if before == 0 {
            self.summary[word / BITS].fetch_or(1 << (word % BITS), Ordering::AcqRel);
        }
    }

    /// Whether a block's bit is set.
    pub(super) fn is_set(&self, id: BlockId) -> bool {
        self.words[id.0 as usize / BITS].load(Ordering::Relaxed) >> (id.0 as usize % BITS) & 1 == 1
    }

    /// Bits set; exact when nothing moves.
    pub(super) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

/// The lowest `count` set bits of `bits`.
fn lowest(bits: u64, count: usize) -> u64 {
    if count >= bits.count_ones() as usize {
        return bits;
    }
    let mut rest = bits;
    for _ in 0..count {
        rest &= rest - 1;
    }
    bits & !rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_bitmap_hands_out_every_id_once_in_order() {
        for num_blocks in [1, 63, 64, 65, 4097, 9000] {
            let bitmap = Bitmap::new(num_blocks);
            let mut ids = vec![BlockId(0); num_blocks];
            bitmap.claim(&mut ids);
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            assert!(sorted.iter().enumerate().all(|(i, id)| id.0 as usize == i));
            assert_eq!(bitmap.count(), 0);
            bitmap.set(ids.into_iter());
            assert_eq!(bitmap.count() as usize, num_blocks);
        }
    }

    #[test]
    fn single_free_bits_are_found_wherever_they_are() {
        let bitmap = Bitmap::new(10_000);
        let mut ids = vec![BlockId(0); 10_000];
        bitmap.claim(&mut ids);
        for id in [9_999, 0, 4_096, 64, 63, 5_000] {
            bitmap.set([BlockId(id)].into_iter());
            let mut one = [BlockId(0)];
            bitmap.claim(&mut one);
            assert_eq!(one, [BlockId(id)]);
        }
    }
}
