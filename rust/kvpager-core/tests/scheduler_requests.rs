//! What can be asked of requests: deadlines, bounds of the queue, pause and resume, drain, reset, priorities.

mod support;

use kvpager_core::Error;
use kvpager_core::scheduler::{Deadline, FinishReason, QueueLimits, Request, TenantConfig};
use std::sync::Arc;
use support::{Engine, after_steps, config, expected_output, prompt, request};

#[test]
fn a_deadline_ends_waiting_running_and_paused_requests() {
    let mut config = config(4);
    config.max_running = 2;
    let mut engine = Engine::new(16, config, true);
    let tenant = engine.tenant("a");
    let with = |seed| Request { deadline: after_steps(3), ..request(&tenant, &prompt(seed, 5), 20) };
    let running = engine.scheduler.submit(with(1)).unwrap();
    let paused = engine.scheduler.submit(with(2)).unwrap();
    let waiting = engine.scheduler.submit(with(3)).unwrap();
    let free = engine.submit(&tenant, &prompt(4, 5), 6).unwrap();
    engine.turn();
    assert!(engine.scheduler.pause(paused).unwrap());
    engine.finish(40);
    engine.check_idle();
    for id in [running, paused, waiting] {
        let ended = &engine.finished[&id];
        assert_eq!(ended.reason, FinishReason::Deadline, "{ended:?}");
        assert!(ended.steps <= 3);
    }
    assert_eq!(engine.finished[&free].reason, FinishReason::Length);
    assert_eq!(engine.finished[&running].output_tokens, 3);
}

#[test]
fn a_deadline_in_seconds_follows_the_callers_clock() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant("a");
    let deadline = Deadline { steps: None, seconds: Some(2.5) };
    let id = engine.scheduler.submit(Request { deadline, ..request(&tenant, &prompt(1, 5), 20) }).unwrap();
    for now in [100.0, 101.0, 102.0, 102.4, 102.5] {
        engine.turn_at(now);
        assert_eq!(engine.finished.contains_key(&id), now >= 102.5);
    }
    assert_eq!(engine.finished[&id].output_tokens, 4);
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let deadline = Deadline { steps: None, seconds: Some(bad) };
        let request = Request { deadline, ..request(&tenant, &prompt(1, 5), 20) };
        assert!(matches!(engine.scheduler.submit(request), Err(Error::InvalidArgument(_))));
    }
}

fn bounded(engine: &Engine, name: &str, queue: QueueLimits) -> Arc<kvpager_core::scheduler::Tenant> {
    let config = TenantConfig { queue, ..TenantConfig::new(name, engine.pool.num_blocks()) };
    engine.scheduler.add_tenant(&config).expect("a tenant of a new name")
}

fn refusal(result: kvpager_core::Result<kvpager_core::SequenceId>) -> (String, bool, Option<u64>) {
    match result {
        Err(Error::Refused { reason, retryable, retry_after_steps }) => {
            (reason, retryable, retry_after_steps)
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn the_queue_is_bounded_by_requests_and_tokens_of_a_tenant_and_of_all() {
    let mut config = config(4);
    config.queue = QueueLimits { max_requests: 4, max_tokens: 40 };
    let mut engine = Engine::new(64, config, true);
    let narrow = bounded(&engine, "narrow", QueueLimits { max_requests: 2, max_tokens: 12 });
    let wide = engine.tenant("wide");
    engine.submit(&narrow, &prompt(1, 5), 2).unwrap();
    let (reason, retryable, retry) = refusal(engine.submit(&narrow, &prompt(2, 8), 2));
    assert!(
        reason.contains("\"narrow\": 5 prompt tokens waiting, 8 more would pass the limit of 12"),
        "{reason}"
    );
    assert!(retryable && retry.is_some_and(|steps| steps >= 1));
    engine.submit(&narrow, &prompt(2, 7), 2).unwrap();
    let (reason, ..) = refusal(engine.submit(&narrow, &prompt(3, 1), 2));
    assert!(reason.contains("2 requests waiting, the limit is 2"), "{reason}");
    let (reason, retryable, retry) = refusal(engine.submit(&narrow, &prompt(3, 13), 2));
    assert!(reason.contains("13 tokens; at most 12"), "{reason}");
    assert!(!retryable && retry.is_none());
    // The refused ones took no place of the global bound either.
    engine.submit(&wide, &prompt(4, 20), 2).unwrap();
    let (reason, retryable, _) = refusal(engine.submit(&wide, &prompt(5, 9), 2));
    assert!(
        reason.contains("32 prompt tokens waiting, 9 more would pass the limit of 40") && retryable,
        "{reason}"
    );
    engine.submit(&wide, &prompt(5, 8), 2).unwrap();
    assert_eq!((narrow.num_waiting(), narrow.num_waiting_tokens(), wide.num_waiting_tokens()), (2, 12, 28));
    engine.finish(20);
    assert_eq!((narrow.num_waiting(), narrow.num_waiting_tokens(), wide.num_waiting_tokens()), (0, 0, 0));
    engine.submit(&narrow, &prompt(3, 12), 2).unwrap();
}

#[test]
fn the_retry_estimate_follows_the_tenants_own_admissions_and_nobody_elses() {
    let run = |others: u32| {
        let mut config = config(4);
        config.max_running = 8;
        config.max_batch_tokens = 64;
        let mut engine = Engine::new(64, config, false);
        let own = bounded(&engine, "own", QueueLimits { max_requests: 2, ..QueueLimits::NONE });
        let other = engine.tenant("other");
        let mut estimates = Vec::new();
        for seed in 0..8 {
            // One admission every five steps: the slot is asked for that often.
            engine.submit(&own, &prompt(seed, 4), 2).unwrap();
            for i in 0..others {
                engine.submit(&other, &prompt(100 + seed * 10 + i, 4), 2).unwrap();
            }
            for _ in 0..5 {
                engine.turn();
            }
        }
        engine.submit(&own, &prompt(90, 4), 2).unwrap();
        engine.submit(&own, &prompt(91, 4), 2).unwrap();
        estimates.push(refusal(engine.submit(&own, &prompt(92, 4), 2)).2);
        estimates
    };
    assert_eq!(run(0), run(3));
    assert!(run(0)[0].is_some_and(|steps| (1..=5).contains(&steps)), "{:?}", run(0));
}

#[test]
fn a_paused_request_keeps_its_blocks_and_goes_on_where_it_was() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let id = engine.submit(&tenant, &prompt(1, 6), 8).unwrap();
    engine.turn();
    engine.turn();
    assert!(engine.scheduler.pause(id).unwrap() && engine.scheduler.pause(id).unwrap());
    let held = engine.pool.stats().held;
    for _ in 0..5 {
        assert_eq!(engine.turn(), 0);
    }
    assert!(!engine.scheduler.has_work().unwrap());
    assert_eq!((engine.scheduler.stats().num_paused, engine.pool.stats().held), (1, held));
    assert!(engine.scheduler.resume(id).unwrap() && engine.scheduler.resume(id).unwrap());
    engine.finish(20);
    assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 6), 8, &[]));
    assert_eq!((engine.finished[&id].preemptions, engine.finished[&id].steps), (0, 8));
    assert!(!engine.scheduler.pause(id).unwrap() && !engine.scheduler.resume(id).unwrap());
    assert!(engine.scheduler.pause(kvpager_core::SequenceId(99)).is_err());
}

#[test]
fn a_request_paused_in_the_queue_does_not_block_those_behind_and_keeps_its_place() {
    let mut config = config(4);
    config.max_running = 1;
    let mut engine = Engine::new(32, config, true);
    let tenant = engine.tenant("a");
    let ids: Vec<_> = (0..4).map(|seed| engine.submit(&tenant, &prompt(seed, 5), 2).unwrap()).collect();
    engine.scheduler.pause(ids[1]).unwrap();
    for _ in 0..3 {
        engine.turn();
    }
    engine.scheduler.resume(ids[1]).unwrap();
    engine.finish(20);
    let mut order: Vec<_> = engine.finished.values().map(|ended| (ended.queue_steps, ended.id)).collect();
    order.sort_unstable();
    assert_eq!(order[0].1, ids[0]);
    assert!(engine.finished[&ids[1]].queue_steps < engine.finished[&ids[3]].queue_steps);
}

#[test]
fn paused_blocks_are_forced_out_for_whoever_needs_them() {
    for policy in ["reserve", "watermark", "forecast"] {
        let mut config = config(4);
        config.policy = kvpager_core::scheduler::AdmissionPolicy::from_name(policy).unwrap();
        let mut engine = Engine::new(8, config, true);
        let tenant = engine.tenant("a");
        let paused = engine.submit(&tenant, &prompt(1, 18), 6).unwrap();
        engine.turn();
        engine.turn();
        engine.scheduler.pause(paused).unwrap();
        let other = engine.submit(&tenant, &prompt(2, 18), 6).unwrap();
        for _ in 0..12 {
            engine.turn();
        }
        assert_eq!(engine.finished[&other].reason, FinishReason::Length, "{policy}");
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_forced_out, stats.num_preemptions), (1, 0), "{policy}");
        engine.scheduler.resume(paused).unwrap();
        engine.finish(20);
        assert_eq!(engine.outputs[&paused], expected_output(&prompt(1, 18), 6, &[]), "{policy}");
        assert_eq!(engine.finished[&paused].preemptions, 1);
    }
}

#[test]
fn a_paused_request_gives_its_row_up_when_no_other_is_free() {
    let mut config = config(4);
    config.max_running = 1;
    let mut engine = Engine::new(32, config, true);
    let tenant = engine.tenant("a");
    let paused = engine.submit(&tenant, &prompt(1, 6), 6).unwrap();
    engine.turn();
    engine.scheduler.pause(paused).unwrap();
    let other = engine.submit(&tenant, &prompt(2, 6), 6).unwrap();
    for _ in 0..8 {
        engine.turn();
    }
    assert_eq!(engine.finished[&other].reason, FinishReason::Length);
    engine.scheduler.abort(paused).unwrap();
    engine.finish(5);
    engine.check_idle();
}

#[test]
fn draining_accepts_nothing_and_ends_the_rest_at_its_deadline() {
    let mut config = config(4);
    config.max_running = 2;
    let mut engine = Engine::new(32, config, true);
    let tenant = engine.tenant("a");
    let short = engine.submit(&tenant, &prompt(1, 5), 3).unwrap();
    let long = engine.submit(&tenant, &prompt(2, 5), 60).unwrap();
    let waiting = engine.submit(&tenant, &prompt(3, 5), 60).unwrap();
    engine.turn();
    engine.scheduler.pause(waiting).unwrap();
    engine.scheduler.drain(after_steps(5)).unwrap();
    let (reason, retryable, _) = refusal(engine.submit(&tenant, &prompt(4, 5), 1));
    assert!(reason.contains("drained") && !retryable, "{reason}");
    engine.finish(10);
    engine.check_idle();
    assert_eq!(engine.finished[&short].reason, FinishReason::Length);
    assert_eq!(engine.finished[&long].reason, FinishReason::Drained);
    assert_eq!(engine.finished[&waiting].reason, FinishReason::Drained);
    assert!(engine.scheduler.drain(after_steps(0)).is_err());
}

#[test]
fn a_reset_is_refused_while_blocks_are_in_use_unless_the_running_go_back_to_the_queue() {
    let mut config = config(4);
    config.max_running = 3;
    let mut engine = Engine::new(32, config, true);
    let tenant = engine.tenant("a");
    let ids: Vec<_> = (0..5).map(|seed| engine.submit(&tenant, &prompt(seed, 9), 4).unwrap()).collect();
    let batch = engine.scheduler.step(0).unwrap();
    assert!(matches!(engine.scheduler.reset_cache(true), Err(Error::WrongState(_))));
    let (token_start, tokens) = engine.run(&batch);
    engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    let before = engine.pool.stats();
    assert!(matches!(engine.scheduler.reset_cache(false), Err(Error::WrongState(_))));
    assert_eq!(engine.pool.stats(), before);
    let reset = engine.scheduler.reset_cache(true).unwrap();
    assert_eq!(reset.num_requeued, 3);
    let stats = engine.pool.stats();
    assert_eq!((stats.free, stats.cached, stats.held), (32, 0, 0));
    engine.finish(30);
    let mut by_wait: Vec<_> =
        engine.finished.values().map(|ended| (ended.steps + ended.queue_steps, ended.id)).collect();
    by_wait.sort_unstable();
    assert!(by_wait[..3].iter().all(|(_, id)| ids[..3].contains(id)), "the running ones come first again");
    for (seed, id) in ids.iter().enumerate() {
        assert_eq!(engine.outputs[id], expected_output(&prompt(seed as u32, 9), 4, &[]));
    }
    assert!(engine.scheduler.reset_cache(false).unwrap().num_evicted > 0);
    assert_eq!(engine.pool.stats().free, 32);
}

#[test]
fn waiting_makes_up_for_priority() {
    let mut config = config(4);
    config.max_running = 1;
    config.ageing_steps = 10;
    let mut engine = Engine::new(32, config, true);
    let tenant = engine.tenant("a");
    engine.submit(&tenant, &prompt(0, 4), 4).unwrap();
    engine.turn();
    let low = engine.scheduler.submit(Request { priority: 2, ..request(&tenant, &prompt(1, 4), 2) }).unwrap();
    let mut seed = 2;
    // A stream of urgent requests that never leaves a place free.
    while !engine.finished.contains_key(&low) {
        engine.submit(&tenant, &prompt(seed, 4), 2).unwrap();
        engine.turn();
        engine.turn();
        seed += 1;
        assert!(seed < 40, "the low class starved");
    }
    let waited = engine.finished[&low].queue_steps;
    assert!((18..=26).contains(&waited), "two classes are 20 steps, it waited {waited}");
}
