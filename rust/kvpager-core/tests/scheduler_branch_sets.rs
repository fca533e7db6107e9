//! Branch sets: samples, beams and forks of one request run together, give way together and come back together.

mod support;

use kvpager_core::geometry::Span;
use kvpager_core::scheduler::{
    AdmissionPolicy, FinishReason, ForecastConfig, Request, Retention, SchedulerConfig, Tenant,
};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::HashMap;
use std::sync::Arc;
use support::{
    Engine, any_groups, config, expected_output, expected_sample, host_tier, next_token, prefix_hash, prompt,
    request,
};

fn samples(engine: &Engine, tenant: &Arc<Tenant>, prompt: &[u32], max_tokens: u32, n: u32) -> SequenceId {
    engine.submit_request(Request { n, ..request(tenant, prompt, max_tokens) }).expect("it fits")
}

fn branches(first: SequenceId, n: u64) -> Vec<SequenceId> {
    (0..n).map(|i| SequenceId(first.0 + i)).collect()
}

fn overcommitting(block_size: u32) -> SchedulerConfig {
    SchedulerConfig { policy: AdmissionPolicy::Watermark { free_share: 0.0 }, ..config(block_size) }
}

/// Turns until the set of `ids` has been preempted, and waits.
fn until_preempted(engine: &mut Engine, tenant: &Tenant, ids: &[SequenceId]) {
    for _ in 0..100 {
        engine.turn();
        let stats = engine.scheduler.stats();
        if stats.num_preemptions > 0 {
            assert_eq!(stats.num_preemptions, ids.len() as u64, "{:?} of {tenant:?} went together", ids);
            return;
        }
    }
    panic!("nobody was preempted");
}

#[test]
fn a_set_is_preempted_whole_and_what_its_branches_share_is_computed_once_more() {
    for reuse in [true, false] {
        let mut engine = Engine::new(15, overcommitting(4), reuse);
        let tenant = engine.tenant("a");
        let old = engine.submit(&tenant, &prompt(1, 9), 24).unwrap();
        let first = samples(&engine, &tenant, &prompt(2, 10), 14, 3);
        let ids = branches(first, 3);
        until_preempted(&mut engine, &tenant, &ids);
        let lengths: Vec<_> = ids.iter().map(|id| engine.outputs[id].len()).collect();
        assert!(lengths.iter().all(|&length| length == lengths[0]), "they are of one length: {lengths:?}");
        engine.finish(200);
        let stats = engine.scheduler.stats();
        if reuse {
            assert!(stats.recomputed_tokens <= 3 * 16, "{stats:?}");
        } else if stats.num_preemptions == 3 {
            // Two full blocks of the prompt once, of each the rest.
            let rest = (10 + lengths[0] as u64 - 1) - 8;
            assert_eq!(stats.recomputed_tokens, 8 + 3 * rest, "{stats:?}");
        }
        assert_eq!(engine.outputs[&old], expected_output(&prompt(1, 9), 24, &[]));
        assert_eq!(engine.finished[&old].preemptions, 0);
        for (i, id) in ids.iter().enumerate() {
            assert_eq!(engine.outputs[id], expected_sample(&prompt(2, 10), 14, i as u64), "reuse {reuse}");
        }
        engine.check_idle();
    }
}

#[test]
fn a_set_that_comes_back_shares_what_some_of_its_branches_have_in_common() {
    let mut engine = Engine::new(64, overcommitting(4), false);
    let tenant = engine.tenant("a");
    let first = samples(&engine, &tenant, &prompt(2, 8), 40, 2);
    (0..14).for_each(|_| {
        engine.turn();
    });
    // Both have 13 tokens of their own computed; each gets a twin.
    let mut ids = branches(first, 2);
    for id in ids.clone() {
        ids.extend(engine.fork(id, 1).unwrap());
    }
    let held = engine.pool.stats().held;
    assert_eq!(held, 2 + 2 * 4);
    let before = engine.scheduler.stats().computed_tokens;
    engine.scheduler.reset_cache(true).unwrap();
    assert_eq!(engine.pool.stats().held, 0);
    while engine.outputs[&ids[0]].len() == 14 {
        engine.turn();
    }
    let computed = engine.scheduler.stats().computed_tokens - before;
    // 2 full blocks of the prompt, 3 more of each pair, the sixth block and the next token of each.
    assert_eq!(computed, 8 + 2 * 12 + 4 + 4, "what is common is computed once");
    assert!(engine.pool.stats().held <= 2 + 2 * 3 + 4, "and stored once: {:?}", engine.pool.stats());
    engine.finish(200);
    for (place, id) in ids.iter().enumerate() {
        assert_eq!(engine.outputs[id], expected_sample(&prompt(2, 8), 40, place as u64 % 2));
    }
    engine.check_idle();
}

#[test]
fn a_branch_that_ends_while_its_set_waits_leaves_it() {
    for gone in 0..3 {
        let mut engine = Engine::new(15, overcommitting(4), true);
        let tenant = engine.tenant("a");
        let old = engine.submit(&tenant, &prompt(1, 9), 24).unwrap();
        let first = samples(&engine, &tenant, &prompt(2, 10), 14, 3);
        let ids = branches(first, 3);
        until_preempted(&mut engine, &tenant, &ids);
        // The request's first id stands for all of them.
        assert!(engine.scheduler.abort(ids[gone]).unwrap());
        engine.finish(200);
        for (i, id) in ids.iter().enumerate() {
            let is_gone = i == gone || gone == 0;
            let expected = if is_gone { FinishReason::Aborted } else { FinishReason::Length };
            assert_eq!(engine.finished[id].reason, expected);
            if !is_gone {
                assert_eq!(engine.outputs[id], expected_sample(&prompt(2, 10), 14, i as u64));
            }
        }
        assert_eq!(engine.outputs[&old].len(), 24);
        engine.check_idle();
    }
}

#[test]
fn the_eldest_branch_ends_while_it_computes_for_the_others() {
    for waits in [0, 1] {
        let mut config = overcommitting(4);
        config.max_prefill_chunk = 4;
        let mut engine = Engine::new(64, config, false);
        let tenant = engine.tenant("a");
        let parent = engine.submit(&tenant, &prompt(2, 30), 20).unwrap();
        while engine.outputs.get(&parent).is_none_or(|output| output.len() < 3) {
            engine.turn();
        }
        let children = engine.fork(parent, 2).unwrap();
        engine.scheduler.reset_cache(true).unwrap();
        (0..3).for_each(|_| {
            engine.turn();
        });
        let computed = engine.scheduler.stats().computed_tokens;
        let batch = engine.scheduler.step(0).unwrap();
        assert_eq!(batch.arrays.sequence_ids, [parent.0], "one computes for all");
        let (token_start, tokens) = engine.run(&batch);
        if waits == 0 {
            assert!(engine.scheduler.abort(parent).unwrap());
        }
        engine.note(engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap().finished);
        if waits == 1 {
            assert!(engine.scheduler.abort(parent).unwrap());
        }
        engine.finish(100);
        assert_eq!(engine.finished[&parent].reason, FinishReason::Aborted);
        for child in &children {
            assert_eq!(engine.outputs[child], expected_output(&prompt(2, 30), 20, &[]));
        }
        // 32 tokens were computed by the parent and its heir together, once; what follows by each child.
        let after = engine.scheduler.stats().computed_tokens - computed;
        assert_eq!(after, (32 - 12) + 2 * (30 + 20 - 1 - 32), "nothing was computed again");
        engine.check_idle();
    }
}

#[test]
fn a_fork_whose_set_could_never_fit_is_refused() {
    let mut engine = Engine::new(10, overcommitting(4), true);
    let tenant = engine.tenant_with("a", 0, 8);
    let parent = engine.submit(&tenant, &prompt(1, 10), 8).unwrap();
    engine.turn();
    let before = engine.pool.stats();
    // 5 blocks of life, 2 of them full and shared: 2 + 3 * 3.
    let refused = engine.fork(parent, 2);
    assert!(
        matches!(&refused, Err(Error::Refused { retryable: false, reason, .. }) if reason.contains("11 blocks")),
        "{refused:?}"
    );
    assert_eq!(engine.pool.stats(), before);
    engine.fork(parent, 1).unwrap();
    engine.finish(50);
    engine.check_idle();
}

#[test]
fn a_fork_that_is_refused_lets_nothing_go_that_is_kept() {
    // What is kept is of another prompt, or is held by the parent too and would not come free.
    for (num_blocks, seed) in [(23, 2), (24, 1)] {
        let mut engine = Engine::new(num_blocks, config(4), true);
        let tenant = engine.tenant("a");
        let retention = Some(Retention::default());
        engine.submit_request(Request { retention, ..request(&tenant, &prompt(1, 16), 1) }).unwrap();
        engine.finish(10);
        let long = [&prompt(seed, 16)[..], &prompt(3, 24)].concat();
        let parent = engine.submit(&tenant, &long, 20).unwrap();
        while !engine.outputs.contains_key(&parent) {
            engine.turn();
        }
        let stats = engine.scheduler.stats();
        assert_eq!((stats.num_retained, stats.num_kept_blocks), (1, 4));
        let before = engine.pool.stats();
        // Two need 10 blocks: there are 4 and those 4, or 9.
        let refused = engine.fork(parent, 2);
        assert!(matches!(refused, Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. })), "{refused:?}");
        assert_eq!(engine.scheduler.stats().num_retained, 1);
        assert_eq!(engine.pool.stats(), before);
        // One needs 5.
        engine.fork(parent, 1).unwrap();
        assert_eq!(engine.scheduler.stats().num_retained, u64::from(seed == 1));
        engine.finish(100);
    }
}

#[test]
fn no_branch_keeps_what_another_one_of_its_set_is_short_of() {
    let mut config = overcommitting(4);
    config.max_prefill_chunk = 1;
    let mut engine = Engine::new(12, config, false);
    // All that the three may have between them: whoever writes the shared block last does not need its copy.
    let tenant = engine.tenant_with("a", 0, 6);
    let parent = engine.submit(&tenant, &prompt(1, 5), 1).unwrap();
    engine.turn();
    let children = engine.fork(parent, 2).unwrap();
    engine.finish(20);
    for id in [parent, children[0], children[1]] {
        assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 5), 1, &[]));
    }
    engine.check_idle();
}

#[test]
fn a_re_order_before_the_first_token_is_refused() {
    let mut engine = Engine::new(64, overcommitting(4), true);
    let tenant = engine.tenant("a");
    let one = engine.submit(&tenant, &prompt(1, 1), 4).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    engine.scheduler.abandon(batch.step_id, "the prompt is one token, to be computed", false).unwrap();
    // Its last token is one of the prompt.
    assert!(matches!(engine.scheduler.reorder(&[one], &[one], &[7]), Err(Error::WrongState(_))));
    engine.finish(20);
    assert_eq!(engine.outputs[&one], expected_output(&prompt(1, 1), 4, &[]));
    engine.check_idle();
}

#[test]
fn a_set_is_paused_and_resumed_whole() {
    let mut engine = Engine::new(64, overcommitting(4), true);
    let tenant = engine.tenant("a");
    let first = samples(&engine, &tenant, &prompt(2, 10), 14, 3);
    (0..3).for_each(|_| {
        engine.turn();
    });
    assert!(engine.scheduler.pause(SequenceId(first.0 + 1)).unwrap());
    assert_eq!(engine.turn(), 0, "beams can't go on without one of them");
    assert_eq!(engine.scheduler.stats().num_paused, 3);
    assert!(engine.scheduler.resume(SequenceId(first.0 + 2)).unwrap());
    assert_eq!(engine.turn(), 3);
    engine.finish(50);
    engine.check_idle();
}

#[test]
fn a_paused_request_gives_its_place_to_a_set_that_has_enough_with_it() {
    for pauses_late in [false, true] {
        let mut engine = Engine::new(64, SchedulerConfig { max_running: 4, ..config(4) }, true);
        let (a, b) = (engine.tenant("a"), engine.tenant("b"));
        let slow = engine.submit(&a, &prompt(1, 3), 50).unwrap();
        let long = engine.submit(&a, &prompt(2, 3), 10).unwrap();
        engine.turn();
        if !pauses_late {
            assert!(engine.scheduler.pause(slow).unwrap());
        }
        let first = samples(&engine, &b, &prompt(3, 3), 4, 4);
        engine.turn();
        let behind = [&a, &b].map(|tenant| engine.submit(tenant, &prompt(4, 3), 4).unwrap());
        while !engine.finished.contains_key(&long) {
            assert_eq!(engine.scheduler.stats().num_forced_out, 0, "with it the set has still not enough");
            engine.turn();
        }
        if pauses_late {
            (0..10).for_each(|_| {
                engine.turn();
            });
            assert!(engine.scheduler.pause(slow).unwrap());
        }
        for _ in 0..20 {
            engine.turn();
        }
        for id in branches(first, 4).iter().chain(&behind) {
            assert!(engine.finished.contains_key(id), "{id} waits for a paused one, late {pauses_late}");
        }
        assert_eq!(engine.scheduler.stats().num_forced_out, 1);
        assert!(engine.scheduler.resume(slow).unwrap());
        engine.finish(100);
        assert_eq!(engine.outputs[&slow], expected_output(&prompt(1, 3), 50, &[]));
        engine.check_idle();
    }
}

/// Beam searches whose every step is a function of what they have, run beside each other; their outputs.
fn searches(engine: &mut Engine, shapes: &[(u32, u32, u32)], max_turns: usize) -> Vec<Vec<u32>> {
    let tenant = engine.tenant("a");
    let submit = |(seed, &(length, max_tokens, n)): (usize, &(u32, u32, u32))| {
        branches(samples(engine, &tenant, &prompt(seed as u32, length), max_tokens, n), n.into())
    };
    let sets: Vec<_> = shapes.iter().enumerate().map(submit).collect();
    for _ in 0..max_turns {
        if !engine.scheduler.has_work().expect("one thread") {
            break;
        }
        let length_of = |engine: &Engine, id| engine.outputs.get(id).map_or(0, Vec::len);
        let before: Vec<_> = sets.iter().map(|ids| length_of(engine, &ids[0])).collect();
        engine.turn();
        for (ids, length) in sets.iter().zip(before) {
            let lengths: Vec<_> = ids.iter().map(|id| length_of(engine, id)).collect();
            assert!(lengths.iter().all(|&each| each == lengths[0]), "torn beams: {lengths:?}");
            let has_ended = engine.finished.contains_key(&ids[0]);
            if lengths[0] == length || has_ended {
                continue;
            }
            let mixed = |i: usize| prefix_hash(&[length as u32, i as u32]) as usize;
            let parents: Vec<_> = (0..ids.len()).map(|i| ids[mixed(i) % ids.len()]).collect();
            let tokens: Vec<_> = (0..ids.len()).map(|i| (mixed(i) % 50) as i32).collect();
            engine.reorder(ids, &parents, &tokens).expect("beams are ready together");
        }
    }
    assert!(!engine.scheduler.has_work().expect("one thread"), "not done: {:?}", engine.scheduler.stats());
    engine.check_idle();
    sets.iter().flatten().map(|id| engine.outputs[id].clone()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Beams go on together or not at all, so `reorder` finds them at one length, whatever they were short of.
    #[test]
    fn beam_searches_give_the_same_in_a_tiny_pool_under_every_policy(
        spare in 0..6u32,
        block_size in 1..5u32,
        reuse in any::<bool>(),
        forecasts in any::<bool>(),
        groups in any_groups(),
        (chunk, open) in (0..5u32, 1..3u32),
        host in host_tier(),
        shapes in prop::collection::vec((1..12u32, 1..14u32, 1..5u32), 1..5),
    ) {
        let ample = SchedulerConfig { max_running: 20, ..config(block_size) };
        let expected = searches(&mut Engine::new(400, ample, reuse), &shapes, 100);
        let bold = ForecastConfig { free_share: 0.0, deviations: 0.001, growth_spread: 0.0 };
        let policy = if forecasts { AdmissionPolicy::Forecast(bold) } else { AdmissionPolicy::Watermark { free_share: 0.0 } };
        let (overflow, host_tier) = host;
        let mut config = SchedulerConfig { policy, overflow, host_tier, max_running: 9, max_batch_tokens: 11, ..config(block_size) };
        (config.layer_groups, config.max_prefill_chunk, config.max_open_steps) = (groups, chunk, open);
        let keeps_first = config.layer_groups[0] == Span::Full;
        // Just enough for the largest of them.
        let need = |&(length, max_tokens, n): &(u32, u32, u32)| {
            let full = if keeps_first { length / block_size } else { 0 };
            let life = config.lifetime_blocks(length, max_tokens);
            life + (n - 1) * (life - full) + u32::from(keeps_first && n > 1 && length % block_size != 0)
        };
        let num_blocks = shapes.iter().map(need).max().unwrap_or(0) + spare;
        let found = searches(&mut Engine::new(num_blocks, config, reuse), &shapes, 4000);
        prop_assert_eq!(found, expected);
    }
}

#[test]
fn beams_are_preempted_in_a_pool_that_is_too_small_for_all_of_them() {
    let mut engine = Engine::new(24, overcommitting(2), true);
    searches(&mut engine, &[(6, 14, 2), (5, 14, 3), (4, 14, 3)], 1000);
    assert!(engine.scheduler.stats().num_preemptions > 0, "{:?}", engine.scheduler.stats());
}

#[derive(Clone, Debug)]
enum Operation {
    Submit { seed: u32, length: u32, max_tokens: u32, n: u32, priority: i32 },
    Turn,
    Crash(usize),
    Fork(Index, u32),
    Reorder(Index, u32),
    Draft(Index, usize),
    Abort(Index),
    Pause(Index),
    Resume(Index),
    Evict(u32),
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    let which = any::<Index>;
    let submit = (0..3u32, 1..12u32, 1..12u32, 1..4u32, 0..2i32).prop_map(
        |(seed, length, max_tokens, n, priority)| Operation::Submit { seed, length, max_tokens, n, priority },
    );
    prop_oneof![
        4 => submit,
        20 => Just(Operation::Turn),
        1 => (0..support::CRASH_POINTS).prop_map(Operation::Crash),
        3 => (which(), 1..3u32).prop_map(|(which, count)| Operation::Fork(which, count)),
        3 => (which(), any::<u32>()).prop_map(|(which, seed)| Operation::Reorder(which, seed)),
        1 => (which(), 1..4usize).prop_map(|(which, count)| Operation::Draft(which, count)),
        1 => which().prop_map(Operation::Abort),
        1 => which().prop_map(Operation::Pause),
        2 => which().prop_map(Operation::Resume),
        1 => (1..6u32).prop_map(Operation::Evict),
        1 => Just(Operation::Reset),
    ]
}

/// An engine with what was asked of it: prompt and limit of each sequence, and which are of one set.
struct World {
    engine: Engine,
    tenant: Arc<Tenant>,
    prompts: HashMap<SequenceId, (Vec<u32>, u32)>,
    sets: Vec<Vec<SequenceId>>,
    ids: Vec<SequenceId>,
}

impl World {
    fn pick(&self, which: &Index) -> Option<SequenceId> {
        let live: Vec<_> = self.ids.iter().filter(|id| !self.engine.finished.contains_key(id)).collect();
        (!live.is_empty()).then(|| *live[which.index(live.len())])
    }

    /// Live members of the set that a sequence is of.
    fn set_of(&self, id: SequenceId) -> Vec<SequenceId> {
        let set = self.sets.iter().find(|set| set.contains(&id)).cloned().unwrap_or_default();
        set.into_iter().filter(|id| !self.engine.finished.contains_key(id)).collect()
    }

    fn submit(&mut self, (seed, length, max_tokens): (u32, u32, u32), n: u32, priority: i32) {
        let prompt = prompt(seed, length);
        let wanted = Request { n, priority, ..request(&self.tenant, &prompt, max_tokens) };
        let Ok(first) = self.engine.submit_request(wanted) else { return };
        let ids = branches(first, n.into());
        self.prompts.extend(ids.iter().map(|&id| (id, (prompt.clone(), max_tokens))));
        self.ids.extend(&ids);
        self.sets.push(ids);
    }

    fn fork(&mut self, id: SequenceId, count: u32) {
        let Ok(children) = self.engine.fork(id, count) else { return };
        let parent = self.prompts[&id].clone();
        self.prompts.extend(children.iter().map(|&child| (child, parent.clone())));
        self.ids.extend(&children);
        let set = self.sets.iter_mut().find(|set| set.contains(&id)).expect("a set");
        set.extend(children);
    }

    fn reorder(&mut self, id: SequenceId, seed: u32) {
        let ids = self.set_of(id);
        let from = |i: usize| prefix_hash(&[seed, i as u32]) as usize;
        let parents: Vec<_> = (0..ids.len()).map(|i| ids[from(i) % ids.len()]).collect();
        let tokens: Vec<_> = (0..ids.len()).map(|i| (from(i) % 50) as i32).collect();
        match self.engine.reorder(&ids, &parents, &tokens) {
            Ok(()) | Err(Error::WrongState(_) | Error::InvalidArgument(_)) => {}
            Err(other) => panic!("a re-order needs nothing: {other}"),
        }
    }

    fn draft(&mut self, id: SequenceId, count: usize) {
        let Some(output) = self.engine.outputs.get(&id) else { return };
        let mut known = self.prompts[&id].0.clone();
        known.extend(output);
        let drafts: Vec<_> = (0..count)
            .map(|_| {
                known.push(next_token(prefix_hash(&known)));
                *known.last().expect("a token") as i32
            })
            .collect();
        self.engine.scheduler.propose(&[id], &[0, count as i32], &drafts).expect("one thread");
    }

    /// A turn in which each sequence goes on as it must, and each set computes a token of all its branches or of none.
    fn turn(&mut self) {
        let before = self.engine.outputs.clone();
        self.engine.turn();
        let length = |id: &SequenceId| before.get(id).map_or(0, Vec::len);
        for (id, output) in &self.engine.outputs {
            let (prompt, _) = &self.prompts[id];
            for end in length(id).max(1)..output.len() {
                let mut known = prompt.clone();
                known.extend(&output[..end]);
                assert_eq!(output[end], next_token(prefix_hash(&known)), "token {end} of {id}");
            }
        }
        for set in &self.sets {
            let live: Vec<_> = set.iter().filter(|id| !self.engine.finished.contains_key(id)).collect();
            let grew = |id: &SequenceId| self.engine.outputs.get(id).map_or(0, Vec::len) > length(id);
            let num_grown = live.iter().filter(|id| grew(id)).count();
            assert!(num_grown == 0 || num_grown == live.len(), "{live:?} went on in part");
        }
    }

    fn apply(&mut self, operation: &Operation) {
        let which = match operation {
            Operation::Fork(which, _) | Operation::Reorder(which, _) | Operation::Draft(which, _) => which,
            Operation::Abort(which) | Operation::Pause(which) | Operation::Resume(which) => which,
            Operation::Submit { seed, length, max_tokens, n, priority } => {
                return self.submit((*seed, *length, *max_tokens), *n, *priority);
            }
            Operation::Turn => return self.turn(),
            Operation::Crash(point) => return self.engine.killed_turn(*point, false),
            Operation::Evict(num_blocks) => {
                self.engine.index.iter().for_each(|index| {
                    index.evict(*num_blocks);
                });
                return;
            }
            Operation::Reset => {
                self.engine.scheduler.reset_cache(true).expect("no step is open");
                return self.engine.check();
            }
        };
        let Some(id) = self.pick(which) else { return };
        match operation {
            Operation::Fork(_, count) => self.fork(id, *count),
            Operation::Reorder(_, seed) => self.reorder(id, *seed),
            Operation::Draft(_, count) => self.draft(id, *count),
            Operation::Abort(_) => drop(self.engine.scheduler.abort(id).expect("it was issued")),
            Operation::Pause(_) => drop(self.engine.scheduler.pause(id).expect("it was issued")),
            _ => drop(self.engine.scheduler.resume(id).expect("it was issued")),
        }
        self.engine.check();
    }
}

/// What an abandoned step took ahead of what is computed is promised to a beam still when it goes on from another.
#[test]
fn a_beam_that_goes_on_from_another_keeps_what_an_abandoned_step_took_for_it() {
    for (turns, point, seed) in (0..7 * support::CRASH_POINTS as u32 * 6)
        .map(|i| (i % 7, (i / 7) as usize % support::CRASH_POINTS, i / 7 / support::CRASH_POINTS as u32))
    {
        // Prompt, growth of each beam: all nine.
        let engine = Engine::new(9, config(2), false);
        let tenant = engine.tenant("a");
        let mut world = World { engine, tenant, prompts: HashMap::new(), sets: Vec::new(), ids: Vec::new() };
        world.apply(&Operation::Submit { seed: 0, length: 2, max_tokens: 8, n: 2, priority: 0 });
        (0..=turns).for_each(|_| world.apply(&Operation::Turn));
        world.apply(&Operation::Crash(point));
        world.reorder(world.ids[0], seed);
        (0..60).for_each(|_| world.apply(&Operation::Turn));
        assert!(!world.engine.scheduler.has_work().unwrap(), "{turns} turns, crash {point}, seed {seed}");
        world.engine.check_idle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn branches_run_together_or_not_at_all_and_every_one_ends(
        num_blocks in 6..24u32,
        block_size in 1..5u32,
        reuse in any::<bool>(),
        policy in prop::sample::select(vec![
            AdmissionPolicy::Reserve,
            AdmissionPolicy::Watermark { free_share: 0.0 },
            AdmissionPolicy::Forecast(ForecastConfig { free_share: 0.0, deviations: 0.001, growth_spread: 0.0 }),
        ]),
        groups in any_groups(),
        chunk in 0..5u32,
        host in host_tier(),
        operations in prop::collection::vec(operation(), 1..80),
    ) {
        let mut config = config(block_size);
        let num_blocks = num_blocks * groups.len() as u32;
        (config.layer_groups, config.max_prefill_chunk) = (groups, chunk);
        (config.max_running, config.max_batch_tokens, config.policy) = (6, 9, policy);
        (config.ageing_steps, config.urgent_preempts) = (8, policy.overcommits());
        (config.overflow, config.host_tier) = host;
        let engine = Engine::new(num_blocks, config, reuse);
        let tenant = engine.tenant("a");
        let mut world = World { engine, tenant, prompts: HashMap::new(), sets: Vec::new(), ids: Vec::new() };
        for operation in &operations {
            world.apply(operation);
        }
        for id in &world.ids {
            world.engine.scheduler.resume(*id).unwrap();
        }
        for _ in 0..4000 {
            if world.engine.scheduler.has_work().unwrap() {
                world.turn();
            }
        }
        prop_assert!(!world.engine.scheduler.has_work().unwrap(), "{:?}", world.engine.scheduler.stats());
        world.engine.check_idle();
        if policy == AdmissionPolicy::Reserve {
            prop_assert_eq!(world.engine.scheduler.stats().num_preemptions, 0);
        }
        for (id, ended) in &world.engine.finished {
            prop_assert!(matches!(ended.reason, FinishReason::Length | FinishReason::Aborted), "{:?}", ended);
            let output = world.engine.outputs.get(id).map_or(0, Vec::len);
            prop_assert!(ended.reason == FinishReason::Aborted || output == world.prompts[id].1 as usize);
        }
    }
}
