//! No request waits past the worst wait that `docs/notes/scheduler.md` derives for the pool, the queue and the mix.

mod support;

use kvpager_core::scheduler::{
    AdmissionPolicy, Deadline, ForecastConfig, HostTierConfig, Overflow, Request, Retention,
};
use proptest::prelude::*;
use support::{Engine, config, expected_output, request};

fn policy() -> impl Strategy<Value = AdmissionPolicy> {
    prop::sample::select(vec![
        AdmissionPolicy::Reserve,
        AdmissionPolicy::Watermark { free_share: 0.0 },
        AdmissionPolicy::Forecast(ForecastConfig { free_share: 0.0, deviations: 0.0, growth_spread: 0.0 }),
        AdmissionPolicy::Forecast(ForecastConfig::default()),
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_request_waits_past_the_derived_bound(
        num_blocks in 9..40u32,
        host_blocks in 0..60u32,
        overflow in prop::sample::select(vec![Overflow::Auto, Overflow::Recompute, Overflow::Swap]),
        max_token_gap in prop::sample::select(vec![1e-9, 1.0, 1e9]),
        policy in policy(),
        retains in any::<bool>(),
        rows in prop::collection::vec((0..2usize, 1..12u32, 1..24u32, 0..2u32), 1..40),
    ) {
        let mut config = config(4);
        config.max_running = 6;
        config.max_batch_tokens = 12;
        config.max_bypass = 3;
        config.max_bypass_steps = 16;
        config.policy = policy;
        config.overflow = if host_blocks == 0 { Overflow::Auto } else { overflow };
        config.host_tier = HostTierConfig { num_blocks: host_blocks, max_token_gap, ..HostTierConfig::default() };
        let (places, chunk) = (config.max_running, config.max_batch_tokens - config.max_running);
        let mut engine = Engine::new(num_blocks, config, retains);
        let tenants = [engine.tenant("a"), engine.tenant("b")];
        let mut accepted = Vec::new();
        for (number, &(tenant, prompt_tokens, max_tokens, gap)) in rows.iter().enumerate() {
            let prompt: Vec<u32> = (0..prompt_tokens).map(|i| number as u32 * 100 + i).collect();
            // What is kept until somebody needs it: whoever waits can have it.
            let retention = retains.then(|| Retention { priority: gap as i32, ..Retention::default() });
            let wanted = Request { retention, ..request(&tenants[tenant], &prompt, max_tokens) };
            let id = engine.scheduler.submit(wanted).expect("fits the pool");
            accepted.push((id, prompt, max_tokens, engine.scheduler.stats().steps));
            for _ in 0..gap {
                engine.turn();
            }
        }
        let longest = accepted.iter().map(|row| (row.1.len() as u32).div_ceil(chunk) + row.2).max().unwrap_or(0);
        let turn = u64::from(longest * (num_blocks / 32 + places + 2));
        while engine.scheduler.has_work().expect("one thread") {
            let now = engine.scheduler.stats().steps;
            for (older, (id, _, _, arrival)) in accepted.iter().enumerate() {
                if !engine.finished.contains_key(id) {
                    let older = older as u64;
                    let bound = (older + u64::from(places)) * turn + older * 16;
                    prop_assert!(now - arrival <= bound, "request {id} waits {} steps, at most {bound}", now - arrival);
                }
            }
            engine.turn();
        }
        for (id, prompt, max_tokens, _) in accepted {
            prop_assert_eq!(&engine.outputs[&id], &expected_output(&prompt, max_tokens, &[]));
        }
        engine.scheduler.drain(Deadline::default()).expect("a deadline");
        engine.turn();
        engine.check_idle();
    }
}
