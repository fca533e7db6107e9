//! Random work on tiny pools: every request ends, its output depends on nothing but its prompt, no slot is
//! read that its sequence did not write or match, and the invariants hold after every turn.

mod support;

use kvpager_core::scheduler::{
    AdmissionPolicy, Deadline, FinishReason, ForecastConfig, Retention, ZeroBlocks,
};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use support::{Engine, config, expected_output, family_prompt, host_tier, request, retention};

#[derive(Clone, Debug)]
enum Operation {
    Submit {
        tenant: usize,
        family: u32,
        shared: u32,
        own: u32,
        max_tokens: u32,
        reuse: bool,
        priority: i32,
    },
    /// What requests ask to be kept from now on.
    Retain(Option<Retention>),
    Turn,
    Abandon {
        fail: bool,
    },
    Abort(prop::sample::Index),
    Pause(prop::sample::Index),
    Resume(prop::sample::Index),
    Evict(u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    let submit = (0..3usize, 0..3u32, 0..12u32, 1..8u32, 1..8u32, prop::bool::weighted(0.9), 0..2i32)
        .prop_map(|(tenant, family, shared, own, max_tokens, reuse, priority)| Operation::Submit {
            tenant,
            family,
            shared,
            own,
            max_tokens,
            reuse,
            priority,
        });
    let retention = retention(prop::option::of(1..20u64), 12, 0..3);
    prop_oneof![
        1 => prop::option::of(retention).prop_map(Operation::Retain),
        4 => submit,
        6 => Just(Operation::Turn),
        1 => any::<bool>().prop_map(|fail| Operation::Abandon { fail }),
        1 => any::<prop::sample::Index>().prop_map(Operation::Abort),
        1 => any::<prop::sample::Index>().prop_map(Operation::Pause),
        1 => any::<prop::sample::Index>().prop_map(Operation::Resume),
        1 => (1..4u32).prop_map(Operation::Evict),
    ]
}

fn policy() -> impl Strategy<Value = AdmissionPolicy> {
    prop_oneof![
        Just(AdmissionPolicy::Reserve),
        Just(AdmissionPolicy::Watermark { free_share: 0.0 }),
        Just(AdmissionPolicy::Watermark { free_share: 0.1 }),
        Just(AdmissionPolicy::Forecast(ForecastConfig {
            free_share: 0.0,
            deviations: 0.001,
            growth_spread: 0.0
        })),
        Just(AdmissionPolicy::Forecast(ForecastConfig::default())),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_and_its_output_is_independent_of_the_schedule(
        num_blocks in 8..30u32,
        block_size in 1..5u32,
        max_batch_tokens in 3..20u32,
        max_prefill_chunk in 0..6u32,
        cached in prop::bool::weighted(0.8),
        policy in policy(),
        host in host_tier(),
        operations in prop::collection::vec(operation(), 1..60),
    ) {
        let mut config = config(block_size);
        config.max_running = 3;
        config.max_batch_tokens = max_batch_tokens;
        config.max_prefill_chunk = max_prefill_chunk;
        config.zero_blocks = ZeroBlocks::Always;
        config.policy = policy;
        config.max_bypass = max_prefill_chunk;
        (config.overflow, config.host_tier) = host;
        let mut engine = Engine::new(num_blocks, config, cached);
        let tenants = [
            engine.tenant("a"),
            engine.tenant_with("b", num_blocks / 4, num_blocks / 2),
            engine.tenant_with("c", 0, num_blocks),
        ];
        let mut accepted: Vec<(SequenceId, Vec<u32>, u32)> = Vec::new();
        let mut aborted = Vec::new();
        let mut retention = None;
        for operation in operations {
            match operation {
                Operation::Submit { tenant, family, shared, own, max_tokens, reuse, priority } => {
                    let prompt = family_prompt(family, shared, own);
                    let mut request = request(&tenants[tenant], &prompt, max_tokens);
                    request.reuse = reuse;
                    request.priority = priority;
                    request.retention = retention.filter(|_| reuse && cached);
                    match engine.scheduler.submit(request) {
                        Ok(id) => accepted.push((id, prompt, max_tokens)),
                        Err(Error::Refused { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
                Operation::Retain(asked) => retention = asked,
                Operation::Turn => { engine.turn(); }
                Operation::Abandon { fail } => engine.abandoned_turn(fail),
                Operation::Abort(which) if !accepted.is_empty() => {
                    let id = accepted[which.index(accepted.len())].0;
                    if engine.scheduler.abort(id).unwrap() {
                        aborted.push(id);
                    }
                }
                Operation::Pause(which) if !accepted.is_empty() => {
                    engine.scheduler.pause(accepted[which.index(accepted.len())].0).unwrap();
                }
                Operation::Resume(which) if !accepted.is_empty() => {
                    engine.scheduler.resume(accepted[which.index(accepted.len())].0).unwrap();
                }
                Operation::Abort(_) | Operation::Pause(_) | Operation::Resume(_) => {}
                Operation::Evict(num_blocks) => {
                    if let Some(index) = &engine.index {
                        index.evict(num_blocks);
                        engine.check();
                    }
                }
            }
        }
        for (id, ..) in &accepted {
            engine.scheduler.resume(*id).unwrap();
        }
        engine.finish(2000);
        // What is kept after its request's end goes.
        engine.scheduler.drain(Deadline::default()).unwrap();
        engine.turn();
        engine.check_idle();
        if policy == AdmissionPolicy::Reserve {
            prop_assert_eq!(engine.scheduler.stats().num_preemptions, 0);
        }
        for (id, prompt, max_tokens) in accepted {
            let finished = &engine.finished[&id];
            if finished.reason == FinishReason::Length {
                prop_assert_eq!(&engine.outputs[&id], &expected_output(&prompt, max_tokens, &[]));
            } else {
                prop_assert!(finished.reason == FinishReason::Error || aborted.contains(&id));
            }
        }
    }
}
