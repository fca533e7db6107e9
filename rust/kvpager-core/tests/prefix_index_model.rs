//! The index against a naive model: a map from whole prefixes to blocks, searched exhaustively.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, ShareScope};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error, NamespaceId};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

const NUM_BLOCKS: u32 = 20;
const BLOCK_SIZE: usize = 2;

#[derive(Clone, Debug)]
enum Step {
    /// Match in a namespace; keep the pin.
    Match(usize, Vec<u32>),
    /// Extend one of the pins by these blocks.
    Extend(usize, Vec<u32>),
    /// Drop one of the pins.
    Drop(usize),
    Evict(u32),
    Clear,
}

/// Blocks are named by one small number each: block `b` is the tokens `[b, b + 1]`.
fn tokens_of(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|&b| [b, b + 1]).collect()
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || prop::collection::vec(0..3u32, 0..7);
    let step = prop_oneof![
        4 => (0..2usize, path()).prop_map(|(ns, path)| Step::Match(ns, path)),
        5 => (any::<usize>(), prop::collection::vec(0..3u32, 1..5)).prop_map(|(i, p)| Step::Extend(i, p)),
        4 => any::<usize>().prop_map(Step::Drop),
        2 => (1..5u32).prop_map(Step::Evict),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(step, 1..60)
}

/// A resident block of the model.
#[derive(Clone, Copy, Debug)]
struct Resident {
    block: BlockHandle,
    released: u64,
}

#[derive(Default)]
struct Model {
    resident: HashMap<(usize, Vec<u32>), Resident>,
    pins: Vec<(usize, Vec<u32>)>,
    clock: u64,
}

impl Model {
    fn longest(&self, ns: usize, path: &[u32]) -> usize {
        (0..=path.len())
            .rev()
            .find(|&n| n == 0 || self.resident.contains_key(&(ns, path[..n].to_vec())))
            .unwrap()
    }

    fn is_held(&self, ns: usize, prefix: &[u32]) -> bool {
        self.pins.iter().any(|(other, path)| *other == ns && path.starts_with(prefix))
    }

    fn num_held(&self) -> usize {
        self.resident.keys().filter(|(ns, prefix)| self.is_held(*ns, prefix)).count()
    }

    fn unpin(&mut self, i: usize) {
        let (ns, path) = self.pins.swap_remove(i);
        self.clock += 1;
        for n in 1..=path.len() {
            if !self.is_held(ns, &path[..n]) {
                let resident = self.resident.get_mut(&(ns, path[..n].to_vec())).unwrap();
                resident.released = self.clock;
            }
        }
    }

    /// Removes the unheld block without children that was released longest ago.
    fn evict_one(&mut self) -> bool {
        let has_child = |ns: usize, prefix: &[u32]| {
            self.resident.keys().any(|(other, path)| {
                *other == ns && path.len() == prefix.len() + 1 && path.starts_with(prefix)
            })
        };
        let victim = self
            .resident
            .iter()
            .filter(|((ns, prefix), _)| !self.is_held(*ns, prefix) && !has_child(*ns, prefix))
            .min_by_key(|(_, resident)| resident.released)
            .map(|(key, _)| key.clone());
        victim.is_some_and(|key| self.resident.remove(&key).is_some())
    }
}

struct World {
    pool: Arc<BlockPool>,
    account: AccountId,
    index: Arc<PrefixIndex>,
    namespaces: [NamespaceId; 2],
    pins: Vec<Pin>,
    model: Model,
}

impl World {
    fn new(constant_hash: bool, eviction: EvictionPolicy) -> Self {
        let config = PoolConfig { num_blocks: NUM_BLOCKS, ..PoolConfig::default() };
        let pool = BlockPool::new(config).unwrap();
        let account = pool.add_account(Quota { guaranteed: 0, limit: NUM_BLOCKS }).unwrap();
        let config = IndexConfig { block_size: BLOCK_SIZE as u32, eviction };
        let make = if constant_hash { PrefixIndex::with_constant_hash } else { PrefixIndex::new };
        let index = make(pool.clone(), config).unwrap();
        let namespaces = ["a", "b"].map(|tenant| {
            let scope = ShareScope::Private(tenant.into());
            index.namespace(&scope, &Fingerprint::default(), account).unwrap()
        });
        Self { pool, account, index, namespaces, pins: Vec::new(), model: Model::default() }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Match(ns, path) => self.match_whole(*ns, path),
            Step::Extend(i, path) if !self.pins.is_empty() => self.extend(i % self.pins.len(), path),
            Step::Drop(i) if !self.pins.is_empty() => {
                let i = i % self.pins.len();
                drop(self.pins.swap_remove(i));
                self.model.unpin(i);
            }
            Step::Extend(..) | Step::Drop(_) => {}
            Step::Evict(n) => self.evict(*n),
            Step::Clear => {
                self.index.clear();
                while self.model.evict_one() {}
            }
        }
        self.check();
    }

    /// Evicts as many as there are, if need be all. Which they are is the model's to say under `lru`; under another
    /// policy the model looks what is left, of which it asks only that every prefix of it is left too.
    fn evict(&mut self, num_blocks: u32) {
        let cached = self.model.resident.len() - self.model.num_held();
        let expected = cached.min(num_blocks as usize);
        assert_eq!(self.index.evict(num_blocks) as usize, expected);
        if self.index.config().eviction == EvictionPolicy::Lru {
            (0..expected).for_each(|_| assert!(self.model.evict_one()));
            return;
        }
        let left = self.model.resident.len() - expected;
        let is_left = |(ns, path): &(usize, Vec<u32>)| {
            let tokens = [tokens_of(path), vec![9]].concat();
            let found = self.index.peek_prefix(self.namespaces[*ns], &tokens).unwrap();
            found == path.len() * BLOCK_SIZE
        };
        self.model.resident.retain(|key, _| is_left(key));
        assert_eq!(self.model.resident.len(), left);
        assert_eq!(self.model.num_held(), left - (cached - expected));
    }

    fn match_whole(&mut self, ns: usize, path: &[u32]) {
        let found = self.model.longest(ns, path);
        let needed = (1..=found).filter(|&n| !self.model.is_held(ns, &path[..n])).count();
        let fits = self.model.num_held() + needed <= NUM_BLOCKS as usize;
        let mut blocks = Vec::new();
        let result = self.index.match_whole(self.namespaces[ns], &tokens_of(path), &mut blocks);
        assert_eq!(result.is_ok(), fits);
        let Ok(pin) = result else { return };
        assert_eq!(pin.num_blocks(), found);
        let expected: Vec<BlockHandle> =
            (1..=found).map(|n| self.model.resident[&(ns, path[..n].to_vec())].block).collect();
        assert_eq!(blocks, expected);
        self.pins.push(pin);
        self.model.pins.push((ns, path[..found].to_vec()));
    }

    fn extend(&mut self, i: usize, path: &[u32]) {
        if self.model.num_held() + path.len() > NUM_BLOCKS as usize {
            return;
        }
        let mut blocks = vec![BlockHandle::new(0, BlockId(0)); path.len()];
        while let Err(error) = self.pool.allocate(self.account, &mut blocks) {
            let Error::NeedsReclaim { needed, free, .. } = error else { panic!("{error}") };
            self.evict((needed - free) as u32);
        }
        let own = blocks.clone();
        let done = self.index.extend(&mut self.pins[i], &tokens_of(path), &mut blocks).unwrap();
        assert_eq!(done.num_indexed, path.len());
        let (ns, mut prefix) = self.model.pins[i].clone();
        let mut num_duplicates = 0;
        for (n, &b) in path.iter().enumerate() {
            prefix.push(b);
            let key = (ns, prefix.clone());
            let new = Resident { block: own[n], released: 0 };
            num_duplicates += usize::from(self.model.resident.contains_key(&key));
            assert_eq!(self.model.resident.entry(key).or_insert(new).block, blocks[n]);
        }
        assert_eq!(done.num_duplicates, num_duplicates);
        self.model.pins[i].1 = prefix;
    }

    fn check(&self) {
        self.index.check_invariants().unwrap();
        self.pool.check_invariants().unwrap();
        let stats = self.pool.stats();
        assert_eq!(stats.held as usize, self.model.num_held());
        assert_eq!((stats.held + stats.cached) as usize, self.model.resident.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn test_every_answer_equals_the_naive_models(steps in steps()) {
        let mut world = World::new(false, EvictionPolicy::Lru);
        steps.iter().for_each(|step| world.step(step));
    }

    #[test]
    fn test_every_answer_is_the_same_with_a_constant_hash(steps in steps()) {
        let mut world = World::new(true, EvictionPolicy::Lru);
        steps.iter().for_each(|step| world.step(step));
    }

    #[test]
    fn test_every_answer_but_the_victims_is_the_same_under_the_other_policies(
        steps in steps(),
        eviction in prop_oneof![Just(EvictionPolicy::Clock), Just(EvictionPolicy::Learned)],
    ) {
        let mut world = World::new(false, eviction);
        steps.iter().for_each(|step| world.step(step));
    }
}
