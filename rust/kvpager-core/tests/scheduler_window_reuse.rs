//! Reuse in models in which no layer group sees all tokens: a match needs the windows' ends only, and what is found is
//! right under every policy, whatever is short.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use kvpager_core::Error;
use kvpager_core::block_pool::{BlockPool, PoolConfig};
use kvpager_core::geometry::Span;
use kvpager_core::prefix_index::{EvictionPolicy, IndexConfig, Isolation, PrefixIndex, ShareScope};
use kvpager_core::scheduler::{
    AdmissionPolicy, Deadline, ForecastConfig, HostTierConfig, Overflow, Retention, SchedulerConfig, Tenant,
};
use std::sync::Arc;
use support::{Engine, config, expected_output, prompt, request, tenant_config};

fn windowed(groups: &[Span]) -> SchedulerConfig {
    SchedulerConfig { layer_groups: groups.into(), ..config(4) }
}

fn engine(num_blocks: u32, config: SchedulerConfig, eviction: EvictionPolicy) -> Engine {
    let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
    let index = IndexConfig { block_size: config.block_size, eviction };
    let index = PrefixIndex::new(Arc::clone(&pool), index).unwrap();
    Engine::with_index(pool, Some(index), config).unwrap()
}

fn index(engine: &Engine) -> Arc<PrefixIndex> {
    Arc::clone(engine.index.as_ref().unwrap())
}

/// Runs a request alone; returns how many prompt tokens came from the index.
fn cached_tokens(engine: &mut Engine, tenant: &Arc<Tenant>, tokens: &[u32]) -> u32 {
    let id = engine.submit(tenant, tokens, 3).unwrap();
    engine.finish(200);
    assert_eq!(engine.outputs[&id], expected_output(tokens, 3, &[]));
    engine.finished[&id].cached_tokens
}

/// Homes that the index knows in a tenant's namespace.
fn num_homes(engine: &Engine, tenant: &Tenant) -> usize {
    index(engine).namespace_stats(tenant.namespace().unwrap()).unwrap().num_blocks
}

#[test]
fn a_match_needs_the_end_of_the_window_and_nothing_before_it() {
    for groups in
        [vec![Span::Sliding(8)], vec![Span::Sliding(8), Span::Sliding(5)], vec![Span::Sliding(8), Span::Full]]
    {
        let mut engine = Engine::new(64, windowed(&groups), true);
        let tenant = engine.tenant("a");
        let long = prompt(1, 42);
        assert_eq!(cached_tokens(&mut engine, &tenant, &long), 0);
        // 44 tokens are computed, 11 blocks in each group; the query at 40 sees 33 and later, two blocks.
        let kept: u64 = groups.iter().map(|span| if *span == Span::Full { 11 } else { 3 }).sum();
        let excess = engine.pool.stats().cached - kept;
        assert_eq!(u64::from(index(&engine).evict(excess as u32)), excess);
        engine.check();
        assert_eq!(
            cached_tokens(&mut engine, &tenant, &long),
            40,
            "{groups:?}: only what is before the window went"
        );
        // A prefix of it ends where the window's blocks are gone.
        assert_eq!(cached_tokens(&mut engine, &tenant, &long[..21]), 0, "{groups:?}");
        assert_eq!(cached_tokens(&mut engine, &tenant, &long[..21]), 20, "computed again, it is there again");
        engine.check_idle();
        index(&engine).evict(u32::MAX);
        assert_eq!((engine.pool.stats().free, num_homes(&engine, &tenant)), (64, 0));
    }
}

#[test]
fn blocks_that_leave_the_window_are_free_for_others_while_the_sequence_runs() {
    // A window of 8 takes 3 blocks of 4 at any time; the pool has 6, and two sequences of 100 tokens run in it.
    let mut settings = windowed(&[Span::Sliding(8)]);
    settings.max_prefill_chunk = 1;
    for eviction in [EvictionPolicy::Lru, EvictionPolicy::Learned, EvictionPolicy::Clock] {
        let mut engine = engine(6, settings.clone(), eviction);
        let tenant = engine.tenant("a");
        let ids = [1, 2].map(|seed| engine.submit(&tenant, &prompt(seed, 10), 90).unwrap());
        engine.turn();
        assert_eq!(engine.scheduler.stats().num_running, 2);
        engine.finish(200);
        for (seed, id) in (1..).zip(ids) {
            assert_eq!(engine.outputs[&id], expected_output(&prompt(seed, 10), 90, &[]));
        }
        assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        engine.check_idle();
    }
}

#[test]
fn a_chunk_that_has_just_begun_needs_nothing_of_those_before_it() {
    let mut engine = Engine::new(64, windowed(&[Span::Chunked(8)]), true);
    let tenant = engine.tenant("a");
    assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(1, 18)), 0);
    index(&engine).evict(4);
    assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(1, 18)), 16, "the query at 16 sees itself");
    assert_eq!(
        cached_tokens(&mut engine, &tenant, &prompt(1, 15)),
        8,
        "the one at 12 sees a block that went"
    );
    engine.check_idle();
}

fn settings() -> impl Iterator<Item = (SchedulerConfig, EvictionPolicy)> {
    let forecast = AdmissionPolicy::Forecast(ForecastConfig::default());
    let admission = [AdmissionPolicy::Reserve, AdmissionPolicy::Watermark { free_share: 0.0 }, forecast];
    let evictions = [EvictionPolicy::Lru, EvictionPolicy::Learned, EvictionPolicy::Clock];
    let groups = [vec![Span::Sliding(8)], vec![Span::Chunked(8)], vec![Span::Sliding(8), Span::Chunked(12)]];
    let swaps = [(Overflow::Recompute, 0), (Overflow::Swap, 64)];
    let all = admission.into_iter().flat_map(move |policy| evictions.map(|eviction| (policy, eviction)));
    all.flat_map(move |(policy, eviction)| {
        let of = |groups: &Vec<Span>| {
            swaps.map(|(overflow, num_blocks)| {
                let host_tier = HostTierConfig { num_blocks, ..HostTierConfig::default() };
                let config = SchedulerConfig { policy, overflow, host_tier, ..windowed(groups) };
                (SchedulerConfig { max_model_tokens: 64, max_batch_tokens: 24, ..config }, eviction)
            })
        };
        groups.iter().flat_map(of).collect::<Vec<_>>()
    })
}

#[test]
fn outputs_are_those_without_an_index_under_every_policy() {
    for (config, eviction) in settings() {
        let shape =
            format!("{:?} {:?} {eviction:?} {:?}", config.policy, config.layer_groups, config.overflow);
        let mut num_cached = 0;
        let run = |reuse: bool, num_cached: &mut u32| {
            let mut engine = if reuse {
                engine(32, config.clone(), eviction)
            } else {
                Engine::new(32, config.clone(), false)
            };
            let tenant = engine.tenant("a");
            let mut outputs = Vec::new();
            for round in 0..6 {
                // Turns of three conversations that go on, beside a prompt that comes once.
                let prompts = (1..=3).map(|seed| prompt(seed, 8 + 6 * round)).chain([prompt(50 + round, 20)]);
                let ids: Vec<_> = prompts.map(|tokens| engine.submit(&tenant, &tokens, 7).unwrap()).collect();
                engine.finish(1000);
                outputs.extend(ids.iter().map(|id| engine.outputs[id].clone()));
                *num_cached += ids.iter().map(|id| engine.finished[id].cached_tokens).sum::<u32>();
            }
            engine.check_idle();
            outputs
        };
        assert_eq!(run(true, &mut num_cached), run(false, &mut 0), "{shape}");
        assert!(num_cached > 0, "{shape}");
    }
}

/// Homes are few where a prompt is hardly longer than its windows: one for each block here.
#[test]
fn when_homes_are_short_prefixes_are_lost_and_nothing_else() {
    for eviction in [EvictionPolicy::Lru, EvictionPolicy::Learned, EvictionPolicy::Clock] {
        let config = SchedulerConfig { max_model_tokens: 32, ..windowed(&[Span::Chunked(28)]) };
        let mut engine = engine(16, config, eviction);
        let tenant = engine.tenant("a");
        for round in 0..60 {
            cached_tokens(&mut engine, &tenant, &prompt(round % 20, 29));
            assert!(num_homes(&engine, &tenant) <= 32);
        }
        assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(19, 29)), 28, "what was used last is there");
        engine.check_idle();
        index(&engine).evict(u32::MAX);
        assert_eq!((engine.pool.stats().free, num_homes(&engine, &tenant)), (16, 0));
    }
}

#[test]
fn whole_windows_go_the_one_used_longest_ago_first() {
    let mut engine = Engine::new(12, windowed(&[Span::Sliding(8)]), true);
    let tenant = engine.tenant("a");
    for seed in [1, 2, 3] {
        cached_tokens(&mut engine, &tenant, &prompt(seed, 17));
    }
    assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(1, 17)), 16);
    // Another one takes the room of a window: that of 2, which is the oldest now.
    cached_tokens(&mut engine, &tenant, &prompt(4, 17));
    assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(1, 17)), 16);
    assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(4, 17)), 16);
    assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(2, 17)), 0);
}

#[test]
fn what_is_kept_of_a_request_is_its_windows() {
    for (groups, kept) in [(vec![Span::Sliding(8)], 2), (vec![Span::Sliding(8), Span::Sliding(4)], 3)] {
        let mut engine = Engine::new(64, windowed(&groups), true);
        let tenant = engine.tenant("a");
        let retained = kvpager_core::scheduler::Request {
            retention: Some(Retention::default()),
            ..request(&tenant, &prompt(1, 41), 1)
        };
        engine.submit_request(retained).unwrap();
        engine.finish(100);
        assert_eq!(engine.scheduler.stats().num_kept_blocks, kept);
        assert_eq!(engine.pool.stats().held, kept);
        index(&engine).evict(64);
        assert_eq!(cached_tokens(&mut engine, &tenant, &prompt(1, 41)), 40);
        engine.scheduler.drain(Deadline { steps: None, seconds: None }).unwrap();
        engine.turn();
        engine.check_idle();
    }
}

#[test]
fn a_purge_takes_the_homes_and_what_is_attached_to_them() {
    let mut engine = Engine::new(64, windowed(&[Span::Sliding(8)]), true);
    let tenants = ["a", "b"].map(|name| engine.tenant(name));
    for tenant in &tenants {
        assert_eq!(cached_tokens(&mut engine, tenant, &prompt(1, 22)), 0, "others' are absent");
    }
    let purged = index(&engine).purge(&ShareScope::Private("a".to_owned()));
    assert_eq!(purged.num_evicted, 6, "24 tokens were computed");
    assert_eq!((num_homes(&engine, &tenants[0]), num_homes(&engine, &tenants[1])), (0, 6));
    assert_eq!(cached_tokens(&mut engine, &tenants[0], &prompt(1, 22)), 0);
    assert_eq!(cached_tokens(&mut engine, &tenants[1], &prompt(1, 22)), 20);
    engine.check_idle();
}

#[test]
fn a_strict_tenants_blocks_stay_within_its_limit_and_others_take_none_of_its_homes() {
    let config = SchedulerConfig { max_model_tokens: 32, ..windowed(&[Span::Chunked(28)]) };
    let mut engine = Engine::new(40, config, true);
    let mut strict = tenant_config("b", 16, 16);
    strict.sharing.isolation = Isolation::Strict;
    let tenants = [engine.tenant("a"), engine.scheduler.add_tenant(&strict).unwrap()];
    assert_eq!(cached_tokens(&mut engine, &tenants[1], &prompt(1, 29)), 0);
    for round in 0..40 {
        cached_tokens(&mut engine, &tenants[0], &prompt(round, 29));
    }
    assert_eq!(cached_tokens(&mut engine, &tenants[1], &prompt(1, 29)), 28);
    for round in 0..10 {
        cached_tokens(&mut engine, &tenants[1], &prompt(round, 29));
        let stats = engine.pool.account_stats(tenants[1].account).unwrap();
        assert!(stats.committed + stats.cached <= 16, "{stats:?}");
    }
}

#[test]
fn only_its_scheduler_matches_and_inserts() {
    let mut engine = Engine::new(32, windowed(&[Span::Sliding(8)]), true);
    let tenant = engine.tenant("a");
    cached_tokens(&mut engine, &tenant, &prompt(1, 22));
    let (index, namespace) = (index(&engine), tenant.namespace().unwrap());
    let mut blocks = Vec::new();
    let mut refused = Vec::new();
    refused.push(index.match_prefix(namespace, &prompt(1, 22), &mut blocks).err());
    refused.push(index.match_whole(namespace, &prompt(1, 22), &mut blocks).err());
    refused.push(index.insert_prefix(namespace, &prompt(9, 8), &mut blocks).err());
    let chain = index.chain(&[namespace]).unwrap();
    refused.push(index.match_chain(&chain, &prompt(1, 22), &mut blocks).err());
    refused.push(index.insert_chain(&chain, &prompt(9, 8), &mut blocks).err());
    let mut root = index.root(namespace).unwrap();
    refused.push(index.match_partial(&root, &prompt(1, 3)).err());
    refused.push(index.extend(&mut root, &[], &mut []).err());
    for error in refused {
        assert!(
            matches!(&error, Some(Error::WrongState(text)) if text.contains("only its scheduler")),
            "{error:?}"
        );
    }
    assert!(blocks.is_empty());
    drop(root);
    engine.check_idle();
}

#[test]
fn an_index_that_keeps_blocks_already_is_refused() {
    let pool = BlockPool::new(PoolConfig { num_blocks: 32, ..PoolConfig::default() }).unwrap();
    let index = IndexConfig { block_size: 4, eviction: EvictionPolicy::Lru };
    let index = PrefixIndex::new(Arc::clone(&pool), index).unwrap();
    let full = Engine::with_index(Arc::clone(&pool), Some(Arc::clone(&index)), config(4));
    let mut full = full.unwrap();
    let tenant = full.tenant("a");
    cached_tokens(&mut full, &tenant, &prompt(1, 9));
    drop(full);
    let second =
        || Engine::with_index(Arc::clone(&pool), Some(Arc::clone(&index)), windowed(&[Span::Sliding(8)]));
    let error = second().err();
    assert!(
        matches!(&error, Some(Error::WrongState(text)) if text.contains("keeps blocks already")),
        "{error:?}"
    );
    index.clear();
    assert!(second().is_ok());
    assert!(second().is_ok(), "the next scheduler of the model uses the index");
}
