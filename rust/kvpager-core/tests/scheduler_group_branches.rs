//! Forks, samples and beams in models with several layer groups, or in which no group sees all tokens.

mod support;

use kvpager_core::block_pool::Quota;
use kvpager_core::geometry::Span;
use kvpager_core::scheduler::{AdmissionPolicy, FinishReason, Request, SchedulerConfig, Tenant};
use kvpager_core::{Error, SequenceId};
use std::collections::HashSet;
use std::sync::Arc;
use support::{Engine, config, expected_output, expected_sample, next_token, prefix_hash, prompt, request};

fn models() -> [Vec<Span>; 4] {
    [
        vec![Span::Full, Span::Sliding(8)],
        vec![Span::Full, Span::Chunked(8), Span::Full],
        vec![Span::Sliding(8)],
        vec![Span::Sliding(3), Span::Chunked(16)],
    ]
}

fn grouped(groups: &[Span]) -> SchedulerConfig {
    SchedulerConfig { layer_groups: groups.into(), ..config(4) }
}

fn overcommitting(groups: &[Span]) -> SchedulerConfig {
    SchedulerConfig { policy: AdmissionPolicy::Watermark { free_share: 0.0 }, ..grouped(groups) }
}

fn samples(engine: &Engine, tenant: &Arc<Tenant>, tokens: &[u32], max: u32, n: u32) -> SequenceId {
    engine.submit_request(Request { n, ..request(tenant, tokens, max) }).expect("it fits")
}

fn branches(first: SequenceId, n: u64) -> Vec<SequenceId> {
    (0..n).map(|i| SequenceId(first.0 + i)).collect()
}

/// Blocks that `n` samples have at once at most: each of further groups for each of them.
fn need(config: &SchedulerConfig, prompt_tokens: u32, max_tokens: u32, n: u32) -> u32 {
    let keeps_first = config.layer_groups[0] == Span::Full;
    let life = config.lifetime_blocks(prompt_tokens, max_tokens);
    let full = if keeps_first { prompt_tokens / config.block_size } else { 0 };
    let copy = keeps_first && !prompt_tokens.is_multiple_of(config.block_size);
    life + (n - 1) * (life - full) + u32::from(copy)
}

#[test]
fn a_fork_shares_every_block_of_every_group_and_copies_the_last_one_of_each_on_the_first_write() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        let mut engine = Engine::new(96, grouped(groups), reuse);
        let tenant = engine.tenant("a");
        let parent = engine.submit(&tenant, &prompt(1, 10), 20).unwrap();
        engine.turn();
        let in_use = |engine: &Engine| {
            let arenas = engine.scheduler.arenas();
            let all = (0..arenas.len())
                .flat_map(|group| (0..8).flat_map(move |row| (0..8).map(move |c| (group, row, c))));
            all.filter_map(|(g, row, c)| arenas[g].get(row, c)).filter(|&id| id >= 0).collect::<HashSet<_>>()
        };
        let before = in_use(&engine);
        let children = engine.fork(parent, 2).unwrap();
        assert_eq!(in_use(&engine), before, "{groups:?}, reuse {reuse}: nothing is copied yet");
        let batch = engine.scheduler.step(0).unwrap();
        let copies = &batch.arrays.block_copies;
        assert_eq!(copies.len(), 2 * groups.len(), "the last branch writes the original");
        let sources: HashSet<_> = copies.iter().map(|copy| copy[0]).collect();
        assert_eq!(sources.len(), groups.len(), "one block of each group is copied");
        assert_eq!(in_use(&engine).len(), before.len() + copies.len());
        let (token_start, tokens) = engine.run(&batch);
        engine.note(engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap().finished);
        engine.finish(40);
        for id in [parent, children[0], children[1]] {
            assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 10), 20, &[]), "{groups:?}");
        }
        assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        engine.check_idle();
    }
}

#[test]
fn what_samples_need_of_every_group_is_promised_at_once_and_is_enough() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        for (chunk, prompt_tokens, max_tokens, n) in [(0, 10, 25, 3), (3, 13, 18, 4), (1, 8, 30, 2)] {
            let config = SchedulerConfig { max_prefill_chunk: chunk, ..grouped(groups) };
            let need = need(&config, prompt_tokens, max_tokens, n);
            let mut engine = Engine::new(need, config.clone(), reuse);
            let tenant = engine.tenant("a");
            let tokens = prompt(1, prompt_tokens);
            let first = samples(&engine, &tenant, &tokens, max_tokens, n);
            let batch = engine.scheduler.step(0).unwrap();
            let stats = engine.pool.stats();
            assert_eq!(stats.held + stats.reserved, u64::from(need), "{groups:?}: all or nothing");
            engine.scheduler.abandon(batch.step_id, "it was to be planned only", false).unwrap();
            engine.finish(100);
            for (i, id) in branches(first, n.into()).into_iter().enumerate() {
                assert_eq!(engine.outputs[&id], expected_sample(&tokens, max_tokens, i as u64), "{groups:?}");
            }
            assert_eq!(engine.scheduler.stats().num_preemptions, 0);
            engine.check_idle();
            let short = Engine::new(need - 1, config, reuse);
            let tenant = short.tenant("a");
            let refused = short.scheduler.submit(Request { n, ..request(&tenant, &tokens, max_tokens) });
            let says = |reason: &str| reason.contains(&format!("need {need} blocks"));
            assert!(
                matches!(&refused, Err(Error::Refused { retryable: false, reason, .. }) if says(reason)),
                "{refused:?}"
            );
        }
    }
}

#[test]
fn a_fork_whose_set_could_never_fit_in_all_groups_is_refused_with_the_numbers() {
    let config = overcommitting(&[Span::Full, Span::Sliding(8)]);
    let life = config.lifetime_blocks(10, 8);
    // What is full is shared in the first group only: in the other each pays for its window.
    let most = life + (life - 2);
    let mut engine = Engine::new(64, config, true);
    let tenant = engine.tenant_with("a", 0, most);
    let parent = engine.submit(&tenant, &prompt(1, 10), 8).unwrap();
    engine.turn();
    let before = engine.pool.stats();
    let refused = engine.fork(parent, 2);
    let says = |reason: &str| reason.contains(&format!("may need {} blocks", most + life - 2));
    assert!(matches!(&refused, Err(Error::Refused { reason, .. }) if says(reason)), "{refused:?}");
    assert_eq!(engine.pool.stats(), before);
    let child = engine.fork(parent, 1).unwrap()[0];
    engine.finish(50);
    for id in [parent, child] {
        assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 10), 8, &[]));
    }
    engine.check_idle();
}

#[test]
fn a_fork_that_does_not_fit_changes_nothing_in_any_group() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        let config = grouped(groups);
        let mut engine = Engine::new(2 * config.lifetime_blocks(10, 20), config, reuse);
        let tenant = engine.tenant("a");
        let parent = engine.submit(&tenant, &prompt(1, 10), 20).unwrap();
        engine.submit(&tenant, &prompt(2, 10), 20).unwrap();
        engine.turn();
        let before = engine.pool.stats();
        let refused = engine.fork(parent, 1);
        assert!(
            matches!(refused, Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. })),
            "{groups:?}: {refused:?}"
        );
        assert_eq!(engine.pool.stats(), before);
        engine.finish(50);
        assert_eq!(engine.outputs[&parent], expected_output(&prompt(1, 10), 20, &[]));
        engine.check_idle();
    }
}

#[test]
fn a_set_is_preempted_whole_and_comes_back_with_the_same_output() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        let config = overcommitting(groups);
        let blocks = need(&config, 10, 14, 3).max(config.lifetime_blocks(9, 24));
        let mut engine = Engine::new(blocks, config, reuse);
        let tenant = engine.tenant("a");
        let old = engine.submit(&tenant, &prompt(1, 9), 24).unwrap();
        let first = samples(&engine, &tenant, &prompt(2, 10), 14, 3);
        let mut preempted = 0;
        for _ in 0..200 {
            if !engine.scheduler.has_work().unwrap() {
                break;
            }
            let length = engine.outputs.get(&first).map_or(0, Vec::len);
            if groups[0] != Span::Full && length == 4 && preempted == 0 {
                // Windows alone do not grow: nobody is short of anything.
                assert!(engine.scheduler.reset_cache(true).unwrap().num_requeued >= 3);
                assert_eq!(engine.pool.stats().held, 0);
                preempted = 3;
            }
            engine.turn();
            if groups[0] != Span::Full {
                continue;
            }
            let now = engine.scheduler.stats().num_preemptions;
            assert!([0, 1, 3].contains(&(now - preempted)), "{groups:?}: {now} after {preempted}");
            preempted = now;
        }
        assert!(preempted >= 3, "{groups:?}: {preempted} preempted");
        assert_eq!(engine.outputs[&old], expected_output(&prompt(1, 9), 24, &[]));
        for (i, id) in branches(first, 3).into_iter().enumerate() {
            assert_eq!(engine.outputs[&id], expected_sample(&prompt(2, 10), 14, i as u64), "{groups:?}");
        }
        engine.check_idle();
    }
}

/// Re-orders all beams before each token: by `parents` of (turn, beam). Every token is what its history gives.
fn search(engine: &mut Engine, ids: &[SequenceId], tokens: &[u32], parents: impl Fn(usize, usize) -> usize) {
    engine.turn();
    for turn in 0..100 {
        if engine.finished.contains_key(&ids[0]) {
            break;
        }
        let from: Vec<_> = (0..ids.len()).map(|beam| ids[parents(turn, beam)]).collect();
        let chosen: Vec<i32> = (0..ids.len()).map(|beam| ((turn * 7 + beam) % 50) as i32).collect();
        engine.reorder(ids, &from, &chosen).expect("a re-order needs nothing");
        let known = engine.outputs.clone();
        assert_eq!(engine.turn(), ids.len());
        for id in ids {
            let history = [tokens, &known[id]].concat();
            assert_eq!(engine.outputs[id].last(), Some(&next_token(prefix_hash(&history))));
        }
    }
    assert_eq!(engine.scheduler.stats().num_preemptions, 0);
    engine.check_idle();
}

#[test]
fn a_re_order_needs_nothing_in_a_full_pool_also_if_beams_swap_places() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        for rotate in [1, 2] {
            let config = grouped(groups);
            let mut engine = Engine::new(need(&config, 6, 30, 3), config, reuse);
            let tenant = engine.tenant("a");
            let ids = branches(samples(&engine, &tenant, &prompt(3, 6), 30, 3), 3);
            search(&mut engine, &ids, &prompt(3, 6), |_, beam| (beam + rotate) % 3);
        }
    }
}

#[test]
fn beams_that_all_go_on_from_one_share_its_windows() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        let config = grouped(groups);
        let mut engine = Engine::new(need(&config, 6, 30, 3), config, reuse);
        let tenant = engine.tenant("a");
        let ids = branches(samples(&engine, &tenant, &prompt(3, 6), 30, 3), 3);
        search(&mut engine, &ids, &prompt(3, 6), |turn, beam| if turn % 5 == 0 { turn % 3 } else { beam });
    }
}

#[test]
fn a_re_order_after_a_crash_of_the_copies_needs_nothing_either() {
    // With a window smaller than a block, nobody could compute the block's beginning again.
    for (groups, reuse) in [(vec![Span::Sliding(2)], false), (vec![Span::Full, Span::Sliding(2)], true)] {
        let config = grouped(&groups);
        let mut engine = Engine::new(need(&config, 6, 9, 3), config, reuse);
        let tenant = engine.tenant("a");
        let ids = branches(samples(&engine, &tenant, &prompt(3, 6), 9, 3), 3);
        engine.turn();
        for crash in 0..support::CRASH_POINTS {
            engine.killed_turn(crash, false);
            let outputs = engine.outputs.clone();
            let last = |id: &SequenceId| *outputs[id].last().expect("a token") as i32;
            let (from, chosen) = ([ids[1], ids[2], ids[1]], [last(&ids[1]), last(&ids[2]), last(&ids[1])]);
            engine.reorder(&ids, &from, &chosen).expect("a re-order needs nothing");
            if crash % 3 == 2 {
                engine.turn();
            }
        }
        engine.finish(30);
        assert_eq!(engine.scheduler.stats().recomputed_tokens, 0);
        assert_eq!(engine.outputs[&ids[0]], engine.outputs[&ids[2]]);
        engine.check_idle();
    }
}

#[test]
fn branches_end_one_by_one_and_what_they_had_alone_comes_back() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        let mut engine = Engine::new(128, grouped(groups), reuse);
        let tenant = engine.tenant("a");
        let first = samples(&engine, &tenant, &prompt(1, 10), 30, 4);
        (0..8).for_each(|_| {
            engine.turn();
        });
        for id in branches(first, 4).into_iter().skip(1) {
            let before = engine.pool.stats();
            assert!(engine.scheduler.abort(id).unwrap());
            engine.turn();
            assert_eq!(engine.finished[&id].reason, FinishReason::Aborted);
            let after = engine.pool.stats();
            assert!(after.held + after.reserved < before.held + before.reserved, "{groups:?}");
        }
        engine.finish(50);
        assert_eq!(engine.outputs[&first], expected_sample(&prompt(1, 10), 30, 0));
        engine.check_idle();
    }
}

#[test]
fn samples_that_a_lower_quota_will_never_let_in_end_with_capacity() {
    for groups in [vec![Span::Full], vec![Span::Sliding(8)]] {
        let config = grouped(&groups);
        let (life, need) = (config.lifetime_blocks(20, 4), need(&config, 20, 4, 3));
        let mut engine = Engine::new(64, config, true);
        let tenant = engine.tenant("a");
        let first = samples(&engine, &tenant, &prompt(1, 20), 4, 3);
        let quota = Quota { guaranteed: 0, limit: need - 1 };
        assert!(quota.limit >= life, "one of them alone would fit");
        engine.pool.set_quota(tenant.account, quota).unwrap();
        engine.finish(40);
        for id in branches(first, 3) {
            assert_eq!(engine.finished[&id].reason, FinishReason::Capacity, "{groups:?}");
        }
        engine.check_idle();
    }
}

/// What is promised to samples is there when they split, also if their tenant has more than it may have by then.
#[test]
fn samples_share_their_prompt_though_their_quota_was_lowered_meanwhile() {
    for (groups, reuse) in models().iter().flat_map(|groups| [(groups, true), (groups, false)]) {
        let config = grouped(groups);
        let need = need(&config, 10, 12, 3);
        let mut engine = Engine::new(need, config, reuse);
        let tenant = engine.tenant("a");
        let first = samples(&engine, &tenant, &prompt(1, 10), 12, 3);
        engine.take_off();
        engine.pool.set_quota(tenant.account, Quota { guaranteed: 0, limit: need / 3 }).unwrap();
        engine.land();
        engine.finish(40);
        assert_eq!(engine.scheduler.stats().computed_tokens, 10 + 3 * 11, "{groups:?}: the prompt once");
        for (i, id) in branches(first, 3).into_iter().enumerate() {
            assert_eq!(engine.outputs[&id], expected_sample(&prompt(1, 10), 12, i as u64), "{groups:?}");
        }
        engine.check_idle();
    }
}
