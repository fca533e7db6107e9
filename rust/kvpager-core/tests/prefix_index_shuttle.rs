//! Random schedules of threads that match, insert, evict and purge in one index at once, under every policy.
//! `make test-loom` runs them after the exact models.
//!
//! A failure prints the seed; `KVPAGER_SHUTTLE_SEED=<seed>` runs that one alone.

#![cfg(shuttle)]
#![expect(clippy::unwrap_used, reason = "tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, ShareScope};
use kvpager_core::{AccountId, BlockHandle, Error, NamespaceId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Schedules of a seed.
const SCHEDULES: usize = 60;
const SEEDS: u64 = 40;
const THREADS: u64 = 4;
const OPERATIONS: usize = 10;
const BLOCKS: u32 = 10;

/// A generator of work: the same for the same seed, whatever the schedule.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// Few paths, so that they meet.
    fn path(&mut self) -> Vec<u32> {
        let length = 1 + self.below(4);
        (0..length).map(|_| 1 + self.below(2) as u32).collect()
    }
}

/// What a block of one token holds: its namespace and all tokens up to it.
fn content(namespace: NamespaceId, path: &[u32]) -> u64 {
    path.iter().fold(u64::from(namespace.0) + 1, |hash, &token| hash * 10 + u64::from(token))
}

struct World {
    pool: Arc<BlockPool>,
    index: Arc<PrefixIndex>,
    /// (scope, account, namespace) of two tenants.
    tenants: Vec<(ShareScope, AccountId, NamespaceId)>,
    /// By block. Written by who has the block alone, before it is inserted.
    written: Vec<AtomicU64>,
}

impl World {
    fn new(eviction: EvictionPolicy) -> Self {
        let pool =
            BlockPool::new(PoolConfig { num_blocks: BLOCKS, max_accounts: 2, max_open_steps: 1 }).unwrap();
        // A keyed hash would place the nodes otherwise in each run, and a schedule is repeated by its seed.
        let index = IndexConfig { block_size: 1, eviction };
        let index = PrefixIndex::with_constant_hash(Arc::clone(&pool), index).unwrap();
        let tenant = |name: &str| {
            let account = pool.add_account(Quota { guaranteed: 2, limit: BLOCKS }).unwrap();
            let scope = ShareScope::Private(name.to_owned());
            let namespace = index.namespace(&scope, &Fingerprint::default(), account).unwrap();
            (scope, account, namespace)
        };
        let tenants = ["alice", "bob"].map(tenant).into();
        Self { pool, index, tenants, written: (0..BLOCKS).map(|_| AtomicU64::new(0)).collect() }
    }

    fn check(&self, namespace: NamespaceId, path: &[u32], blocks: &[BlockHandle]) {
        for (end, block) in (1..).zip(blocks) {
            let there = self.written[block.id().0 as usize].load(Ordering::Relaxed);
            assert_eq!(there, content(namespace, &path[..end]), "block {} of {path:?}", block.id());
        }
    }

    /// Pins what is there of a path, and looks at it now and when others have had their turn.
    fn match_and_look(&self, tenant: usize, path: &[u32]) {
        let namespace = self.tenants[tenant].2;
        let mut blocks = Vec::new();
        match self.index.match_whole(namespace, path, &mut blocks) {
            Ok(pin) => {
                self.check(namespace, path, &blocks);
                shuttle::thread::yield_now();
                self.check(namespace, path, &blocks);
                drop(pin);
            }
            Err(error) => assert!(is_short(&error), "{error}"),
        }
    }

    /// Makes a path resident: what is missing is allocated, written and inserted.
    fn insert(&self, tenant: usize, path: &[u32]) {
        let (_, account, namespace) = self.tenants[tenant];
        let mut blocks = Vec::new();
        let mut pin = match self.index.match_whole(namespace, path, &mut blocks) {
            Ok(pin) => pin,
            Err(error) => return assert!(is_short(&error), "{error}"),
        };
        let found = blocks.len();
        blocks.resize(path.len(), BlockHandle::from_bits(0));
        if !self.allocate(account, &mut blocks[found..]) {
            return;
        }
        for (end, block) in (found + 1..).zip(&blocks[found..]) {
            self.written[block.id().0 as usize].store(content(namespace, &path[..end]), Ordering::Relaxed);
        }
        let done = self.index.extend(&mut pin, &path[found..], &mut blocks[found..]).unwrap();
        self.check(namespace, path, &blocks);
        self.pool.release(&blocks[found + done.num_indexed..]).unwrap();
        self.check_pinned(&pin, path, &blocks);
    }

    /// What is pinned stays, whatever others evict.
    fn check_pinned(&self, pin: &Pin, path: &[u32], blocks: &[BlockHandle]) {
        shuttle::thread::yield_now();
        self.check(pin.namespace(), path, &blocks[..pin.num_blocks()]);
    }

    fn allocate(&self, account: AccountId, out: &mut [BlockHandle]) -> bool {
        loop {
            match self.pool.allocate(account, out) {
                Ok(()) => return true,
                Err(Error::NeedsReclaim { .. }) => {
                    if self.index.evict_for(account, out.len() as u32).unwrap() == 0 {
                        return false;
                    }
                }
                Err(error) => {
                    assert!(is_short(&error), "{error}");
                    return false;
                }
            }
        }
    }

    fn work(&self, draw: &mut Draw) {
        let tenant = draw.below(2) as usize;
        let path = draw.path();
        match draw.below(12) {
            0..=4 => self.match_and_look(tenant, &path),
            5..=8 => self.insert(tenant, &path),
            9 => drop(self.index.evict(1 + draw.below(3) as u32)),
            10 => drop(self.index.evict_for(self.tenants[tenant].1, 2).unwrap()),
            _ => drop(self.index.purge(&self.tenants[tenant].0)),
        }
    }

    /// Nothing is held, every block is somewhere, and all that is cached can go.
    fn finish(&self) {
        self.index.check_invariants().unwrap();
        self.pool.check_invariants().unwrap();
        let stats = self.pool.stats();
        assert_eq!((stats.held, stats.free + stats.cached), (0, stats.capacity), "{stats:?}");
        self.index.evict(u32::MAX);
        assert_eq!(self.pool.stats().free, stats.capacity);
    }
}

fn is_short(error: &Error) -> bool {
    matches!(error, Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. })
}

fn work(eviction: EvictionPolicy, seed: u64) {
    let world = Arc::new(World::new(eviction));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let world = Arc::clone(&world);
            shuttle::thread::spawn(move || {
                let mut draw = Draw(seed * THREADS + thread);
                (0..OPERATIONS).for_each(|_| world.work(&mut draw));
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    world.finish();
}

fn run(eviction: EvictionPolicy) {
    let one = std::env::var("KVPAGER_SHUTTLE_SEED").ok().map(|seed| seed.parse().unwrap());
    for seed in one.map_or(0..SEEDS, |seed: u64| seed..seed + 1) {
        println!("if this fails: KVPAGER_SHUTTLE_SEED={seed}");
        shuttle::check_random_with_seed(move || work(eviction, seed), seed, SCHEDULES);
    }
}

#[test]
fn threads_in_one_index_show_nobody_anothers_content_and_lose_nothing_under_lru() {
    run(EvictionPolicy::Lru);
}

#[test]
fn threads_in_one_index_show_nobody_anothers_content_and_lose_nothing_under_clock() {
    run(EvictionPolicy::Clock);
}

#[test]
fn threads_in_one_index_show_nobody_anothers_content_and_lose_nothing_under_learned() {
    run(EvictionPolicy::Learned);
}
