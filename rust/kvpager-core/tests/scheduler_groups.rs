//! Models with layer groups: each group reads exactly its window, what leaves a window is let go, and what is promised
//! is enough.

mod support;

use kvpager_core::geometry::Span;
use kvpager_core::prefix_index::Isolation;
use kvpager_core::scheduler::{
    AdmissionPolicy, FinishReason, ForecastConfig, HostTierConfig, Overflow, SchedulerConfig, Tenant,
    ZeroBlocks,
};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use std::sync::Arc;
use support::{Engine, NO_LIMIT, config, expected_output, host_tier, prompt, request, span, tenant_config};

fn grouped(block_size: u32, groups: &[Span]) -> SchedulerConfig {
    SchedulerConfig { layer_groups: groups.into(), ..config(block_size) }
}

#[test]
fn a_windowed_group_holds_no_more_than_its_window_while_it_runs() {
    for (groups, most) in [
        // 37 tokens: 10 blocks of 4; a window of 8 touches 3, with a token more.
        (vec![Span::Full, Span::Sliding(8)], 10 + 3),
        (vec![Span::Full, Span::Chunked(8)], 10 + 2),
        (vec![Span::Sliding(8)], 3),
        (vec![Span::Full, Span::Full, Span::Sliding(4)], 20 + 2),
        (vec![Span::Sliding(4), Span::Full, Span::Sliding(8)], 2 + 10 + 3),
    ] {
        let mut config = grouped(4, &groups);
        config.max_prefill_chunk = 1;
        let mut engine = Engine::new(most, config, false);
        let tenant = engine.tenant("a");
        let id = engine.submit(&tenant, &prompt(1, 8), 30).unwrap();
        engine.finish(200);
        assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 8), 30, &[]), "{groups:?}");
        assert_eq!(engine.pool.stats().peak_held, u64::from(most), "{groups:?}");
        engine.check_idle();
        let refused = Engine::new(most - 1, grouped_by_one(&groups), false);
        let tenant = refused.tenant("a");
        let error = refused.submit(&tenant, &prompt(1, 8), 30).unwrap_err().to_string();
        assert!(error.contains(&format!("need {most} blocks")), "{error}");
    }
}

fn grouped_by_one(groups: &[Span]) -> SchedulerConfig {
    SchedulerConfig { max_prefill_chunk: 1, ..grouped(4, groups) }
}

#[test]
fn table_entries_before_the_window_are_cleared_and_those_in_it_are_not() {
    let mut engine = Engine::new(32, grouped(2, &[Span::Full, Span::Sliding(4), Span::Chunked(4)]), false);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 9), 4).unwrap();
    engine.turn();
    let row = |group: usize| -> Vec<bool> {
        (0..6).map(|column| engine.scheduler.arenas()[group].get(0, column).unwrap() >= 0).collect()
    };
    // 9 tokens are computed: the next query, at 9, sees 6.. of a window of 4, and 8.. of a chunk of 4.
    assert_eq!(row(0), [true, true, true, true, true, false]);
    assert_eq!(row(1), [false, false, false, true, true, false]);
    assert_eq!(row(2), [false, false, false, false, true, false]);
    engine.finish(20);
    engine.check_idle();
    assert!((0..6).all(|column| engine.scheduler.arenas()[1].get(0, column) == Some(-1)));
}

#[test]
fn a_long_prompt_lets_its_chunks_room_go_when_it_is_computed() {
    let mut config = grouped(4, &[Span::Sliding(8)]);
    config.max_batch_tokens = 32;
    let mut engine = Engine::new(64, config, false);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 100), 100).unwrap();
    engine.turn();
    let stats = engine.pool.stats();
    assert_eq!(stats.held + stats.reserved, 11, "a window of 8 and chunks of 32, at any phase");
    (0..3).for_each(|_| {
        engine.turn();
    });
    let stats = engine.pool.stats();
    assert_eq!(stats.held + stats.reserved, 3, "a window of 8 and a token");
    engine.finish(200);
    engine.check_idle();
}

/// Runs a request alone; returns how many prompt tokens came from the index.
fn cached_tokens(engine: &mut Engine, tenant: &Arc<Tenant>, tokens: &[u32]) -> u32 {
    let id = engine.submit(tenant, tokens, 3).expect("it fits");
    engine.finish(200);
    assert_eq!(engine.outputs[&id], expected_output(tokens, 3, &[]));
    engine.finished[&id].cached_tokens
}

#[test]
fn a_match_needs_no_more_of_a_window_than_its_end() {
    let mut engine = Engine::new(64, grouped(4, &[Span::Full, Span::Sliding(8)]), true);
    let tenant = engine.tenant("a");
    let long = prompt(1, 42);
    assert_eq!(cached_tokens(&mut engine, &tenant, &long), 0);
    // 44 tokens are computed, 11 blocks: the window's end has 2 or 3, the 8 before are tombstones after this.
    let index = Arc::clone(engine.index.as_ref().unwrap());
    let before = engine.pool.stats().cached;
    assert_eq!(before, 22, "every block of both groups is cached");
    assert_eq!(index.evict(8), 8);
    engine.check();
    assert_eq!(cached_tokens(&mut engine, &tenant, &long), 40, "only the middle of the window went");
    // A prefix of it ends where the window's blocks are gone.
    assert_eq!(cached_tokens(&mut engine, &tenant, &long[..21]), 0);
    assert_eq!(cached_tokens(&mut engine, &tenant, &long[..21]), 20, "computed again, it is there again");
    engine.check_idle();
}

/// Models whose groups keep everything, a window or a chunk, in any order.
fn models() -> [Vec<Span>; 4] {
    [
        vec![Span::Full, Span::Sliding(8), Span::Chunked(8)],
        vec![Span::Full, Span::Full],
        vec![Span::Sliding(8), Span::Sliding(4)],
        vec![Span::Chunked(8), Span::Full],
    ]
}

/// Runs four equal prompts at once in chunks of so many tokens (0: of any); returns how many tokens of each came from the
/// index.
fn cached_of_equal_prompts(groups: &[Span], max_prefill_chunk: u32) -> Vec<u32> {
    let mut engine = Engine::new(128, SchedulerConfig { max_prefill_chunk, ..grouped(4, groups) }, true);
    let tenant = engine.tenant("a");
    let ids = [(); 4].map(|()| engine.submit(&tenant, &prompt(1, 22), 9).expect("it fits"));
    engine.finish(200);
    assert!(ids.iter().all(|id| engine.outputs[id] == expected_output(&prompt(1, 22), 9, &[])));
    engine.check_idle();
    assert!(engine.index.as_ref().is_some_and(|index| index.evict(u32::MAX) > 0));
    assert_eq!(engine.pool.stats().free, 128, "all that is cached can be evicted");
    ids.iter().map(|id| engine.finished[id].cached_tokens).collect()
}

#[test]
fn equal_prompts_that_overlap_are_computed_once_in_every_group() {
    for groups in models() {
        for chunk in [0, 4, 5, 8] {
            assert_eq!(cached_of_equal_prompts(&groups, chunk), [0, 20, 20, 20], "{groups:?}, {chunk}");
        }
        // In chunks of less than a block all of them begin before there is anything to share.
        for chunk in [1, 2, 3] {
            let plain = cached_of_equal_prompts(&[Span::Full], chunk);
            assert_eq!(cached_of_equal_prompts(&groups, chunk), plain, "{groups:?}, {chunk}");
            assert!(plain[3] > 0);
        }
    }
}

#[test]
fn a_prompt_that_was_paused_goes_on_behind_what_another_has_computed_since() {
    for groups in models() {
        let config = SchedulerConfig { max_prefill_chunk: 6, ..grouped(4, &groups) };
        let mut engine = Engine::new(128, config, true);
        let tenant = engine.tenant("a");
        let first = engine.submit(&tenant, &prompt(1, 60), 9).unwrap();
        engine.turn();
        engine.turn();
        assert!(engine.scheduler.pause(first).unwrap());
        let second = engine.submit(&tenant, &prompt(1, 60), 9).unwrap();
        (0..12).for_each(|_| {
            engine.turn();
        });
        assert!(engine.scheduler.resume(first).unwrap());
        engine.finish(200);
        assert_eq!(engine.finished[&second].cached_tokens, 12, "{groups:?}");
        assert_eq!(engine.finished[&first].cached_tokens, 56 - 12, "{groups:?}");
        for id in [first, second] {
            assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 60), 9, &[]));
        }
        engine.check_idle();
    }
}

#[test]
fn what_others_use_of_a_window_costs_a_running_sequence_nothing() {
    // Two of one prompt, under `reserve` in a pool for exactly two: each writes on when the other still uses the window.
    let config = SchedulerConfig {
        max_batch_tokens: 8,
        max_running: 8,
        ..grouped(4, &[Span::Full, Span::Sliding(8)])
    };
    let need = config.lifetime_blocks(22, 30);
    let mut engine = Engine::new(2 * need, config, true);
    let tenant = engine.tenant("a");
    let ids = [engine.submit(&tenant, &prompt(1, 22), 30), engine.submit(&tenant, &prompt(1, 22), 30)];
    engine.finish(60);
    for id in ids {
        assert_eq!(engine.outputs[&id.unwrap()], expected_output(&prompt(1, 22), 30, &[]));
    }
    assert_eq!(engine.scheduler.stats().num_preemptions, 0);
    engine.check_idle();
}

/// A pool that holds little more than one of four requests, with a host tier.
fn tiered(groups: &[Span], host_blocks: u32) -> SchedulerConfig {
    SchedulerConfig {
        policy: AdmissionPolicy::Watermark { free_share: 0.0 },
        overflow: Overflow::Swap,
        host_tier: HostTierConfig { num_blocks: host_blocks, ..HostTierConfig::default() },
        ..grouped(4, groups)
    }
}

#[test]
fn the_tails_of_all_groups_move_out_and_back_and_nothing_is_computed_twice() {
    for (groups, num_blocks) in [
        (vec![Span::Full, Span::Sliding(8)], 16),
        (vec![Span::Full, Span::Chunked(8), Span::Full], 26),
        (vec![Span::Sliding(8), Span::Full], 16),
        (vec![Span::Sliding(24)], 12),
    ] {
        for reuse in [false, true] {
            let mut engine = Engine::new(num_blocks, tiered(&groups, 128), reuse);
            let tenant = engine.tenant("a");
            let ids: Vec<_> =
                (1..=4).map(|seed| engine.submit(&tenant, &prompt(seed, 8), 24).unwrap()).collect();
            engine.finish(2000);
            let stats = engine.scheduler.stats();
            assert!(stats.swapped_out_blocks > 0, "{groups:?}: {stats:?}");
            assert_eq!(stats.swapped_out_blocks, stats.swapped_in_blocks);
            assert_eq!(stats.recomputed_tokens, 0, "{groups:?}");
            for (seed, id) in (1..).zip(&ids) {
                assert_eq!(engine.outputs[id], expected_output(&prompt(seed, 8), 24, &[]), "{groups:?}");
            }
            engine.check_idle();
        }
    }
}

#[test]
fn a_tail_alone_leaves_of_a_long_sequence_and_more_of_it_before_another_is_touched() {
    // 40 columns of one full group, with a window of 8 beside it: a tail of 32 blocks is less than half of that.
    let mut engine = Engine::new(100, tiered(&[Span::Full, Span::Sliding(8)], 256), true);
    let tenant = engine.tenant("a");
    let long = prompt(1, 150);
    let first = engine.submit(&tenant, &prompt(9, 120), 100).unwrap();
    let second = engine.submit(&tenant, &long, 100).unwrap();
    let (mut partly, mut most_parked) = (false, 0);
    for _ in 0..1000 {
        if !engine.scheduler.has_work().unwrap() {
            break;
        }
        engine.turn();
        let stats = engine.scheduler.stats();
        most_parked = most_parked.max(stats.num_parked);
        // The first holds at most 55 + 3; what is beyond that is the head of the second.
        partly |= stats.num_parked == 1 && engine.pool.stats().held > 60;
    }
    assert!(partly && most_parked == 1);
    assert_eq!(engine.outputs[&first], expected_output(&prompt(9, 120), 100, &[]));
    assert_eq!(engine.outputs[&second], expected_output(&long, 100, &[]));
    assert_eq!(engine.scheduler.stats().recomputed_tokens, 0);
    engine.check_idle();
}

#[test]
fn a_session_keeps_its_blocks_in_the_first_group_and_a_turn_finds_what_every_group_has() {
    let mut engine = Engine::new(64, grouped(4, &[Span::Full, Span::Sliding(8), Span::Chunked(8)]), true);
    let tenant = engine.tenant("a");
    let session = engine.scheduler.open_session(&tenant, NO_LIMIT).unwrap();
    let mut conversation = prompt(1, 10);
    for (turn, cached) in [(1, 0), (2, 12), (3, 28)] {
        let mut request = request(&tenant, &conversation, 6);
        request.session = Some(Arc::clone(&session));
        let id = engine.scheduler.submit(request).unwrap();
        engine.finish(200);
        assert_eq!(engine.outputs[&id], expected_output(&conversation, 6, &[]));
        assert_eq!(engine.finished[&id].cached_tokens, cached, "turn {turn}");
        assert_eq!(engine.scheduler.stats().num_sessions_kept, 1);
        conversation.extend(&engine.outputs[&id]);
        conversation.extend(prompt(turn + 1, 8));
    }
    // Its full blocks stay, whatever is evicted.
    let held = engine.pool.stats().held;
    assert!(held >= 43 / 4, "{held} blocks are held");
    engine.index.as_ref().unwrap().evict(u32::MAX);
    engine.check();
    assert_eq!(engine.pool.stats().held, held);
    let mut request = request(&tenant, &conversation, 6);
    request.session = Some(Arc::clone(&session));
    let id = engine.scheduler.submit(request).unwrap();
    engine.finish(200);
    assert_eq!(engine.outputs[&id], expected_output(&conversation, 6, &[]));
    assert!(engine.scheduler.close_session(&session));
    engine.turn();
    engine.check_idle();
}

#[test]
fn sessions_yield_the_blocks_of_a_grouped_model_before_a_request_waits() {
    let mut engine = Engine::new(24, grouped(4, &[Span::Full, Span::Sliding(4)]), true);
    let tenant = engine.tenant("a");
    for seed in 0..3 {
        let session = engine.scheduler.open_session(&tenant, NO_LIMIT).unwrap();
        let mut request = request(&tenant, &prompt(seed, 16), 2);
        request.session = Some(session);
        engine.scheduler.submit(request).unwrap();
        engine.finish(100);
    }
    assert!(engine.pool.stats().held >= 12);
    assert_eq!(engine.scheduler.stats().num_sessions_kept, 3);
    let id = engine.submit(&tenant, &prompt(7, 32), 8).unwrap();
    engine.finish(100);
    assert_eq!(engine.outputs[&id], expected_output(&prompt(7, 32), 8, &[]));
    assert_eq!(engine.finished[&id].queue_steps, 0);
    assert!(engine.scheduler.stats().num_sessions_kept < 3);
}

/// A strict tenant may have just what its longest request takes, and a shorter one has left what that begins with. With
/// two steps open its prefix was pinned, found to be of no use, and let go, at every look; with one, what it was to use
/// was evicted to make room for it.
#[test]
fn a_request_that_takes_all_there_is_does_not_wait_for_the_prefix_that_it_finds() {
    for depth in [1, 2] {
        let mut config = grouped(3, &[Span::Full, Span::Full, Span::Full]);
        (config.max_batch_tokens, config.max_running, config.max_open_steps) = (6, 5, depth);
        let mut engine = Engine::new(114, config, true);
        let mut strict = tenant_config("b", 57, 57);
        strict.sharing.isolation = Isolation::Strict;
        let tenant = engine.scheduler.add_tenant(&strict).unwrap();
        let long = shared_prompt(1, 13, 7);
        engine.submit(&tenant, &shared_prompt(1, 12, 1), 1).unwrap();
        let id = engine.submit(&tenant, &long, 33).unwrap();
        for _ in 0..2 * 300 {
            if engine.flights.len() < depth as usize && engine.scheduler.has_work().unwrap() {
                engine.take_off();
            } else if !engine.flights.is_empty() {
                engine.land();
            }
        }
        assert_eq!(engine.finished[&id].reason, FinishReason::Length, "with {depth} open steps");
        assert!(engine.finished[&id].queue_steps < 10, "{}", engine.finished[&id].queue_steps);
        assert_eq!(engine.outputs[&id], expected_output(&long, 33, &[]));
    }
}

#[test]
fn a_model_without_groups_is_refused() {
    let none = grouped(4, &[]).validate().unwrap_err().to_string();
    assert!(none.contains("0 groups"), "{none}");
}

fn policy() -> impl Strategy<Value = AdmissionPolicy> {
    prop_oneof![
        3 => Just(AdmissionPolicy::Reserve),
        1 => Just(AdmissionPolicy::Watermark { free_share: 0.0 }),
        1 => Just(AdmissionPolicy::Forecast(ForecastConfig {
            free_share: 0.0,
            deviations: 0.001,
            growth_spread: 0.0
        })),
        1 => Just(AdmissionPolicy::Forecast(ForecastConfig::default())),
    ]
}

#[derive(Clone, Debug)]
enum Operation {
    Submit { family: u32, shared: u32, own: u32, max_tokens: u32 },
    TakeOff,
    Land,
    Crash(prop::sample::Index),
    Draft { length: usize, num_right: usize },
    Abort(prop::sample::Index),
    Pause(prop::sample::Index),
    Resume(prop::sample::Index),
    Evict(u32),
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    let submit = (0..3u32, 0..20u32, 1..8u32, 1..20u32)
        .prop_map(|(family, shared, own, max_tokens)| Operation::Submit { family, shared, own, max_tokens });
    prop_oneof![
        4 => submit,
        8 => Just(Operation::TakeOff),
        6 => Just(Operation::Land),
        1 => any::<prop::sample::Index>().prop_map(Operation::Crash),
        3 => (1..6usize, 0..6usize).prop_map(|(length, num_right)| Operation::Draft { length, num_right }),
        1 => any::<prop::sample::Index>().prop_map(Operation::Abort),
        1 => any::<prop::sample::Index>().prop_map(Operation::Pause),
        1 => any::<prop::sample::Index>().prop_map(Operation::Resume),
        1 => (1..6u32).prop_map(Operation::Evict),
        1 => Just(Operation::Reset),
    ]
}

/// Few families of prompts and few tokens, so that prefixes are shared, split and computed twice.
fn shared_prompt(family: u32, shared: u32, own: u32) -> Vec<u32> {
    (0..shared).map(|i| 100 + family + i % 2).chain((0..own).map(|i| 7 + i)).collect()
}

/// Drafts for all that run: some right ones, then a wrong one.
fn draft(engine: &Engine, accepted: &[(SequenceId, Vec<u32>, u32)], length: usize, num_right: usize) {
    for (id, prompt, max_tokens) in accepted {
        let done = engine.outputs.get(id).map_or(0, Vec::len);
        let all = expected_output(prompt, *max_tokens, &[]);
        let mut drafts: Vec<i32> = all[done.min(all.len())..].iter().map(|&token| token as i32).collect();
        drafts.truncate(length);
        if let Some(wrong) = drafts.get_mut(num_right) {
            *wrong += 1;
        }
        let start = [0, drafts.len() as i32];
        engine.scheduler.propose(&[*id], &start, &drafts).expect("nobody else is in the scheduler");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn every_group_reads_its_window_whatever_the_schedule(
        num_blocks in 12..60u32,
        block_size in 1..5u32,
        groups in prop::collection::vec(span(), 1..4),
        cached in prop::bool::weighted(0.7),
        is_strict in prop::bool::weighted(0.3),
        max_batch_tokens in 3..20u32,
        max_prefill_chunk in 0..6u32,
        max_open_steps in 1..4u32,
        policy in policy(),
        host in host_tier(),
        lags in any::<bool>(),
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let mut config = grouped(block_size, &groups);
        config.max_running = 3;
        config.max_batch_tokens = max_batch_tokens;
        config.max_prefill_chunk = max_prefill_chunk;
        config.max_open_steps = max_open_steps;
        config.zero_blocks = ZeroBlocks::Always;
        config.policy = policy;
        (config.overflow, config.host_tier) = host;
        let mut engine = Engine::new(num_blocks, config, cached);
        engine.lags = lags;
        let guaranteed = if is_strict { num_blocks / 2 } else { num_blocks / 4 };
        let mut other = tenant_config("b", guaranteed, num_blocks / 2);
        other.sharing.isolation = if is_strict { Isolation::Strict } else { Isolation::Scoped };
        let other = engine.scheduler.add_tenant(&other).unwrap();
        let tenants = [engine.tenant("a"), other];
        let mut accepted: Vec<(SequenceId, Vec<u32>, u32)> = Vec::new();
        let mut aborted = Vec::new();
        for operation in operations {
            match operation {
                Operation::Submit { family, shared, own, max_tokens } => {
                    let prompt = shared_prompt(family, shared, own);
                    let tenant = &tenants[family as usize % 2];
                    match engine.submit(tenant, &prompt, max_tokens) {
                        Ok(id) => accepted.push((id, prompt, max_tokens)),
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
                Operation::Draft { length, num_right } if engine.flights.is_empty() => {
                    draft(&engine, &accepted, length, num_right);
                }
                Operation::Abort(which) if !accepted.is_empty() => {
                    let id = accepted[which.index(accepted.len())].0;
                    if engine.scheduler.abort(id).unwrap() {
                        aborted.push(id);
                    }
                }
                Operation::Pause(which) if !accepted.is_empty() => {
                    engine.scheduler.pause(accepted[which.index(accepted.len())].0).unwrap();
                }
                Operation::Resume(which) if !accepted.is_empty() => {
                    engine.scheduler.resume(accepted[which.index(accepted.len())].0).unwrap();
                }
                Operation::Evict(num_blocks) => {
                    if let Some(index) = &engine.index {
                        index.evict(num_blocks);
                        engine.check();
                    }
                }
                Operation::Reset if engine.flights.is_empty() => {
                    engine.scheduler.reset_cache(true).unwrap();
                    engine.check();
                }
                _ => {}
            }
            if is_strict {
                let stats = engine.pool.account_stats(tenants[1].account).unwrap();
                prop_assert!(stats.committed + stats.cached <= stats.limit, "{:?}", stats);
            }
        }
        for (id, ..) in &accepted {
            engine.scheduler.resume(*id).unwrap();
        }
        while !engine.flights.is_empty() {
            engine.land();
        }
        engine.finish(3000);
        engine.check_idle();
        if policy == AdmissionPolicy::Reserve {
            prop_assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        }
        for (id, prompt, max_tokens) in accepted {
            let finished = &engine.finished[&id];
            if finished.reason == FinishReason::Length {
                prop_assert_eq!(&engine.outputs[&id], &expected_output(&prompt, max_tokens, &[]));
            } else {
                prop_assert!(aborted.contains(&id), "{:?}", finished.reason);
            }
        }
    }
}
