//! Killing the model at any point between `step` and `commit` leaves P1, P2 and P7 true: nothing is
//! over-committed, every block is in one state, every request ends, with the output that it always has.

mod support;

use kvpager_core::SequenceId;
use kvpager_core::scheduler::{AdmissionPolicy, FinishReason, HostTierConfig, Overflow, Request};
use proptest::prelude::*;
use std::collections::HashMap;
use support::{CRASH_POINTS, Engine, config, expected_output, expected_sample, prompt, request};

/// A sequence's prompt, with the output that it had when it was forked, and what it may still output.
type Expected = HashMap<SequenceId, (Vec<u32>, u32)>;

fn check_outputs(engine: &Engine, expected: &Expected) {
    for (id, (prompt, max_tokens)) in expected {
        assert!(engine.finished.contains_key(id), "{id} never ended");
        assert_eq!(&engine.outputs[id], &expected_output(prompt, *max_tokens, &[]), "{id}");
    }
}

fn propose(engine: &Engine, id: SequenceId, right: usize) {
    let output = engine.outputs.get(&id).map_or(0, Vec::len);
    let drafts: Vec<i32> = (0..3).map(|i| if i < right { (output + i) as i32 % 50 } else { 77 }).collect();
    engine.scheduler.propose(&[id], &[0, 3], &drafts).expect("no step is open");
}

/// Requests that share prefixes, are forked, have drafts and outgrow the pool, and a model that dies at `point` in
/// every `every`th step.
fn run(host_blocks: u32, point: usize, every: u32) -> u64 {
    let mut settings = config(4);
    settings.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
    settings.max_running = 6;
    settings.overflow = if host_blocks > 0 { Overflow::Swap } else { Overflow::Auto };
    settings.host_tier =
        HostTierConfig { num_blocks: host_blocks, max_token_gap: 1e-9, ..HostTierConfig::default() };
    let mut engine = Engine::new(18, settings, true);
    let tenants = [engine.tenant("a"), engine.tenant_with("b", 4, 18)];
    let mut expected = Expected::new();
    for i in 0..8u32 {
        let prompt: Vec<u32> = prompt(i % 3, 8).into_iter().chain(0..i % 4).collect();
        let id = engine.submit(&tenants[i as usize % 2], &prompt, 20).expect("fits");
        expected.insert(id, (prompt, 20));
    }
    for step in 0..3000u32 {
        if !engine.scheduler.has_work().expect("one thread") {
            break;
        }
        let mut ids: Vec<SequenceId> = expected.keys().copied().collect();
        ids.sort_unstable();
        let id = ids[step as usize % ids.len()];
        propose(&engine, id, step as usize % 4);
        if expected.len() < 12
            && step % 5 == 0
            && let Ok(children) = engine.fork(id, 1)
        {
            expected.insert(children[0], expected[&id].clone());
        }
        if step % every == every - 1 {
            engine.killed_turn(point, false);
        } else {
            engine.turn();
        }
    }
    assert!(!engine.scheduler.has_work().expect("one thread"), "not done: {:?}", engine.scheduler.stats());
    check_outputs(&engine, &expected);
    engine.check_idle();
    engine.scheduler.stats().swapped_out_blocks
}

#[test]
fn the_model_may_die_at_each_point_of_a_step_with_forks_drafts_and_swaps_in_flight() {
    for point in 0..CRASH_POINTS {
        for every in [2, 3, 7] {
            run(0, point, every);
            assert!(run(40, point, every) > 0, "nothing was swapped");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn kills_at_random_points_leave_every_promise_true(
        policy in prop::sample::select(vec!["reserve", "watermark", "forecast"]),
        host_blocks in prop::sample::select(vec![0, 12, 40]),
        rows in prop::collection::vec((1..14u32, 1..16u32, 1..4u32), 1..10),
        turns in prop::collection::vec((0..CRASH_POINTS * 2, any::<bool>()), 1..40),
    ) {
        let mut settings = config(4);
        settings.policy = match policy {
            "watermark" => AdmissionPolicy::Watermark { free_share: 0.0 },
            name => AdmissionPolicy::from_name(name).expect("a known policy"),
        };
        settings.host_tier =
            HostTierConfig { num_blocks: host_blocks, max_token_gap: 1e-9, ..HostTierConfig::default() };
        let mut engine = Engine::new(10, settings, true);
        let tenants = [engine.tenant("a"), engine.tenant("b")];
        let mut expected = Vec::new();
        for (i, &(length, max_tokens, n)) in rows.iter().enumerate() {
            let prompt = prompt(i as u32 % 2, length);
            let samples = Request { n, ..request(&tenants[i % 2], &prompt, max_tokens) };
            // Some have more samples than the pool has room for.
            let Ok(first) = engine.submit_request(samples) else { continue };
            for branch in 0..u64::from(n) {
                expected.push((first, branch, expected_sample(&prompt, max_tokens, branch)));
            }
        }
        for (point, fail) in turns {
            if point < CRASH_POINTS {
                engine.killed_turn(point, fail);
            } else {
                engine.turn();
            }
        }
        engine.finish(3000);
        engine.check_idle();
        for (first, branch, output) in expected {
            let id = SequenceId(first.0 + branch);
            match engine.finished.get(&id).map(|ended| ended.reason) {
                Some(FinishReason::Length) => prop_assert_eq!(&engine.outputs[&id], &output),
                Some(_) => {}
                // The request failed before it became several.
                None => prop_assert_eq!(engine.finished[&first].reason, FinishReason::Error),
            }
        }
    }
}
