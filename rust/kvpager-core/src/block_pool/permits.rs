//! The two counters that every account draws on, in one word, and the pool's other totals.

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

/// What every allocation or pin writes, or reads to see whether the peak rises.
#[derive(Debug)]
struct Totals {
    permits: AtomicU64,
    /// In the index and not held, of all accounts. Changed by the index only.
    cached: AtomicI64,
    /// Blocks and pinned capacity that wait for a step to close.
    quarantined: AtomicI64,
    /// Written only while it rises.
    peak_held: AtomicI64,
}

/// The pool's totals, in one line: who needs one of them needs the others.
#[derive(Debug)]
pub(super) struct PermitCounter {
    totals: CachePadded<Totals>,
    capacity: u32,
}

impl PermitCounter {
    pub(super) fn new(capacity: u32) -> Self {
        let word = AtomicU64::new(Permits { free: capacity, shared: capacity }.pack());
        let [cached, quarantined, peak_held] = std::array::from_fn(|_| AtomicI64::new(0));
        Self { totals: CachePadded::new(Totals { permits: word, cached, quarantined, peak_held }), capacity }
    }

    // Relaxed, in what follows: statistics.

    pub(super) fn cached(&self) -> i64 {
        self.totals.cached.load(Ordering::Relaxed)
    }

    pub(super) fn count_cached(&self, change: i64) {
        self.totals.cached.fetch_add(change, Ordering::Relaxed);
    }

    pub(super) fn count_quarantined(&self, change: i64) {
        self.totals.quarantined.fetch_add(change, Ordering::Relaxed);
    }

    pub(super) fn peak_held(&self) -> i64 {
        self.totals.peak_held.load(Ordering::Relaxed)
    }

    /// Raises the peak to what is held now.
    pub(super) fn note_peak(&self) {
        let quarantined = self.totals.quarantined.load(Ordering::Relaxed);
        let held = i64::from(self.capacity) - i64::from(self.load().free) - self.cached() - quarantined;
        if held > self.peak_held() {
            self.totals.peak_held.fetch_max(held, Ordering::Relaxed);
        }
    }

    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(super) fn load(&self) -> Permits {
        // Relaxed: a number for statistics and waiting.
        Permits::unpack(self.totals.permits.load(Ordering::Relaxed))
    }

    /// Takes both or neither. `in_account` is what the account can add from its guarantee, for the error.
    #[inline]
    pub(super) fn take(&self, wanted: Permits, in_account: u64) -> Result<()> {
        if wanted == (Permits { free: 0, shared: 0 }) {
            return Ok(());
        }
        let cell = &self.totals.permits;
        let mut word = cell.load(Ordering::Relaxed);
        loop {
            let now = Permits::unpack(word);
            if now.shared < wanted.shared || now.free < wanted.free {
                return Err(self.refused(now, wanted, in_account));
            }
            let next = Permits { free: now.free - wanted.free, shared: now.shared - wanted.shared };
            // Acquire pairs with the Release of `give`: the blocks behind the permits are published. A failure
            // means that another thread took or gave.
            match cell.compare_exchange_weak(word, next.pack(), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(changed) => word = changed,
            }
        }
    }

    #[cold]
    fn refused(&self, now: Permits, wanted: Permits, in_account: u64) -> Error {
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
            cached: self.cached().max(0) as u64,
        }
    }

    /// Gives permits. What backs them has been published before.
    #[inline]
    pub(super) fn give(&self, permits: Permits) {
        if permits != (Permits { free: 0, shared: 0 }) {
            // Release pairs with the Acquire of `take`.
            self.totals.permits.fetch_add(permits.pack(), Ordering::AcqRel);
        }
    }
}
