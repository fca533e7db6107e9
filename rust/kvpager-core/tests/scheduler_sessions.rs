//! Sessions keep their blocks between turns, and let go before anybody suffers for it.

mod support;

use kvpager_core::scheduler::{AdmissionPolicy, Deadline, FinishReason, Session};
use kvpager_core::{Error, SequenceId};
use std::sync::Arc;
use support::{Engine, NO_LIMIT, config, prompt, request};

fn submit(engine: &Engine, session: &Arc<Session>, prompt: &[u32], max_tokens: u32) -> SequenceId {
    let mut request = request(&session.tenant, prompt, max_tokens);
    request.session = Some(Arc::clone(session));
    engine.scheduler.submit(request).expect("a turn")
}

/// Runs one turn of a session to its end; returns all tokens of the conversation.
fn turn(engine: &mut Engine, session: &Arc<Session>, prompt: &[u32], max_tokens: u32) -> Vec<u32> {
    let id = submit(engine, session, prompt, max_tokens);
    engine.finish(200);
    let output = &engine.outputs[&id];
    prompt.iter().chain(output).copied().collect()
}

#[test]
fn a_session_keeps_its_blocks_between_turns_and_the_next_turn_finds_them() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let session = engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session");
    let tokens = turn(&mut engine, &session, &prompt(1, 10), 6);
    // 15 positions are written: three full blocks.
    assert_eq!((engine.held(), engine.scheduler.stats().num_sessions_kept), (3, 1));
    // Nothing that is cached can be evicted under it.
    assert_eq!(engine.index.as_ref().map(|index| index.evict(32)), Some(0));
    let mut longer = tokens;
    longer.extend(prompt(2, 5));
    let id = submit(&engine, &session, &longer, 4);
    engine.finish(100);
    assert_eq!(engine.finished[&id].cached_tokens, 12);
    assert_eq!(engine.held(), 6);
    assert!(engine.scheduler.close_session(&session));
    assert!(!engine.scheduler.close_session(&session));
    engine.turn();
    assert_eq!(engine.held(), 0);
    engine.check_idle();
}

#[test]
fn idle_sessions_let_go_before_a_request_waits_or_is_preempted() {
    for policy in [AdmissionPolicy::Reserve, AdmissionPolicy::Watermark { free_share: 0.0 }] {
        let mut settings = config(4);
        settings.policy = policy;
        let mut engine = Engine::new(16, settings, true);
        let (tenant, other) = (engine.tenant("a"), engine.tenant("b"));
        let sessions: Vec<_> =
            (0..3).map(|_| engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session")).collect();
        for (i, session) in sessions.iter().enumerate() {
            turn(&mut engine, session, &prompt(i as u32, 16), 2);
        }
        assert_eq!(engine.held(), 12);
        // Five blocks and four: two sessions go, the one that was idle shortest stays.
        let first = engine.submit(&other, &prompt(7, 17), 2).expect("accepted");
        engine.turn();
        assert!(engine.finished.is_empty() || !engine.finished.contains_key(&first));
        assert_eq!(engine.scheduler.stats().num_sessions_kept, 2);
        engine.submit(&tenant, &prompt(8, 16), 1).expect("accepted");
        engine.turn();
        assert_eq!(engine.scheduler.stats().num_sessions_kept, 1);
        engine.finish(100);
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_preemptions, stats.num_sessions_kept, engine.held()), (0, 1, 4));
    }
}

#[test]
fn growth_takes_the_blocks_of_idle_sessions_before_it_preempts() {
    let mut settings = config(4);
    settings.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
    let mut engine = Engine::new(12, settings, true);
    let tenant = engine.tenant("a");
    let session = engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session");
    turn(&mut engine, &session, &prompt(1, 24), 2);
    assert_eq!(engine.held(), 6);
    let ids = [2, 3].map(|seed| engine.submit(&tenant, &prompt(seed, 8), 16).expect("accepted"));
    engine.finish(200);
    assert!(ids.iter().all(|id| engine.finished[id].reason == FinishReason::Length));
    let stats = engine.scheduler.stats();
    assert_eq!((stats.num_preemptions, stats.num_sessions_kept), (0, 0));
    engine.check_idle();
}

#[test]
fn a_tenants_sessions_stay_within_its_bound_for_them() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant_that_keeps("a", 7);
    let sessions: Vec<_> =
        (0..4).map(|_| engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session")).collect();
    for (i, session) in sessions.iter().enumerate() {
        turn(&mut engine, session, &prompt(i as u32, 12), 2);
        assert!(engine.held() <= 7);
    }
    assert_eq!((engine.held(), engine.scheduler.stats().num_sessions_kept), (6, 2));
}

#[test]
fn the_time_limit_of_a_session_is_counted_from_its_last_turn() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let limit = Deadline { steps: Some(3), seconds: None };
    let session = engine.scheduler.open_session(&tenant, limit).expect("a session");
    let tokens = turn(&mut engine, &session, &prompt(1, 10), 3);
    engine.turn();
    turn(&mut engine, &session, &tokens, 3);
    assert!(engine.held() > 0);
    for _ in 0..2 {
        engine.turn();
        assert!(engine.held() > 0);
    }
    engine.turn();
    engine.turn();
    assert_eq!((engine.held(), session.is_open()), (0, true));
    // It still takes turns.
    turn(&mut engine, &session, &tokens, 3);
    assert!(engine.held() > 0);
}

#[test]
fn a_drain_releases_sessions_and_then_aborts_the_rest_after_its_deadline_with_a_reason() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let session = engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session");
    turn(&mut engine, &session, &prompt(1, 16), 2);
    let id = submit(&engine, &session, &prompt(2, 8), 30);
    engine.turn();
    engine.scheduler.drain(Deadline { steps: Some(4), seconds: None }).expect("a deadline");
    engine.turn();
    assert_eq!(engine.scheduler.stats().num_sessions_kept, 0);
    assert!(matches!(engine.scheduler.open_session(&tenant, NO_LIMIT), Err(Error::Refused { .. })));
    engine.finish(20);
    assert_eq!(engine.finished[&id].reason, FinishReason::Drained);
    engine.check_idle();
}

#[test]
fn a_turn_that_does_not_fit_its_session_is_refused_with_the_reason() {
    let engine = Engine::new(32, config(4), true);
    let (tenant, other) = (engine.tenant("a"), engine.tenant("b"));
    let session = engine.scheduler.open_session(&tenant, NO_LIMIT).expect("a session");
    let refused = |change: &dyn Fn(&mut kvpager_core::scheduler::Request), text: &str| {
        let mut turn = request(&tenant, &prompt(1, 5), 2);
        turn.session = Some(Arc::clone(&session));
        change(&mut turn);
        let error = engine.scheduler.submit(turn).expect_err("refused").to_string();
        assert!(error.contains(text), "{error}");
    };
    refused(&|turn| turn.n = 2, "not n = 2");
    refused(&|turn| turn.reuse = false, "reuse must be true");
    refused(&|turn| turn.tenant = Arc::clone(&other), "of tenant \"a\" is submitted for tenant \"b\"");
    assert!(engine.scheduler.close_session(&session));
    refused(&|_| {}, "was closed");
    let limit = Deadline { steps: Some(0), seconds: None };
    assert!(engine.scheduler.open_session(&tenant, limit).is_err());
    let without_index = Engine::new(8, config(4), false);
    let tenant = without_index.tenant("a");
    assert!(without_index.scheduler.open_session(&tenant, NO_LIMIT).is_err());
}
