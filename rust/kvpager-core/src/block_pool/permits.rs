//! The two counters that every account draws on, in one word.

use crate::error::{Error, Result};
use crate::sync::{AtomicI64, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// An unpacked permit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Permits {
    /// Free blocks that nobody has a permit for yet.
    pub(super) free: u32,
    /// Capacity that is neither guaranteed to an account nor committed beyond a guarantee.
    pub(super) shared: u32,
}

impl Permits {
    const fn pack(self) -> u64 {
        (self.free as u64) << 32 | self.shared as u64
    }

    const fn unpack(word: u64) -> Self {
        Self { free: (word >> 32) as u32, shared: word as u32 }
    }
}

/// The permit word, alone in its line: every allocation writes it.
#[derive(Debug)]
pub(super) struct PermitCounter {
    word: CachePadded<AtomicU64>,
    capacity: u32,
}

impl PermitCounter {
    pub(super) fn new(capacity: u32) -> Self {
        let word = AtomicU64::new(Permits { free: capacity, shared: capacity }.pack());
        Self { word: CachePadded::new(word), capacity }
    }

    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(super) fn load(&self) -> Permits {
        // Relaxed: a number for statistics and waiting.
        Permits::unpack(self.word.load(Ordering::Relaxed))
    }

    /// Takes both or neither. `in_account` is what the account can add from its guarantee, for the error.
    #[inline]
    pub(super) fn take(&self, wanted: Permits, in_account: u64, cached: &AtomicI64) -> Result<()> {
        if wanted == (Permits { free: 0, shared: 0 }) {
            return Ok(());
        }
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let now = Permits::unpack(word);
            if now.shared < wanted.shared || now.free < wanted.free {
                return Err(self.refused(now, wanted, in_account, cached));
            }
            let next = Permits { free: now.free - wanted.free, shared: now.shared - wanted.shared };
            // Acquire pairs with the Release of `give`: the blocks behind the permits are published. A failure
            // means that another thread took or gave.
            match self.word.compare_exchange_weak(word, next.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(changed) => word = changed,
            }
        }
    }

    #[cold]
    fn refused(&self, now: Permits, wanted: Permits, in_account: u64, cached: &AtomicI64) -> Error {
        if now.shared < wanted.shared {
            return Error::OutOfBlocks {
                needed: u64::from(wanted.shared) + in_account,
                available: u64::from(now.shared) + in_account,
                capacity: u64::from(self.capacity),
            };
        }
        Error::NeedsReclaim {
            needed: u64::from(wanted.free),
            free: u64::from(now.free),
            cached: cached.load(Ordering::Relaxed).max(0) as u64,
        }
    }

    /// Gives permits. What backs them has been published before.
    #[inline]
    pub(super) fn give(&self, permits: Permits) {
        if permits != (Permits { free: 0, shared: 0 }) {
            // Release pairs with the Acquire of `take`.
            self.word.fetch_add(permits.pack(), Ordering::AcqRel);
        }
    }
}
