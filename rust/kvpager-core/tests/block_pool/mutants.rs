//! Every planted fault must be seen by some promise; the five that only an interleaving shows, by a model in
//! `block_pool_loom.rs` (`make test-mutants` runs both).

use crate::promises;
use kvpager_core::block_pool::faults;
use std::panic::catch_unwind;

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
    for (name, promises) in &caught {
        println!("{name:18} {}", promises.join(", "));
    }
    assert_eq!(broken::<{ faults::NONE }>(), Vec::<&str>::new());
    let survivors: Vec<_> =
        caught.iter().filter(|(_, promises)| promises.is_empty()).map(|(name, _)| name).collect();
    assert!(survivors.is_empty(), "not seen: {survivors:?}");
}
