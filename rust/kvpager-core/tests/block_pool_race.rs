//! A plain program of random legal work, for the thread sanitizer: `make test-tsan`. It has no test harness, since std
//! is not instrumented and the harness would be reported. What a block's owner writes is plain memory, so an edge that
//! is missing in the pool is a race there. `cargo test` runs it shortly without the sanitizer.
//!
//! `KVPAGER_RACE_ROUNDS` is the number of rounds; `KVPAGER_RACE_FAULT=relaxed-bits` plants a claim that acquires
//! nothing, which the sanitizer must report.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test that is a program")]

#[cfg(not(any(loom, shuttle)))]
#[path = "block_pool/work.rs"]
mod work;

#[cfg(not(any(loom, shuttle)))]
fn round<const F: u8>(seed: u64) {
    use work::{Shared, Worker};
    const THREADS: usize = 4;
    // Never freed: the sanitizer does not follow the fence by which the last owner of an `Arc` frees it.
    let shared: &'static Shared<F> = Box::leak(Box::new(Shared::new(100, THREADS as u32)));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            std::thread::spawn(move || {
                let mut worker = Worker::new(shared, thread, seed);
                worker.work(4_000);
                worker.end()
            })
        })
        .collect();
    let cached = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    shared.finish(cached);
}

#[cfg(not(any(loom, shuttle)))]
fn main() {
    use kvpager_core::block_pool::faults;
    let rounds = std::env::var("KVPAGER_RACE_ROUNDS").map_or(3, |value| value.parse().unwrap());
    let relaxed = std::env::var("KVPAGER_RACE_FAULT").is_ok_and(|fault| fault == "relaxed-bits");
    for seed in 0..rounds {
        if relaxed { round::<{ faults::RELAXED_BITS }>(seed) } else { round::<{ faults::NONE }>(seed) }
    }
    println!("{rounds} rounds of random work lost and doubled nothing");
}

#[cfg(any(loom, shuttle))]
fn main() {}
