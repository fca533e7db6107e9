//! Random schedules of models that are too large for all: four threads of random legal work. `make test-loom` runs
//! them after the exact models.
//!
//! A failure prints the seed; `KVPAGER_SHUTTLE_SEED=<seed>` runs that one alone. `KVPAGER_SHUTTLE_ROUNDS` is the number
//! of seeds, each with [`SCHEDULES`] schedules.

#![cfg(shuttle)]
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "block_pool/work.rs"]
mod work;

use kvpager_core::block_pool::faults;
use std::sync::Arc;
use work::{Shared, Worker};

/// Schedules of a seed.
const SCHEDULES: usize = 40;
const THREADS: usize = 4;
const OPERATIONS: usize = 25;

fn work<const F: u8>(seed: u64) {
    let shared = Arc::new(Shared::<F>::new(11, THREADS as u32));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let shared = Arc::clone(&shared);
            shuttle::thread::spawn(move || {
                let mut worker = Worker::new(&shared, thread, seed);
                worker.work(OPERATIONS);
                worker.end()
            })
        })
        .collect();
    let cached = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    shared.finish(cached);
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

fn run<const F: u8>(rounds: u64) {
    let seeds = match number("KVPAGER_SHUTTLE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("KVPAGER_SHUTTLE_ROUNDS").unwrap_or(rounds),
    };
    for seed in seeds {
        println!("if this fails: KVPAGER_SHUTTLE_SEED={seed}");
        shuttle::check_random_with_seed(move || work::<F>(seed), seed, SCHEDULES);
    }
}

#[test]
fn random_work_loses_and_doubles_nothing() {
    run::<{ faults::NONE }>(60);
}

#[test]
fn a_rare_change_of_thread_finds_nothing_either() {
    let rounds = number("KVPAGER_SHUTTLE_ROUNDS").unwrap_or(20);
    for seed in 0..rounds {
        println!("work of seed {seed}; the schedule is printed with the failure");
        shuttle::check_pct(move || work::<{ faults::NONE }>(seed), SCHEDULES, 3);
    }
}

macro_rules! planted {
    ($($name:ident: $fault:ident),* $(,)?) => {
        mod planted {
            $(#[test] #[should_panic] fn $name() { super::run::<{ super::faults::$fault }>(400) })*
        }
    };
}

planted!(
    the_same_generation_is_seen: SAME_GENERATION,
    a_blind_release_is_seen: BLIND_RELEASE,
    a_lost_push_is_seen: LOSE_LATE_PUSH,
    a_leaking_reservation_is_seen: LEAK_RESERVATION,
    a_torn_quota_is_seen: TORN_QUOTA,
    torn_references_are_seen: TORN_REFERENCES,
);
