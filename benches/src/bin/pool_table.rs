//! Prints the tables of `benches/results/block-pool.md`: the pool beside the plain alternatives, in one run.
//!
//! The numbers are chosen to stand a busy machine: CPU time of the thread for one thread, bursts that were measured
//! to overlap for two, percentiles for more threads than cores. `pool-table [alone|pairs|tails|build]`.

#![expect(clippy::print_stdout, reason = "a program that prints tables")]

use hdrhistogram::Histogram;
use kvpager_benches::{
    Array, Direct, Drawn, Magazines, MutexFifo, MutexVec, Peer, Pool, Quarantined, Reserved, Tenants, Worker,
};
use kvpager_core::block_pool::{BlockPool, PoolConfig};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const BLOCKS: u32 = 65_536;
const REPEATS: usize = 7;

/// CPU time of this thread in nanoseconds.
fn cpu_time() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are in order")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// CPU nanoseconds of an operation of one thread, one value a repeat.
fn alone<P: Peer>(peer: &P, batch: usize) -> f64 {
    let mut worker = Worker::new(peer, 0, batch);
    let operations = (400_000 / batch).max(2_000);
    for _ in 0..operations {
        worker.operate();
    }
    let repeat = |_| {
        let start = cpu_time();
        for _ in 0..operations {
            worker.operate();
        }
        (cpu_time() - start) as f64 / operations as f64
    };
    median((0..REPEATS).map(repeat).collect())
}

/// Nanoseconds of an operation of two threads in bursts that overlap for at least 85 % of both. They meet spinning
/// before each burst, so that both have a core when it starts.
fn paired<P: Peer>(peer: &P, batch: usize) -> (f64, usize) {
    let (rounds, done) = ([const { AtomicUsize::new(0) }; 2], AtomicBool::new(false));
    let operations = if batch == 1 { 400 } else { 100 };
    let start = Instant::now();
    let bursts = |thread: usize| {
        let mut worker = Worker::new(peer, thread, batch);
        let mut times = Vec::new();
        for round in 1..=6_000 {
            rounds[thread].store(round, Ordering::Release);
            while rounds[1 - thread].load(Ordering::Acquire) < round {
                if done.load(Ordering::Relaxed) || start.elapsed() > Duration::from_secs(3) {
                    done.store(true, Ordering::Relaxed);
                    return times;
                }
                std::hint::spin_loop();
            }
            let from = start.elapsed();
            for _ in 0..operations {
                worker.operate();
            }
            times.push((from, start.elapsed()));
        }
        times
    };
    let (mine, other) = std::thread::scope(|scope| {
        let other = scope.spawn(|| bursts(1));
        let mine = bursts(0);
        (mine, other.join().expect("the other thread works the same"))
    });
    let mut kept = Vec::new();
    for ((a, b), (c, d)) in mine.into_iter().zip(other) {
        let both = b.min(d).saturating_sub(a.max(c)).as_nanos() as f64;
        let (first, second) = ((b - a).as_nanos() as f64, (d - c).as_nanos() as f64);
        if both >= 0.85 * first.max(second) {
            kept.push((first + second) / 2.0 / f64::from(operations));
        }
    }
    let count = kept.len();
    if count == 0 { (f64::NAN, 0) } else { (median(kept), count) }
}

/// Percentiles of an operation of many threads, in nanoseconds, the clock (some 25) included.
fn tail<P: Peer>(peer: &P, threads: usize, batch: usize) -> [u64; 4] {
    let barrier = Barrier::new(threads);
    let work = |thread: usize| {
        let mut worker = Worker::new(peer, thread, batch);
        let mut times = histogram();
        barrier.wait();
        let end = Instant::now() + Duration::from_millis(1_500);
        let mut before = Instant::now();
        while before < end {
            worker.operate();
            let now = Instant::now();
            times.saturating_record((now - before).as_nanos() as u64);
            before = now;
        }
        times
    };
    let mut sum = histogram();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        for thread in threads {
            sum.add(thread.join().expect("every thread works the same")).expect("same settings");
        }
    });
    [sum.value_at_quantile(0.5), sum.value_at_quantile(0.99), sum.value_at_quantile(0.999), sum.max()]
}

fn print_alone() {
    println!("\none thread, {BLOCKS} blocks, CPU ns per operation (release + allocate a batch)\n");
    println!("| what | batch 1 | batch 16 | batch 256 | ns a block at 256 |\n|---|---|---|---|---|");
    fn row<P: Peer>(name: &str, make: impl Fn() -> P) {
        let times: Vec<f64> = [1, 16, 256].iter().map(|batch| alone(&make(), *batch)).collect();
        let [one, few, many] = times[..] else { return };
        println!("| {name} | {one:.1} | {few:.1} | {many:.0} | {:.2} |", many / 256.0);
    }
    let pool = || Pool::new(BLOCKS, 1, Tenants::Same);
    row("kvpager, direct", || Direct(pool()));
    row("kvpager, direct, guaranteed", || Direct(Pool::new(BLOCKS, 1, Tenants::Different)));
    row("kvpager, from a reservation and back", || Reserved(pool(), 8_192));
    row("kvpager, from a reservation, released to the pool", || Drawn(pool()));
    row("kvpager, through the quarantine", || Quarantined(pool()));
    row("kvpager, magazine", || Magazines(pool()));
    row("kvpager, 10 % free at random, direct", || {
        let pool = pool();
        pool.fragment(10);
        Direct(pool)
    });
    row("Mutex<Vec>", || MutexVec::new(BLOCKS));
    row("Mutex<VecDeque>", || MutexFifo::new(BLOCKS));
    row("ArrayQueue", || Array::new(BLOCKS));
}

fn print_pairs() {
    println!("\ntwo threads side by side, ns per operation per thread (bursts kept)\n");
    println!("| what | batch 1 | batch 16 | batch 256 |\n|---|---|---|---|");
    fn row<P: Peer>(name: &str, make: impl Fn() -> P) {
        let cells: Vec<String> = [1, 16, 256]
            .iter()
            .map(|batch| paired(&make(), *batch))
            .map(|(time, kept)| format!("{time:.0} ({kept})"))
            .collect();
        println!("| {name} | {} |", cells.join(" | "));
    }
    row("kvpager, different tenants", || Direct(Pool::new(BLOCKS, 2, Tenants::Different)));
    row("kvpager, same tenant", || Direct(Pool::new(BLOCKS, 2, Tenants::Same)));
    row("kvpager, from reservations and back", || Reserved(Pool::new(BLOCKS, 2, Tenants::Same), 8_192));
    row("kvpager, magazines", || Magazines(Pool::new(BLOCKS, 2, Tenants::Same)));
    row("Mutex<Vec>", || MutexVec::new(BLOCKS));
    row("Mutex<VecDeque>", || MutexFifo::new(BLOCKS));
    row("ArrayQueue", || Array::new(BLOCKS));
}

fn print_tails() {
    println!("\n8 threads, ns per operation: p50 / p99 / p99.9 / max\n");
    println!("| what | batch 1 | batch 16 |\n|---|---|---|");
    fn row<P: Peer>(name: &str, make: impl Fn() -> P) {
        let cells: Vec<String> = [1, 16]
            .iter()
            .map(|batch| tail(&make(), 8, *batch))
            .map(|[p50, p99, p999, max]| format!("{p50} / {p99} / **{p999}** / {max}"))
            .collect();
        println!("| {name} | {} |", cells.join(" | "));
    }
    row("kvpager, different tenants", || Direct(Pool::new(BLOCKS, 8, Tenants::Different)));
    row("kvpager, same tenant", || Direct(Pool::new(BLOCKS, 8, Tenants::Same)));
    row("kvpager, magazines", || Magazines(Pool::new(BLOCKS, 8, Tenants::Same)));
    row("Mutex<Vec>", || MutexVec::new(BLOCKS));
    row("Mutex<VecDeque>", || MutexFifo::new(BLOCKS));
    row("ArrayQueue", || Array::new(BLOCKS));
}

fn print_build() {
    let build = |_| {
        let start = cpu_time();
        let pool = BlockPool::new(PoolConfig { num_blocks: 1_000_000, ..PoolConfig::default() });
        let time = (cpu_time() - start) as f64 / 1e6;
        assert!(pool.is_ok());
        time
    };
    println!("\nbuilding 1,000,000 blocks: {:.1} ms CPU", median((0..REPEATS).map(build).collect()));
}

fn main() {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|name| name == part);
    for (name, print) in [
        ("alone", print_alone as fn()),
        ("pairs", print_pairs),
        ("tails", print_tails),
        ("build", print_build),
    ] {
        if wanted(name) {
            print();
        }
    }
}
