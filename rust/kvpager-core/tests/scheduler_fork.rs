//! Forks share blocks and copy the last one before they write it.

mod support;

use kvpager_core::scheduler::{AdmissionPolicy, FinishReason};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use support::{Engine, any_groups, config, expected_output, prompt};

#[test]
fn a_fork_shares_every_full_block_and_copies_the_tail_on_the_first_write() {
    for reuse in [true, false] {
        let mut engine = Engine::new(32, config(4), reuse);
        let tenant = engine.tenant("a");
        let parent = engine.submit(&tenant, &prompt(1, 10), 8).unwrap();
        engine.turn();
        assert_eq!(engine.pool.stats().held, 3);
        let children = engine.fork(parent, 2).unwrap();
        assert_eq!(engine.pool.stats().held, 3, "nothing is copied yet");
        let batch = engine.scheduler.step(0).unwrap();
        let arrays = &batch.arrays;
        assert_eq!(arrays.sequence_ids, [parent.0, children[0].0, children[1].0]);
        assert_eq!(arrays.block_copies.len(), 2, "the last owner writes the original");
        let slots: std::collections::HashSet<_> = arrays.slot_mapping.iter().collect();
        assert_eq!(slots.len(), 3);
        assert_eq!(engine.pool.stats().held, 5);
        let (token_start, tokens) = engine.run(&batch);
        engine.note(engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap().finished);
        engine.finish(20);
        for id in [parent, children[0], children[1]] {
            assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 10), 8, &[]), "reuse {reuse}");
            assert_eq!(engine.finished[&id].output_tokens, 8);
        }
        assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        engine.check_idle();
    }
}

#[test]
fn a_fork_at_a_block_edge_copies_nothing() {
    let mut engine = Engine::new(32, config(4), false);
    let tenant = engine.tenant("a");
    let parent = engine.submit(&tenant, &prompt(1, 8), 8).unwrap();
    engine.turn();
    engine.fork(parent, 3).unwrap();
    let batch = engine.scheduler.step(0).unwrap();
    assert!(batch.arrays.block_copies.is_empty());
    engine.scheduler.abandon(batch.step_id, "over", true).unwrap();
    engine.finish(3);
    engine.check_idle();
}

#[test]
fn a_fork_that_does_not_fit_changes_nothing() {
    for reuse in [true, false] {
        let mut engine = Engine::new(6, config(4), reuse);
        let tenant = engine.tenant("a");
        let parent = engine.submit(&tenant, &prompt(1, 10), 8).unwrap();
        engine.turn();
        let before = engine.pool.stats();
        // Each needs 5 - 2 full blocks, and one a block for the copy of the last one; one is free.
        assert!(matches!(engine.fork(parent, 1), Err(Error::OverQuota { needed: 4, available: 1, .. })));
        assert_eq!(engine.pool.stats(), before);
        let batch = engine.scheduler.step(0).unwrap();
        assert!(matches!(engine.fork(parent, 1), Err(Error::WrongState(_))), "it is in an open step");
        let (token_start, tokens) = engine.run(&batch);
        engine.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
        assert!(matches!(engine.fork(parent, 8), Err(Error::Refused { retryable: true, .. })));
        assert!(matches!(engine.fork(SequenceId(77), 1), Err(Error::InvalidArgument(_))));
        engine.finish(20);
        assert!(matches!(engine.fork(parent, 1), Err(Error::WrongState(_))), "it has ended");
        assert_eq!(engine.outputs[&parent], expected_output(&prompt(1, 10), 8, &[]));
    }
}

#[test]
fn the_copy_is_made_again_when_its_step_crashed() {
    let mut engine = Engine::new(32, config(4), true);
    let tenant = engine.tenant("a");
    let parent = engine.submit(&tenant, &prompt(1, 10), 8).unwrap();
    engine.turn();
    let child = engine.fork(parent, 1).unwrap()[0];
    engine.crashed_turn();
    engine.finish(20);
    for id in [parent, child] {
        assert_eq!(engine.outputs[&id], expected_output(&prompt(1, 10), 8, &[]));
    }
    engine.check_idle();
}

#[test]
fn a_split_reservation_promises_the_same_in_two_parts() {
    let engine = Engine::new(8, config(4), false);
    let tenant = engine.tenant("a");
    let mut whole = engine.pool.reserve(tenant.account, 6).unwrap();
    let mut drawn = [kvpager_core::BlockHandle::from_bits(0); 4];
    whole.allocate(&mut drawn).unwrap();
    whole.put_back(&drawn).unwrap();
    assert!(whole.split(7).is_err());
    let mut part = whole.split(4).unwrap();
    assert_eq!((whole.num_blocks(), part.num_blocks(), engine.pool.stats().reserved), (2, 4, 6));
    part.allocate(&mut drawn).unwrap();
    engine.check();
    drop((whole, part));
    assert_eq!((engine.pool.stats().reserved, engine.pool.stats().held), (0, 4));
    engine.pool.release(&drawn).unwrap();
    engine.check_idle();
}

#[derive(Clone, Debug)]
enum Operation {
    Submit(u32, u32, u32),
    Turn,
    Crash,
    Fork(prop::sample::Index, u32),
    Abort(prop::sample::Index),
    Pause(prop::sample::Index),
    Resume(prop::sample::Index),
}

fn operation() -> impl Strategy<Value = Operation> {
    let which = any::<prop::sample::Index>;
    prop_oneof![
        2 => (0..3u32, 1..12u32, 1..10u32).prop_map(|(seed, length, max)| Operation::Submit(seed, length, max)),
        6 => Just(Operation::Turn),
        1 => Just(Operation::Crash),
        3 => (which(), 1..3u32).prop_map(|(which, count)| Operation::Fork(which, count)),
        1 => which().prop_map(Operation::Abort),
        1 => which().prop_map(Operation::Pause),
        1 => which().prop_map(Operation::Resume),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn forks_end_with_the_output_of_their_prompt(
        num_blocks in 6..24u32,
        block_size in 1..5u32,
        reuse in any::<bool>(),
        overcommits in any::<bool>(),
        groups in any_groups(),
        chunk in 0..5u32,
        operations in prop::collection::vec(operation(), 1..60),
    ) {
        let mut config = config(block_size);
        let num_blocks = num_blocks * groups.len() as u32;
        (config.layer_groups, config.max_prefill_chunk) = (groups, chunk);
        config.max_running = 5;
        config.max_batch_tokens = 9;
        if overcommits {
            config.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
        }
        let mut engine = Engine::new(num_blocks, config, reuse);
        let tenant = engine.tenant("a");
        let mut accepted: Vec<(SequenceId, Vec<u32>, u32)> = Vec::new();
        for operation in operations {
            let pick = |which: &prop::sample::Index| which.index(accepted.len().max(1));
            match operation {
                Operation::Submit(seed, length, max_tokens) => {
                    if let Ok(id) = engine.submit(&tenant, &prompt(seed, length), max_tokens) {
                        accepted.push((id, prompt(seed, length), max_tokens));
                    }
                }
                Operation::Turn => { engine.turn(); }
                Operation::Crash => engine.crashed_turn(),
                Operation::Fork(which, count) => if let Some((id, prompt, max)) = accepted.get(pick(&which)).cloned() {
                    for child in engine.fork(id, count).unwrap_or_default() {
                        accepted.push((child, prompt.clone(), max));
                    }
                },
                Operation::Abort(which) => if let Some((id, ..)) = accepted.get(pick(&which)) {
                    engine.scheduler.abort(*id).unwrap();
                },
                Operation::Pause(which) => if let Some((id, ..)) = accepted.get(pick(&which)) {
                    engine.scheduler.pause(*id).unwrap();
                },
                Operation::Resume(which) => if let Some((id, ..)) = accepted.get(pick(&which)) {
                    engine.scheduler.resume(*id).unwrap();
                },
            }
        }
        for (id, ..) in &accepted {
            engine.scheduler.resume(*id).unwrap();
        }
        engine.finish(3000);
        engine.check_idle();
        if !overcommits {
            prop_assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        }
        for (id, prompt, max_tokens) in accepted {
            if engine.finished[&id].reason == FinishReason::Length {
                prop_assert_eq!(&engine.outputs[&id], &expected_output(&prompt, max_tokens, &[]));
            }
        }
    }
}
