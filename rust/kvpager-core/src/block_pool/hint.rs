//! Where each thread looks for free blocks first, so that threads work on different groups.

#[cfg(not(any(loom, shuttle)))]
mod imp {
    use crate::sync::{AtomicU32, Ordering};
    use std::cell::Cell;

    /// Pools that a thread remembers its place in; beyond, two that share an entry make it start anew.
    const REMEMBERED: usize = 4;

    /// Numbers the pools, from 1.
    static POOLS: AtomicU32 = AtomicU32::new(0);

    thread_local! {
        /// `pool << 32 | group`, where this thread last claimed.
        static GROUPS: [Cell<u64>; REMEMBERED] = const { [const { Cell::new(0) }; REMEMBERED] };
    }

    /// A pool's number, and how many threads have started in it.
    #[derive(Debug)]
    pub(in crate::block_pool) struct Hints {
        pool: u32,
        threads: AtomicU32,
    }

    impl Hints {
        pub(in crate::block_pool) fn new() -> Self {
            // Relaxed, here and below: only that each gets another number.
            let pool = POOLS.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            Self { pool, threads: AtomicU32::new(0) }
        }

        #[inline]
        pub(in crate::block_pool) fn load(&self, num_groups: usize) -> usize {
            let hint = GROUPS.with(|groups| groups[self.pool as usize % REMEMBERED].get());
            let group = hint as u32 as usize;
            if (hint >> 32) as u32 == self.pool && group < num_groups {
                group
            } else {
                self.start(num_groups)
            }
        }

        #[inline]
        pub(in crate::block_pool) fn store(&self, group: usize) {
            let hint = u64::from(self.pool) << 32 | group as u64;
            GROUPS.with(|groups| groups[self.pool as usize % REMEMBERED].set(hint));
        }

        /// The first thread starts with the first block, the next ones a golden section of the pool apart.
        #[cold]
        fn start(&self, num_groups: usize) -> usize {
            let thread = self.threads.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9);
            ((u64::from(thread) * num_groups as u64) >> 32) as usize
        }
    }
}

/// In a model every thread starts with the first block, so that they meet.
#[cfg(any(loom, shuttle))]
mod imp {
    #[derive(Debug)]
    pub(in crate::block_pool) struct Hints;

    impl Hints {
        pub(in crate::block_pool) const fn new() -> Self {
            Self
        }

        pub(in crate::block_pool) const fn load(&self, _num_groups: usize) -> usize {
            0
        }

        pub(in crate::block_pool) const fn store(&self, _group: usize) {}
    }
}

pub(super) use imp::Hints;
