//! One word per block: generation, kind, account, references.
//!
//! ```text
//! 63          32 31  29 28     19 18        0
//! [ generation ] [kind] [account] [references]
//! ```
//!
//! The generation grows each time the block leaves its owner, so a handle from before is stale. It wraps after
//! 2^32 releases of one block; a handle would have to be kept that long to be mistaken.
//!
//! Who may write the word is decided by the block's two bits in its [group](super::groups): the one who claimed
//! the block writes with a plain store; a shared block's word changes by compare-exchange only.

use crate::error::{Error, HandleFault};
use crate::ids::{AccountId, BlockHandle};

const REFERENCE_BITS: u32 = 19;
const ACCOUNT_BITS: u32 = 10;
const KIND_BITS: u32 = 3;

/// Most references to one block.
pub(super) const MAX_REFERENCES: u32 = (1 << REFERENCE_BITS) - 1;
/// Most accounts of a pool.
pub const MAX_ACCOUNTS: u32 = 1 << ACCOUNT_BITS;

/// What a block is, as its word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Nobody's, and its bits say free, or are about to.
    Free,
    /// Has one reference and was never shared, or is just becoming shared.
    Held,
    /// Has been shared: references are counted by exchanges.
    Shared,
    /// The index's. Whether it is held or cached is decided by pins on its node.
    Indexed,
    /// Released; a step that may read it is open. `references` has the low bits of the epoch it waits for.
    Leaving,
    /// Its last reference or its place in the index is gone: the call that took it is about to free it.
    Dropped,
    /// In a magazine.
    Stored,
}

const KINDS: [Kind; 8] = [
    Kind::Free,
    Kind::Held,
    Kind::Shared,
    Kind::Indexed,
    Kind::Leaving,
    Kind::Dropped,
    Kind::Stored,
    Kind::Free,
];

/// An unpacked state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) generation: u32,
    pub(super) kind: Kind,
    pub(super) account: AccountId,
    pub(super) references: u32,
}

impl State {
    pub(super) const fn free(generation: u32) -> Self {
        Self { generation, kind: Kind::Free, account: AccountId(0), references: 0 }
    }

    pub(super) const fn held(generation: u32, account: AccountId) -> Self {
        Self { generation, kind: Kind::Held, account, references: 1 }
    }

    pub(super) const fn pack(self) -> u64 {
        (self.generation as u64) << 32
            | (self.kind as u64) << (REFERENCE_BITS + ACCOUNT_BITS)
            | (self.account.0 as u64) << REFERENCE_BITS
            | self.references as u64
    }

    pub(super) const fn unpack(word: u64) -> Self {
        let kind = (word >> (REFERENCE_BITS + ACCOUNT_BITS)) as usize & ((1 << KIND_BITS) - 1);
        Self {
            generation: (word >> 32) as u32,
            kind: KINDS[kind],
            account: AccountId((word >> REFERENCE_BITS) as u32 & (MAX_ACCOUNTS - 1)),
            references: word as u32 & MAX_REFERENCES,
        }
    }

    /// The account of a packed word.
    pub(super) const fn account_of(word: u64) -> AccountId {
        AccountId((word >> REFERENCE_BITS) as u32 & (MAX_ACCOUNTS - 1))
    }

    /// What the low half of a packed word should be, and which bits of a word to compare: the generation, and the
    /// account if one is wanted.
    pub(super) const fn pattern(wanted: Option<AccountId>) -> (u64, u64) {
        match wanted {
            Some(account) => {
                let accounts = (MAX_ACCOUNTS as u64 - 1) << REFERENCE_BITS;
                ((account.0 as u64) << REFERENCE_BITS, u64::MAX << 32 | accounts)
            }
            None => (0, u64::MAX << 32),
        }
    }

    /// The packed word of a block that waits in quarantine for an epoch, in the generation after a packed word's.
    pub(super) const fn leaving<const FAULT: u8>(word: u64, epoch: u64) -> u64 {
        let accounts = (MAX_ACCOUNTS as u64 - 1) << REFERENCE_BITS;
        let kind = (Kind::Leaving as u64) << (REFERENCE_BITS + ACCOUNT_BITS);
        Self::freed::<FAULT>(word) | kind | word & accounts | epoch & MAX_REFERENCES as u64
    }

    /// The packed word of a block of this generation and account, of another kind and without references.
    const fn of_kind(word: u64, kind: Kind) -> u64 {
        let accounts = (MAX_ACCOUNTS as u64 - 1) << REFERENCE_BITS;
        word & (u64::MAX << 32 | accounts) | (kind as u64) << (REFERENCE_BITS + ACCOUNT_BITS)
    }

    /// The packed word of a block that is the index's.
    pub(super) const fn indexed(word: u64) -> u64 {
        Self::of_kind(word, Kind::Indexed)
    }

    /// The packed word of an indexed block that is about to be freed.
    pub(super) const fn dropped(word: u64) -> u64 {
        Self::of_kind(word, Kind::Dropped)
    }

    /// Whether a packed word is that of a handle's block, in the index.
    pub(super) const fn is_indexed(word: u64, block: BlockHandle) -> bool {
        word >> 32 == block.to_bits() >> 32 && word == Self::indexed(word)
    }

    /// The packed word of a free block in the generation after a packed word's.
    pub(super) const fn freed<const FAULT: u8>(word: u64) -> u64 {
        let generation = (word >> 32) as u32;
        let next = generation.wrapping_add((FAULT != super::faults::SAME_GENERATION) as u32);
        (next as u64) << 32
    }

    /// The packed word of a block held by its new owner, in the generation of a free block's word.
    pub(super) const fn handed_out(word: u64, account: AccountId) -> u64 {
        let held = Self::held(0, account).pack();
        (word >> 32) << 32 | held
    }

    /// The same block after it left its owner.
    pub(super) const fn next_generation<const FAULT: u8>(self) -> u32 {
        self.generation.wrapping_add((FAULT != super::faults::SAME_GENERATION) as u32)
    }

    /// Whether it is held by references.
    pub(super) const fn is_referenced(self) -> bool {
        matches!(self.kind, Kind::Held | Kind::Shared)
    }

    /// What is wrong with a handle that was expected to name this block while it is held by references.
    pub(super) fn fault(self, block: BlockHandle) -> Error {
        let ahead = block.generation().wrapping_sub(self.generation);
        let fault = match self.kind {
            _ if ahead != 0 && ahead < u32::MAX / 2 => HandleFault::NeverIssued,
            _ if ahead != 0 => HandleFault::Stale,
            Kind::Free | Kind::Leaving | Kind::Stored => HandleFault::NeverIssued,
            Kind::Dropped => HandleFault::OverRelease,
            Kind::Held | Kind::Shared | Kind::Indexed => HandleFault::WrongState,
        };
        self.error(block, fault)
    }

    pub(super) const fn error(self, block: BlockHandle, fault: HandleFault) -> Error {
        Error::InvalidHandle {
            id: block.id(),
            generation: block.generation(),
            current: self.generation,
            fault,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_cuts_agree_with_the_fields() {
        let state = State { generation: u32::MAX, kind: Kind::Shared, account: AccountId(9), references: 3 };
        assert_eq!(State::account_of(state.pack()), AccountId(9));
        let free = State::freed::<{ super::super::faults::NONE }>(state.pack());
        assert_eq!(State::unpack(free), State::free(0));
        let leaving = State::leaving::<{ super::super::faults::NONE }>(state.pack(), 5);
        let expected = State { generation: 0, kind: Kind::Leaving, account: AccountId(9), references: 5 };
        assert_eq!(State::unpack(leaving), expected);
        let word = State::handed_out(State::free(7).pack(), AccountId(5));
        assert_eq!(State::unpack(word), State::held(7, AccountId(5)));
    }

    #[test]
    fn every_field_survives_packing() {
        for kind in &KINDS[..7] {
            for (generation, account, references) in
                [(0, 0, 0), (u32::MAX, MAX_ACCOUNTS - 1, MAX_REFERENCES), (7, 3, 1)]
            {
                let state = State { generation, kind: *kind, account: AccountId(account), references };
                assert_eq!(State::unpack(state.pack()), state);
            }
        }
    }
}
