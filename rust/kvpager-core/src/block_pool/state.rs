//! One word per block: generation, kind, owner, references.
//!
//! ```text
//! 63          32 31   30 29      20 19        0
//! [ generation ] [ kind ] [ account ] [ references ]
//! ```
//!
//! The generation grows each time the block becomes free, so a handle from before is stale. It wraps after 2^32
//! releases of one block; a handle would have to be kept that long to be mistaken.

use crate::error::{Error, HandleFault, Result};
use crate::ids::{AccountId, BlockHandle};

/// Most references to one block.
pub(super) const MAX_REFERENCES: u32 = (1 << 20) - 1;
/// Most accounts of a pool.
pub(super) const MAX_ACCOUNTS: u32 = 1 << 10;

/// What a block is, as its word says. Whether an indexed block is held or cached is decided by its node's pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nobody's. Its bit in the bitmap is set, or about to be.
    Free,
    /// Referenced by sequences.
    Held,
    /// The index's.
    Indexed,
    /// Its last reference is gone: a release is under way, or a step that may read it is open.
    Leaving,
}

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

    pub(super) const fn pack(self) -> u64 {
        let kind = match self.kind {
            Kind::Free => 0,
            Kind::Held => 1,
            Kind::Indexed => 2,
            Kind::Leaving => 3,
        };
        (self.generation as u64) << 32 | kind << 30 | (self.account.0 as u64) << 20 | self.references as u64
    }

    pub(super) const fn unpack(word: u64) -> Self {
        let kind = match (word >> 30) & 3 {
            0 => Kind::Free,
            1 => Kind::Held,
            2 => Kind::Indexed,
            _ => Kind::Leaving,
        };
        Self {
            generation: (word >> 32) as u32,
            kind,
            account: AccountId(((word >> 20) & (MAX_ACCOUNTS as u64 - 1)) as u32),
            references: (word & MAX_REFERENCES as u64) as u32,
        }
    }

    /// Checks that a handle names this block in this kind.
    pub(super) fn expect(self, block: BlockHandle, kind: Kind) -> Result<Self> {
        if self.generation != block.generation() {
            return Err(self.fault(block, HandleFault::Stale));
        }
        match (self.kind, kind) {
            (found, wanted) if found == wanted => Ok(self),
            (Kind::Leaving | Kind::Free, _) => Err(self.fault(block, HandleFault::OverRelease)),
            _ => Err(self.fault(block, HandleFault::WrongState)),
        }
    }

    pub(super) const fn fault(self, block: BlockHandle, fault: HandleFault) -> Error {
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
    fn every_field_survives_packing() {
        for kind in [Kind::Free, Kind::Held, Kind::Indexed, Kind::Leaving] {
            for (generation, account, references) in
                [(0, 0, 0), (u32::MAX, MAX_ACCOUNTS - 1, MAX_REFERENCES), (7, 3, 1)]
            {
                let state = State { generation, kind, account: AccountId(account), references };
                assert_eq!(State::unpack(state.pack()), state);
            }
        }
    }
}
