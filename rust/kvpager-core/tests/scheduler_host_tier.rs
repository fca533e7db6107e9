//! The host tier: tails move out and back, every token is the one it would have been.

mod support;

use kvpager_core::block_pool::Quota;
use kvpager_core::geometry::Span;
use kvpager_core::scheduler::{AdmissionPolicy, FinishReason, HostTierConfig, Overflow, SchedulerConfig};
use support::{Engine, config, expected_output, prompt};

fn tiered(host_blocks: u32) -> SchedulerConfig {
    let mut config = config(4);
    config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
    config.overflow = Overflow::Swap;
    config.host_tier = HostTierConfig { num_blocks: host_blocks, ..HostTierConfig::default() };
    config
}

/// Four requests of 8 + 24 tokens in a pool that holds little more than one.
fn crowd(engine: &mut Engine) -> Vec<(kvpager_core::SequenceId, Vec<u32>)> {
    let tenant = engine.tenant("a");
    let submit = |seed| {
        let prompt = prompt(seed, 8);
        (engine.submit(&tenant, &prompt, 24).expect("fits"), prompt)
    };
    (1..=4).map(submit).collect()
}

#[test]
fn a_swapped_request_goes_on_where_it_was_and_nothing_is_computed_twice() {
    for reuse in [true, false] {
        let mut engine = Engine::new(12, tiered(64), reuse);
        let requests = crowd(&mut engine);
        engine.finish(400);
        let stats = engine.scheduler.stats();
        assert!(
            stats.swapped_out_blocks > 0 && stats.swapped_out_blocks == stats.swapped_in_blocks,
            "{stats:?}"
        );
        assert_eq!(stats.recomputed_tokens, 0);
        for (id, prompt) in &requests {
            assert_eq!(engine.outputs[id], expected_output(prompt, 24, &[]));
        }
        assert_eq!(engine.finished[&requests[0].0].preemptions, 0, "the oldest is never a victim");
        engine.check_idle();
    }
}

#[test]
fn a_full_host_tier_means_recompute() {
    let mut engine = Engine::new(12, tiered(3), false);
    let requests = crowd(&mut engine);
    engine.finish(400);
    let stats = engine.scheduler.stats();
    assert!(stats.recomputed_tokens > 0, "{stats:?}");
    for (id, prompt) in &requests {
        assert_eq!(engine.outputs[id], expected_output(prompt, 24, &[]));
    }
    engine.check_idle();
}

#[test]
fn auto_takes_what_costs_less() {
    for (link, swaps) in [(1e12, true), (1e3, false)] {
        let mut config = tiered(64);
        config.overflow = Overflow::Auto;
        config.host_tier.link_bytes_per_second = link;
        let mut engine = Engine::new(12, config, false);
        crowd(&mut engine);
        engine.finish(400);
        let stats = engine.scheduler.stats();
        assert_eq!((stats.swapped_out_blocks > 0, stats.recomputed_tokens > 0), (swaps, !swaps), "{stats:?}");
    }
}

#[test]
fn refuse_ends_the_youngest_with_what_it_has() {
    let mut config = tiered(0);
    config.overflow = Overflow::Refuse;
    let mut engine = Engine::new(12, config, false);
    let requests = crowd(&mut engine);
    engine.finish(400);
    let refused: Vec<_> =
        requests.iter().filter(|(id, _)| engine.finished[id].reason == FinishReason::Capacity).collect();
    assert!(!refused.is_empty() && refused.len() < 4);
    assert_eq!(engine.finished[&requests[0].0].reason, FinishReason::Length);
    for (id, prompt) in refused {
        let output = engine.outputs.get(id).cloned().unwrap_or_default();
        assert_eq!(output, expected_output(prompt, 24, &[])[..output.len()]);
        assert!(!engine.scheduler.abort(*id).unwrap());
    }
    engine.check_idle();
}

#[test]
fn a_step_that_is_abandoned_while_it_moves_blocks_loses_no_token() {
    let mut engine = Engine::new(12, tiered(64), true);
    let requests = crowd(&mut engine);
    let mut turn = 0;
    while engine.scheduler.has_work().unwrap() && turn < 600 {
        if turn % 3 == 2 {
            engine.crashed_turn();
        } else {
            engine.turn();
        }
        turn += 1;
    }
    for (id, prompt) in &requests {
        assert_eq!(engine.outputs[id], expected_output(prompt, 24, &[]));
    }
    engine.check_idle();
}

#[test]
fn a_parked_request_can_be_aborted() {
    let mut engine = Engine::new(12, tiered(64), true);
    let requests = crowd(&mut engine);
    for _ in 0..400 {
        if engine.scheduler.stats().num_parked > 0 {
            break;
        }
        engine.turn();
    }
    assert!(engine.scheduler.stats().num_parked > 0);
    for (id, _) in &requests {
        assert!(engine.scheduler.abort(*id).unwrap());
    }
    engine.finish(3);
    engine.check_idle();
}

#[test]
fn a_tenants_share_of_the_host_tier_is_its_share_of_the_device() {
    let mut engine = Engine::new(24, tiered(16), false);
    let a = engine.tenant_with("a", 0, 12);
    let ids: Vec<_> = (1..=4).map(|seed| engine.submit(&a, &prompt(seed, 8), 24).unwrap()).collect();
    while engine.scheduler.has_work().unwrap() {
        engine.turn();
        assert!(engine.scheduler.host_pool().unwrap().stats().held <= 8);
    }
    assert!(engine.scheduler.stats().swapped_out_blocks > 0);
    assert!(ids.iter().all(|id| engine.outputs[id].len() == 24));
}

#[test]
fn a_parked_request_that_a_lowered_quota_never_lets_back_ends_and_others_go_on() {
    for groups in [&[Span::Full][..], &[Span::Sliding(6), Span::Full]] {
        let mut engine =
            Engine::new(24, SchedulerConfig { layer_groups: groups.into(), ..tiered(100) }, false);
        let (a, b) = (engine.tenant("a"), engine.tenant("b"));
        let ids: Vec<_> = (1..=6).map(|seed| engine.submit(&a, &prompt(seed, 6), 40).unwrap()).collect();
        while engine.scheduler.stats().num_parked == 0 {
            engine.turn();
        }
        assert!(engine.finished.is_empty());
        engine.pool.set_quota(a.account, Quota { guaranteed: 0, limit: 2 }).unwrap();
        let other = engine.submit(&b, &prompt(7, 6), 20).unwrap();
        engine.finish(200);
        assert!(ids.iter().all(|id| engine.finished[id].reason == FinishReason::Capacity));
        assert_eq!(engine.outputs[&other], expected_output(&prompt(7, 6), 20, &[]));
        engine.check_idle();
    }
}

#[test]
fn a_parked_request_that_is_to_pause_with_all_others_comes_back_at_their_cost_and_others_go_on() {
    for max_running in [8, 3] {
        let mut engine = Engine::new(12, SchedulerConfig { max_running, ..tiered(64) }, false);
        let requests = crowd(&mut engine);
        let other = engine.tenant("b");
        while engine.scheduler.stats().num_parked == 0 {
            engine.turn();
        }
        for (id, _) in &requests {
            assert!(engine.scheduler.pause(*id).unwrap());
        }
        let short = engine.submit(&other, &prompt(5, 8), 8).unwrap();
        engine.finish(100);
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_paused, stats.num_parked), (4, 0), "{stats:?}");
        assert_eq!(engine.outputs[&short], expected_output(&prompt(5, 8), 8, &[]));
        for (id, _) in &requests {
            assert!(engine.scheduler.resume(*id).unwrap());
        }
        engine.finish(600);
        for (id, prompt) in &requests {
            assert_eq!(engine.outputs[id], expected_output(prompt, 24, &[]));
        }
        engine.check_idle();
    }
}
