//! Parallel samples of one prompt, and beams that go on from each other.

mod support;

use kvpager_core::block_pool::Quota;
use kvpager_core::scheduler::{AdmissionPolicy, FinishReason, Overflow, Request};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use std::sync::Arc;
use support::{
    Engine, NO_LIMIT, after_steps, any_groups, config, expected_sample, next_token, prefix_hash, prompt,
    request,
};

fn samples(
    engine: &Engine,
    tenant: &std::sync::Arc<kvpager_core::scheduler::Tenant>,
    seed: u32,
    length: u32,
    max: u32,
    n: u32,
) -> kvpager_core::Result<SequenceId> {
    engine.submit_request(Request { n, ..request(tenant, &prompt(seed, length), max) })
}

fn branches(first: SequenceId, n: u64) -> Vec<SequenceId> {
    (0..n).map(|i| SequenceId(first.0 + i)).collect()
}

#[test]
fn the_prompt_is_computed_once_and_every_sample_goes_its_own_way() {
    for reuse in [true, false] {
        let mut engine = Engine::new(32, config(4), reuse);
        let tenant = engine.tenant("a");
        let first = samples(&engine, &tenant, 1, 10, 6, 3).unwrap();
        assert_eq!(engine.turn(), 10);
        assert_eq!(engine.pool.stats().held, 3, "the prompt is there once");
        let batch = engine.scheduler.step(0).unwrap();
        assert_eq!(batch.arrays.sequence_ids, [first.0, first.0 + 1, first.0 + 2]);
        assert_eq!(batch.arrays.block_copies.len(), 2);
        assert_eq!(engine.pool.stats().held, 5);
        let (token_start, tokens) = engine.run(&batch);
        engine.note(engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap().finished);
        engine.finish(20);
        for (i, id) in branches(first, 3).into_iter().enumerate() {
            assert_eq!(engine.outputs[&id], expected_sample(&prompt(1, 10), 6, i as u64), "reuse {reuse}");
            assert_eq!(engine.finished[&id].branch, i as u32);
        }
        assert_eq!(engine.scheduler.stats().computed_tokens, 10 + 3 * 5);
        engine.check_idle();
    }
}

#[test]
fn samples_are_promised_all_or_nothing_and_refused_if_they_can_never_fit() {
    let mut engine = Engine::new(16, config(4), true);
    let tenant = engine.tenant_with("a", 0, 12);
    // 2 full blocks and a part, 4 blocks of life: 4 + 2 * (4 - 2) + 1 for a copy.
    let first = samples(&engine, &tenant, 1, 10, 6, 3).unwrap();
    let refused = samples(&engine, &tenant, 1, 10, 6, 6);
    assert!(
        matches!(&refused, Err(Error::Refused { retryable: false, reason, .. }) if reason.contains("need 15 blocks")),
        "{refused:?}"
    );
    assert!(matches!(samples(&engine, &tenant, 1, 4, 1, 9), Err(Error::Refused { retryable: false, .. })));
    assert!(matches!(samples(&engine, &tenant, 1, 4, 1, 0), Err(Error::InvalidArgument(_))));
    let second = samples(&engine, &tenant, 2, 10, 6, 3).unwrap();
    engine.turn();
    let stats = engine.pool.stats();
    assert_eq!(stats.held + stats.reserved, 9, "the second one waits as a whole");
    engine.finish(40);
    assert_eq!(engine.scheduler.stats().num_preemptions, 0);
    for (seed, first) in [(1, first), (2, second)] {
        for (i, id) in branches(first, 3).into_iter().enumerate() {
            assert_eq!(engine.outputs[&id], expected_sample(&prompt(seed, 10), 6, i as u64));
        }
    }
    engine.check_idle();
}

#[test]
fn samples_end_one_by_one_or_with_their_request() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let first = samples(&engine, &tenant, 1, 10, 8, 3).unwrap();
    engine.turn();
    let held = engine.pool.stats();
    assert!(engine.scheduler.abort(SequenceId(first.0 + 1)).unwrap());
    engine.turn();
    assert_eq!(engine.finished[&SequenceId(first.0 + 1)].reason, FinishReason::Aborted);
    assert!(engine.pool.stats().reserved < held.reserved);
    assert!(engine.scheduler.abort(first).unwrap());
    assert!(!engine.scheduler.abort(first).unwrap());
    engine.turn();
    assert_eq!(engine.finished.len(), 3);
    engine.check_idle();
    let waiting = samples(&engine, &tenant, 1, 10, 8, 4).unwrap();
    assert!(engine.scheduler.abort(waiting).unwrap());
    engine.finish(3);
    assert!(branches(waiting, 4).iter().all(|&id| !engine.scheduler.abort(id).unwrap()));
    engine.check_idle();
}

/// Each id of a request for three samples has ended (`Engine::note` sees that none ended twice), and what the request cost
/// is counted once.
fn check_reported(engine: &Engine, first: SequenceId, reasons: [FinishReason; 3]) {
    for (branch, (id, reason)) in branches(first, 3).into_iter().zip(reasons).enumerate() {
        let ended = &engine.finished[&id];
        assert_eq!((ended.branch as usize, ended.reason), (branch, reason));
        let tokens = u64::from(ended.prompt_tokens + ended.cached_tokens + ended.output_tokens);
        assert_eq!(tokens + ended.steps + ended.preemptions > 0, branch == 0, "{ended:?}");
        assert_eq!(ended.detail.is_some(), ended.reason == FinishReason::Error);
        assert!(!engine.scheduler.abort(id).expect("it was issued"));
    }
    engine.check_idle();
}

/// What ends a request of three samples before it has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    Abort,
    AbortPaused,
    AbortAlone,
    Deadline,
    Drain,
    Quota,
    Reset,
    Fail,
}

impl Cause {
    fn reasons(self) -> [FinishReason; 3] {
        use FinishReason::{Aborted, Capacity, Drained, Error};
        match self {
            Self::Abort | Self::AbortPaused | Self::Reset => [Aborted; 3],
            // The others end later, by the deadline.
            Self::AbortAlone => [FinishReason::Deadline, Aborted, FinishReason::Deadline],
            Self::Deadline => [FinishReason::Deadline; 3],
            Self::Drain => [Drained; 3],
            Self::Quota => [Capacity; 3],
            Self::Fail => [Error; 3],
        }
    }

    fn act(self, engine: &mut Engine, tenant: &kvpager_core::scheduler::Tenant, first: SequenceId) {
        let scheduler = Arc::clone(&engine.scheduler);
        match self {
            Self::Abort => assert!(scheduler.abort(first).expect("it was issued")),
            Self::AbortPaused => {
                assert!(scheduler.pause(first).expect("it was issued"));
                engine.turn();
                assert!(scheduler.abort(first).expect("it was issued"));
            }
            Self::AbortAlone => assert!(scheduler.abort(SequenceId(first.0 + 1)).expect("it was issued")),
            Self::Deadline => {}
            Self::Drain => scheduler.drain(after_steps(1)).expect("a deadline"),
            Self::Quota => {
                engine.pool.set_quota(tenant.account, Quota { guaranteed: 0, limit: 4 }).expect("a quota");
            }
            Self::Reset => {
                assert!(scheduler.abort(first).expect("it was issued"));
                scheduler.reset_cache(true).expect("no step is open");
            }
            Self::Fail => engine.abandoned_turn(true),
        }
    }
}

#[test]
fn a_request_that_ends_before_it_has_its_samples_reports_each_of_its_ids_once() {
    use Cause::{Abort, AbortAlone, AbortPaused, Deadline, Drain, Fail, Quota, Reset};
    for (is_started, causes) in [
        (false, &[Abort, AbortPaused, AbortAlone, Deadline, Drain, Quota, Reset][..]),
        (true, &[Abort, AbortPaused, AbortAlone, Deadline, Drain, Fail, Reset][..]),
    ] {
        for &cause in causes {
            let mut config = config(4);
            config.max_prefill_chunk = 2;
            let mut engine = Engine::new(64, config, true);
            let (before, tenant) = (engine.tenant("before"), engine.tenant("a"));
            let old = (!is_started).then(|| samples(&engine, &before, 2, 2, 12, 8).unwrap());
            engine.turn();
            let deadline = if matches!(cause, Deadline | AbortAlone) { after_steps(4) } else { NO_LIMIT };
            let wanted = Request { n: 3, deadline, ..request(&tenant, &prompt(1, 20), 4) };
            let first = engine.scheduler.submit(wanted).unwrap();
            engine.turn();
            assert!(engine.finished.is_empty());
            cause.act(&mut engine, &tenant, first);
            engine.finish(40);
            check_reported(&engine, first, cause.reasons());
            assert_eq!(engine.finished.len(), 3 + old.map_or(0, |_| 8), "{cause:?}");
        }
    }
}

#[test]
fn a_request_that_is_refused_room_before_it_has_its_samples_reports_each_of_its_ids_once() {
    for aborts in [false, true] {
        let mut config = config(4);
        config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        (config.overflow, config.max_prefill_chunk) = (Overflow::Refuse, 1);
        let mut engine = Engine::new(12, config, true);
        let tenant = engine.tenant("a");
        let old = engine.submit(&tenant, &prompt(2, 4), 36).unwrap();
        engine.turn();
        let first = samples(&engine, &tenant, 1, 22, 1, 3).unwrap();
        engine.turn();
        if aborts {
            assert!(engine.scheduler.abort(SequenceId(first.0 + 2)).unwrap());
        }
        engine.finish(60);
        let last = if aborts { FinishReason::Aborted } else { FinishReason::Capacity };
        check_reported(&engine, first, [FinishReason::Capacity, FinishReason::Capacity, last]);
        assert_eq!(engine.finished[&old].reason, FinishReason::Length);
    }
}

#[test]
fn beams_go_on_from_each_other_without_computing_anything_again() {
    for reuse in [true, false] {
        let mut engine = Engine::new(40, config(4), reuse);
        let tenant = engine.tenant("a");
        let first = samples(&engine, &tenant, 3, 6, 12, 3).unwrap();
        let ids = branches(first, 3);
        engine.turn();
        let mut seed = 1u32;
        while engine.finished.is_empty() {
            let parents: Vec<_> = (0..3).map(|i| ids[((seed / (i + 1)) % 3) as usize]).collect();
            let tokens: Vec<i32> = (0..3).map(|i| ((seed + i) % 50) as i32).collect();
            let before = engine.outputs.clone();
            engine.scheduler.reorder(&ids, &parents, &tokens).unwrap();
            engine.check();
            for ((id, parent), &token) in ids.iter().zip(&parents).zip(&tokens) {
                let mut output = before[parent].clone();
                *output.last_mut().unwrap() = token as u32;
                engine.outputs.insert(*id, output);
            }
            let known = engine.outputs.clone();
            assert_eq!(engine.turn(), 3);
            for id in &ids {
                let mut history = prompt(3, 6);
                history.extend(&known[id]);
                assert_eq!(
                    engine.outputs[id].last(),
                    Some(&next_token(prefix_hash(&history))),
                    "reuse {reuse}"
                );
            }
            seed = seed.wrapping_mul(7) + 3;
        }
        assert_eq!(engine.scheduler.stats().computed_tokens, 6 + 3 * 11);
        assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        engine.check_idle();
    }
}

#[test]
fn a_re_order_that_cannot_be_changes_nothing() {
    let mut engine = Engine::new(40, config(4), true);
    let tenant = engine.tenant("a");
    let first = samples(&engine, &tenant, 3, 6, 12, 2).unwrap();
    let other = engine.submit(&tenant, &prompt(4, 7), 12).unwrap();
    let ids = branches(first, 2);
    engine.turn();
    let before = engine.pool.stats();
    let reorder =
        |to: &[SequenceId], from: &[SequenceId]| engine.scheduler.reorder(to, from, &vec![1; to.len()]);
    assert!(matches!(reorder(&ids, &ids[..1]), Err(Error::InvalidArgument(_))));
    assert!(matches!(reorder(&[ids[0], ids[0]], &ids), Err(Error::InvalidArgument(_))));
    assert!(matches!(reorder(&[ids[0]], &[other]), Err(Error::InvalidArgument(_))), "of another length");
    assert!(matches!(reorder(&[ids[0]], &[SequenceId(99)]), Err(Error::WrongState(_))));
    assert_eq!(engine.pool.stats(), before);
    let batch = engine.scheduler.step(0).unwrap();
    assert!(matches!(engine.scheduler.reorder(&ids, &ids, &[1, 1]), Err(Error::WrongState(_))));
    engine.scheduler.abandon(batch.step_id, "over", true).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn samples_are_the_same_whatever_the_schedule(
        num_blocks in 6..24u32,
        block_size in 1..5u32,
        reuse in any::<bool>(),
        overcommits in any::<bool>(),
        groups in any_groups(),
        chunk in 0..5u32,
        requests in prop::collection::vec((0..3u32, 1..12u32, 1..8u32, 1..4u32), 1..7),
        events in prop::collection::vec((0..6usize, any::<prop::sample::Index>()), 0..50),
    ) {
        let mut config = config(block_size);
        let num_blocks = num_blocks * groups.len() as u32;
        (config.layer_groups, config.max_prefill_chunk) = (groups, chunk);
        config.max_running = 5;
        config.max_batch_tokens = 7;
        if overcommits {
            config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        }
        let mut engine = Engine::new(num_blocks, config, reuse);
        let tenant = engine.tenant("a");
        let mut accepted = Vec::new();
        for (seed, length, max, n) in requests {
            if let Ok(first) = samples(&engine, &tenant, seed, length, max, n) {
                accepted.push((first, prompt(seed, length), max, n));
            }
        }
        for (event, which) in events {
            let chosen = accepted.get(which.index(accepted.len().max(1)));
            match (event, chosen) {
                (0, _) => engine.crashed_turn(),
                (1, Some((first, .., n))) => { engine.scheduler.abort(SequenceId(first.0 + u64::from(*n) - 1)).unwrap(); }
                (2, Some((first, ..))) => { engine.scheduler.pause(*first).unwrap(); }
                (3, Some((first, ..))) => { engine.scheduler.resume(*first).unwrap(); }
                _ => { engine.turn(); }
            }
        }
        for (first, ..) in &accepted {
            engine.scheduler.resume(*first).unwrap();
        }
        engine.finish(3000);
        engine.check_idle();
        for (first, prompt, max, n) in accepted {
            for (i, id) in branches(first, u64::from(n)).into_iter().enumerate() {
                if engine.finished[&id].reason == FinishReason::Length {
                    prop_assert_eq!(&engine.outputs[&id], &expected_sample(&prompt, max, i as u64));
                }
            }
        }
    }
}
