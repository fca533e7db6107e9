//! Equal prefixes whose requests overlap in time are computed once, by a scheduler that never waits for ever.

mod support;

use kvpager_core::scheduler::FinishReason;
use proptest::prelude::*;
use support::{Engine, config, expected_output, prompt};

const BLOCK_SIZE: u32 = 4;

fn engine() -> Engine {
    Engine::new(256, config(BLOCK_SIZE), true)
}

fn computed(engine: &Engine) -> u64 {
    engine.scheduler.stats().computed_tokens
}

#[test]
fn test_equal_prompts_of_one_step_are_computed_once() {
    let mut engine = engine();
    let tenant = engine.tenant("a");
    // 100 tokens take four steps of 32; the last block is every request's own, as its last token is computed.
    let prompt = prompt(1, 100);
    let ids: Vec<_> = (0..8).map(|_| engine.submit(&tenant, &prompt, 3).unwrap()).collect();
    engine.finish(40);
    for id in &ids {
        assert_eq!(engine.outputs[id], expected_output(&prompt, 3, &[]));
        assert!(engine.finished[id].cached_tokens == if id == &ids[0] { 0 } else { 96 });
    }
    // Prompt once, then a last block and two decodes each.
    assert_eq!(computed(&engine), 100 + 7 * 4 + 8 * 2);
    engine.check_idle();
}

#[test]
fn test_a_prompt_that_comes_while_an_equal_one_is_computed_catches_up() {
    for late in 1..4 {
        let mut engine = engine();
        let tenant = engine.tenant("a");
        let prompt = prompt(1, 100);
        engine.submit(&tenant, &prompt, 1).unwrap();
        for _ in 0..late {
            engine.turn();
        }
        let second = engine.submit(&tenant, &prompt, 1).unwrap();
        engine.finish(20);
        assert_eq!(computed(&engine), 104, "{late} steps later");
        assert_eq!(engine.finished[&second].cached_tokens, 96);
    }
}

#[test]
fn test_prompts_share_as_far_as_they_are_equal() {
    let mut engine = engine();
    let tenant = engine.tenant("a");
    let (long, mut other) = (prompt(1, 100), prompt(1, 100));
    other.truncate(50);
    other.extend(prompt(2, 30));
    let ids = [engine.submit(&tenant, &long, 1).unwrap(), engine.submit(&tenant, &other, 1).unwrap()];
    engine.finish(20);
    assert_eq!(engine.outputs[&ids[1]], expected_output(&other, 1, &[]));
    assert_eq!(engine.finished[&ids[1]].cached_tokens, 48);
    assert_eq!(computed(&engine), 100 + 80 - 48);
}

#[test]
fn test_followers_go_on_when_the_one_they_wait_for_ends_or_its_step_fails() {
    for fails in [false, true] {
        let mut engine = engine();
        let tenant = engine.tenant("a");
        let prompt = prompt(1, 100);
        let ids: Vec<_> = (0..3).map(|_| engine.submit(&tenant, &prompt, 2).unwrap()).collect();
        engine.turn();
        if fails {
            engine.abandoned_turn(false);
        }
        engine.scheduler.abort(ids[0]).unwrap();
        engine.finish(40);
        for id in &ids[1..] {
            assert_eq!(engine.finished[id].reason, FinishReason::Length);
            assert_eq!(engine.outputs[id], expected_output(&prompt, 2, &[]));
        }
        engine.check_idle();
    }
}

#[test]
fn test_nobody_waits_for_another_tenants_equal_prompt() {
    let mut alone = engine();
    let mut beside = engine();
    let steps = |engine: &mut Engine, has_other: bool| {
        let other = engine.tenant("other");
        let tenant = engine.tenant("a");
        if has_other {
            engine.submit(&other, &prompt(1, 30), 1).unwrap();
        } else {
            engine.submit(&other, &prompt(2, 30), 1).unwrap();
        }
        let id = engine.submit(&tenant, &prompt(1, 30), 2).unwrap();
        engine.finish(20);
        let done = &engine.finished[&id];
        (done.steps, done.queue_steps, done.cached_tokens)
    };
    assert_eq!(steps(&mut alone, false), steps(&mut beside, true));
}

#[test]
fn test_without_reuse_nobody_waits() {
    let mut engine = engine();
    let tenant = engine.tenant("a");
    for _ in 0..2 {
        let mut request = support::request(&tenant, &prompt(1, 12), 1);
        request.reuse = false;
        engine.scheduler.submit(request).unwrap();
    }
    assert_eq!(engine.turn(), 24);
}

#[test]
fn test_others_pass_a_request_that_waits_for_a_chunk() {
    let mut engine = engine();
    let tenant = engine.tenant("a");
    let prompt_of_24 = prompt(1, 24);
    let first = engine.submit(&tenant, &prompt_of_24, 1).unwrap();
    let second = engine.submit(&tenant, &prompt_of_24, 1).unwrap();
    let third = engine.submit(&tenant, &prompt(3, 8), 1).unwrap();
    assert_eq!(engine.turn(), 32);
    assert!(engine.finished.contains_key(&first) && engine.finished.contains_key(&third));
    engine.finish(3);
    assert_eq!(engine.finished[&second].cached_tokens, 20);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Prompts of few different blocks, submitted at any times into a small pool, with steps that fail: outputs
    /// are those of each prompt alone, all ends come, and nothing is kept.
    #[test]
    fn test_outputs_do_not_depend_on_who_shares(
        requests in prop::collection::vec((prop::collection::vec(0..2u32, 1..8), 0..4u32, 1..5u32), 1..12),
        failing in prop::collection::vec(0..30usize, 0..3),
    ) {
        let mut engine = Engine::new(24, config(BLOCK_SIZE), true);
        let tenant = engine.tenant("a");
        let mut expected = Vec::new();
        for (turn, (blocks, tail, max_tokens)) in requests.iter().enumerate() {
            let mut tokens: Vec<u32> = blocks.iter().flat_map(|block| prompt(*block, BLOCK_SIZE)).collect();
            tokens.extend(prompt(9, *tail));
            expected.push((engine.submit(&tenant, &tokens, *max_tokens).unwrap(), tokens, *max_tokens));
            if failing.contains(&turn) {
                engine.abandoned_turn(false);
            } else if turn % 2 == 0 {
                engine.turn();
            }
        }
        engine.finish(400);
        for (id, tokens, max_tokens) in expected {
            prop_assert_eq!(&engine.outputs[&id], &expected_output(&tokens, max_tokens, &[]));
        }
        engine.check_idle();
    }
}
