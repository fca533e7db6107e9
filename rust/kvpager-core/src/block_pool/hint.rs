//! Where each thread looks for free blocks first, so that threads work on different groups.

#[cfg(not(loom))]
mod imp {
    use crate::sync::{AtomicU32, Ordering};
    use std::cell::Cell;

    /// Numbers the threads that ever asked.
    static THREADS: AtomicU32 = AtomicU32::new(0);

    thread_local! {
        /// The group where this thread last claimed; `u32::MAX` before the first time.
        static GROUP: Cell<u32> = const { Cell::new(u32::MAX) };
    }

    pub(in crate::block_pool) fn load(num_groups: usize) -> usize {
        match GROUP.get() as usize {
            group if group < num_groups => group,
            _ => spread(num_groups),
        }
    }

    pub(in crate::block_pool) fn store(group: usize) {
        GROUP.set(group as u32);
    }

    /// Successive threads start a golden section of the pool apart.
    #[cold]
    fn spread(num_groups: usize) -> usize {
        // Relaxed: only that each thread gets another number.
        let thread = THREADS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9);
        ((u64::from(thread) * num_groups as u64) >> 32) as usize
    }
}

#[cfg(loom)]
mod imp {
    pub(in crate::block_pool) fn load(_num_groups: usize) -> usize {
        0
    }

    pub(in crate::block_pool) fn store(_group: usize) {}
}

pub(super) use imp::{load, store};
