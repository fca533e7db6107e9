//! The stress engine: a sound pool passes, and every planted fault is seen, with a history that says how.

#![expect(clippy::unwrap_used, reason = "tests")]

use kvpager_core::block_pool::faults;
use kvpager_core::stress::{MIXES, Stress, StressConfig, fault_names};
use serde_json::Value;
use std::time::{Duration, Instant};

fn run(mix: &str, seed: u64, fault: Option<&str>, time: Duration) -> Value {
    run_and_shrink(mix, seed, fault, time, Duration::from_millis(300))
}

fn run_and_shrink(mix: &str, seed: u64, fault: Option<&str>, time: Duration, shrink_time: Duration) -> Value {
    let config = StressConfig::new((8, 4096, 4), mix, seed, fault).unwrap();
    let mut stress = Stress::new(StressConfig { shrink_time, ..config });
    let begin = Instant::now();
    while stress.is_sound() && begin.elapsed() < time {
        stress.advance(time);
    }
    stress.report()
}

#[test]
fn a_sound_pool_passes_every_mix() {
    for (mix, _) in MIXES {
        let begin = Instant::now();
        let mut stress = Stress::new(StressConfig::new((8, 4096, 4), mix, 7, None).unwrap());
        // Longer where others have the processors.
        while begin.elapsed().as_secs() < 2
            || (stress.num_operations() < 10_000 && begin.elapsed().as_secs() < 60)
        {
            stress.advance(Duration::from_secs(1));
        }
        let report = stress.report();
        assert_eq!(report["ok"], true, "{report:#}");
        assert!(report["operations"].as_u64().unwrap() > 1_000, "{report:#}");
        assert!(report["checks"].as_u64().unwrap() > 4, "{report:#}");
        assert!(report["latency_ns"]["count"].as_u64().unwrap() > 1_000, "{report:#}");
    }
}

#[test]
fn a_round_does_something_however_little_time_it_has() {
    let mut stress = Stress::new(StressConfig::new((3, 100, 2), "all", 5, None).unwrap());
    stress.advance(Duration::ZERO);
    assert!(stress.is_sound(), "{:#}", stress.report());
    assert!(stress.num_operations() > 100, "{:#}", stress.report());
}

#[test]
fn every_planted_fault_is_seen() {
    for name in fault_names() {
        let begin = Instant::now();
        let report = run("all", 1, Some(name), Duration::from_secs(300));
        let history = &report["history"];
        println!(
            "{name:18} {:5.2} s, {} rounds, {} operations; {} {}/{}, {} operations on {} blocks: {}",
            begin.elapsed().as_secs_f64(),
            report["rounds"],
            report["operations"],
            history["way"],
            history["failures"],
            history["runs"],
            history["operations"].as_array().map_or(0, Vec::len),
            history["blocks"],
            history["text"],
        );
        assert_eq!(report["ok"], false, "{name} was not seen");
        assert!(!report["violations"].as_array().unwrap().is_empty());
    }
    // Two have a second name; one, a missing ordering, is for loom and the sanitizer.
    assert_eq!(fault_names().count(), faults::ALL.len() + 2 - 1);
}

#[test]
fn what_one_thread_can_see_is_shown_by_a_few_operations() {
    for (name, most) in
        [("double-release", 20), ("stale-handle", 8), ("skip-quarantine", 8), ("leak-magazine", 8)]
    {
        let time = Duration::from_secs(60);
        // Which history there is to make smaller is a matter of timing: the next seed is the next chance.
        let mut tried = Vec::new();
        let is_shown = (1..=3).any(|seed| {
            let history = run_and_shrink("all", seed, Some(name), time, time)["history"].clone();
            let is_small =
                history["operations"].as_array().is_some_and(|operations| operations.len() <= most);
            let is_proof = history["way"] == "in_order" && is_small;
            tried.push(history);
            is_proof
        });
        assert!(is_shown, "{name}: {tried:#?}");
    }
}

#[test]
fn nonsense_is_refused_with_the_numbers() {
    for (numbers, text) in [
        ((0, 1, 1), "threads is 0"),
        ((257, 1, 1), "256"),
        ((1, 0, 1), "blocks is 0"),
        ((1, 1 << 25, 1), "33554432"),
        ((1, 1, 0), "tenants is 0"),
        ((1, 1, 251), "250"),
    ] {
        let error = StressConfig::new(numbers, "all", 0, None).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    assert!(StressConfig::new((1, 1, 1), "some", 0, None).unwrap_err().to_string().contains("quota"));
    assert!(
        StressConfig::new((1, 1, 1), "all", 0, Some("none"))
            .unwrap_err()
            .to_string()
            .contains("early-permit")
    );
}
