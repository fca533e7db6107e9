//! Threads in one index: pins, releases, insertions and evictions side by side, under every policy.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, ShareScope};
use kvpager_core::{AccountId, BlockHandle, Error, NamespaceId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Far longer than anything takes, on a machine that has better things to do.
const PATIENCE: Duration = Duration::from_secs(60);
const BLOCK_SIZE: usize = 2;
const POLICIES: [EvictionPolicy; 3] = [EvictionPolicy::Lru, EvictionPolicy::Learned, EvictionPolicy::Clock];

struct World {
    pool: Arc<BlockPool>,
    index: Arc<PrefixIndex>,
    account: AccountId,
    namespaces: [NamespaceId; 2],
}

fn world(num_blocks: u32, eviction: EvictionPolicy) -> World {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    let config = IndexConfig { block_size: BLOCK_SIZE as u32, eviction };
    let index = PrefixIndex::new(pool.clone(), config).unwrap();
    let namespaces = ["alice", "bob"].map(|tenant| {
        index.namespace(&ShareScope::Private(tenant.into()), &Fingerprint::default(), account).unwrap()
    });
    World { pool, index, account, namespaces }
}

/// A small generator of its own for each thread.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }

    fn path(&mut self) -> Vec<u32> {
        let length = self.below(8) as usize;
        (0..length).flat_map(|_| [self.below(3) as u32, 7]).collect()
    }
}

/// Short of capacity in the moment: what two threads that pin one path at once hold both, or no room at all.
fn is_short(error: &Error) -> bool {
    matches!(error, Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. })
}

/// Operations that may fail for want of room, and for nothing else. Returns how many did not.
fn work(world: &World, seed: u64, rounds: usize) -> usize {
    let mut draw = Draw(seed);
    let mut pins: Vec<Pin> = Vec::new();
    let mut blocks: Vec<BlockHandle> = Vec::new();
    let mut done = 0;
    for _ in 0..rounds {
        let namespace = world.namespaces[draw.below(2) as usize];
        let path = draw.path();
        blocks.clear();
        let result = match draw.below(8) {
            0..3 => world.index.match_whole(namespace, &path, &mut blocks).map(|pin| pins.push(pin)),
            3..5 => world.index.insert_prefix(namespace, &path, &mut blocks).map(|(pin, _)| pins.push(pin)),
            5 => world.index.evict_for(world.account, draw.below(4) as u32).map(|_| ()),
            _ => {
                pins.pop();
                Ok(())
            }
        };
        match result {
            Ok(()) => done += 1,
            Err(error) => assert!(is_short(&error), "{error}"),
        }
        pins.truncate(6);
        for pin in &pins {
            assert!(pin.num_blocks() < 8);
        }
    }
    done
}

#[test]
fn test_threads_pin_insert_and_evict_at_once_and_leave_nothing_held() {
    for eviction in POLICIES {
        let world = world(24, eviction);
        let done: usize = std::thread::scope(|scope| {
            let world = &world;
            let threads: Vec<_> =
                (1..5u64).map(|seed| scope.spawn(move || work(world, seed * 0x9e37_79b9, 20_000))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(done > 40_000, "{done} of 80,000 under {eviction:?}");
        world.index.check_invariants().unwrap();
        world.pool.check_invariants().unwrap();
        let stats = world.pool.stats();
        assert_eq!((stats.held, stats.free + stats.cached), (0, 24), "{eviction:?}");
        assert_eq!(u64::from(world.index.evict(24)), stats.cached, "{eviction:?}");
    }
}

/// Pins that all go through one head, of which each is the first and the last in turn, beside an evictor that must
/// never take a held block.
#[test]
fn test_a_pinned_prefix_stays_whole_while_others_pin_release_and_evict() {
    for eviction in POLICIES {
        let world = world(16, eviction);
        let is_over = AtomicBool::new(false);
        let prompt: Vec<u32> = (0..8).collect();
        let mut first = Vec::new();
        drop(world.index.insert_prefix(world.namespaces[0], &prompt, &mut first).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    world.index.evict(1);
                    std::thread::yield_now();
                }
            });
            let readers: Vec<_> = (1..4usize)
                .map(|shorter| {
                    let (world, prompt) = (&world, &prompt);
                    scope.spawn(move || {
                        let mut draw = Draw(shorter as u64);
                        for _ in 0..5_000 {
                            let end = BLOCK_SIZE * (1 + draw.below(4) as usize);
                            let mut blocks = Vec::new();
                            let inserted =
                                world.index.insert_prefix(world.namespaces[0], &prompt[..end], &mut blocks);
                            let Ok((_pin, _)) = inserted else { continue };
                            let mut again = Vec::new();
                            let found = world
                                .index
                                .match_whole(world.namespaces[0], &prompt[..end], &mut again)
                                .unwrap();
                            assert_eq!((found.num_blocks(), &again), (end / BLOCK_SIZE, &blocks));
                        }
                    })
                })
                .collect();
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
        });
        world.index.check_invariants().unwrap();
        world.pool.check_invariants().unwrap();
        assert_eq!(world.pool.stats().held, 0, "{eviction:?}");
    }
}

/// A writer that is stopped inside another namespace's lock would stop this one if they shared any: here one namespace
/// is written without a pause, and the other's matches go on meanwhile.
#[test]
fn test_readers_of_one_namespace_go_on_while_another_is_written() {
    for eviction in POLICIES {
        let world = world(4096, eviction);
        let prompt: Vec<u32> = (0..64).collect();
        let mut blocks = Vec::new();
        let held = world.index.insert_prefix(world.namespaces[0], &prompt, &mut blocks).unwrap();
        let (is_over, writes) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut matches = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut draw = Draw(9);
                while !is_over.load(Ordering::Relaxed) {
                    let long: Vec<u32> = (0..256).map(|_| draw.below(4) as u32).collect();
                    let mut blocks = Vec::new();
                    let is_done = world.index.insert_prefix(world.namespaces[1], &long, &mut blocks).is_ok();
                    writes.fetch_add(usize::from(is_done), Ordering::Relaxed);
                }
            });
            let start = Instant::now();
            // Until there were many of both, however the machine shares its processors out.
            while (matches <= 100 || writes.load(Ordering::Relaxed) <= 10) && start.elapsed() < PATIENCE {
                blocks.clear();
                let pin = world.index.match_whole(world.namespaces[0], &prompt, &mut blocks).unwrap();
                assert_eq!(pin.num_blocks(), 32);
                matches += 1;
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let writes = writes.into_inner();
        assert!(matches > 100 && writes > 10, "{matches} matches, {writes} writes under {eviction:?}");
        drop(held);
        world.index.check_invariants().unwrap();
    }
}
