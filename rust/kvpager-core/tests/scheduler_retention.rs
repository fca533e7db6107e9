//! Requests say how long their prefix stays, how much of it, and what goes first; nobody suffers for what is kept.

mod support;

use kvpager_core::geometry::Span;
use kvpager_core::prefix_index::{Isolation, ShareScope};
use kvpager_core::scheduler::{
    AdmissionPolicy, Deadline, FinishReason, FinishedRequest, ForecastConfig, HostTierConfig, Overflow,
    Request, Retention, Sharing, Tenant, TenantConfig, TenantScope,
};
use kvpager_core::{Error, SequenceId};
use std::sync::Arc;
use support::{Engine, NO_LIMIT, after_steps, config, prompt, request, tenant_config};

fn of_priority(priority: i32) -> Retention {
    Retention { priority, ..Retention::default() }
}

fn for_steps(steps: u64) -> Retention {
    Retention::from(after_steps(steps))
}

fn submit(
    engine: &Engine,
    tenant: &Arc<Tenant>,
    prompt: &[u32],
    max: u32,
    retention: Retention,
) -> SequenceId {
    let request = Request { retention: Some(retention), ..request(tenant, prompt, max) };
    engine.submit_request(request).expect("accepted")
}

/// Runs a request of 8 computed tokens, two blocks, to its end.
fn retain(engine: &mut Engine, tenant: &Arc<Tenant>, seed: u32, retention: Retention) {
    submit(engine, tenant, &prompt(seed, 8), 1, retention);
    engine.finish(100);
}

/// Whether all that was computed of `prompt(seed, 8)` is there, or nothing.
fn is_there(engine: &Engine, tenant: &Tenant, seed: u32) -> bool {
    let index = engine.index.as_ref().expect("an index");
    let longer = prompt(seed, 9);
    index.peek_prefix(tenant.namespace().expect("an index"), &longer).expect("known") > 0
}

/// Evicts all that is cached; says what of the seeds is left: what is held.
fn left(engine: &Engine, tenant: &Tenant, seeds: std::ops::Range<u32>) -> Vec<u32> {
    engine.index.as_ref().expect("an index").evict(u32::MAX);
    seeds.filter(|&seed| is_there(engine, tenant, seed)).collect()
}

#[test]
fn what_a_request_retains_stays_until_its_time_has_passed_and_is_cached_then() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    retain(&mut engine, &tenant, 1, for_steps(3));
    for _ in 0..3 {
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_retained, stats.num_kept_blocks, engine.held()), (1, 2, 2));
        assert_eq!((left(&engine, &tenant, 1..2), tenant.num_kept_blocks()), (vec![1], 2));
        engine.turn();
    }
    engine.turn();
    assert_eq!((engine.held(), engine.scheduler.stats().num_retained, tenant.num_kept_blocks()), (0, 0, 0));
    assert!(is_there(&engine, &tenant, 1), "it is cached");
    let seconds = Retention::from(Deadline { steps: None, seconds: Some(2.5) });
    submit(&engine, &tenant, &prompt(2, 8), 1, seconds);
    for (now, expected) in [(1e6, 2), (1e6 + 1.0, 2), (1e6 + 2.0, 2), (1e6 + 3.0, 0)] {
        engine.turn_at(now);
        assert_eq!(engine.held(), expected, "at {now}");
    }
    engine.check_idle();
}

#[test]
fn no_more_is_kept_than_was_asked_for_and_no_less() {
    for (asked, expected) in [(1, 1), (4, 1), (5, 2), (16, 4), (17, 5), (1000, 5)] {
        let mut engine = Engine::new(32, config(4), true);
        let tenant = engine.tenant("a");
        let retention = Retention { num_tokens: Some(asked), ..Retention::default() };
        // 22 tokens are computed, 5 whole blocks.
        submit(&engine, &tenant, &prompt(1, 20), 3, retention);
        engine.finish(100);
        let stats = engine.pool.stats();
        assert_eq!((stats.held, stats.cached), (expected, 5 - expected), "asked for {asked} tokens");
    }
}

#[test]
fn a_lower_priority_goes_first_then_what_was_kept_first_and_all_that_is_merely_cached_before() {
    let mut engine = Engine::new(12, config(4), true);
    let tenant = engine.tenant("a");
    for (seed, priority) in [(1, 5), (2, -1), (3, 0), (4, 0)] {
        retain(&mut engine, &tenant, seed, of_priority(priority));
    }
    let id = engine.submit(&tenant, &prompt(5, 8), 1).expect("accepted");
    engine.finish(100);
    assert_eq!((engine.finished[&id].cached_tokens, engine.pool.stats().cached), (0, 2));
    // Room for 2, 4, 6 ... blocks in all: the ones that nobody retained, then by priority and time.
    for (blocks, expected) in [
        (4, vec![1, 2, 3, 4]),
        (5, vec![1, 3, 4]),
        (7, vec![1, 4]),
        (9, vec![1]),
        (10, vec![1]),
        (11, vec![]),
    ] {
        let id = engine.submit(&tenant, &prompt(50 + blocks, blocks * 4), 1).expect("accepted");
        engine.finish(10);
        let FinishedRequest { reason, queue_steps, .. } = engine.finished[&id];
        assert_eq!((reason, queue_steps), (FinishReason::Length, 0), "nobody waits");
        assert_eq!(left(&engine, &tenant, 1..5), expected, "{blocks} blocks");
    }
    assert_eq!(engine.scheduler.stats().num_preemptions, 0);
    engine.check_idle();
}

#[test]
fn admission_by_every_policy_sees_that_what_is_kept_can_be_had() {
    for policy in [
        AdmissionPolicy::Reserve,
        AdmissionPolicy::Watermark { free_share: 0.1 },
        AdmissionPolicy::Forecast(ForecastConfig::default()),
    ] {
        let mut settings = config(4);
        settings.policy = policy;
        let mut engine = Engine::new(16, settings, true);
        let (tenant, other) = (engine.tenant("a"), engine.tenant("b"));
        for seed in 1..8 {
            retain(&mut engine, &tenant, seed, Retention::default());
        }
        assert_eq!(engine.held(), 14);
        // One that is alone, one for which room is left beside it, and one of another tenant.
        for (owner, seed, length, running) in [(&tenant, 20, 4, 1), (&tenant, 21, 20, 2), (&other, 22, 12, 3)]
        {
            engine.submit(owner, &prompt(seed, length), 4).expect("accepted");
            engine.turn();
            assert_eq!(engine.scheduler.stats().num_running, running, "{policy:?}");
        }
        engine.finish(100);
        assert_eq!(engine.scheduler.stats().num_preemptions, 0);
    }
}

#[test]
fn growth_takes_what_is_kept_before_it_preempts_or_swaps() {
    for host_blocks in [0, 64] {
        let mut settings = config(4);
        settings.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        settings.host_tier = HostTierConfig { num_blocks: host_blocks, ..HostTierConfig::default() };
        settings.overflow = if host_blocks > 0 { Overflow::Swap } else { Overflow::Auto };
        let mut engine = Engine::new(12, settings, true);
        let tenant = engine.tenant("a");
        for seed in 1..4 {
            retain(&mut engine, &tenant, seed, of_priority(seed as i32));
        }
        // Five blocks of each.
        let ids = [7, 8].map(|seed| engine.submit(&tenant, &prompt(seed, 8), 13).expect("accepted"));
        engine.finish(200);
        assert!(ids.iter().all(|id| engine.finished[id].reason == FinishReason::Length));
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_preemptions, stats.swapped_out_blocks, stats.num_retained), (0, 0, 1));
        assert_eq!(left(&engine, &tenant, 1..4), [3]);
    }
}

#[test]
fn a_fork_is_not_refused_for_what_is_kept() {
    let mut engine = Engine::new(12, config(4), true);
    let tenant = engine.tenant("a");
    for seed in 1..4 {
        retain(&mut engine, &tenant, seed, Retention::default());
    }
    let id = engine.submit(&tenant, &prompt(9, 8), 9).expect("accepted");
    engine.turn();
    engine.turn();
    assert_eq!(engine.fork(id, 2).expect("room is made").len(), 2);
    engine.finish(100);
    assert_eq!(engine.scheduler.stats().num_retained, 1);
}

#[test]
fn the_tenant_that_is_short_gives_first_then_the_one_most_above_its_guarantee_and_none_within_it() {
    let mut engine = Engine::new(24, config(4), true);
    let own = engine.tenant_with("own", 0, 24);
    let safe = engine.tenant_with("safe", 4, 24);
    let rich = engine.tenant_with("rich", 0, 24);
    let asker = engine.tenant_with("asker", 0, 24);
    for (tenant, seeds) in [(&own, 1..3), (&safe, 3..5), (&rich, 5..9)] {
        for seed in seeds {
            retain(&mut engine, tenant, seed, of_priority(9));
        }
    }
    let kept = |engine: &Engine| {
        engine.check();
        [&own, &safe, &rich].map(|tenant| tenant.num_kept_blocks())
    };
    assert_eq!(kept(&engine), [4, 4, 8]);
    let ask = |engine: &mut Engine, tenant: &Arc<Tenant>, blocks: u32| {
        let id = engine.submit(tenant, &prompt(90 + blocks, blocks * 4), 1).expect("accepted");
        engine.finish(10);
        let FinishedRequest { reason, queue_steps, .. } = engine.finished[&id];
        assert_eq!((reason, queue_steps), (FinishReason::Length, 0), "nobody waits");
    };
    ask(&mut engine, &own, 8);
    assert_eq!(kept(&engine), [4, 4, 8], "there was room");
    ask(&mut engine, &own, 10);
    assert_eq!(kept(&engine), [2, 4, 8]);
    ask(&mut engine, &asker, 14);
    assert_eq!(kept(&engine), [2, 4, 4]);
    ask(&mut engine, &asker, 20);
    assert_eq!(kept(&engine), [0, 4, 0]);
}

#[test]
fn what_could_not_let_a_waiting_request_in_is_not_let_go_for_it() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    retain(&mut engine, &tenant, 1, Retention::default());
    let running = engine.submit(&tenant, &prompt(2, 8), 24).expect("accepted");
    engine.turn();
    let large = engine.submit(&tenant, &prompt(3, 48), 4).expect("accepted");
    for _ in 0..5 {
        engine.turn();
        assert_eq!((engine.scheduler.stats().num_retained, engine.scheduler.stats().num_waiting), (1, 1));
    }
    engine.finish(100);
    assert_eq!(engine.finished[&running].reason, FinishReason::Length);
    assert_eq!(engine.finished[&large].reason, FinishReason::Length);
}

#[test]
fn under_open_steps_no_more_is_let_go_than_will_be_enough_when_they_have_closed() {
    let mut settings = config(4);
    settings.max_open_steps = 2;
    let mut engine = Engine::new(24, settings, true);
    let tenant = engine.tenant("a");
    for seed in 1..7 {
        retain(&mut engine, &tenant, seed, Retention::default());
    }
    engine.submit(&tenant, &prompt(20, 4), 20).expect("accepted");
    engine.take_off();
    // 12 blocks are kept and 6 promised; it is short of 3, and an open step may read what is let go.
    let large = engine.submit(&tenant, &prompt(21, 32), 4).expect("accepted");
    engine.take_off();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_retained, stats.num_waiting), (4, 1));
    engine.land();
    engine.take_off();
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_retained, stats.num_waiting), (4, 0));
    while !engine.flights.is_empty() || engine.scheduler.has_work().expect("one thread") {
        if engine.flights.is_empty() {
            engine.take_off();
        }
        engine.land();
    }
    assert_eq!(engine.finished[&large].reason, FinishReason::Length);
}

#[test]
fn what_is_kept_of_a_tenant_stays_within_its_bound_and_each_block_counts_once() {
    let mut engine = Engine::new(64, config(4), true);
    let tenant = engine.tenant_that_keeps("a", 7);
    // Three of four blocks in common: 4 + 1 + 1 + 1.
    for (tail, priority) in [(1, 1), (2, 0), (3, 1), (4, 1)] {
        let mut tokens = prompt(1, 12);
        tokens.extend(prompt(10 + tail, 4));
        submit(&engine, &tenant, &tokens, 1, of_priority(priority));
        engine.finish(100);
        assert_eq!(engine.held(), 3 + u64::from(tail));
    }
    // Two more: the lowest priority goes, then what was kept first.
    retain(&mut engine, &tenant, 40, of_priority(2));
    assert_eq!((tenant.num_kept_blocks(), engine.held(), engine.scheduler.stats().num_retained), (7, 7, 3));
    // Of a prefix that is longer than the bound, its beginning stays.
    submit(&engine, &tenant, &prompt(50, 40), 1, of_priority(3));
    engine.finish(100);
    assert_eq!((tenant.num_kept_blocks(), engine.held(), engine.scheduler.stats().num_retained), (7, 7, 1));
    let index = Arc::clone(engine.index.as_ref().expect("an index"));
    index.evict(64);
    let namespace = tenant.namespace().expect("an index");
    assert_eq!(index.peek_prefix(namespace, &prompt(50, 41)).expect("known"), 28);
    // Sessions count as well.
    let session = engine.scheduler.open_session(&tenant, Retention { priority: 4, ..NO_LIMIT.into() });
    let turn = Request { session: session.ok(), ..request(&tenant, &prompt(60, 20), 1) };
    engine.scheduler.submit(turn).expect("a turn");
    engine.finish(100);
    let stats = engine.scheduler.stats();
    assert_eq!((tenant.num_kept_blocks(), stats.num_retained, stats.num_sessions_kept), (5, 0, 1));
    // A bound of none keeps nothing.
    let none = engine.tenant_that_keeps("none", 0);
    retain(&mut engine, &none, 1, of_priority(9));
    assert_eq!(none.num_kept_blocks(), 0);
}

#[test]
fn equal_prefixes_are_kept_once_with_the_higher_priority_and_the_later_end() {
    let mut engine = Engine::new(10, config(4), true);
    let tenant = engine.tenant("a");
    let both = |steps, priority| Retention { priority, ..for_steps(steps) };
    retain(&mut engine, &tenant, 1, both(20, 0));
    retain(&mut engine, &tenant, 1, both(2, 7));
    assert_eq!((engine.scheduler.stats().num_retained, engine.held()), (1, 2));
    retain(&mut engine, &tenant, 2, both(20, 6));
    for _ in 0..10 {
        engine.turn();
    }
    assert_eq!(engine.held(), 4, "the later end counts");
    // 8 blocks of 10: one of them goes, the one that was last asked for with less.
    engine.submit(&tenant, &prompt(3, 32), 1).expect("accepted");
    engine.turn();
    assert_eq!(left(&engine, &tenant, 1..3), [1], "the higher priority counts");
    for _ in 0..10 {
        engine.turn();
    }
    assert_eq!(engine.held(), 0);
    // Ends that are counted in other ways are not comparable: each holds.
    retain(&mut engine, &tenant, 1, for_steps(2));
    retain(&mut engine, &tenant, 1, Retention::default());
    assert_eq!((engine.scheduler.stats().num_retained, engine.held()), (2, 2));
    for _ in 0..5 {
        engine.turn();
    }
    assert_eq!((engine.scheduler.stats().num_retained, engine.held()), (1, 2));
}

#[test]
fn it_is_kept_however_its_request_ends_as_far_as_it_got_and_only_from_then_on() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let aborted = submit(&engine, &tenant, &prompt(1, 8), 20, Retention::default());
    let mut late = Request { retention: Some(Retention::default()), ..request(&tenant, &prompt(2, 8), 20) };
    late.deadline = Deadline { steps: Some(4), seconds: None };
    let late = engine.scheduler.submit(late).expect("accepted");
    for _ in 0..2 {
        engine.turn();
        assert_eq!(engine.scheduler.stats().num_kept_blocks, 0, "they run");
    }
    assert!(engine.scheduler.abort(aborted).expect("issued"));
    engine.finish(100);
    assert_eq!(engine.finished[&aborted].reason, FinishReason::Aborted);
    assert_eq!(engine.finished[&late].reason, FinishReason::Deadline);
    // 9 and 11 tokens were computed.
    assert_eq!((engine.scheduler.stats().num_retained, engine.held()), (2, 4));
    // One that never ran leaves nothing.
    let waiting = submit(&engine, &tenant, &prompt(3, 8), 20, Retention::default());
    assert!(engine.scheduler.abort(waiting).expect("issued"));
    engine.finish(100);
    assert_eq!(engine.held(), 4);
}

#[test]
fn a_preempted_request_holds_nothing_while_it_waits() {
    let mut settings = config(4);
    settings.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
    let mut engine = Engine::new(8, settings, true);
    let tenant = engine.tenant("a");
    let ids = [1, 2].map(|seed| submit(&engine, &tenant, &prompt(seed, 8), 18, of_priority(9)));
    let mut preempted = 0;
    while engine.scheduler.has_work().expect("one thread") {
        engine.turn();
        let stats = engine.scheduler.stats();
        preempted = preempted.max(stats.num_preemptions);
        if !engine.finished.contains_key(&ids[0]) {
            assert_eq!(stats.num_kept_blocks, 0);
        }
    }
    assert!(preempted > 0);
    assert!(ids.iter().all(|id| engine.finished[id].reason == FinishReason::Length));
}

#[test]
fn every_sample_and_fork_keeps_what_it_computed_and_the_prompt_counts_once() {
    let mut engine = Engine::new(64, config(4), true);
    let tenant = engine.tenant("a");
    let three =
        Request { n: 3, retention: Some(Retention::default()), ..request(&tenant, &prompt(1, 12), 6) };
    let id = engine.scheduler.submit(three).expect("accepted");
    engine.turn();
    engine.turn();
    engine.fork(id, 1).expect("it runs");
    engine.finish(100);
    // 17 tokens of each: 3 blocks of the prompt, and one of each of the samples; the fork's is equal to the first's.
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_kept_blocks, engine.held(), stats.num_retained), (6, 6, 3));
}

#[test]
fn purge_reset_and_drain_let_go_of_all_that_is_kept() {
    let mut engine = Engine::new(32, config(4), true);
    let (tenant, other) = (engine.tenant("a"), engine.tenant("b"));
    let index = Arc::clone(engine.index.as_ref().expect("an index"));
    let fill = |engine: &mut Engine| {
        retain(engine, &tenant, 1, Retention::default());
        retain(engine, &other, 1, Retention::default());
    };
    fill(&mut engine);
    // What runs while its scope is purged leaves nothing that could be found.
    let running = submit(&engine, &tenant, &prompt(2, 8), 5, Retention::default());
    engine.turn();
    index.purge(&ShareScope::Private("a".to_owned()));
    engine.finish(100);
    assert_eq!(engine.finished[&running].reason, FinishReason::Length);
    assert_eq!((tenant.num_kept_blocks(), other.num_kept_blocks(), engine.held()), (0, 2, 2));
    assert_eq!((left(&engine, &tenant, 1..3), left(&engine, &other, 1..2)), (vec![], vec![1]));
    fill(&mut engine);
    assert_eq!(engine.scheduler.stats().num_retained, 2);
    engine.scheduler.reset_cache(false).expect("nothing runs");
    assert_eq!((engine.pool.stats().free, engine.scheduler.stats().num_retained), (32, 0));
    fill(&mut engine);
    engine.scheduler.drain(NO_LIMIT).expect("a deadline");
    engine.turn();
    assert_eq!((engine.held(), engine.scheduler.stats().num_retained), (0, 0));
    engine.check_idle();
}

#[test]
fn a_member_keeps_what_is_its_own_and_a_groups_handle_what_is_the_groups() {
    let mut engine = Engine::new(32, config(4), true);
    let add = |name: &str, scope, group: Option<&Arc<Tenant>>| {
        let sharing = Sharing { scope, group: group.map(Arc::clone), ..Sharing::default() };
        let config = TenantConfig { sharing, ..tenant_config(name, 0, 32) };
        engine.scheduler.add_tenant(&config).expect("a tenant")
    };
    let group = add("group", TenantScope::Group, None);
    let member = add("member", TenantScope::Private, Some(&group));
    engine.submit(&group, &prompt(1, 8), 1).expect("accepted");
    engine.finish(10);
    let mut tokens = prompt(1, 8);
    tokens.extend(prompt(2, 8));
    let id = submit(&engine, &member, &tokens, 1, Retention::default());
    engine.finish(10);
    assert_eq!(engine.finished[&id].cached_tokens, 8);
    let held_by = |tenant: &Tenant| engine.pool.account_stats(tenant.account).expect("its account").held;
    assert_eq!((held_by(&group), held_by(&member), member.num_kept_blocks()), (0, 2, 2));
    // Without the head nobody finds it, and with it again everybody who may does.
    let index = Arc::clone(engine.index.as_ref().expect("an index"));
    index.evict(32);
    assert_eq!((held_by(&group), held_by(&member)), (0, 2));
    submit(&engine, &group, &prompt(1, 8), 1, Retention::default());
    engine.finish(10);
    let held_by = |tenant: &Tenant| engine.pool.account_stats(tenant.account).expect("its account").held;
    assert_eq!((held_by(&group), group.num_kept_blocks()), (2, 2));
    let id = engine.submit(&member, &[&tokens[..], &[7]].concat(), 1).expect("accepted");
    engine.finish(10);
    assert_eq!(engine.finished[&id].cached_tokens, 16);
}

#[test]
fn what_is_kept_under_salts_does_not_lock_other_salts_out() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    engine.index.as_ref().expect("an index").set_max_salts(2);
    for salt in 1..=3u8 {
        let salted = Request {
            salt: Some(vec![salt]),
            retention: Some(of_priority(-i32::from(salt))),
            ..request(&tenant, &prompt(1, 8), 1)
        };
        let id = engine.scheduler.submit(salted).expect("accepted");
        engine.finish(20);
        assert_eq!(engine.finished[&id].reason, FinishReason::Length);
    }
    assert!(engine.scheduler.stats().num_retained <= 2);
}

#[test]
fn what_is_kept_of_a_model_with_groups_can_be_used_in_every_group() {
    let mut settings = config(4);
    settings.layer_groups = Box::new([Span::Full, Span::Sliding(8)]);
    for num_tokens in [None, Some(24)] {
        let mut engine = Engine::new(64, settings.clone(), true);
        let tenant = engine.tenant("a");
        let retention = Retention { num_tokens, ..Retention::default() };
        submit(&engine, &tenant, &prompt(1, 41), 3, retention);
        engine.finish(100);
        let blocks = num_tokens.map_or(10, |tokens| tokens / 4);
        // And those that the window needs after it.
        assert_eq!(engine.scheduler.stats().num_kept_blocks, u64::from(blocks) + 2);
        assert_eq!(engine.held(), u64::from(blocks) + 2);
        let index = Arc::clone(engine.index.as_ref().expect("an index"));
        index.evict(64);
        let id = engine.submit(&tenant, &prompt(1, 41), 2).expect("accepted");
        engine.finish(100);
        assert_eq!(engine.finished[&id].cached_tokens, blocks * 4);
        engine.scheduler.drain(NO_LIMIT).expect("a deadline");
        engine.turn();
        engine.check_idle();
    }
}

/// A chunk begins where the prompt says, not where what is kept begins: the public head counts.
#[test]
fn what_is_kept_behind_a_public_head_has_what_each_group_needs_at_its_place_in_the_prompt() {
    for groups in
        [vec![Span::Full, Span::Chunked(16)], vec![Span::Chunked(16)], vec![Span::Full, Span::Sliding(7)]]
    {
        let mut settings = config(4);
        settings.layer_groups = groups.into();
        let mut engine = Engine::new(64, settings, true);
        let sharing = Sharing { scope: TenantScope::Public, ..Sharing::default() };
        let public = engine.scheduler.add_tenant(&TenantConfig { sharing, ..tenant_config("public", 0, 16) });
        let public = public.expect("a tenant");
        let sharing = Sharing { public: Some(Arc::clone(&public)), ..Sharing::default() };
        let member = engine.scheduler.add_tenant(&TenantConfig { sharing, ..tenant_config("a", 0, 64) });
        let member = member.expect("a tenant");
        engine.submit(&public, &prompt(1, 4), 1).expect("accepted");
        engine.finish(20);
        // A block of the head and four of its own: the next query, at 20, sees a chunk that begins at 16.
        let tokens = [prompt(1, 4), prompt(7, 17)].concat();
        submit(&engine, &member, &tokens, 1, Retention::default());
        engine.finish(20);
        engine.index.as_ref().expect("an index").evict(64);
        let id = engine.submit(&member, &tokens, 1).expect("accepted");
        engine.finish(20);
        assert_eq!(engine.finished[&id].cached_tokens, 20);
    }
}

#[test]
fn a_retention_that_cannot_be_is_refused_with_the_reason() {
    let engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let sharing = Sharing { scope: TenantScope::Public, ..Sharing::default() };
    let public = engine.scheduler.add_tenant(&TenantConfig { sharing, ..tenant_config("public", 0, 8) });
    let public = public.expect("a tenant");
    let session = engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session");
    let refused = |engine: &Engine, change: &dyn Fn(&mut Request), text: &str| {
        let tenant = engine.tenant(&format!("tenant {text}"));
        let mut wanted = request(&tenant, &prompt(1, 5), 2);
        wanted.retention = Some(Retention::default());
        change(&mut wanted);
        let error = engine.scheduler.submit(wanted).expect_err("refused");
        assert!(matches!(error, Error::InvalidArgument(_)) && error.to_string().contains(text), "{error}");
    };
    refused(&engine, &|wanted| wanted.reuse = false, "reuse must be true");
    refused(&engine, &|wanted| wanted.tenant = Arc::clone(&public), "is of no public scope");
    let turn = |wanted: &mut Request| {
        (wanted.tenant, wanted.session) = (Arc::clone(&tenant), Some(Arc::clone(&session)));
    };
    refused(&engine, &turn, "is no turn of a session");
    let retaining = |retention| move |wanted: &mut Request| wanted.retention = Some(retention);
    let none = Retention { num_tokens: Some(0), ..Retention::default() };
    refused(&engine, &retaining(none), "keeps 0 tokens");
    refused(&engine, &retaining(for_steps(0)), "the end of the retention is 0 steps away");
    let never = Retention::from(Deadline { steps: None, seconds: Some(f64::NAN) });
    refused(&engine, &retaining(never), "NaN seconds away");
    refused(&Engine::new(8, config(4), false), &|_| {}, "needs a prefix index");
    assert!(engine.scheduler.open_session(&tenant, never).is_err());
}

#[test]
fn a_strict_tenants_retention_takes_nothing_from_others_and_gives_them_nothing() {
    let mut engine = Engine::new(24, config(4), true);
    let sharing = Sharing { isolation: Isolation::Strict, ..Sharing::default() };
    let strict = engine.scheduler.add_tenant(&TenantConfig { sharing, ..tenant_config("strict", 8, 8) });
    let (strict, other) = (strict.expect("a tenant"), engine.tenant("other"));
    for seed in 1..5 {
        retain(&mut engine, &strict, seed, Retention::default());
    }
    assert_eq!(strict.num_kept_blocks(), 8);
    let id = engine.submit(&other, &prompt(9, 60), 4).expect("accepted");
    engine.turn();
    assert_eq!((engine.scheduler.stats().num_running, strict.num_kept_blocks()), (1, 8));
    engine.finish(100);
    assert_eq!(engine.finished[&id].reason, FinishReason::Length);
    for seed in 20..25 {
        retain(&mut engine, &other, seed, Retention::default());
    }
    // Its own quota is what it is short of: its own goes.
    engine.submit(&strict, &prompt(30, 12), 1).expect("accepted");
    engine.finish(100);
    assert_eq!((strict.num_kept_blocks(), other.num_kept_blocks()), (4, 10));
}
