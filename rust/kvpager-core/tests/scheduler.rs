//! The scheduler's promises, each a test.

mod support;

use kvpager_core::scheduler::{AdmissionPolicy, FinishReason};
use kvpager_core::{Error, SequenceId};
use std::sync::Arc;
use support::{Engine, config, expected_output, prompt, request};

#[test]
fn a_request_runs_from_arrival_to_its_last_freed_block() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    let prompt = prompt(1, 9);
    let id = engine.submit(&tenant, &prompt, 5).unwrap();
    engine.finish(20);
    assert_eq!(engine.outputs[&id], expected_output(&prompt, 5, &[]));
    let finished = &engine.finished[&id];
    assert_eq!(finished.reason, FinishReason::Length);
    assert_eq!((finished.prompt_tokens, finished.cached_tokens, finished.output_tokens), (9, 0, 5));
    assert_eq!((finished.steps, finished.queue_steps), (5, 0));
    engine.check_idle();
    // 9 + 5 - 1 computed tokens: three full blocks stay cached, the tail is free again.
    assert_eq!(engine.pool.stats().cached, 3);
}

#[test]
fn the_next_turn_of_a_chat_reuses_prompt_and_output() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let mut chat = prompt(1, 9);
    let first = engine.submit(&tenant, &chat, 6).unwrap();
    engine.finish(20);
    chat.extend_from_slice(&engine.outputs[&first]);
    chat.extend(prompt(2, 3));
    let second = engine.submit(&tenant, &chat, 4).unwrap();
    engine.finish(20);
    assert_eq!(engine.finished[&second].cached_tokens, 12);
    assert_eq!(engine.outputs[&second], expected_output(&chat, 4, &[]));
}

#[test]
fn at_least_the_last_prompt_token_is_computed() {
    for length in 1..=17 {
        let mut engine = Engine::new(32, config(4), true);
        let tenant = engine.tenant("a");
        let prompt = prompt(1, length);
        let cold = engine.submit(&tenant, &prompt, 3).unwrap();
        engine.finish(20);
        let warm = engine.submit(&tenant, &prompt, 3).unwrap();
        engine.finish(20);
        assert_eq!(engine.finished[&warm].cached_tokens, (length - 1) / 4 * 4);
        assert_eq!(engine.outputs[&warm], engine.outputs[&cold]);
    }
}

#[test]
fn a_foreign_tenants_prefix_is_like_an_absent_one() {
    let mut engine = Engine::new(32, config(4), true);
    let (a, b) = (engine.tenant("a"), engine.tenant("b"));
    let prompt = prompt(1, 16);
    engine.submit(&a, &prompt, 2).unwrap();
    engine.finish(20);
    let id = engine.submit(&b, &prompt, 2).unwrap();
    engine.finish(20);
    assert_eq!(engine.finished[&id].cached_tokens, 0);
}

#[test]
fn without_reuse_nothing_is_looked_up_or_left_behind() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let prompt = prompt(1, 16);
    engine.submit(&tenant, &prompt, 2).unwrap();
    engine.finish(20);
    let cached = engine.pool.stats().cached;
    let mut private = request(&tenant, &prompt, 8);
    private.reuse = false;
    let id = engine.scheduler.submit(private).unwrap();
    engine.finish(20);
    assert_eq!(engine.finished[&id].cached_tokens, 0);
    assert_eq!(engine.pool.stats().cached, cached);
}

#[test]
fn equal_content_computed_at_the_same_time_is_kept_once() {
    let mut engine = Engine::new(64, config(4), true);
    let tenant = engine.tenant("a");
    let prompt = prompt(1, 12);
    let ids: Vec<_> = (0..4).map(|_| engine.submit(&tenant, &prompt, 6).unwrap()).collect();
    engine.finish(30);
    for id in ids {
        assert_eq!(engine.outputs[&id], expected_output(&prompt, 6, &[]));
    }
    engine.check_idle();
    assert_eq!(engine.pool.stats().cached, 4);
}

#[test]
fn what_is_reserved_equals_what_is_used_for_every_length() {
    for prompt_tokens in 1..=20 {
        for max_tokens in 1..=20 {
            let mut engine = Engine::new(10, config(4), true);
            let tenant = engine.tenant("a");
            engine.submit(&tenant, &prompt(1, prompt_tokens), max_tokens).unwrap();
            engine.turn();
            let need = u64::from((prompt_tokens + max_tokens - 1).div_ceil(4));
            if max_tokens > 1 {
                let stats = engine.pool.stats();
                assert_eq!(stats.held + stats.reserved, need);
            }
            engine.finish(40);
            assert_eq!(engine.pool.stats().peak_held, need);
        }
    }
}

#[test]
fn requests_wait_for_room_and_hold_nothing_while_they_wait() {
    let mut engine = Engine::new(6, config(4), true);
    let tenant = engine.tenant("a");
    let prompts: Vec<_> = (1..=5).map(|seed| prompt(seed, 13)).collect();
    let ids: Vec<_> = prompts.iter().map(|prompt| engine.submit(&tenant, prompt, 5).unwrap()).collect();
    engine.turn();
    assert_eq!(engine.scheduler.stats().num_running, 1);
    assert_eq!(engine.scheduler.stats().num_waiting, 4);
    let stats = engine.pool.stats();
    assert_eq!(stats.held + stats.reserved, 5);
    engine.finish(200);
    for (id, prompt) in ids.iter().zip(&prompts) {
        assert_eq!(engine.outputs[id], expected_output(prompt, 5, &[]));
        assert_eq!(engine.finished[id].preemptions, 0);
    }
    assert!(engine.finished[&ids[4]].queue_steps > engine.finished[&ids[1]].queue_steps);
    engine.check_idle();
}

#[test]
fn cached_blocks_make_room_and_a_request_never_evicts_its_own_match() {
    let mut engine = Engine::new(5, config(4), true);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 9), 1).unwrap();
    engine.finish(9);
    engine.submit(&tenant, &prompt(2, 9), 1).unwrap();
    engine.finish(9);
    assert_eq!(engine.pool.stats().cached, 4);
    let mut long = prompt(1, 8);
    long.extend(prompt(3, 8));
    let id = engine.submit(&tenant, &long, 1).unwrap();
    engine.finish(9);
    assert_eq!(engine.finished[&id].cached_tokens, 8);
}

#[test]
fn what_can_never_fit_is_refused_with_the_numbers() {
    let engine = Engine::new(3, config(4), true);
    let tenant = engine.tenant("a");
    let error = engine.submit(&tenant, &prompt(1, 13), 1).unwrap_err();
    assert!(matches!(&error, Error::Refused { retryable: false, .. }), "{error}");
    for number in ["13", "1", "4 blocks", "may have 3"] {
        assert!(error.to_string().contains(number), "{error}");
    }
    assert!(engine.submit(&tenant, &prompt(1, 11), 2).is_ok());
    let error = engine.submit(&tenant, &prompt(1, 300), 1).unwrap_err();
    assert!(error.to_string().contains("256 positions"), "{error}");
    let limited = engine.tenant_with("b", 0, 2);
    assert!(engine.submit(&limited, &prompt(1, 9), 1).is_err());
    for bad in [request(&tenant, &[], 1), request(&tenant, &[1], 0), request(&tenant, &[1 << 31], 1)] {
        assert!(matches!(engine.scheduler.submit(bad), Err(Error::InvalidArgument(_))));
    }
    let other = Engine::new(3, config(4), true);
    assert!(other.submit(&tenant, &[1], 1).is_err());
}

#[test]
fn a_full_queue_refuses_and_says_that_later_may_do() {
    let mut engine = Engine::new(8, config(4), true);
    let tenant = engine.tenant("a");
    for _ in 0..64 {
        engine.submit(&tenant, &[1, 2], 1).unwrap();
    }
    let error = engine.submit(&tenant, &[1, 2], 1).unwrap_err();
    assert!(matches!(error, Error::Refused { retryable: true, .. }));
    engine.turn();
    assert!(engine.submit(&tenant, &[1, 2], 1).is_ok());
}

#[test]
fn abort_works_in_every_state_and_is_idempotent() {
    for turns in 0..6 {
        let mut engine = Engine::new(8, config(4), true);
        let tenant = engine.tenant("a");
        let other = engine.submit(&tenant, &prompt(2, 40 / 4), 12).unwrap();
        let id = engine.submit(&tenant, &prompt(1, 10), 3).unwrap();
        for _ in 0..turns {
            engine.turn();
        }
        let live = engine.scheduler.abort(id).unwrap();
        assert_eq!(live, !engine.finished.contains_key(&id));
        assert!(!engine.scheduler.abort(id).unwrap());
        engine.finish(40);
        assert!(engine.finished.contains_key(&id) && engine.finished.contains_key(&other));
        engine.check_idle();
    }
    let engine = Engine::new(8, config(4), true);
    assert!(engine.scheduler.abort(SequenceId(77)).is_err());
}

#[test]
fn tokens_of_a_request_aborted_since_the_plan_are_dropped_and_counted() {
    let mut engine = Engine::new(8, config(4), true);
    let tenant = engine.tenant("a");
    let id = engine.submit(&tenant, &prompt(1, 6), 5).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    assert!(engine.scheduler.abort(id).unwrap());
    let (token_start, tokens) = engine.run(&batch);
    let outcome = engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    assert_eq!(outcome.dropped_tokens, 1);
    assert_eq!(outcome.finished[0].reason, FinishReason::Aborted);
    assert_eq!(engine.pool.stats().cached, 0);
    engine.check_idle();
}

#[test]
fn an_abandoned_step_leaves_nothing_matchable_and_can_run_again() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    let prompt = prompt(1, 10);
    let id = engine.submit(&tenant, &prompt, 4).unwrap();
    for _ in 0..3 {
        let batch = engine.scheduler.step(0).unwrap();
        engine.scheduler.abandon(batch.step_id, "the model crashed", false).unwrap();
        assert_eq!(engine.pool.stats().cached, 0);
    }
    engine.finish(20);
    assert_eq!(engine.outputs[&id], expected_output(&prompt, 4, &[]));
    let failed = engine.submit(&tenant, &prompt, 4).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    let outcome = engine.scheduler.abandon(batch.step_id, "out of memory", true).unwrap();
    assert_eq!(outcome.finished[0].id, failed);
    assert_eq!(outcome.finished[0].reason, FinishReason::Error);
    assert_eq!(outcome.finished[0].detail.as_deref(), Some("out of memory"));
    engine.check_idle();
}

#[test]
fn a_bad_commit_changes_nothing() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    let prompt = prompt(1, 5);
    let id = engine.submit(&tenant, &prompt, 2).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    let (token_start, tokens) = engine.run(&batch);
    for (start, ids) in [
        (vec![0], vec![]),
        (vec![0, 2], vec![1, 2]),
        (vec![0, 0], vec![]),
        (vec![0, 1], vec![-1]),
        (vec![0, 1], vec![]),
    ] {
        assert!(engine.scheduler.commit(batch.step_id, &start, &ids).is_err());
    }
    assert!(engine.scheduler.step(0).is_err(), "a second step while one is open");
    assert!(engine.scheduler.commit(kvpager_core::StepId(99), &token_start, &tokens).is_err());
    engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    assert!(engine.scheduler.commit(batch.step_id, &token_start, &tokens).is_err(), "committed twice");
    engine.finish(9);
    assert_eq!(engine.outputs[&id], expected_output(&prompt, 2, &[]));
}

#[test]
fn decodes_come_first_and_prefill_is_chunked_within_the_budget() {
    let mut config = config(4);
    config.max_batch_tokens = 10;
    config.max_prefill_chunk = 6;
    let mut engine = Engine::new(64, config, true);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 2), 30).unwrap();
    engine.turn();
    let long = prompt(2, 25);
    let id = engine.submit(&tenant, &long, 1).unwrap();
    engine.submit(&tenant, &prompt(3, 25), 1).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    assert_eq!(batch.arrays.query_start, [0, 1, 7, 10]);
    assert_eq!(batch.arrays.sample_rows, [0]);
    let (token_start, tokens) = engine.run(&batch);
    engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    engine.finish(60);
    assert_eq!(engine.outputs[&id], expected_output(&long, 1, &[]));
}

#[test]
fn padding_rows_touch_nothing() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 5), 2).unwrap();
    let batch = engine.scheduler.step(4).unwrap();
    assert_eq!(batch.arrays.sequence_ids[1..], [u64::MAX; 3]);
    assert_eq!(batch.arrays.context_lens[1..], [0; 3]);
    let (token_start, tokens) = engine.run(&batch);
    assert_eq!(token_start.len(), 5);
    engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    engine.finish(9);
}

#[test]
fn a_batch_that_is_still_held_is_not_overwritten() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 5), 8).unwrap();
    let held = engine.scheduler.step(0).unwrap();
    let before = held.arrays.token_ids.clone();
    let (token_start, tokens) = engine.run(&held);
    engine.scheduler.commit(held.step_id, &token_start, &tokens).unwrap();
    engine.finish(20);
    assert_eq!(held.arrays.token_ids, before);
}

#[test]
fn blocks_are_zeroed_when_their_tenant_changes_and_only_then() {
    let mut engine = Engine::new(4, config(4), false);
    let (a, b) = (engine.tenant("a"), engine.tenant("b"));
    let zeroed = |engine: &mut Engine, tenant: &Arc<_>| {
        engine.submit(tenant, &prompt(1, 12), 1).unwrap();
        let batch = engine.scheduler.step(0).unwrap();
        let (token_start, tokens) = engine.run(&batch);
        engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
        batch.arrays.block_zeros.len()
    };
    assert_eq!(zeroed(&mut engine, &a), 0);
    let again = zeroed(&mut engine, &a);
    assert_eq!(again, 0);
    assert!(zeroed(&mut engine, &b) >= 2);
}

#[test]
fn stop_tokens_end_a_request_but_not_before_min_tokens() {
    let mut engine = Engine::new(64, config(4), true);
    let tenant = engine.tenant("a");
    let prompt = prompt(1, 5);
    let free = expected_output(&prompt, 20, &[]);
    let stop = free[3];
    let first = free.iter().position(|&token| token == stop).unwrap();
    let mut early = request(&tenant, &prompt, 20);
    early.stop_token_ids = vec![stop];
    let mut late = early.clone();
    late.min_tokens = first as u32 + 2;
    let (early, late) = (engine.scheduler.submit(early).unwrap(), engine.scheduler.submit(late).unwrap());
    engine.finish(60);
    assert_eq!(engine.outputs[&early], free[..=first]);
    assert_eq!(engine.finished[&early].reason, FinishReason::Stop);
    assert!(engine.outputs[&late].len() > first + 1);
}

#[test]
fn tenants_that_both_wait_are_served_alike_whatever_their_number_of_requests() {
    let mut config = config(4);
    config.max_running = 2;
    let mut engine = Engine::new(64, config, false);
    let (a, b) = (engine.tenant("a"), engine.tenant("b"));
    let greedy: Vec<_> = (0..20).map(|seed| engine.submit(&a, &prompt(seed, 8), 4).unwrap()).collect();
    let modest: Vec<_> = (0..4).map(|seed| engine.submit(&b, &prompt(seed, 8), 4).unwrap()).collect();
    while !modest.iter().all(|id| engine.finished.contains_key(id)) {
        engine.turn();
    }
    let done = greedy.iter().filter(|id| engine.finished.contains_key(id)).count();
    assert!(done <= 6, "{done} of the greedy tenant's requests passed");
    engine.finish(200);
}

#[test]
fn two_threads_in_the_scheduler_are_an_error_at_the_call() {
    let engine = Engine::new(16, config(4), true);
    let seen = std::sync::atomic::AtomicBool::new(false);
    let start = std::time::Instant::now();
    let work = || {
        while !seen.load(std::sync::atomic::Ordering::Relaxed) && start.elapsed().as_secs() < 60 {
            match engine.scheduler.step(0) {
                Ok(batch) => while engine.scheduler.commit(batch.step_id, &[0], &[]).is_err() {},
                Err(Error::WrongState(_)) => seen.store(true, std::sync::atomic::Ordering::Relaxed),
                Err(other) => panic!("{other}"),
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(work);
        }
    });
    assert!(seen.into_inner());
}

#[test]
fn many_threads_submit_and_abort_while_the_engine_runs() {
    let mut engine = Engine::new(24, config(4), true);
    let tenants = [engine.tenant("a"), engine.tenant("b")];
    let shared = Arc::clone(&engine.scheduler);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread: u32| {
                let (tenant, shared) = (Arc::clone(&tenants[thread as usize % 2]), Arc::clone(&shared));
                scope.spawn(move || {
                    let mut accepted = Vec::new();
                    for i in 0..100 {
                        match shared.submit(request(&tenant, &prompt(i % 3, 5 + i % 9), 1 + i % 7)) {
                            Ok(id) if i % 5 == thread => {
                                shared.abort(id).unwrap();
                                accepted.push(id);
                            }
                            Ok(id) => accepted.push(id),
                            Err(Error::Refused { retryable: true, .. }) => std::thread::yield_now(),
                            Err(other) => panic!("{other}"),
                        }
                    }
                    accepted
                })
            })
            .collect();
        while !threads.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            engine.turn();
        }
        engine.finish(5000);
        for id in threads.into_iter().flat_map(|thread| thread.join().unwrap()) {
            assert!(engine.finished.contains_key(&id), "request {id} never ended");
        }
    });
    engine.check_idle();
}

#[test]
fn overcommit_preempts_the_youngest_never_the_oldest_and_loses_no_token() {
    for reuse in [true, false] {
        let mut config = config(4);
        config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        let mut engine = Engine::new(8, config, reuse);
        let tenant = engine.tenant("a");
        let prompts: Vec<_> = (1..=4).map(|seed| prompt(seed, 8)).collect();
        let ids: Vec<_> = prompts.iter().map(|prompt| engine.submit(&tenant, prompt, 8).unwrap()).collect();
        engine.finish(200);
        for (id, prompt) in ids.iter().zip(&prompts) {
            assert_eq!(engine.outputs[id], expected_output(prompt, 8, &[]));
        }
        let preemptions: u64 = ids.iter().map(|id| engine.finished[id].preemptions).sum();
        assert!((1..=12).contains(&preemptions), "{preemptions}");
        assert_eq!(engine.finished[&ids[0]].preemptions, 0);
        assert_eq!(engine.scheduler.stats().num_preemptions, preemptions);
        engine.check_idle();
    }
}

#[test]
fn a_head_that_does_not_fit_is_passed_by_a_bounded_number_of_small_requests() {
    let mut config = config(4);
    config.max_bypass = 4;
    config.max_batch_tokens = 200;
    config.max_running = 32;
    let mut engine = Engine::new(10, config, false);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(1, 5), 20).unwrap();
    engine.turn();
    let head = engine.submit(&tenant, &prompt(2, 17), 3).unwrap();
    let small: Vec<_> = (3..23).map(|seed| engine.submit(&tenant, &prompt(seed, 2), 3).unwrap()).collect();
    let mut passed = 0;
    while !engine.outputs.contains_key(&head) {
        passed = small.iter().filter(|id| engine.outputs.contains_key(id)).count();
        engine.turn();
    }
    assert_eq!(passed, 4);
    engine.finish(200);
}

#[test]
fn a_quota_is_kept_by_preempting_inside_the_tenant() {
    let mut config = config(4);
    config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
    let mut engine = Engine::new(40, config, false);
    let (a, b) = (engine.tenant_with("a", 0, 6), engine.tenant_with("b", 0, 34));
    let mine: Vec<_> = (1..=3).map(|seed| engine.submit(&a, &prompt(seed, 8), 8).unwrap()).collect();
    let other: Vec<_> = (4..=6).map(|seed| engine.submit(&b, &prompt(seed, 8), 8).unwrap()).collect();
    engine.finish(200);
    assert!(mine.iter().any(|id| engine.finished[id].preemptions > 0));
    assert!(other.iter().all(|id| engine.finished[id].preemptions == 0));
}

#[test]
fn what_other_tenants_are_guaranteed_is_not_counted_on() {
    let mut engine = Engine::new(8, config(4), false);
    let a = engine.tenant("a");
    let id = engine.submit(&a, &prompt(1, 28), 5).unwrap();
    let _b = engine.tenant_with("b", 2, 8);
    let error = engine.submit(&a, &prompt(1, 28), 5).unwrap_err();
    assert!(error.to_string().contains("may have 6"), "{error}");
    engine.finish(20);
    assert_eq!(engine.finished[&id].reason, FinishReason::Capacity);
    engine.check_idle();
}

#[test]
fn a_tenants_own_cached_blocks_go_before_anothers() {
    let mut engine = Engine::new(8, config(4), true);
    let (a, b) = (engine.tenant_with("a", 0, 8), engine.tenant_with("b", 0, 8));
    engine.submit(&a, &prompt(1, 16), 1).unwrap();
    engine.finish(9);
    engine.submit(&b, &prompt(2, 16), 1).unwrap();
    engine.finish(9);
    engine.submit(&b, &prompt(3, 16), 1).unwrap();
    engine.finish(9);
    let id = engine.submit(&a, &prompt(1, 16), 1).unwrap();
    engine.finish(9);
    assert_eq!(engine.finished[&id].cached_tokens, 12);
}
