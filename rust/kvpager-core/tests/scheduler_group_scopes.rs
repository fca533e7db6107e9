//! Layer groups with group and public scopes: what a scope shares is found in every group, and is paid by the scope.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod follower;
mod support;

use follower::Follower;
use kvpager_core::Error;
use kvpager_core::block_pool::{BlockPool, PoolConfig};
use kvpager_core::geometry::Span;
use kvpager_core::prefix_index::{EventConfig, EvictionPolicy, IndexConfig, PrefixIndex, ShareScope};
use kvpager_core::scheduler::{
    AdmissionPolicy, FinishReason, SchedulerConfig, Sharing, Tenant, TenantScope, ZeroBlocks,
};
use proptest::prelude::*;
use std::sync::Arc;
use support::{Engine, config, expected_output, prompt, tenant_config};

fn grouped(groups: &[Span]) -> SchedulerConfig {
    SchedulerConfig { layer_groups: groups.into(), ..config(4) }
}

/// A handle of the operator.
fn handle(engine: &Engine, name: &str, scope: TenantScope, limit: u32) -> Arc<Tenant> {
    let mut config = tenant_config(name, 0, limit);
    config.sharing.scope = scope;
    engine.scheduler.add_tenant(&config).expect("the tenant is new")
}

fn member(
    engine: &Engine,
    name: &str,
    public: Option<&Arc<Tenant>>,
    group: Option<&Arc<Tenant>>,
) -> Arc<Tenant> {
    let mut config = tenant_config(name, 0, engine.pool.num_blocks());
    config.sharing = Sharing { public: public.cloned(), group: group.cloned(), ..Sharing::default() };
    engine.scheduler.add_tenant(&config).expect("the tenant is new")
}

fn committed(engine: &Engine, tenant: &Tenant) -> u64 {
    engine.pool.account_stats(tenant.account).expect("it has an account").committed
}

/// The first `shared` tokens of a prompt, and others.
fn continued(shared: u32, own: u32) -> Vec<u32> {
    prompt(1, shared).into_iter().chain(prompt(7, own)).collect()
}

fn cached_tokens(engine: &mut Engine, tenant: &Arc<Tenant>, tokens: &[u32]) -> u32 {
    let id = engine.submit(tenant, tokens, 3).expect("it fits");
    engine.finish(200);
    assert_eq!(engine.outputs[&id], expected_output(tokens, 3, &[]));
    engine.finished[&id].cached_tokens
}

#[test]
fn a_published_prefix_is_found_in_every_group_and_charged_once_to_the_public_account() {
    for length in 20..28 {
        let mut engine = Engine::new(96, grouped(&[Span::Full, Span::Sliding(8)]), true);
        let system = handle(&engine, "system", TenantScope::Public, 40);
        let members = ["a", "b"].map(|name| member(&engine, name, Some(&system), None));
        let published = engine.submit(&system, &prompt(1, length), 1).unwrap();
        engine.finish(50);
        // Its full blocks, and of the window what the query after them sees.
        let num_blocks = length / 4;
        let kept = u64::from(num_blocks) + 2;
        assert_eq!(committed(&engine, &system), kept, "{length} tokens");
        engine.index.as_ref().unwrap().evict(u32::MAX);
        // Only its end counts, so whether a prefix is there depends on no eviction.
        assert_eq!(cached_tokens(&mut engine, &members[0], &continued(12, 3)), 0);
        for member in &members {
            engine.submit(member, &continued(length, 9), 20).unwrap();
        }
        while engine.scheduler.has_work().unwrap() {
            engine.turn();
            assert_eq!(committed(&engine, &system), kept, "guests of what is published cost nothing");
        }
        let found =
            engine.finished.iter().filter(|(id, request)| **id > published && request.prompt_tokens > 20);
        assert!(found.map(|(_, request)| request.cached_tokens).eq([num_blocks * 4; 2]));
        let again = cached_tokens(&mut engine, &members[0], &continued(length, 9));
        assert_eq!(again, (length + 8) / 4 * 4, "and its own continuation");
        assert_eq!(engine.scheduler.unpublish(&system).unwrap(), 1);
        assert_eq!(committed(&engine, &system), 0);
        assert_eq!(
            cached_tokens(&mut engine, &members[1], &continued(length, 9)),
            0,
            "nothing of it is found"
        );
        engine.check();
        engine.check_idle();
        engine.index.as_ref().unwrap().evict(u32::MAX);
        assert_eq!(engine.pool.stats().free, 96);
    }
}

#[test]
fn a_publication_of_windowed_groups_has_no_output() {
    let engine = Engine::new(96, grouped(&[Span::Full, Span::Sliding(8)]), true);
    let system = handle(&engine, "system", TenantScope::Public, 40);
    let error = engine.submit(&system, &prompt(1, 9), 2).unwrap_err().to_string();
    assert!(error.contains("max_tokens is 2, must be 1: with 2 layer groups"), "{error}");
}

#[test]
fn guests_of_a_group_are_paid_by_it_once_and_it_gets_everything_back() {
    let mut engine = Engine::new(96, grouped(&[Span::Full, Span::Sliding(8), Span::Chunked(8)]), true);
    let team = handle(&engine, "team", TenantScope::Group, 60);
    let members = ["a", "b"].map(|name| member(&engine, name, None, Some(&team)));
    assert_eq!(cached_tokens(&mut engine, &team, &prompt(1, 22)), 0);
    assert_eq!(committed(&engine, &team), 0);
    for member in &members {
        engine.submit(member, &continued(22, 1), 20).unwrap();
    }
    engine.turn();
    // 5 blocks; the next query, at 23, sees positions from 16 on in both others: one block, and what the member wrote.
    assert_eq!(committed(&engine, &team), 5 + 1 + 1);
    // Its own request beside its guests pays for itself.
    let own = engine.submit(&team, &continued(22, 1), 4).unwrap();
    engine.finish(100);
    assert_eq!(engine.finished[&own].cached_tokens, 20);
    assert!(members.iter().all(|member| committed(&engine, member) == 0) && committed(&engine, &team) == 0);
    engine.check_idle();
    engine.index.as_ref().unwrap().evict(u32::MAX);
    assert_eq!(engine.pool.stats().free, 96);
}

#[test]
fn a_group_without_room_for_its_guests_costs_its_members_the_hit_and_nothing_else() {
    let config = SchedulerConfig { max_prefill_chunk: 4, ..grouped(&[Span::Full, Span::Sliding(8)]) };
    let mut engine = Engine::new(96, config, true);
    let team = handle(&engine, "team", TenantScope::Group, 10);
    let members = ["a", "b"].map(|name| member(&engine, name, None, Some(&team)));
    cached_tokens(&mut engine, &team, &prompt(1, 20));
    cached_tokens(&mut engine, &team, &prompt(2, 9));
    let long = engine.submit(&members[0], &continued(20, 1), 20).unwrap();
    engine.turn();
    assert_eq!(committed(&engine, &team), 5 + 2);
    // Two blocks of the full group and two of the window: the window's do not fit into the team's 10.
    let tokens: Vec<u32> = prompt(2, 9).into_iter().chain([5, 6]).collect();
    let short = engine.submit(&members[1], &tokens, 3).unwrap();
    engine.finish(100);
    assert_eq!(engine.finished[&long].cached_tokens, 20);
    assert_eq!(engine.finished[&short].cached_tokens, 0);
    assert_eq!(engine.outputs[&short], expected_output(&tokens, 3, &[]));
    assert_eq!(cached_tokens(&mut engine, &members[0], &tokens), 8, "now there is room");
    engine.check_idle();
}

fn span() -> impl Strategy<Value = Span> {
    prop_oneof![Just(Span::Full), (1..12u64).prop_map(Span::Sliding), (1..12u64).prop_map(Span::Chunked)]
}

#[derive(Clone, Debug)]
enum Operation {
    Submit { tenant: usize, family: u32, shared: u32, own: u32, max_tokens: u32 },
    TakeOff,
    Land,
    Crash(prop::sample::Index),
    Abort(prop::sample::Index),
    Evict(u32),
    Unpublish,
    Purge(&'static str),
    Poll,
}

fn operation() -> impl Strategy<Value = Operation> {
    let submit = (0..5usize, 0..2u32, 0..20u32, 1..8u32, 1..12u32).prop_map(
        |(tenant, family, shared, own, max_tokens)| Operation::Submit {
            tenant,
            family,
            shared,
            own,
            max_tokens,
        },
    );
    prop_oneof![
        5 => submit,
        8 => Just(Operation::TakeOff),
        6 => Just(Operation::Land),
        1 => any::<prop::sample::Index>().prop_map(Operation::Crash),
        1 => any::<prop::sample::Index>().prop_map(Operation::Abort),
        1 => (1..6u32).prop_map(Operation::Evict),
        1 => Just(Operation::Unpublish),
        1 => prop_oneof![Just("a"), Just("b")].prop_map(Operation::Purge),
        3 => Just(Operation::Poll),
    ]
}

fn followed_engine(num_blocks: u32, config: SchedulerConfig, capacity: usize) -> Engine {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let events = EventConfig { key: [7; 32], capacity, with_tokens: false };
    let index = IndexConfig { block_size: config.block_size, eviction: EvictionPolicy::Lru };
    let index = PrefixIndex::with_events(Arc::clone(&pool), index, events).unwrap();
    Engine::with_index(pool, Some(index), config).unwrap()
}

/// A follower that applies events holds what a snapshot has, in every group.
fn follow(engine: &Engine, follower: &mut Follower) {
    let index = engine.index.as_ref().unwrap();
    let snapshot = index.snapshot();
    if !follower.apply(&index.poll_events(usize::MAX)) {
        *follower = Follower::from_snapshot(&snapshot);
    }
    assert_eq!(*follower, Follower::from_snapshot(&snapshot));
}

/// Longest common beginning, in whole blocks.
fn common_blocks(a: &[u32], b: &[u32], block_size: u32) -> u32 {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count() as u32;
    common / block_size * block_size
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    /// Every slot that is read has the right content (the engine checks), the shares add up (the index checks), nothing
    /// is found that nobody of the chain computed, a follower knows what there is, and nothing stays held.
    #[test]
    fn shared_scopes_serve_every_group_right_whatever_the_schedule(
        spare in 0..40u32,
        block_size in 1..5u32,
        groups in prop::collection::vec(span(), 1..4),
        shared_limit in 8..30u32,
        max_batch_tokens in 4..20u32,
        max_open_steps in 1..4u32,
        overcommits in any::<bool>(),
        event_capacity in prop_oneof![Just(1usize << 20), 1..200usize],
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let mut config = SchedulerConfig { block_size, max_batch_tokens, max_open_steps, ..grouped(&groups) };
        config.max_running = 4;
        config.zero_blocks = ZeroBlocks::Always;
        if overcommits {
            config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        }
        // What is published stays: the largest request must fit beside it.
        let num_blocks = shared_limit + config.lifetime_blocks(27, 12) + spare;
        let mut engine = followed_engine(num_blocks, config, event_capacity);
        let mut follower = Follower::from_snapshot(&engine.index.as_ref().unwrap().snapshot());
        let system = handle(&engine, "system", TenantScope::Public, shared_limit);
        let team = handle(&engine, "team", TenantScope::Group, shared_limit);
        let tenants = [
            Arc::clone(&system),
            Arc::clone(&team),
            member(&engine, "a", Some(&system), Some(&team)),
            member(&engine, "b", Some(&system), Some(&team)),
            member(&engine, "c", Some(&system), None),
        ];
        // Whose prefixes each may find.
        let chains: [&[usize]; 5] = [&[0], &[1], &[0, 1, 2], &[0, 1, 3], &[0, 4]];
        let mut accepted = Vec::new();
        for operation in operations {
            match operation {
                Operation::Submit { tenant, family, shared, own, max_tokens } => {
                    let tokens: Vec<u32> =
                        (0..shared).map(|i| 100 + family + i % 2).chain((0..own).map(|i| 7 + i)).collect();
                    let max_tokens = if tenant == 0 { 1 } else { max_tokens };
                    match engine.submit(&tenants[tenant], &tokens, max_tokens) {
                        Ok(id) => accepted.push((id, tenant, tokens, max_tokens)),
                        Err(Error::Refused { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
                Operation::TakeOff if engine.flights.len() < max_open_steps as usize => {
                    engine.take_off();
                }
                Operation::Land if !engine.flights.is_empty() => {
                    engine.land();
                }
                Operation::Crash(place) if !engine.flights.is_empty() => {
                    engine.crash(place.index(engine.flights.len()), false);
                }
                Operation::Abort(which) if !accepted.is_empty() => {
                    engine.scheduler.abort(accepted[which.index(accepted.len())].0).unwrap();
                }
                Operation::Evict(count) => {
                    engine.index.as_ref().unwrap().evict(count);
                    engine.check();
                }
                Operation::Unpublish => {
                    engine.scheduler.unpublish(&system).unwrap();
                    engine.check();
                }
                Operation::Purge(name) => {
                    engine.index.as_ref().unwrap().purge(&ShareScope::Private(name.to_owned()));
                    engine.check();
                }
                Operation::Poll => follow(&engine, &mut follower),
                _ => {}
            }
            for tenant in [&system, &team] {
                prop_assert!(committed(&engine, tenant) <= u64::from(shared_limit));
            }
        }
        while !engine.flights.is_empty() {
            engine.land();
        }
        engine.finish(3000);
        engine.scheduler.unpublish(&system).unwrap();
        engine.check();
        engine.check_idle();
        let whole = |(_, _, tokens, max_tokens): &(_, usize, Vec<u32>, u32)| {
            [&tokens[..], &expected_output(tokens, *max_tokens, &[])].concat()
        };
        for (id, tenant, tokens, max_tokens) in &accepted {
            let finished = &engine.finished[id];
            match finished.reason {
                FinishReason::Length => {
                    prop_assert_eq!(&engine.outputs[id], &expected_output(tokens, *max_tokens, &[]));
                }
                FinishReason::Aborted => {}
                FinishReason::Capacity => prop_assert!(*tenant == 0 || overcommits),
                other => prop_assert!(false, "{:?}", other),
            }
            let may_find = accepted.iter().filter(|other| other.0 != *id && chains[*tenant].contains(&other.1));
            let longest = may_find.map(|other| common_blocks(tokens, &whole(other), block_size)).max();
            prop_assert!(finished.cached_tokens <= longest.unwrap_or(0));
        }
        follow(&engine, &mut follower);
        let index = engine.index.as_ref().unwrap();
        index.evict(u32::MAX);
        prop_assert_eq!(engine.pool.stats().free, u64::from(num_blocks));
        follow(&engine, &mut follower);
        prop_assert_eq!(follower.num_attached(), 0);
    }
}
