//! Reuse of a part of a block by copy: exact, private to its scope, and of no effect on what comes out.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{
    EvictionPolicy, Fingerprint, IndexConfig, Isolation, PrefixIndex, ShareScope,
};
use kvpager_core::scheduler::{Sharing, Tenant, TenantConfig};
use kvpager_core::{NamespaceId, SequenceId};
use proptest::prelude::*;
use std::sync::Arc;
use support::{Engine, config, expected_output, request};

fn world(num_blocks: u32) -> (Arc<BlockPool>, Arc<PrefixIndex>, [NamespaceId; 2]) {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    let config = IndexConfig { block_size: 4, eviction: EvictionPolicy::Lru };
    let index = PrefixIndex::new(pool.clone(), config).unwrap();
    let namespaces = ["alice", "bob"].map(|tenant| {
        index.namespace(&ShareScope::Private(tenant.into()), &Fingerprint::default(), account).unwrap()
    });
    (pool, index, namespaces)
}

#[test]
fn test_the_closest_block_is_found_and_pinned_alone() {
    let (pool, index, [alice, bob]) = world(16);
    let mut blocks = Vec::new();
    for prompt in [[1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 0, 0, 1, 1, 1, 1]] {
        drop(index.insert_prefix(alice, &prompt, &mut blocks).unwrap());
    }
    let mut found = Vec::new();
    let pin = index.match_whole(alice, &[1, 2, 3, 4], &mut found).unwrap();
    let closest = |tokens: &[u32]| index.match_partial(&pin, tokens).unwrap();
    let partial = closest(&[5, 6, 7, 0]).unwrap();
    assert_eq!((partial.num_tokens, partial.block), (3, blocks[1]));
    assert_eq!(closest(&[5, 6, 0, 9]).unwrap().num_tokens, 3);
    assert_eq!(closest(&[5]).unwrap().num_tokens, 1);
    assert!(closest(&[6, 6, 7]).is_none() && closest(&[]).is_none());
    // The pinned block and the one above it stay; what follows goes.
    drop(pin);
    assert_eq!((pool.stats().held, index.evict(16)), (2, 3));
    assert_eq!(index.peek_prefix(alice, &[1, 2, 3, 4, 5, 6, 7, 8, 0]).unwrap(), 8);
    let foreign = index.root(bob).unwrap();
    assert!(index.match_partial(&foreign, &[1, 2, 3]).unwrap().is_none());
    drop(partial);
    assert_eq!(pool.stats().held, 0);
    index.check_invariants().unwrap();
}

#[test]
fn test_nothing_purged_is_found() {
    let (_, index, [alice, _]) = world(16);
    let (mut blocks, mut found) = (Vec::new(), Vec::new());
    let held = index.insert_prefix(alice, &[1, 2, 3, 4, 5, 6, 7, 8], &mut blocks).unwrap();
    let pin = index.match_whole(alice, &[1, 2, 3, 4], &mut found).unwrap();
    assert!(index.match_partial(&pin, &[5, 6]).unwrap().is_some());
    index.purge(&ShareScope::Private("alice".into()));
    assert!(index.match_partial(&pin, &[5, 6]).unwrap().is_none());
    drop(held);
    index.check_invariants().unwrap();
}

fn tenant(engine: &Engine, name: &str, isolation: Isolation, blocks: u32) -> Arc<Tenant> {
    let guaranteed_blocks = if isolation == Isolation::Strict { blocks } else { 0 };
    engine
        .scheduler
        .add_tenant(&TenantConfig {
            guaranteed_blocks,
            sharing: Sharing { isolation, ..Sharing::default() },
            ..TenantConfig::new(name, blocks)
        })
        .unwrap()
}

/// Runs one request alone; returns its reused tokens.
fn run(engine: &mut Engine, tenant: &Arc<Tenant>, prompt: &[u32], partial: bool) -> u32 {
    let mut wanted = request(tenant, prompt, 3);
    wanted.partial = partial;
    let id = engine.scheduler.submit(wanted).unwrap();
    engine.finish(50);
    assert_eq!(engine.outputs[&id], expected_output(prompt, 3, &[]));
    engine.finished[&id].cached_tokens
}

#[test]
fn test_a_request_that_asks_for_it_reuses_a_part_of_a_block_by_a_copy() {
    let mut engine = Engine::new(32, config(8), true);
    let alice = engine.tenant("alice");
    let first: Vec<u32> = (0..20).collect();
    assert_eq!(run(&mut engine, &alice, &first, true), 0);
    let other = [&first[..13], &[40, 41, 42, 43, 44, 45]].concat();
    assert_eq!(run(&mut engine, &alice, &other, false), 8);
    // Its own block is resident now and agrees in more.
    let third = [&first[..13], &[40, 41, 99, 99, 99, 99]].concat();
    assert_eq!(run(&mut engine, &alice, &third, true), 15);
    // The last token is always computed, also where the resident block goes on with it.
    assert_eq!(run(&mut engine, &alice, &first[..12], true), 11);
    assert_eq!(run(&mut engine, &alice, &first[..9], true), 8);
    engine.check_idle();
}

#[test]
fn test_the_copy_is_in_the_batch_and_its_source_stays_until_the_step_closes() {
    let mut engine = Engine::new(8, config(8), true);
    let alice = engine.tenant("alice");
    let first: Vec<u32> = (0..9).collect();
    run(&mut engine, &alice, &first, true);
    let mut wanted = request(&alice, &[&first[..5], &[70, 71, 72]].concat(), 1);
    wanted.partial = true;
    engine.scheduler.submit(wanted).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    assert_eq!(batch.arrays.block_copies.len(), 1);
    assert_eq!(batch.arrays.positions[0], 5);
    let [from, to] = batch.arrays.block_copies[0];
    assert_ne!(from, to);
    let index = engine.index.clone().unwrap();
    assert_eq!(index.evict(8), 0, "the step may still read the source");
    let (token_start, tokens) = engine.run(&batch);
    let outcome = engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    engine.note(outcome.finished);
    assert_eq!(index.evict(8), 2);
    engine.check_idle();
}

#[test]
fn test_another_tenants_block_is_not_copied() {
    for isolation in [Isolation::Scoped, Isolation::Strict] {
        let mut engine = Engine::new(32, config(8), true);
        let [alice, bob] = ["alice", "bob"].map(|name| tenant(&engine, name, isolation, 16));
        let prompt: Vec<u32> = (0..20).collect();
        run(&mut engine, &alice, &prompt, true);
        assert_eq!(run(&mut engine, &bob, &prompt[..14], true), 0);
        assert_eq!(run(&mut engine, &alice, &prompt[..14], true), 13);
        engine.check_idle();
    }
}

#[derive(Clone, Debug)]
enum Act {
    /// (tenant, how much of a common text, what follows, tokens to sample, whether it asks for parts).
    Submit(usize, usize, Vec<u32>, u32, bool),
    Turn,
    Crash,
    Abandon,
    Evict(u32),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let submit = (0..2usize, 0..24usize, prop::collection::vec(0..3u32, 1..12), 1..6u32, any::<bool>());
    let act = prop_oneof![
        4 => submit.prop_map(|(t, common, rest, n, partial)| Act::Submit(t, common, rest, n, partial)),
        8 => Just(Act::Turn),
        1 => Just(Act::Crash),
        1 => Just(Act::Abandon),
        1 => (1..4u32).prop_map(Act::Evict),
    ];
    prop::collection::vec(act, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn test_what_comes_out_does_not_depend_on_parts_that_are_reused(
        acts in acts(), block_size in 2..9u32, num_blocks in 16..40u32, chunk in 0..9u32,
    ) {
        let mut settings = config(block_size);
        settings.max_prefill_chunk = chunk;
        let mut engine = Engine::new(num_blocks, settings, true);
        let tenants = ["alice", "bob"].map(|name| engine.tenant(name));
        let text: Vec<u32> = (100..124).collect();
        let mut expected: Vec<(SequenceId, Vec<u32>)> = Vec::new();
        for act in acts {
            match act {
                Act::Submit(tenant, common, rest, max_tokens, partial) => {
                    let prompt = [&text[..common], &rest[..]].concat();
                    let mut wanted = request(&tenants[tenant], &prompt, max_tokens);
                    wanted.partial = partial;
                    if let Ok(id) = engine.scheduler.submit(wanted) {
                        expected.push((id, expected_output(&prompt, max_tokens, &[])));
                    }
                }
                Act::Turn => {
                    engine.turn();
                }
                Act::Crash => engine.crashed_turn(),
                Act::Abandon => engine.abandoned_turn(false),
                Act::Evict(count) => {
                    engine.index.as_ref().unwrap().evict(count);
                }
            }
        }
        engine.finish(2000);
        engine.check_idle();
        for (id, output) in expected {
            prop_assert_eq!(&engine.outputs[&id], &output);
        }
    }
}
