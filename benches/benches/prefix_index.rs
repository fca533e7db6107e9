//! Native calls of the prefix index. Blocks of 16, sequences of 32 shared and 32 own blocks, uint32 tokens; each row
//! names the blocks that are resident. `cargo bench -p kvpager-benches --bench prefix_index`.
//!
//! Times are of one thread unless the row says otherwise. `elem/s` counts blocks; its inverse is the time a block.
//! The replay needs the traces (`KVPAGER_SHARED`, or `shared/` beside the repository) and is left out without them.

#![expect(clippy::print_stdout, reason = "memory is a figure, not a time")]

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flate2::read::GzDecoder;
use kvpager_benches::prefixes::{BLOCK_SIZE, OWN, POLICIES, Random, SHARED, World};
use kvpager_core::prefix_index::EvictionPolicy;
use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RESIDENT: [usize; 3] = [10_000, 100_000, 1_000_000];

fn matches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match + pin + touch + unpin, 64 blocks");
    group.throughput(Throughput::Elements((SHARED + OWN) as u64));
    for (name, eviction) in POLICIES {
        for resident in RESIDENT {
            let mut world = World::new(resident, OWN, eviction);
            let mut blocks = Vec::with_capacity(SHARED + OWN);
            group.bench_function(BenchmarkId::new(name, resident), |bencher| {
                bencher.iter(|| {
                    let place = world.random.below(world.known.len());
                    world.find(&world.known[place], &mut blocks);
                });
            });
        }
    }
    group.finish();
}

/// Time in which `threads` threads do `rounds` matches each, all of `hot` prompts, beside a writer that inserts a new
/// prompt for a tenth of the time if there is one.
fn together(world: &World, threads: usize, rounds: u64, hot: usize, has_writer: bool) -> Duration {
    let (start, is_over) = (Barrier::new(threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        if has_writer {
            scope.spawn(|| {
                let mut random = Random(77);
                let mut prompt = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    prompt.clear();
                    random.tokens(OWN * BLOCK_SIZE, &mut prompt);
                    let begin = Instant::now();
                    world.insert(&prompt);
                    std::thread::sleep(9 * begin.elapsed());
                    world.index.evict(OWN as u32);
                }
            });
        }
        let readers: Vec<_> = (0..threads)
            .map(|thread| {
                let start = &start;
                scope.spawn(move || {
                    let mut random = Random(thread as u64 + 1);
                    let mut blocks = Vec::with_capacity(SHARED + OWN);
                    start.wait();
                    for _ in 0..rounds {
                        world.find(&world.known[random.below(hot)], &mut blocks);
                    }
                })
            })
            .collect();
        start.wait();
        let begin = Instant::now();
        readers.into_iter().for_each(|reader| reader.join().expect("a reader ends"));
        let elapsed = begin.elapsed();
        is_over.store(true, Ordering::Relaxed);
        elapsed
    })
}

fn threads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match on threads, 100k resident");
    for (name, eviction) in [("lru", EvictionPolicy::Lru), ("clock", EvictionPolicy::Clock)] {
        let world = World::new(100_000, OWN, eviction);
        let all = world.known.len();
        for (row, hot, has_writer) in
            [("any prompt", all, false), ("any prompt, a writer", all, true), ("one hot prompt", 1, false)]
        {
            for threads in [1, 2] {
                group.throughput(Throughput::Elements((threads * (SHARED + OWN)) as u64));
                let id = BenchmarkId::new(format!("{name}, {row}"), threads);
                group.bench_function(id, |bencher| {
                    bencher.iter_custom(|rounds| together(&world, threads, rounds, hot, has_writer));
                });
            }
        }
    }
    group.finish();
}

fn inserts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("insert + release of 32 new blocks below 32 shared");
    group.throughput(Throughput::Elements(OWN as u64));
    group
        .measurement_time(Duration::from_millis(500))
        .warm_up_time(Duration::from_millis(200))
        .sample_size(20);
    for resident in RESIDENT {
        let mut world = World::new(resident, OWN, EvictionPolicy::Lru);
        group.bench_function(BenchmarkId::from_parameter(resident), |bencher| {
            bencher.iter_custom(|rounds| {
                let mut elapsed = Duration::ZERO;
                for _ in 0..rounds {
                    let prompt = world.continued(OWN);
                    let begin = Instant::now();
                    world.insert(&prompt);
                    elapsed += begin.elapsed();
                    world.index.evict(OWN as u32);
                }
                elapsed
            });
        });
    }
    group.finish();
}

fn evictions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("evict 32 blocks in one call");
    // What is evicted is put back between the calls, untimed and many times as long.
    group
        .measurement_time(Duration::from_millis(300))
        .warm_up_time(Duration::from_millis(100))
        .sample_size(20);
    for (name, eviction) in POLICIES {
        for resident in [250_000, 1_000_000] {
            for leaf in [32, 4, 1] {
                let mut world = World::new(resident, leaf, eviction);
                let id = BenchmarkId::new(format!("{name}, leaves of {leaf}"), resident);
                group.bench_function(id, |bencher| {
                    bencher.iter_custom(|rounds| {
                        let mut elapsed = Duration::ZERO;
                        for _ in 0..rounds {
                            let begin = Instant::now();
                            black_box(world.index.evict(OWN as u32));
                            elapsed += begin.elapsed();
                            for _ in 0..OWN / leaf {
                                let prompt = world.continued(leaf);
                                world.insert(&prompt);
                            }
                        }
                        elapsed
                    });
                });
            }
        }
    }
    group.finish();
}

/// The first 3,000 prompts of the Mooncake conversation trace as tokens: a trace block is 512 of them.
fn conversation() -> Option<Vec<Vec<u32>>> {
    let beside = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let shared = std::env::var_os("KVPAGER_SHARED").map_or(beside, PathBuf::from);
    let file = std::fs::File::open(shared.join("traces/mooncake_conversation_trace.jsonl.gz")).ok()?;
    let parse = |line: std::io::Result<String>| {
        let row: serde_json::Value = serde_json::from_str(&line.ok()?).ok()?;
        let num_tokens = row["input_length"].as_u64()? as usize;
        let mut tokens = Vec::with_capacity(num_tokens + 512);
        for id in row["hash_ids"].as_array()? {
            Random(id.as_u64()? * 2 + 1).tokens(512, &mut tokens);
        }
        tokens.truncate(num_tokens / BLOCK_SIZE * BLOCK_SIZE);
        Some(tokens)
    };
    BufReader::new(GzDecoder::new(file)).lines().take(3_000).map(parse).collect()
}

fn replay(criterion: &mut Criterion) {
    let Some(prompts) = conversation() else {
        println!("replay: left out, the trace is not there");
        return;
    };
    let num_blocks: usize = prompts.iter().map(|prompt| prompt.len() / BLOCK_SIZE).sum();
    let mut group = criterion.benchmark_group("replay of 3,000 conversation prompts, 500,000 blocks");
    group.throughput(Throughput::Elements(num_blocks as u64)).sample_size(10);
    for (name, eviction) in POLICIES {
        group.bench_function(name, |bencher| {
            let ready = || World::empty(500_000, eviction);
            let run = |world: World| {
                prompts.iter().for_each(|prompt| world.insert(prompt));
                world
            };
            bencher.iter_batched(ready, run, BatchSize::PerIteration);
        });
    }
    group.finish();
}

fn memory(_: &mut Criterion) {
    for (name, eviction) in POLICIES {
        for leaf in [32, 4, 1] {
            let world = World::new(250_000, leaf, eviction);
            let cached = world.index.pool().stats().cached as usize;
            let bytes = world.index.memory_bytes() as f64 / cached as f64;
            let tokens = BLOCK_SIZE * size_of::<u32>();
            println!(
                "memory a cached block, {name}, edges of {leaf}: {bytes:.0} bytes and {tokens} of tokens"
            );
        }
    }
}

criterion_group!(benches, memory, matches, threads, inserts, evictions, replay);
criterion_main!(benches);
