//! Every planted fault must be seen by some promise; those that only an interleaving shows, by a model in
//! `block_pool_loom.rs` (`make test-mutants` runs both).

use crate::promises;
use kvpager_core::block_pool::faults;
use std::panic::catch_unwind;

/// Faults that need an interleaving or a reordering to show: each has a model in `block_pool_loom.rs`.
const BY_MODELS: [&str; 6] =
    ["early-permit", "blind-summary", "lose-late-push", "torn-quota", "torn-references", "relaxed-bits"];

/// The promises that a pool with a fault breaks.
fn broken<const F: u8>() -> Vec<&'static str> {
    let all = promises::all::<F>().into_iter();
    all.filter(|(_, promise)| catch_unwind(promise).is_err()).map(|(name, _)| name).collect()
}

#[test]
fn every_planted_fault_is_seen() {
    let caught = [
        ("same-generation", broken::<{ faults::SAME_GENERATION }>()),
        ("blind-retain", broken::<{ faults::BLIND_RETAIN }>()),
        ("blind-evict", broken::<{ faults::BLIND_EVICT }>()),
        ("blind-release", broken::<{ faults::BLIND_RELEASE }>()),
        ("keep-capacity", broken::<{ faults::KEEP_CAPACITY }>()),
        ("skip-quarantine", broken::<{ faults::SKIP_QUARANTINE }>()),
        ("lend-guarantees", broken::<{ faults::LEND_GUARANTEES }>()),
        ("leak-reservation", broken::<{ faults::LEAK_RESERVATION }>()),
        ("leak-magazine", broken::<{ faults::LEAK_MAGAZINE }>()),
        ("keep-partial", broken::<{ faults::KEEP_PARTIAL }>()),
    ];
    let mut covered: Vec<_> = caught.iter().map(|(name, _)| *name).chain(BY_MODELS).collect();
    let mut all: Vec<_> = faults::ALL.iter().map(|(_, name)| *name).collect();
    covered.sort_unstable();
    all.sort_unstable();
    assert_eq!(covered, all, "a fault without a test");
    for (name, promises) in &caught {
        println!("{name:18} {}", promises.join(", "));
    }
    assert_eq!(broken::<{ faults::NONE }>(), Vec::<&str>::new());
    let survivors: Vec<_> =
        caught.iter().filter(|(_, promises)| promises.is_empty()).map(|(name, _)| name).collect();
    assert!(survivors.is_empty(), "not seen: {survivors:?}");
}
