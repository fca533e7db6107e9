//! Long work is done in pieces of at most 64 blocks: others get in between, and the end is as if it were one.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{
    EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, Purged, ShareScope,
};
use kvpager_core::{AccountId, Error, NamespaceId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const POLICIES: [EvictionPolicy; 3] = [EvictionPolicy::Lru, EvictionPolicy::Learned, EvictionPolicy::Clock];
/// Blocks of one token, enough that work on all of them takes long.
const NUM_BLOCKS: u32 = 300_000;
/// Short ones: work on many nodes takes longer than on many blocks of one.
const PATH: u32 = 5;

struct World {
    pool: Arc<BlockPool>,
    index: Arc<PrefixIndex>,
    accounts: [AccountId; 2],
}

fn world(num_blocks: u32, eviction: EvictionPolicy) -> World {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let accounts = [(); 2].map(|()| pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap());
    let index = PrefixIndex::new(pool.clone(), IndexConfig { block_size: 1, eviction }).unwrap();
    World { pool, index, accounts }
}

impl World {
    fn intern(&self, scope: &ShareScope, account: usize) -> NamespaceId {
        self.index.namespace(scope, &Fingerprint::default(), self.accounts[account]).unwrap()
    }

    fn insert(&self, namespace: NamespaceId, tokens: &[u32]) -> kvpager_core::Result<Pin> {
        self.index.insert_prefix(namespace, tokens, &mut Vec::new()).map(|(pin, _)| pin)
    }

    /// Fills a namespace with paths that begin with different tokens.
    fn fill(&self, namespace: NamespaceId, num_blocks: u32) {
        for path in 0..num_blocks / PATH {
            drop(self.insert(namespace, &path_of(path)).unwrap());
        }
    }

    fn has_begun(&self) -> bool {
        self.pool.account_stats(self.accounts[0]).unwrap().cached < u64::from(NUM_BLOCKS)
    }

    fn check(&self) {
        self.index.check_invariants().unwrap();
        self.pool.check_invariants().unwrap();
    }
}

fn path_of(number: u32) -> Vec<u32> {
    std::iter::once(number).chain((1..PATH).map(|i| 1 << 20 | i)).collect()
}

fn private(name: &str) -> ShareScope {
    ShareScope::Private(name.to_owned())
}

fn salted(salt: u32) -> ShareScope {
    ShareScope::Salted { tenant: "alice".into(), salt: salt.to_le_bytes().to_vec() }
}

/// How often `call` came to its end while another thread did `work`; it returns whether it has seen that begun.
fn calls_during(work: impl FnOnce() + Send, mut call: impl FnMut() -> bool) -> usize {
    let (is_calling, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Begins when the other thread has a processor, and does not have to be woken first.
            while !is_calling.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            work();
            is_over.store(true, Ordering::Relaxed);
        });
        let mut num_calls = 0;
        loop {
            let has_begun = call();
            is_calling.store(true, Ordering::Relaxed);
            if is_over.load(Ordering::Relaxed) {
                return num_calls;
            }
            num_calls += usize::from(has_begun);
        }
    })
}

/// Work that holds its lock for all of 300,000 blocks lets nobody in more than once or twice.
const MANY: usize = 20;

/// Others get in many times: at once, or, on a machine that gives them no processor meanwhile, at a later attempt.
fn lets_others_in(mut num_calls: impl FnMut() -> usize) {
    let (start, mut attempts) = (Instant::now(), Vec::new());
    while attempts.last().is_none_or(|&calls| calls <= MANY) {
        assert!(attempts.len() < 20 || start.elapsed() < Duration::from_secs(60), "{attempts:?} calls");
        attempts.push(num_calls());
    }
}

#[test]
fn test_an_eviction_lets_another_accounts_eviction_in_between_its_pieces() {
    for eviction in POLICIES {
        lets_others_in(|| evict_beside_others(eviction));
    }
}

fn evict_beside_others(eviction: EvictionPolicy) -> usize {
    let w = world(NUM_BLOCKS + 10_000, eviction);
    let [alice, bob] = [w.intern(&private("alice"), 0), w.intern(&private("bob"), 1)];
    w.fill(alice, NUM_BLOCKS);
    w.fill(bob, 10_000);
    let (mut num_evicted, mut others) = (0, 0);
    let num_calls = calls_during(
        || num_evicted = w.index.evict_for(w.accounts[0], NUM_BLOCKS).unwrap(),
        || {
            // Beyond its own blocks it would take the other's.
            if others < 9_000 && (others == 0 || w.has_begun()) {
                others += w.index.evict_for(w.accounts[1], 1).unwrap();
            }
            w.has_begun()
        },
    );
    assert_eq!(num_evicted, NUM_BLOCKS, "{eviction:?}");
    w.check();
    assert_eq!(u64::from(others) + w.pool.stats().cached, 10_000);
    num_calls
}

#[test]
fn test_a_purge_lets_others_into_its_namespace_between_its_pieces() {
    lets_others_in(purge_beside_others);
}

fn purge_beside_others() -> usize {
    let w = world(NUM_BLOCKS + 10_000, EvictionPolicy::Lru);
    let alice = w.intern(&private("alice"), 0);
    w.fill(alice, NUM_BLOCKS);
    let (mut purged, mut number) = (Purged::default(), 0);
    let num_calls = calls_during(
        || purged = w.index.purge(&private("alice")),
        || {
            // New content, and what was there before: it may be found only until the cut. Some is kept for after it,
            // however long it takes to come.
            let has_begun = w.index.peek_prefix(alice, &path_of(0)).unwrap() == 0;
            if number < if has_begun { 9_000 } else { 4_000 } {
                number += 1;
                drop(w.insert(alice, &[1 << 30 | number]).unwrap());
            }
            has_begun
        },
    );
    for path in 0..NUM_BLOCKS / PATH {
        assert_eq!(w.index.peek_prefix(alice, &path_of(path)).unwrap(), 0, "path {path}");
    }
    if num_calls > MANY {
        assert_eq!(w.index.peek_prefix(alice, &[1 << 30 | number, 0]).unwrap(), 1, "inserted after the cut");
    }
    w.check();
    let before_the_cut = purged.num_evicted as u64 - u64::from(NUM_BLOCKS);
    let after_it = w.pool.stats().cached;
    // One may have been pinned at the cut, and have gone with its pin.
    assert!(
        [0, 1].contains(&(u64::from(number) - before_the_cut - after_it)),
        "{after_it} of {number} are left"
    );
    num_calls
}

#[test]
fn test_emptying_a_salts_namespace_lets_others_intern_between_its_pieces() {
    lets_others_in(empty_beside_others);
}

fn empty_beside_others() -> usize {
    let w = world(NUM_BLOCKS, EvictionPolicy::Lru);
    w.index.set_max_salts(1);
    let first = w.intern(&salted(0), 0);
    w.fill(first, NUM_BLOCKS);
    let mut second = first;
    let num_calls = calls_during(
        || second = w.intern(&salted(1), 0),
        || {
            w.intern(&private("bob"), 1);
            w.has_begun()
        },
    );
    assert_ne!(first, second);
    assert!(w.index.root(first).is_err() && w.index.root(second).is_ok());
    assert_eq!(w.index.salt_stats(w.accounts[0]).unwrap().num_reclaimed, 1);
    assert_eq!(w.pool.stats().free, u64::from(NUM_BLOCKS));
    w.check();
    num_calls
}

/// Short of room, or the namespace was given to another salt meanwhile.
fn is_expected(error: &Error) -> bool {
    matches!(
        error,
        Error::OutOfBlocks { .. }
            | Error::OverQuota { .. }
            | Error::NeedsReclaim { .. }
            | Error::Refused { .. }
            | Error::InvalidArgument(_)
    )
}

/// Threads that make salts, pin, purge and evict at once: a salt finds what was inserted under it and nothing else.
#[test]
fn test_salts_purges_and_evictions_at_once_show_nobody_anothers_blocks() {
    for eviction in POLICIES {
        let w = world(600, eviction);
        w.index.set_max_salts(3);
        let num_done: usize = std::thread::scope(|scope| {
            let run = |seed: u32| {
                let w = &w;
                move || {
                    let mut pins = Vec::new();
                    let mut num_done = 0;
                    for round in 0..4_000u32 {
                        let draw = (round ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b) >> 8;
                        let salt = draw % 5;
                        let id = w.index.namespace(&salted(salt), &Fingerprint::default(), w.accounts[0]);
                        // Tokens of other salts are looked for too: the first block says whose they are.
                        let tokens: Vec<u32> = std::iter::once(salt).chain(100..100 + draw % 150).collect();
                        let foreign: Vec<u32> = std::iter::once((salt + 1) % 5).chain(100..250).collect();
                        let done = id.and_then(|id| {
                            assert_eq!(w.index.peek_prefix(id, &foreign)?, 0);
                            w.insert(id, &tokens)
                        });
                        match done {
                            Ok(pin) => {
                                num_done += 1;
                                pins.push(pin);
                            }
                            Err(error) => assert!(is_expected(&error), "{error}"),
                        }
                        match draw % 7 {
                            0 => drop(w.index.purge(&private("alice"))),
                            1 => drop(w.index.evict(draw % 100)),
                            _ => {}
                        }
                        pins.truncate((draw % 3) as usize);
                    }
                    num_done
                }
            };
            let threads: Vec<_> = (1..5).map(|seed| scope.spawn(run(seed))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(num_done > 1_000, "{num_done} under {eviction:?}");
        w.check();
        let stats = w.pool.stats();
        assert_eq!((stats.held, stats.free + stats.cached), (0, 600), "{eviction:?}");
        assert_eq!(u64::from(w.index.evict(600)), stats.cached, "{eviction:?}");
    }
}
