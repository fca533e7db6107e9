//! Nothing is allocated after construction.

use crate::support::{blank, pool};
use kvpager_core::block_pool::{Magazine, Quota, faults};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_is_allocated_after_construction() {
    let (pool, account) = pool::<{ faults::NONE }>(4_096);
    let (mut one, mut many, mut shared) = (blank(1), blank(1_000), blank(100));
    let before = ALLOCATIONS.get();
    for _ in 0..3 {
        pool.allocate(account, &mut one).unwrap();
        pool.allocate(account, &mut many).unwrap();
        pool.allocate(account, &mut shared).unwrap();
        pool.retain(&shared).unwrap();
        pool.release(&shared).unwrap();
        let step = pool.open_step().unwrap();
        pool.release(&one).unwrap();
        pool.release(&many).unwrap();
        pool.release(&shared).unwrap();
        pool.close_step(step).unwrap();

        let mut reservation = pool.reserve(account, 1_500).unwrap();
        reservation.allocate(&mut many).unwrap();
        reservation.put_back(&many[..500]).unwrap();
        reservation.allocate(&mut many[..500]).unwrap();
        drop(reservation);
        pool.index_blocks(&many).unwrap();
        let step = pool.open_step().unwrap();
        pool.unhold_cached(account, 1_000).unwrap();
        pool.close_step(step).unwrap();
        pool.hold_cached(account, 10).unwrap();
        pool.unhold_cached(account, 10).unwrap();
        pool.evict(&many).unwrap();

        let mut magazine = Magazine::new(&pool, account).unwrap();
        one[0] = magazine.allocate().unwrap();
        magazine.release(one[0]).unwrap();
        drop(magazine);
        pool.set_quota(account, Quota { guaranteed: 7, limit: 4_096 }).unwrap();
        assert_eq!(pool.stats().free, 4_096);
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    pool.check_invariants().unwrap();
}
