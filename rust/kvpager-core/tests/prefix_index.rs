//! Promises of the prefix index, one test each. Faults of other projects are named by what went wrong there.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, ShareScope};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error, NamespaceId};
use std::sync::Arc;

struct World {
    pool: Arc<BlockPool>,
    account: AccountId,
    index: Arc<PrefixIndex>,
    namespace: NamespaceId,
}

fn world(num_blocks: u32, block_size: u32) -> World {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    let config = IndexConfig { block_size, eviction: EvictionPolicy::Lru };
    let index = PrefixIndex::new(pool.clone(), config).unwrap();
    let scope = ShareScope::Private("alice".into());
    let namespace = index.namespace(&scope, &Fingerprint::default(), account).unwrap();
    World { pool, account, index, namespace }
}

impl World {
    fn allocate(&self, num_blocks: usize) -> Vec<BlockHandle> {
        let mut blocks = vec![BlockHandle::new(0, BlockId(0)); num_blocks];
        while let Err(error) = self.pool.allocate(self.account, &mut blocks) {
            let Error::NeedsReclaim { needed, free, .. } = error else { panic!("{error}") };
            assert!(self.index.evict((needed - free) as u32) > 0, "{error}");
        }
        blocks
    }

    /// Runs a request to its end: match, compute the rest, insert its whole blocks. Returns its table.
    fn finish(&self, tokens: &[u32]) -> Vec<BlockHandle> {
        let (mut table, pin) = self.run(tokens);
        drop(pin);
        table.truncate(tokens.len() / self.block_size());
        table
    }

    fn run(&self, tokens: &[u32]) -> (Vec<BlockHandle>, Pin) {
        let mut table = Vec::new();
        let mut pin = self.index.match_prefix(self.namespace, tokens, &mut table).unwrap();
        let num_blocks = tokens.len() / self.block_size();
        let mut new = self.allocate(num_blocks - table.len());
        let whole = &tokens[table.len() * self.block_size()..num_blocks * self.block_size()];
        self.index.extend(&mut pin, whole, &mut new).unwrap();
        table.extend(new);
        self.check();
        (table, pin)
    }

    fn block_size(&self) -> usize {
        self.index.config().block_size as usize
    }

    fn hit(&self, tokens: &[u32]) -> usize {
        self.index.peek_prefix(self.namespace, tokens).unwrap()
    }

    fn check(&self) {
        self.index.check_invariants().unwrap();
        self.pool.check_invariants().unwrap();
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn test_last_token_is_always_computed() {
    let w = world(8, 4);
    w.finish(&tokens(0..8));
    assert_eq!(w.hit(&tokens(0..8)), 4);
    assert_eq!(w.hit(&tokens(0..9)), 8);
    for (length, expected) in [(0, 0), (1, 0), (3, 0), (4, 0), (5, 4)] {
        assert_eq!(w.hit(&tokens(0..length)), expected, "prompt of {length}");
    }
    let mut blocks = Vec::new();
    assert_eq!(w.index.match_prefix(w.namespace, &[], &mut blocks).unwrap().num_blocks(), 0);
}

#[test]
fn test_tail_of_a_chain_goes_before_its_head() {
    let w = world(3, 4);
    let a = tokens(0..12);
    w.finish(&a);
    let longer = tokens(0..13);
    let mut taken = Vec::new();
    for expected in [8, 4, 0] {
        taken.extend(w.allocate(1));
        assert_eq!(w.hit(&longer), expected);
    }
    w.check();
}

#[test]
fn test_pinned_blocks_are_not_evicted_for_the_pins_own_allocation() {
    let w = world(4, 4);
    let table = w.finish(&tokens(0..8));
    w.finish(&tokens(100..108));
    let b = [tokens(0..8), tokens(200..208)].concat();
    let mut blocks = Vec::new();
    let pin = w.index.match_prefix(w.namespace, &b, &mut blocks).unwrap();
    assert_eq!(blocks, table);
    w.allocate(2);
    assert_eq!((pin.num_blocks(), w.hit(&tokens(100..109))), (2, 0));
    assert_eq!(w.pool.stats().held, 4);
    w.check();
}

#[test]
fn test_a_walk_that_leaves_an_edge_inside_stops_there() {
    let w = world(12, 1);
    w.finish(&[0, 1, 2]);
    w.finish(&[0, 1, 2, 3, 4, 5]);
    let mut blocks = Vec::new();
    let pin = w.index.match_whole(w.namespace, &[0, 1, 3, 4, 5], &mut blocks).unwrap();
    assert_eq!((pin.num_blocks(), blocks.len()), (2, 2));
    let mut blocks = Vec::new();
    let pin = w.index.match_whole(w.namespace, &[0, 1, 2], &mut blocks).unwrap();
    assert_eq!(w.index.evict(12), 3);
    let mut again = Vec::new();
    let other = w.index.match_whole(w.namespace, &[0, 1, 2], &mut again).unwrap();
    assert_eq!((other.num_blocks(), again), (pin.num_blocks(), blocks));
    w.check();
}

#[test]
fn test_a_match_shorter_than_a_block_makes_no_node() {
    let w = world(4, 4);
    w.finish(&tokens(0..4));
    let bytes = w.index.memory_bytes();
    let mut blocks = Vec::new();
    drop(w.index.match_whole(w.namespace, &tokens(0..3), &mut blocks).unwrap());
    assert_eq!((blocks.len(), w.index.memory_bytes()), (0, bytes));
    assert_eq!(w.index.evict(1), 1);
    w.check();
}

#[test]
fn test_equal_content_is_kept_once() {
    let w = world(16, 4);
    let prompt = tokens(0..12);
    let mut pin_a = w.index.root(w.namespace).unwrap();
    let mut pin_b = w.index.root(w.namespace).unwrap();
    let (mut a, mut b) = (w.allocate(3), w.allocate(3));
    w.index.extend(&mut pin_a, &prompt, &mut a).unwrap();
    let done = w.index.extend(&mut pin_b, &prompt, &mut b).unwrap();
    assert_eq!((done.num_indexed, done.num_duplicates), (3, 3));
    assert_eq!(a, b);
    assert_eq!((w.pool.stats().held, w.pool.stats().free), (3, 13));
    drop((pin_a, pin_b));
    assert_eq!((w.pool.stats().held, w.pool.stats().cached), (0, 3));
    w.check();
}

#[test]
fn test_a_duplicate_of_a_prefix_continues_as_a_branch() {
    let w = world(16, 2);
    w.finish(&tokens(0..8));
    let mut pin = w.index.root(w.namespace).unwrap();
    let mut blocks = w.allocate(4);
    let branch = [tokens(0..4), tokens(50..54)].concat();
    let done = w.index.extend(&mut pin, &branch, &mut blocks).unwrap();
    assert_eq!((done.num_indexed, done.num_duplicates), (4, 2));
    let mut found = Vec::new();
    w.index.match_whole(w.namespace, &branch, &mut found).unwrap();
    assert_eq!(found, blocks);
    assert_eq!(w.hit(&[tokens(0..8), vec![9]].concat()), 8);
    w.check();
}

#[test]
fn test_a_foreign_prefix_is_absent() {
    let w = world(8, 4);
    w.finish(&tokens(0..8));
    let scope = ShareScope::Private("bob".into());
    let bob = w.index.namespace(&scope, &Fingerprint::default(), w.account).unwrap();
    let mut blocks = Vec::new();
    assert_eq!(w.index.peek_prefix(bob, &tokens(0..9)).unwrap(), 0);
    assert_eq!(w.index.match_prefix(bob, &tokens(0..9), &mut blocks).unwrap().num_blocks(), 0);
    assert!(blocks.is_empty());
}

#[test]
fn test_a_refused_match_changes_nothing() {
    let w = world(4, 4);
    w.finish(&tokens(0..12));
    w.pool.hold_cached(w.account, 3).unwrap();
    let mut blocks = Vec::new();
    let error = w.index.match_prefix(w.namespace, &tokens(0..9), &mut blocks).unwrap_err();
    assert!(matches!(error, Error::OverQuota { needed: 2, available: 1, .. }), "{error}");
    assert!(blocks.is_empty());
    w.pool.unhold_cached(w.account, 3).unwrap();
    assert_eq!(w.pool.stats().held, 0);
    assert_eq!(w.index.match_prefix(w.namespace, &tokens(0..9), &mut blocks).unwrap().num_blocks(), 2);
    w.check();
}

#[test]
fn test_every_cached_block_can_be_evicted_at_once() {
    let w = world(64, 2);
    for i in 0..8 {
        w.finish(&[tokens(0..6), tokens(100 * i..100 * i + 6)].concat());
    }
    let cached = w.pool.stats().cached;
    assert_eq!(u64::from(w.index.evict(1000)), cached);
    assert_eq!((w.pool.stats().cached, w.pool.stats().free), (0, 64));
    w.check();
}

#[test]
fn test_clear_spares_what_is_pinned() {
    let w = world(16, 4);
    let (table, pin) = w.run(&tokens(0..8));
    w.finish(&tokens(100..116));
    w.index.clear();
    assert_eq!((w.pool.stats().held, w.pool.stats().cached), (2, 0));
    let mut blocks = Vec::new();
    let other = w.index.match_whole(w.namespace, &tokens(0..8), &mut blocks).unwrap();
    assert_eq!(blocks, table);
    drop((pin, other));
    w.index.clear();
    assert_eq!(w.pool.stats().free, 16);
    w.check();
}

#[test]
fn test_splits_that_serve_nobody_are_merged_again() {
    let w = world(1024, 2);
    let prompt = tokens(0..1024);
    w.finish(&prompt);
    let memory = w.index.memory_bytes();
    let mut state = 1u64;
    for _ in 0..4096 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = 2 * (1 + (state >> 40) as usize % 512);
        let mut blocks = Vec::new();
        let pin = w.index.match_whole(w.namespace, &prompt[..length], &mut blocks).unwrap();
        assert_eq!((pin.num_blocks(), blocks.len()), (length / 2, length / 2));
    }
    w.check();
    // What is used without what follows it stays apart: few ends are, at any moment.
    let stats = w.index.namespace_stats(w.namespace).unwrap();
    assert_eq!(stats.num_blocks, 512);
    assert!(stats.num_nodes < 32, "{stats:?}");
    assert!(w.index.memory_bytes() < memory + 16 * 512, "{} after {memory}", w.index.memory_bytes());
    assert_eq!(w.index.evict(1024), 512);
    w.check();
}

#[test]
fn test_a_branching_point_that_lost_its_branches_is_merged_with_what_is_left() {
    let w = world(512, 1);
    let stem = tokens(0..16);
    for branch in 0..8 {
        w.finish(&[stem.clone(), tokens(100 * branch + 100..100 * branch + 116)].concat());
    }
    // The newest branch and the stem were released together; the others go.
    assert_eq!(w.index.evict(7 * 16), 7 * 16);
    assert_eq!(w.hit(&[stem.clone(), tokens(800..817)].concat()), 32);
    let stats = w.index.namespace_stats(w.namespace).unwrap();
    assert_eq!((stats.num_blocks, stats.num_nodes), (32, 1));
    w.check();
}

#[test]
fn test_the_least_recently_released_namespace_is_evicted_first() {
    let w = world(6, 1);
    let scope = ShareScope::Private("bob".into());
    let bob = w.index.namespace(&scope, &Fingerprint::default(), w.account).unwrap();
    let bobs = World { namespace: bob, pool: w.pool.clone(), index: w.index.clone(), account: w.account };
    w.finish(&[1, 2]);
    bobs.finish(&[3, 4]);
    w.finish(&[5, 6]);
    let left = |w: &World, prompt: &[u32]| {
        let mut blocks = Vec::new();
        w.index.match_whole(w.namespace, prompt, &mut blocks).unwrap();
        blocks.len()
    };
    assert_eq!(w.index.evict(3), 3);
    assert_eq!(w.index.peek_prefix(w.namespace, &[1, 2, 0]).unwrap(), 0);
    assert_eq!(w.index.peek_prefix(bob, &[3, 4, 0]).unwrap(), 1);
    assert_eq!((left(&w, &[5, 6]), left(&bobs, &[3, 4])), (2, 1));
    w.check();
}

#[test]
fn test_an_extend_with_wrong_numbers_is_refused_with_them() {
    let w = world(4, 4);
    let mut pin = w.index.root(w.namespace).unwrap();
    let mut blocks = w.allocate(2);
    let error = w.index.extend(&mut pin, &tokens(0..7), &mut blocks).unwrap_err();
    assert_eq!(error.to_string(), "for 2 blocks 8 tokens are needed, got 7");
    w.pool.release(&blocks).unwrap();
    let error = w.index.extend(&mut pin, &tokens(0..8), &mut blocks).unwrap_err();
    assert!(matches!(error, Error::InvalidHandle { .. }), "{error}");
    assert_eq!(pin.num_blocks(), 0);
    w.check();
}
