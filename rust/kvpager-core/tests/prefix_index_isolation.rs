//! Non-interference, by running an attacker twice beside two different victims and comparing all it sees.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{
    EvictionPolicy, Fingerprint, IndexConfig, Isolation, Pin, PrefixIndex, ShareScope,
};
use kvpager_core::{AccountId, NamespaceId};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::VecDeque;
use std::sync::Arc;

const BLOCK_SIZE: u32 = 2;

/// What a tenant does with the index. Paths name one block by each number.
#[derive(Clone, Debug)]
enum Act {
    /// A request that ends at once.
    Run(Vec<u32>),
    /// A request that goes on.
    Start(Vec<u32>),
    /// Ends the oldest one that goes on.
    End,
    /// Asks how much is reusable.
    Peek(Vec<u32>),
}

fn acts(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Act>> {
    let path = || prop::collection::vec(0..3u32, 1..6);
    let act = prop_oneof![
        4 => path().prop_map(Act::Run),
        2 => path().prop_map(Act::Start),
        2 => Just(Act::End),
        1 => path().prop_map(Act::Peek),
    ];
    prop::collection::vec(act, count)
}

/// The attacker's acts, and before each what the victim does in the two runs.
fn two_runs() -> impl Strategy<Value = (Vec<Act>, [Vec<Vec<Act>>; 2])> {
    let victim = || prop::collection::vec(acts(0..4), 20);
    (acts(5..20), victim(), victim()).prop_map(|(attacker, one, other)| (attacker, [one, other]))
}

/// The same lengths at the same times, other content.
fn with_other_content(acts: &[Vec<Act>]) -> Vec<Vec<Act>> {
    let other = |path: &Vec<u32>| path.iter().map(|block| block * 7 + 100).collect();
    let change = |act: &Act| match act {
        Act::Run(path) => Act::Run(other(path)),
        Act::Start(path) => Act::Start(other(path)),
        Act::Peek(path) => Act::Peek(other(path)),
        Act::End => Act::End,
    };
    acts.iter().map(|acts| acts.iter().map(change).collect()).collect()
}

struct Tenant {
    index: Arc<PrefixIndex>,
    namespace: NamespaceId,
    running: VecDeque<Pin>,
}

impl Tenant {
    /// Acts, and tells what the tenant sees of it.
    fn act(&mut self, act: &Act) -> String {
        let tokens = |path: &[u32]| path.iter().flat_map(|&block| [block; 2]).collect::<Vec<u32>>();
        match act {
            Act::Run(path) | Act::Start(path) => {
                let found = self.index.insert_prefix(self.namespace, &tokens(path), &mut Vec::new());
                match found {
                    Ok((pin, num_matched)) => {
                        if matches!(act, Act::Start(_)) {
                            self.running.push_back(pin);
                        }
                        format!("hit {num_matched}")
                    }
                    Err(error) => error.to_string(),
                }
            }
            Act::End => {
                self.running.pop_front();
                String::new()
            }
            Act::Peek(path) => self.index.peek_prefix(self.namespace, &tokens(path)).unwrap().to_string(),
        }
    }
}

#[derive(Clone, Copy)]
struct Setting {
    isolation: Isolation,
    eviction: EvictionPolicy,
    num_blocks: u32,
}

impl Setting {
    fn tenants(self) -> [Tenant; 2] {
        let pool =
            BlockPool::new(PoolConfig { num_blocks: self.num_blocks, ..PoolConfig::default() }).unwrap();
        let config = IndexConfig { block_size: BLOCK_SIZE, eviction: self.eviction };
        let index = PrefixIndex::new(pool.clone(), config).unwrap();
        let half = self.num_blocks / 2;
        let guaranteed = if self.isolation == Isolation::Strict { half } else { 0 };
        let shared =
            self.account(&pool, &index, Quota { guaranteed: 0, limit: self.num_blocks }, Isolation::Open);
        let tenant = |name: &str| {
            let (scope, account) = if self.isolation == Isolation::Open {
                (ShareScope::Group("all".into()), shared)
            } else {
                let account = self.account(&pool, &index, Quota { guaranteed, limit: half }, self.isolation);
                (ShareScope::Private(name.into()), account)
            };
            let namespace = index.namespace(&scope, &Fingerprint::default(), account).unwrap();
            Tenant { index: index.clone(), namespace, running: VecDeque::new() }
        };
        [tenant("attacker"), tenant("victim")]
    }

    fn account(self, pool: &BlockPool, index: &PrefixIndex, quota: Quota, level: Isolation) -> AccountId {
        let account = pool.add_account(quota).unwrap();
        index.set_isolation(account, level).unwrap();
        account
    }

    /// All that the attacker sees.
    fn observed(self, attacker: &[Act], victim: &[Vec<Act>]) -> Vec<String> {
        let [mut ours, mut theirs] = self.tenants();
        let mut seen = Vec::new();
        for (act, before) in attacker.iter().zip(victim) {
            for other in before {
                theirs.act(other);
            }
            seen.push(ours.act(act));
            ours.index.check_invariants().unwrap();
        }
        seen
    }
}

/// In how many of 300 drawn cases the attacker sees a difference.
fn cases_that_differ(setting: Setting, is_equal_shape: bool) -> usize {
    let mut runner = TestRunner::deterministic();
    let differs = |runner: &mut TestRunner| {
        let (attacker, [one, drawn]) = two_runs().new_tree(runner).unwrap().current();
        let other = if is_equal_shape { with_other_content(&one) } else { drawn };
        setting.observed(&attacker, &one) != setting.observed(&attacker, &other)
    };
    (0..300).filter(|_| differs(&mut runner)).count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn test_under_strict_nothing_seen_depends_on_another_tenant((attacker, [one, other]) in two_runs()) {
        for eviction in [EvictionPolicy::Lru, EvictionPolicy::Learned, EvictionPolicy::Clock] {
            let setting = Setting { isolation: Isolation::Strict, eviction, num_blocks: 16 };
            prop_assert_eq!(setting.observed(&attacker, &one), setting.observed(&attacker, &other));
        }
    }

    #[test]
    fn test_under_scoped_without_pressure_nothing_seen_depends_on_others_content(
        (attacker, [one, _]) in two_runs()
    ) {
        let other = with_other_content(&one);
        let setting = Setting { isolation: Isolation::Scoped, eviction: EvictionPolicy::Lru, num_blocks: 4096 };
        prop_assert_eq!(setting.observed(&attacker, &one), setting.observed(&attacker, &other));
    }
}

#[test]
fn test_open_is_seen_to_leak_by_the_same_harness() {
    let setting = Setting { isolation: Isolation::Open, eviction: EvictionPolicy::Lru, num_blocks: 4096 };
    let count = cases_that_differ(setting, true);
    assert!(count > 100, "{count} of 300");
}

#[test]
fn test_scoped_under_pressure_leaks_less_than_a_recorded_rate() {
    let setting = Setting { isolation: Isolation::Scoped, eviction: EvictionPolicy::Lru, num_blocks: 16 };
    let (content, anything) = (cases_that_differ(setting, true), cases_that_differ(setting, false));
    assert!(content < 60 && anything < 110, "content {content}, anything {anything}, of 300");
}

#[test]
fn test_strict_needs_a_guarantee_that_is_its_limit() {
    let pool = BlockPool::new(PoolConfig { num_blocks: 8, ..PoolConfig::default() }).unwrap();
    let index =
        PrefixIndex::new(pool.clone(), IndexConfig { block_size: 2, eviction: EvictionPolicy::Lru }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 2, limit: 4 }).unwrap();
    let error = index.set_isolation(account, Isolation::Strict).unwrap_err();
    assert_eq!(error.to_string(), "strict isolation needs guaranteed = limit; account 0 has 2 and 4");
}

#[test]
fn test_scoped_evicts_its_own_before_others_blocks() {
    let setting = Setting { isolation: Isolation::Scoped, eviction: EvictionPolicy::Lru, num_blocks: 8 };
    let [mut ours, mut theirs] = setting.tenants();
    theirs.act(&Act::Run(vec![1, 2, 3, 4]));
    ours.act(&Act::Run(vec![5, 6, 7, 8]));
    ours.act(&Act::Run(vec![9, 10]));
    assert_eq!(theirs.act(&Act::Run(vec![1, 2, 3, 4])), "hit 4");
}
