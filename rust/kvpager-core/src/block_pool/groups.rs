//! What may be done with a block: two bits each, 24 blocks a word, with a summary of the words that have free ones.
//!
//! ```text
//! group:   63     48 47          24 23           0      (high, low) bit of a block
//!          [version] [ high plane ] [ low plane  ]      0 1 free        1 0 exclusive
//!                                                       1 1 shared      0 0 off
//! summary: bit g: group g may have a free block
//! ```
//!
//! All transitions of a block are exchanges of its group's word, so up to 24 of them take one exchange:
//!
//! ```text
//!     free ──claim──► exclusive ──share──► shared          off: the one who brought the block there writes its
//!      ▲                  │                  │             state word with plain stores. Quarantined, indexed and
//!      └─────free─────── off ◄───take_out────┘             stored blocks are off as well.
//! ```
//!
//! Claiming bumps the version. A caller that checked generations under one version and takes blocks out under the
//! same one knows that none of them changed hands in between, so a stale handle cannot win a race (except if
//! exactly a multiple of 2^16 claims of this group fall between a load and its exchange).
//!
//! Whoever claims holds free permits, which are published after the bits; so a claim cannot fail, and a fruitless
//! look means that another claimer made progress.

use super::faults;
use super::hint::Hints;
use crate::Result;
use crate::memory::{Asked, bytes_of};
use crate::sync::{AtomicU64, Ordering};
use std::fmt::Display;

/// Bits of a plane.
const PLANE: u32 = 24;
/// Blocks of a group. Small under loom, so that its few blocks span groups.
pub(super) const WIDTH: usize = if cfg!(any(loom, shuttle)) { 2 } else { PLANE as usize };
const VERSION: u64 = 1 << (2 * PLANE);
const MASK: u64 = (1 << PLANE) - 1;
/// Groups of a summary word.
const SPAN: usize = 64;

/// A group's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group(u64);

impl Group {
    pub(super) const fn free(self) -> u64 {
        self.0 & !(self.0 >> PLANE) & MASK
    }

    pub(super) const fn exclusive(self) -> u64 {
        !self.0 & (self.0 >> PLANE) & MASK
    }

    pub(super) const fn shared(self) -> u64 {
        self.0 & (self.0 >> PLANE) & MASK
    }

    pub(super) const fn off(self) -> u64 {
        !(self.0 | (self.0 >> PLANE)) & MASK
    }

    const fn claimed(self, mask: u64) -> Self {
        Self((self.0 ^ (mask | mask << PLANE)).wrapping_add(VERSION))
    }

    const fn taken_out(self, mask: u64) -> Self {
        Self(self.0 & !(mask | mask << PLANE))
    }

    const fn made_shared(self, mask: u64) -> Self {
        Self(self.0 | mask)
    }
}

#[derive(Debug)]
pub(super) struct Groups {
    words: Box<[AtomicU64]>,
    /// A hint: a bit may be set for a group without free blocks, and may be clear for a moment while one is freed.
    summary: Box<[AtomicU64]>,
    hints: Hints,
}

/// The group of a block and its place there.
pub(super) const fn place(id: u32) -> (usize, u64) {
    (id as usize / WIDTH, 1 << (id as usize % WIDTH))
}

impl Groups {
    /// Bytes of so many blocks.
    pub(super) const fn num_bytes(num_blocks: usize) -> usize {
        let num_groups = num_blocks.div_ceil(WIDTH);
        bytes_of::<AtomicU64>(num_groups + num_groups.div_ceil(SPAN))
    }

    /// All of `num_blocks` free.
    pub(super) fn new(num_blocks: usize, memory: &Asked<impl Display>) -> Result<Self> {
        let num_groups = num_blocks.div_ceil(WIDTH);
        let full = |left: usize, width: usize| {
            if left >= width { u64::MAX >> (64 - width) } else { (1 << left) - 1 }
        };
        let word = |g| AtomicU64::new(full(num_blocks - g * WIDTH, WIDTH));
        let of_groups = |s| AtomicU64::new(full(num_groups - s * SPAN, SPAN));
        Ok(Self {
            words: memory.array(num_groups, word)?,
            summary: memory.array(num_groups.div_ceil(SPAN), of_groups)?,
            hints: Hints::new(),
        })
    }

    /// A group now. Acquire pairs with the Release of every exchange below: what was done with a block before it
    /// got into the state seen here comes before what is done next.
    #[inline]
    pub(super) fn load(&self, group: usize) -> Group {
        Group(self.words[group].load(Ordering::Acquire))
    }

    /// Claims `count` free blocks as exclusive and hands them over, group by group; `give` counts them. The caller
    /// holds that many free permits.
    #[inline]
    pub(super) fn claim<const FAULT: u8>(&self, count: usize, mut give: impl FnMut(usize, u64) -> usize) {
        let mut group = self.hints.load(self.words.len());
        let (mut left, mut fruitless) = (count, 0);
        loop {
            let mask = self.claim_from::<FAULT>(group, left);
            fruitless += 1;
            if mask != 0 {
                left -= give(group, mask);
                fruitless = 0;
            }
            if left == 0 {
                return self.hints.store(group);
            }
            // With a planted fault there may be no block behind a permit, and this would never end.
            assert!(
                FAULT == faults::NONE || fruitless < 1_000 + 4 * self.words.len(),
                "no block was found behind a free permit"
            );
            group = self.next_group::<FAULT>(group, fruitless);
        }
    }

    /// Claims up to `count` blocks of one group, lowest first, by one exchange a try.
    #[inline]
    fn claim_from<const FAULT: u8>(&self, group: usize, count: usize) -> u64 {
        let cell = &self.words[group];
        let mut now = Group(cell.load(Ordering::Relaxed));
        loop {
            let mask = lowest(now.free(), count);
            if mask == 0 {
                self.note_empty::<FAULT>(group);
                return 0;
            }
            let next = now.claimed(mask);
            // Acquire pairs with the Release of `free`: what the last owner did comes before what we do. A failure
            // means that another thread's exchange on this group succeeded.
            let order = if FAULT == faults::RELAXED_BITS { Ordering::Release } else { Ordering::AcqRel };
            match cell.compare_exchange_weak(now.0, next.0, order, Ordering::Relaxed) {
                Ok(_) => return mask,
                Err(word) => now = Group(word),
            }
        }
    }

    /// Clears the summary bit of a group that was found without free blocks, and sets it again if one came back
    /// meanwhile. Only a fruitless look comes here: a group that is emptied and filled again keeps its bit.
    fn note_empty<const FAULT: u8>(&self, group: usize) {
        let (cell, bit) = (&self.summary[group / SPAN], 1 << (group % SPAN));
        // Relaxed: a stale 0 leaves the bit to the words themselves, a stale 1 costs the exchange.
        if cell.load(Ordering::Relaxed) & bit == 0 {
            return;
        }
        if FAULT == faults::BLIND_SUMMARY {
            std::thread::yield_now(); // a planted fault shows more often
        }
        // AcqRel here and in `free`, both exchanges of this word: if our clear comes after a freer's `fetch_or`, we
        // have acquired its block and see it below; if before, the freer's `fetch_or` stands.
        cell.fetch_and(!bit, Ordering::AcqRel);
        if FAULT != faults::BLIND_SUMMARY && self.load(group).free() != 0 {
            cell.fetch_or(bit, Ordering::AcqRel);
        }
    }

    /// Where to look next. After a round over the summary without luck, the words themselves: a thread may have
    /// freed a block and not set its summary bit yet, and nobody waits for it.
    fn next_group<const FAULT: u8>(&self, group: usize, fruitless: usize) -> usize {
        let next = if group + 1 == self.words.len() { 0 } else { group + 1 };
        if fruitless > self.summary.len() && FAULT != faults::BLIND_SUMMARY {
            return next;
        }
        let mut at = next / SPAN;
        let mut wanted = u64::MAX << (next % SPAN);
        for _ in 0..=self.summary.len() {
            // Relaxed: only where to look.
            let bits = self.summary[at].load(Ordering::Relaxed) & wanted;
            if bits != 0 {
                return at * SPAN + bits.trailing_zeros() as usize;
            }
            wanted = u64::MAX;
            at = if at + 1 == self.summary.len() { 0 } else { at + 1 };
        }
        next
    }

    /// Takes exclusive blocks out of `seen`, the group as it was when their handles were checked. Fails if the
    /// group has changed since: the caller checks again.
    #[inline]
    pub(super) fn try_take_out(&self, group: usize, seen: Group, mask: u64) -> bool {
        let next = seen.taken_out(mask);
        // AcqRel: Release, so that who sees the blocks off sees what was done before; Acquire as in `load`.
        self.words[group].compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Makes exclusive blocks shared, as `try_take_out`.
    pub(super) fn try_share(&self, group: usize, seen: Group, mask: u64) -> bool {
        let next = seen.made_shared(mask);
        self.words[group].compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes shared blocks out. The caller owns them: it dropped their last reference.
    pub(super) fn take_out_shared(&self, group: usize, mask: u64) {
        // AcqRel: as in `try_take_out`.
        self.words[group].fetch_and(!(mask | mask << PLANE), Ordering::AcqRel);
    }

    /// Gives blocks that are off back to their owner as they were: exclusive, in the same generation.
    pub(super) fn restore(&self, group: usize, mask: u64) {
        self.words[group].fetch_or(mask << PLANE, Ordering::AcqRel);
    }

    /// Gives blocks that are off back as shared ones.
    pub(super) fn restore_shared(&self, group: usize, mask: u64) {
        self.words[group].fetch_or(mask | mask << PLANE, Ordering::AcqRel);
    }

    /// Hands out blocks that are off, in a new generation: exclusive again.
    pub(super) fn reissue(&self, group: usize, mask: u64) {
        // Both planes are 0 there, so the addition carries nothing; it bumps the version as `claimed` does.
        self.words[group].fetch_add((mask << PLANE) | VERSION, Ordering::AcqRel);
    }

    /// Frees blocks that are off.
    #[inline]
    pub(super) fn free(&self, group: usize, mask: u64) {
        if self.free_unseen(group, mask) {
            // An exchange even if the bit is set already: see `note_empty`. Loom finds the lost bit otherwise.
            self.summary[group / SPAN].fetch_or(1 << (group % SPAN), Ordering::AcqRel);
        }
    }

    /// Frees blocks that are off, of many groups. Groups that had none free are noted in the summary 64 at a time.
    pub(super) fn free_all(&self, runs: impl Iterator<Item = (usize, u64)>) {
        let (mut at, mut bits) = (0, 0);
        for (group, mask) in runs {
            if self.free_unseen(group, mask) {
                if group / SPAN != at && bits != 0 {
                    // As in `free`.
                    self.summary[at].fetch_or(std::mem::take(&mut bits), Ordering::AcqRel);
                }
                at = group / SPAN;
                bits |= 1 << (group % SPAN);
            }
        }
        if bits != 0 {
            self.summary[at].fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// Frees blocks that are off. Returns whether the group had no free ones: its summary bit must be set then.
    #[inline]
    fn free_unseen(&self, group: usize, mask: u64) -> bool {
        // Release pairs with the Acquire of `claim_from`.
        let before = Group(self.words[group].fetch_or(mask, Ordering::AcqRel));
        // Not while a test of a planted fault unwinds, which would end the process.
        debug_assert!(
            std::thread::panicking() || before.off() & mask == mask,
            "blocks were freed that were not off"
        );
        before.free() == 0
    }

    /// Checks the summary. Exact when nothing moves.
    pub(super) fn check_summary(&self) -> std::result::Result<(), String> {
        for group in 0..self.words.len() {
            let bit = self.summary[group / SPAN].load(Ordering::Acquire) >> (group % SPAN) & 1;
            if self.load(group).free() != 0 && bit == 0 {
                return Err(format!("group {group} has free blocks that the summary does not show"));
            }
        }
        Ok(())
    }
}

/// The lowest `count` set bits of `bits`.
fn lowest(bits: u64, count: usize) -> u64 {
    if count == 1 {
        return bits & bits.wrapping_neg();
    }
    if count >= PLANE as usize {
        return bits;
    }
    // Neighbours, as in a pool that is hardly used.
    let run = ((1 << count) - 1) << (bits.trailing_zeros() % u64::BITS);
    if bits & run == run {
        return run;
    }
    let mut rest = bits;
    for _ in 0..count {
        rest &= rest.wrapping_sub(1);
        if rest == 0 {
            return bits;
        }
    }
    bits & !rest
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn new(num_blocks: usize) -> Groups {
        let memory = Asked::new("groups", Groups::num_bytes(num_blocks)).expect("they are few");
        Groups::new(num_blocks, &memory).expect("they are few")
    }

    fn claim(groups: &Groups, count: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        groups.claim::<{ faults::NONE }>(count, |group, mask| {
            ids.extend((0..WIDTH).filter(|bit| mask >> bit & 1 == 1).map(|bit| (group * WIDTH + bit) as u32));
            mask.count_ones() as usize
        });
        ids
    }

    fn free(groups: &Groups, id: u32) {
        let (group, bit) = place(id);
        groups.take_out_shared(group, bit);
        groups.free(group, bit);
    }

    #[test]
    fn every_id_is_handed_out_once() {
        for num_blocks in [1, 23, 24, 25, 24 * 64, 24 * 64 + 1, 9_000] {
            let groups = new(num_blocks);
            let mut ids = claim(&groups, num_blocks);
            ids.sort_unstable();
            assert!(ids.iter().enumerate().all(|(i, id)| *id as usize == i));
            ids.iter().for_each(|id| free(&groups, *id));
            groups.check_summary().unwrap();
        }
    }

    #[test]
    fn a_new_pool_hands_out_its_blocks_in_order_whatever_was_done_with_others() {
        for _ in 0..3 {
            let groups = new(1_000);
            let other = new(5_000);
            let mut ids = Vec::new();
            for count in [1, 1, 30, 24, 500, 444] {
                ids.extend(claim(&groups, count));
                claim(&other, 7);
            }
            assert_eq!(ids, (0..1_000).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_lowest_bits_are_found() {
        assert_eq!([1, 2, 3, 4, 5].map(|count| lowest(0b1011_0100, count)), [4, 0x14, 0x34, 0xb4, 0xb4]);
        assert_eq!(
            [2, 9, 23, 24].map(|count| lowest(0xf0_0000, count)),
            [0x30_0000, 0xf0_0000, 0xf0_0000, 0xf0_0000]
        );
        assert_eq!(lowest(0, 7), 0);
    }

    #[test]
    fn one_free_block_is_found_wherever_it_is() {
        let groups = new(10_000);
        claim(&groups, 10_000);
        for id in [9_999, 0, 4_096, 24, 23, 5_000] {
            free(&groups, id);
            assert_eq!(claim(&groups, 1), [id]);
        }
    }

    #[test]
    fn a_batch_on_an_empty_pool_is_one_run() {
        let groups = new(4_096);
        let ids = claim(&groups, 256);
        assert!(ids.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() <= 1);
    }

    #[test]
    fn a_version_change_defeats_an_exchange_on_an_equal_picture() {
        let groups = new(24);
        claim(&groups, 1);
        let seen = groups.load(0);
        free(&groups, 0);
        claim(&groups, 1);
        assert_eq!(groups.load(0).exclusive(), seen.exclusive());
        assert!(!groups.try_take_out(0, seen, 1));
    }
}
