//! Events: a follower that starts from a snapshot and applies them holds the same tree.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod follower;

use follower::Follower;
use kvpager_core::NamespaceId;
use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{
    EventBatch, EventConfig, EventKind, EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex,
    ShareScope, Snapshot,
};
use proptest::prelude::*;
use std::sync::Arc;

const BLOCK_SIZE: usize = 2;

fn index(capacity: usize, key: u8, with_tokens: bool) -> (Arc<PrefixIndex>, [NamespaceId; 2]) {
    let pool = BlockPool::new(PoolConfig { num_blocks: 16, ..PoolConfig::default() }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: 16 }).unwrap();
    let config = IndexConfig { block_size: BLOCK_SIZE as u32, eviction: EvictionPolicy::Lru };
    let events = EventConfig { key: [key; 32], capacity, with_tokens };
    let index = PrefixIndex::with_events(pool, config, events).unwrap();
    let namespaces = ["alice", "bob"].map(|name| {
        let scope = ShareScope::Private(name.into());
        index.namespace(&scope, &Fingerprint::default(), account).unwrap()
    });
    (index, namespaces)
}

#[derive(Clone, Debug)]
enum Step {
    Run(usize, Vec<u32>),
    Start(usize, Vec<u32>),
    End,
    Evict(u32),
    Purge(usize),
    Poll,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || prop::collection::vec(0..3u32, 1..6);
    let step = prop_oneof![
        5 => (0..2usize, path()).prop_map(|(i, path)| Step::Run(i, path)),
        2 => (0..2usize, path()).prop_map(|(i, path)| Step::Start(i, path)),
        2 => Just(Step::End),
        1 => (1..6u32).prop_map(Step::Evict),
        1 => (0..2usize).prop_map(Step::Purge),
        2 => Just(Step::Poll),
    ];
    prop::collection::vec(step, 1..60)
}

fn run(index: &Arc<PrefixIndex>, namespace: NamespaceId, path: &[u32]) -> Option<Pin> {
    let tokens: Vec<u32> = path.iter().flat_map(|&block| [block; BLOCK_SIZE]).collect();
    index.insert_prefix(namespace, &tokens, &mut Vec::new()).ok().map(|(pin, _)| pin)
}

proptest! {
    #[test]
    fn test_a_follower_holds_the_same_tree(steps in steps(), capacity in 1..40usize) {
        let (index, namespaces) = index(capacity, 1, false);
        let mut follower = Follower::from_snapshot(&index.snapshot());
        let mut running = Vec::new();
        for step in steps.iter().chain([&Step::Poll]) {
            match step {
                Step::Run(i, path) => drop(run(&index, namespaces[*i], path)),
                Step::Start(i, path) => running.extend(run(&index, namespaces[*i], path)),
                Step::End => drop(running.pop()),
                Step::Evict(count) => drop(index.evict(*count)),
                Step::Purge(i) => {
                    index.purge(&ShareScope::Private(["alice", "bob"][*i].into()));
                }
                Step::Poll => {
                    let snapshot = index.snapshot();
                    if !follower.apply(&index.poll_events(usize::MAX)) {
                        follower = Follower::from_snapshot(&snapshot);
                    }
                    prop_assert_eq!(&follower, &Follower::from_snapshot(&snapshot));
                }
            }
            index.check_invariants().unwrap();
        }
    }
}

#[test]
fn test_digests_depend_on_key_namespace_and_the_whole_prefix() {
    let digests_of = |key: u8, namespace: usize, path: &[u32]| {
        let (index, namespaces) = index(64, key, false);
        drop(run(&index, namespaces[namespace], path));
        let last = index.poll_events(64).events.pop().unwrap();
        let EventKind::Stored { digests, .. } = last.kind else { panic!("{last:?}") };
        digests
    };
    let base = digests_of(1, 0, &[1, 2]);
    assert_eq!(base, digests_of(1, 0, &[1, 2]));
    assert_eq!(base[0], digests_of(1, 0, &[1, 3])[0]);
    for other in [digests_of(2, 0, &[1, 2]), digests_of(1, 1, &[1, 2]), digests_of(1, 0, &[3, 2])] {
        assert!(base.iter().all(|digest| !other.contains(digest)));
    }
}

#[test]
fn test_tokens_are_in_the_events_only_when_asked_for() {
    for with_tokens in [false, true] {
        let (index, namespaces) = index(64, 1, with_tokens);
        drop(run(&index, namespaces[0], &[1, 2]));
        let event = index.poll_events(64).events.remove(0);
        let EventKind::Stored { tokens, .. } = event.kind else { panic!("{event:?}") };
        assert_eq!(tokens, if with_tokens { vec![1, 1, 2, 2] } else { vec![] });
    }
}

#[test]
fn test_an_index_without_events_has_none() {
    let pool = BlockPool::new(PoolConfig { num_blocks: 4, ..PoolConfig::default() }).unwrap();
    let config = IndexConfig { block_size: 2, eviction: EvictionPolicy::Lru };
    let index = PrefixIndex::new(pool, config).unwrap();
    assert_eq!((index.poll_events(8), index.snapshot()), (EventBatch::default(), Snapshot::default()));
}
