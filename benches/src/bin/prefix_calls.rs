//! Single calls of the prefix index: their time, and what callgrind counts of them.
//!
//! `prefix-calls match|insert|evict POLICY RESIDENT OWN CALLS` prints percentiles of the nanoseconds of a call. A busy
//! machine hardly moves the low ones. Counts, which it does not move at all:
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='*measured*' target/release/prefix-calls match lru 10000 32 1000
//! ```

#![expect(clippy::print_stdout, reason = "a program that prints figures")]

use kvpager_benches::prefixes::{OWN, POLICIES, SHARED, World};
use kvpager_core::BlockHandle;
use std::time::Instant;

/// Timed and counted. Not inlined, so that callgrind finds it.
#[inline(never)]
fn measured(call: &mut dyn FnMut()) {
    call();
}

fn nanoseconds(call: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    measured(call);
    start.elapsed().as_secs_f64() * 1e9
}

fn matches(world: &mut World, calls: usize) -> Vec<f64> {
    let mut blocks: Vec<BlockHandle> = Vec::with_capacity(SHARED + OWN);
    let call = |_| {
        let place = world.random.below(world.known.len());
        nanoseconds(&mut || world.find(&world.known[place], &mut blocks))
    };
    (0..calls).map(call).collect()
}

fn inserts(world: &mut World, own: usize, calls: usize) -> Vec<f64> {
    let call = |_| {
        let prompt = world.continued(own);
        let elapsed = nanoseconds(&mut || world.insert(&prompt));
        world.index.evict(own as u32);
        elapsed
    };
    (0..calls).map(call).collect()
}

fn evictions(world: &mut World, own: usize, calls: usize) -> Vec<f64> {
    let call = |_| {
        let elapsed = nanoseconds(&mut || {
            world.index.evict(OWN as u32);
        });
        for _ in 0..OWN / own {
            let prompt = world.continued(own);
            world.insert(&prompt);
        }
        elapsed
    };
    (0..calls).map(call).collect()
}

fn main() {
    const USAGE: &str = "usage: prefix-calls match|insert|evict POLICY RESIDENT OWN CALLS";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, policy, numbers @ ..] = arguments.as_slice() else { panic!("{USAGE}") };
    let numbers: Vec<usize> = numbers.iter().filter_map(|text| text.parse().ok()).collect();
    let &[resident, own, calls] = numbers.as_slice() else { panic!("{USAGE}") };
    let eviction = POLICIES.iter().find(|(name, _)| name == policy).expect(USAGE).1;
    let mut world = World::new(resident, own, eviction);
    let mut times = match what.as_str() {
        "match" => matches(&mut world, calls),
        "insert" => inserts(&mut world, own, calls),
        "evict" => evictions(&mut world, own, calls),
        _ => panic!("{USAGE}"),
    };
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what} {policy} {resident} {own}: p1 {:.0} p10 {:.0} p50 {:.0} ns", at(0.01), at(0.1), at(0.5));
}
