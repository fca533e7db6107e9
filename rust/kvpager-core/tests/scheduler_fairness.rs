//! Service across tenants, priority inside one: nobody starves, and what is bounded keeps to its bound.

mod support;

use kvpager_core::SequenceId;
use kvpager_core::scheduler::{AdmissionPolicy, SchedulerConfig, Tenant, TenantConfig};
use proptest::prelude::*;
use std::sync::Arc;
use support::{Engine, config, prompt, request};

fn weighted(engine: &Engine, name: &str, weight: f64) -> Arc<Tenant> {
    let config = TenantConfig { weight, ..TenantConfig::new(name, engine.pool.num_blocks()) };
    engine.scheduler.add_tenant(&config).expect("a tenant")
}

/// Most service that a request of this shape can cost, unweighted.
fn cost(config: &SchedulerConfig, prompt_tokens: u32, max_tokens: u32) -> f64 {
    let steps = prompt_tokens.div_ceil(config.max_batch_tokens - config.max_running) + max_tokens;
    let blocks = config.lifetime_blocks(prompt_tokens, max_tokens);
    f64::from(prompt_tokens + max_tokens + blocks * steps)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// As in VTC: two tenants that both have requests waiting differ by at most twice the larger of what the
    /// largest request costs and of what fits the pool at once, over the weight, and the tokens of the pool by
    /// which one may be ahead of a head that waits. What fits is measured as service, too.
    #[test]
    fn backlogged_tenants_differ_by_a_bounded_service(
        small in (1..8u32, 1..12u32),
        large in (20..40u32, 1..16u32),
        weights in (1..4u32, 1..4u32),
        num_blocks in 32..60u32,
        policy in prop::sample::select(vec!["reserve", "watermark", "forecast"]),
    ) {
        let mut settings = config(4);
        settings.queue = kvpager_core::scheduler::QueueLimits::NONE;
        settings.max_bypass = 4;
        settings.max_bypass_steps = 8;
        settings.policy = match policy {
            "watermark" => AdmissionPolicy::Watermark { free_share: 0.0 },
            name => AdmissionPolicy::from_name(name).expect("a known policy"),
        };
        let mut engine = Engine::new(num_blocks, settings.clone(), false);
        let tenants = [
            (weighted(&engine, "small", f64::from(weights.0)), small, f64::from(weights.0)),
            (weighted(&engine, "large", f64::from(weights.1)), large, f64::from(weights.1)),
        ];
        let largest = tenants
            .iter()
            .map(|(_, (length, max_tokens), weight)| cost(&settings, *length, *max_tokens) / weight)
            .fold(0.0, f64::max);
        // A pool full of requests for as long as one lasts; twice, as they stall and are computed again.
        let longest = 2.0 * f64::from(small.1.max(large.1) + 10);
        let least_weight = f64::from(weights.0.min(weights.1));
        let pool = f64::from(num_blocks + settings.max_running) * longest / least_weight;
        let tokens = f64::from(num_blocks * settings.block_size) / least_weight;
        let bound = 2.0 * (largest.max(pool) + tokens);
        let mut lead: Option<f64> = None;
        for step in 0..1500u32 {
            for (i, (tenant, (length, max_tokens), _)) in tenants.iter().enumerate() {
                while tenant.num_waiting() < 10 {
                    let prompt = prompt(step * 2 + i as u32, *length);
                    engine.submit(tenant, &prompt, *max_tokens).expect("fits");
                }
            }
            engine.turn();
            let is_backlogged = |(tenant, (length, max_tokens), _): &(Arc<Tenant>, (u32, u32), f64)| {
                let account = engine.pool.account_stats(tenant.account).expect("its account");
                let need = u64::from(settings.lifetime_blocks(*length, *max_tokens));
                tenant.num_waiting() > 0 && account.committed + need <= account.limit
            };
            if !tenants.iter().all(is_backlogged) {
                // All that a tenant asked for runs, or its own quota is in the way: others do not keep it waiting.
                lead = None;
                continue;
            }
            let service = |i: usize| engine.scheduler.service(&tenants[i].0).expect("one thread");
            let now = service(0) - service(1);
            let start = *lead.get_or_insert(now);
            prop_assert!((now - start).abs() <= bound, "{} after {step} steps, at most {bound}", now - start);
        }
    }
}

#[test]
fn a_tenant_of_large_requests_gets_its_turn_among_small_ones() {
    let mut settings = config(4);
    settings.max_bypass = 4;
    settings.max_bypass_steps = 16;
    let mut engine = Engine::new(32, settings, false);
    let (small, large) = (engine.tenant("small"), engine.tenant("large"));
    let mut waiting: Option<(SequenceId, u32)> = None;
    let (mut ended, mut worst) = (0, 0);
    for step in 0..2000u32 {
        while small.num_waiting() < 4 {
            engine.submit(&small, &prompt(step, 6), 10).expect("fits");
        }
        match waiting {
            Some((id, since)) if engine.finished.contains_key(&id) => {
                (waiting, ended, worst) = (None, ended + 1, worst.max(step - since));
            }
            Some(_) => {}
            None => {
                // Nearly all of the pool: it never fits beside the small ones.
                let id = engine.submit(&large, &prompt(step, 100), 12).expect("fits");
                waiting = Some((id, step));
            }
        }
        engine.turn();
    }
    assert!(ended > 20 && worst < 100, "{ended} ended, the slowest after {worst} steps");
}

#[test]
fn drafts_are_service_also_those_that_were_wrong() {
    let mut engine = Engine::new(64, config(4), false);
    let tenants = [engine.tenant("plain"), engine.tenant("drafts")];
    let ids = [0, 1].map(|i| engine.submit(&tenants[i], &prompt(i as u32, 5), 20).expect("fits"));
    engine.turn();
    let service = |engine: &Engine, i: usize| engine.scheduler.service(&tenants[i]).expect("one thread");
    let before = [0, 1].map(|i| service(&engine, i));
    for _ in 0..4 {
        // 50 is no token that the model samples.
        assert_eq!(engine.scheduler.propose(&[ids[1]], &[0, 2], &[50, 50]).expect("no step is open"), 2);
        engine.turn();
    }
    assert_eq!(engine.outputs[&ids[0]].len(), engine.outputs[&ids[1]].len());
    let [plain, drafts] = [0, 1].map(|i| service(&engine, i) - before[i]);
    assert!(drafts >= plain + 4.0 * 2.0, "{drafts} and {plain}");
}

#[test]
fn an_idle_tenant_re_enters_at_the_least_service_of_the_active_ones() {
    let mut engine = Engine::new(64, config(4), false);
    let (busy, idle) = (engine.tenant("busy"), engine.tenant("idle"));
    for i in 0..40 {
        engine.submit(&busy, &prompt(i, 8), 8).expect("fits");
    }
    for _ in 0..30 {
        engine.turn();
    }
    let before = engine.scheduler.service(&busy).expect("one thread");
    assert!(before > 500.0 && engine.scheduler.service(&idle).expect("one thread") == 0.0);
    engine.submit(&idle, &prompt(99, 8), 1).expect("fits");
    engine.turn();
    let after = engine.scheduler.service(&idle).expect("one thread");
    assert!(after >= before, "{after} is less than {before}: idleness was saved up");
}

#[test]
fn the_lowest_class_runs_after_a_bounded_wait_however_many_are_urgent() {
    let mut settings = config(4);
    settings.max_running = 2;
    settings.ageing_steps = 16;
    let mut engine = Engine::new(32, settings, false);
    let tenant = engine.tenant("a");
    let mut low = request(&tenant, &prompt(1, 4), 2);
    low.priority = 3;
    let low = engine.scheduler.submit(low).expect("fits");
    for step in 0..200u32 {
        while tenant.num_waiting() < 6 {
            engine.submit(&tenant, &prompt(step, 4), 3).expect("fits");
        }
        engine.turn();
    }
    // Three classes of 16 steps, and those that were before it by then.
    assert!(engine.finished[&low].queue_steps < 3 * 16 + 24, "{:?}", engine.finished[&low]);
}

/// A pool that three requests of class 2 fill, and then an urgent one.
fn urgent(preempts: bool, waited: u32) -> (Engine, SequenceId, Vec<SequenceId>) {
    let mut settings = config(4);
    settings.policy = AdmissionPolicy::Watermark { free_share: 0.0 };
    settings.urgent_preempts = preempts;
    settings.ageing_steps = 8;
    let mut engine = Engine::new(16 + waited * 12 / 17, settings, false);
    let tenant = engine.tenant("a");
    let low = (0..3).map(|i| {
        let mut request = request(&tenant, &prompt(i, 16), 4 + waited);
        request.priority = 2;
        engine.scheduler.submit(request).expect("fits")
    });
    let low: Vec<_> = low.collect();
    for _ in 0..2 + waited {
        engine.turn();
    }
    let id = engine.submit(&tenant, &prompt(9, 16), 2).expect("fits");
    engine.turn();
    engine.turn();
    (engine, id, low)
}

#[test]
fn an_urgent_request_preempts_the_youngest_of_a_lower_class_when_asked() {
    for preempts in [false, true] {
        let (mut engine, id, low) = urgent(preempts, 0);
        assert_eq!(engine.finished.contains_key(&id), preempts);
        assert_eq!(engine.scheduler.stats().num_preemptions, u64::from(preempts));
        engine.finish(200);
        let taken: Vec<u64> = low.iter().map(|id| engine.finished[id].preemptions).collect();
        assert_eq!(taken, [0, 0, u64::from(preempts)]);
        engine.check_idle();
    }
}

#[test]
fn an_urgent_request_takes_nothing_from_one_that_waited_its_class_away() {
    // Two classes of 8 steps: after 17 steps those of class 2 come before a request of class 0 that is new.
    let (mut engine, _, low) = urgent(true, 17);
    assert_eq!(engine.scheduler.stats().num_preemptions, 0);
    engine.finish(400);
    assert!(low.iter().all(|id| engine.finished[id].preemptions == 0));
    let mut settings = config(4);
    settings.urgent_preempts = true;
    let error = settings.validate().expect_err("reserve never preempts").to_string();
    assert!(error.contains("urgent_preempts is true and the policy reserve"), "{error}");
}
