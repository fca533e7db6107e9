//! What a worker does in its round takes no memory from the allocator.

use kvpager_core::stress::{Stress, StressConfig};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Allocations an operation: those of a round, divided by its operations.
const MOST: f64 = 0.005;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn operations_allocate_nothing() {
    let mut stress = Stress::new(StressConfig::new((2, 500, 3), "alloc", 11, None).unwrap());
    let (mut least, mut operations) = (f64::MAX, 0);
    let begin = Instant::now();
    // Until a round has many operations, however few it has where others have the processors.
    while least >= MOST && begin.elapsed().as_secs() < 60 {
        let (before, done) = (ALLOCATIONS.load(Ordering::Relaxed), stress.num_operations());
        stress.advance(Duration::from_secs(1));
        operations = stress.num_operations() - done;
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        least = least.min(allocations as f64 / operations as f64);
    }
    assert!(stress.is_sound(), "{:#}", stress.report());
    // A round makes a pool and threads, whatever it does; with many operations that is next to nothing for each. One
    // that allocated would show as 0.01 and more. Refusals that carry a text are left out by the mix.
    assert!(least < MOST, "{least} allocations an operation, the last round had {operations}");
}
