//! Several open steps: planned ahead of sampled tokens, committed in order, abandoned together.

mod support;

use kvpager_core::block_pool::{BlockPool, PoolConfig};
use kvpager_core::scheduler::{
    AdmissionPolicy, FinishReason, HostTierConfig, Overflow, Request, Scheduler, SchedulerConfig,
};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use support::{Engine, config, expected_output, host_tier, prompt, request};

fn deep(block_size: u32, max_open_steps: u32) -> SchedulerConfig {
    SchedulerConfig { max_open_steps, ..config(block_size) }
}

/// Keeps `depth` steps open until nothing is left.
fn finish_deep(engine: &mut Engine, depth: usize, max_turns: usize) {
    for _ in 0..max_turns {
        while engine.flights.len() >= depth {
            engine.land();
        }
        let has_work = engine.scheduler.has_work().expect("one thread");
        if !has_work && engine.flights.is_empty() {
            return;
        }
        if has_work {
            engine.take_off();
        } else {
            engine.land();
        }
    }
    panic!("not done after {max_turns} turns: {:?}", engine.scheduler.stats());
}

#[test]
fn more_open_steps_than_the_pool_has_are_refused_at_the_start() {
    let pool =
        BlockPool::new(PoolConfig { num_blocks: 4, max_open_steps: 8, ..PoolConfig::default() }).unwrap();
    assert!(Scheduler::new(pool.clone(), None, deep(4, 8)).is_ok());
    let error = Scheduler::new(pool, None, deep(4, 20)).err().unwrap().to_string();
    assert!(error.contains("max_open_steps is 20, the pool has 8"), "{error}");
}

#[test]
fn a_pool_has_one_scheduler_at_a_time() {
    let pool = BlockPool::new(PoolConfig { num_blocks: 4, ..PoolConfig::default() }).unwrap();
    let first = Scheduler::new(Arc::clone(&pool), None, config(4)).unwrap();
    let before = pool.stats();
    let refused = Scheduler::new(Arc::clone(&pool), None, config(4)).err();
    assert!(
        matches!(&refused, Some(Error::WrongState(text)) if text.contains("has a scheduler already")),
        "{refused:?}"
    );
    assert_eq!(pool.stats(), before);
    drop(first);
    // One that was not made does not count.
    assert!(Scheduler::new(Arc::clone(&pool), None, deep(4, 20)).is_err());
    assert!(Scheduler::new(pool, None, config(4)).is_ok());
}

#[test]
fn a_decode_is_planned_before_its_token_is_known_and_names_where_it_comes_from() {
    let mut engine = Engine::new(32, deep(4, 2), true);
    let tenant = engine.tenant("a");
    let first = engine.submit(&tenant, &prompt(1, 3), 4).unwrap();
    let second = engine.submit(&tenant, &prompt(2, 5), 4).unwrap();
    engine.take_off();
    engine.take_off();
    let arrays = &engine.flights[1].batch.arrays;
    assert_eq!(arrays.sequence_ids, [first.0, second.0]);
    assert_eq!((&arrays.token_ids[..], &arrays.token_source[..]), (&[-1, -1][..], &[0, 1][..]));
    assert_eq!(arrays.positions, [3, 5]);
    assert!(matches!(engine.scheduler.step(0), Err(Error::WrongState(_))));
    let late = engine.flights[1].batch.step_id;
    let ahead = engine.scheduler.commit(late, &[0, 1, 2], &[1, 1]);
    assert!(matches!(ahead, Err(Error::WrongState(_))), "steps are committed in order");
    finish_deep(&mut engine, 2, 20);
    assert_eq!(engine.outputs[&first], expected_output(&prompt(1, 3), 4, &[]));
    assert_eq!(engine.outputs[&second], expected_output(&prompt(2, 5), 4, &[]));
    engine.check_idle();
}

#[test]
fn exactly_max_tokens_are_planned_and_a_stop_drops_what_was_planned_beyond_it() {
    let mut engine = Engine::new(32, deep(4, 3), true);
    let tenant = engine.tenant("a");
    let full = engine.submit(&tenant, &prompt(1, 3), 5).unwrap();
    let mut planned = 0;
    while engine.scheduler.has_work().unwrap() {
        planned += if engine.flights.len() < 3 { engine.take_off() } else { 0 };
        if engine.flights.len() == 3 {
            engine.land();
        }
        if planned == 3 + 4 {
            break;
        }
    }
    while !engine.flights.is_empty() {
        engine.land();
    }
    assert_eq!((planned, engine.finished[&full].output_tokens), (3 + 4, 5));
    let all = expected_output(&prompt(2, 3), 30, &[]);
    let stop = all[3];
    let cut = all.iter().position(|&token| token == stop).unwrap() + 1;
    let stopped = engine
        .scheduler
        .submit(Request { stop_token_ids: vec![stop], ..request(&tenant, &prompt(2, 3), 30) })
        .unwrap();
    finish_deep(&mut engine, 3, 60);
    assert_eq!(engine.outputs[&stopped], all[..cut]);
    assert_eq!(engine.finished[&stopped].reason, FinishReason::Stop);
    assert_eq!(engine.scheduler.stats().dropped_tokens, 2, "two steps were open beyond the stop");
    engine.check_idle();
}

#[test]
fn what_was_committed_before_an_abort_stays_in_whatever_order_they_come() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut engine = Engine::new(32, deep(4, 3), true);
        let tenant = engine.tenant("a");
        let ids = [0, 1, 2].map(|seed| engine.submit(&tenant, &prompt(seed, 3), 9).unwrap());
        for _ in 0..3 {
            engine.take_off();
        }
        for which in order {
            engine.land();
            assert!(engine.scheduler.abort(ids[which]).unwrap());
            engine.take_off();
        }
        finish_deep(&mut engine, 3, 60);
        for (landed, which) in order.into_iter().enumerate() {
            assert_eq!(engine.finished[&ids[which]].output_tokens as usize, landed + 1);
            assert_eq!(
                engine.outputs[&ids[which]],
                expected_output(&prompt(which as u32, 3), 9, &[])[..=landed]
            );
        }
        engine.check_idle();
    }
}

#[test]
fn blocks_and_rows_wait_for_the_newest_step_that_may_read_them() {
    let mut config = deep(4, 3);
    config.max_running = 2;
    let mut engine = Engine::new(16, config, false);
    let tenant = engine.tenant("a");
    let ended = engine.submit(&tenant, &prompt(1, 7), 20).unwrap();
    engine.submit(&tenant, &prompt(2, 7), 20).unwrap();
    engine.take_off();
    engine.take_off();
    engine.take_off();
    let row = engine.flights[0].batch.arrays.table_rows[0] as usize;
    let tables = std::sync::Arc::clone(engine.scheduler.arena());
    engine.scheduler.abort(ended).unwrap();
    let late = engine.submit(&tenant, &prompt(3, 3), 2).unwrap();
    engine.land();
    assert!(engine.finished.contains_key(&ended));
    assert_eq!(engine.pool.stats().quarantined, 3, "its blocks of 7 prompt and 2 more tokens");
    assert!(tables.get(row, 0).unwrap() >= 0, "an open step may read the row");
    engine.land();
    assert_eq!(engine.pool.stats().quarantined, 3);
    assert_eq!(engine.scheduler.stats().dropped_tokens, 2);
    engine.land();
    assert_eq!((engine.pool.stats().quarantined, tables.get(row, 0).unwrap()), (0, -1));
    assert_eq!(engine.scheduler.stats().dropped_tokens, 3);
    finish_deep(&mut engine, 3, 60);
    assert_eq!(engine.outputs[&late], expected_output(&prompt(3, 3), 2, &[]));
}

#[test]
fn abandoning_a_step_abandons_the_later_ones_and_leaves_the_earlier() {
    for place in 0..3 {
        let mut engine = Engine::new(32, deep(4, 3), true);
        let tenant = engine.tenant("a");
        let ids: Vec<_> = (0..3).map(|seed| engine.submit(&tenant, &prompt(seed, 6), 9).unwrap()).collect();
        engine.take_off();
        engine.take_off();
        engine.take_off();
        engine.crash(place, false);
        assert_eq!(engine.flights.len(), place);
        finish_deep(&mut engine, 3, 60);
        for (seed, id) in ids.iter().enumerate() {
            assert_eq!(engine.outputs[id], expected_output(&prompt(seed as u32, 6), 9, &[]), "at {place}");
        }
        engine.check_idle();
    }
}

/// A host tier under `depth` open steps, in a pool that holds little more than one of four requests.
fn tiered(depth: u32, host_blocks: u32) -> SchedulerConfig {
    SchedulerConfig {
        policy: AdmissionPolicy::Watermark { free_share: 0.0 },
        overflow: Overflow::Swap,
        host_tier: HostTierConfig { num_blocks: host_blocks, ..HostTierConfig::default() },
        ..deep(4, depth)
    }
}

#[test]
fn tails_move_out_and_back_while_several_steps_are_open_and_nothing_is_computed_twice() {
    for (depth, lags, reuse) in [(2, false, true), (2, true, false), (3, true, true), (4, true, true)] {
        let mut engine = Engine::new(12, tiered(depth, 64), reuse);
        engine.lags = lags;
        let tenant = engine.tenant("a");
        let ids: Vec<_> = (1..=4).map(|seed| engine.submit(&tenant, &prompt(seed, 8), 24).unwrap()).collect();
        finish_deep(&mut engine, depth as usize, 2000);
        let stats = engine.scheduler.stats();
        assert!(stats.swapped_out_blocks > 0, "{stats:?}");
        assert_eq!(stats.swapped_out_blocks, stats.swapped_in_blocks);
        assert_eq!(stats.recomputed_tokens, 0);
        for (seed, id) in (1..).zip(&ids) {
            assert_eq!(engine.outputs[id], expected_output(&prompt(seed, 8), 24, &[]), "depth {depth}");
        }
        assert_eq!(engine.finished[&ids[0]].preemptions, 0, "the oldest is never a victim");
        engine.check_idle();
    }
}

#[test]
fn a_victim_is_in_no_open_step_and_what_it_leaves_is_not_taken_before_its_step_has_closed() {
    let mut engine = Engine::new(12, tiered(3, 64), false);
    let tenant = engine.tenant("a");
    (1..=4).for_each(|seed| {
        engine.submit(&tenant, &prompt(seed, 8), 24).unwrap();
    });
    let mut num_moves = 0;
    for _ in 0..400 {
        if engine.flights.len() == 3 || !engine.scheduler.has_work().unwrap() {
            if engine.flights.is_empty() {
                break;
            }
            engine.land();
            continue;
        }
        engine.take_off();
        let Some((newest, earlier)) = engine.flights.make_contiguous().split_last() else { continue };
        let size = 4;
        let blocks = |slots: &[i64]| slots.iter().map(|slot| (slot / size) as i32).collect::<Vec<_>>();
        for flight in earlier {
            let (before, after) = (&flight.batch.arrays, &newest.batch.arrays);
            for [device, _] in &after.swap_out {
                num_moves += 1;
                assert!(
                    !blocks(&before.slot_mapping).contains(device),
                    "an open step writes what is copied out"
                );
            }
            // Both ends of an open step's moves stay as they are.
            let ends: Vec<i32> = before.swap_out.iter().map(|pair| pair[0]).collect();
            assert!(after.swap_in.iter().all(|pair| !ends.contains(&pair[1])));
            assert!(blocks(&after.slot_mapping).iter().all(|block| !ends.contains(block)));
            let read: Vec<i32> = before.swap_in.iter().map(|pair| pair[0]).collect();
            assert!(after.swap_out.iter().all(|pair| !read.contains(&pair[1])));
        }
    }
    assert!(num_moves > 0);
    engine.check_idle();
}

#[test]
fn who_finds_no_victim_because_all_are_in_flight_finds_one_when_nothing_is_planned_ahead() {
    // The oldest is parked by nobody; the second needs the third's blocks, which is in flight in every open step.
    let mut config = tiered(2, 0);
    config.overflow = Overflow::Recompute;
    let mut engine = Engine::new(12, config, false);
    let tenant = engine.tenant("a");
    let ids: Vec<_> = (1..=4).map(|seed| engine.submit(&tenant, &prompt(seed, 8), 24).unwrap()).collect();
    finish_deep(&mut engine, 2, 2000);
    let taken: u64 = ids.iter().map(|id| engine.finished[id].preemptions).sum();
    let stats = engine.scheduler.stats();
    assert!(taken > 0 && taken == stats.num_preemptions);
    // A victim at a time: the blocks of one are enough, and come free when the open step closes.
    let mut plain =
        Engine::new(12, SchedulerConfig { max_open_steps: 1, ..engine.scheduler.config().clone() }, false);
    let tenant = plain.tenant("a");
    (1..=4).for_each(|seed| {
        plain.submit(&tenant, &prompt(seed, 8), 24).unwrap();
    });
    plain.finish(2000);
    assert!(taken <= 2 * plain.scheduler.stats().num_preemptions, "{taken} victims");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn the_output_does_not_depend_on_how_many_steps_are_open_or_which_crash(
        num_blocks in 6..20u32,
        block_size in 1..5u32,
        depth in 2..5u32,
        overcommits in any::<bool>(),
        host in host_tier(),
        lags in any::<bool>(),
        cached in any::<bool>(),
        requests in prop::collection::vec((0..4u32, 1..12u32, 1..9u32), 1..8),
        events in prop::collection::vec((0..8usize, any::<prop::sample::Index>()), 0..80),
    ) {
        let mut config = deep(block_size, depth);
        config.max_running = 3;
        config.max_batch_tokens = 8;
        if overcommits {
            config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        }
        (config.overflow, config.host_tier) = host;
        let mut engine = Engine::new(num_blocks, config, cached);
        engine.lags = lags;
        let tenant = engine.tenant("a");
        let mut accepted: HashMap<SequenceId, (Vec<u32>, u32)> = HashMap::new();
        let mut aborted = Vec::new();
        let mut pending = requests.into_iter();
        for (event, which) in events {
            match event {
                0 => if let Some((seed, length, max_tokens)) = pending.next()
                    && let Ok(id) = engine.submit(&tenant, &prompt(seed, length), max_tokens)
                {
                    accepted.insert(id, (prompt(seed, length), max_tokens));
                },
                1 if !engine.flights.is_empty() => {
                    let place = which.index(engine.flights.len());
                    engine.crash(place, false);
                }
                2 if !accepted.is_empty() && which.index(3) == 0 => {
                    let mut ids: Vec<_> = accepted.keys().copied().collect();
                    ids.sort_unstable();
                    let id = ids[which.index(ids.len())];
                    engine.scheduler.abort(id).unwrap();
                    aborted.push(id);
                }
                3..=5 if engine.flights.len() < depth as usize => { engine.take_off(); }
                _ => if !engine.flights.is_empty() { engine.land(); },
            }
        }
        finish_deep(&mut engine, depth as usize, 3000);
        engine.check_idle();
        for (id, (prompt, max_tokens)) in accepted {
            if !aborted.contains(&id) {
                prop_assert_eq!(engine.finished[&id].reason, FinishReason::Length);
                prop_assert_eq!(&engine.outputs[&id], &expected_output(&prompt, max_tokens, &[]));
            }
        }
    }
}
