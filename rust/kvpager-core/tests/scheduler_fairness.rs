//! Service across tenants, priority inside one: nobody starves, and what is bounded keeps to its bound.

mod support;

use kvpager_core::SequenceId;
use kvpager_core::block_pool::Quota;
use kvpager_core::scheduler::{AdmissionPolicy, Request, Tenant, TenantConfig};
use proptest::prelude::*;
use std::sync::Arc;
use support::{Engine, config, prompt, request};

fn weighted(engine: &Engine, name: &str, weight: f64) -> Arc<Tenant> {
    let config = TenantConfig { weight, ..TenantConfig::new(name, engine.pool.num_blocks()) };
    engine.scheduler.add_tenant(&config).expect("a tenant")
}

/// A tenant that always has requests waiting, all of one shape.
struct Load {
    tenant: Arc<Tenant>,
    prompt_tokens: u32,
    max_tokens: u32,
}

impl Load {
    fn refill(&self, engine: &Engine, seed: u32) {
        while self.tenant.num_waiting() < 10 {
            let prompt = prompt(seed, self.prompt_tokens);
            engine.submit(&self.tenant, &prompt, self.max_tokens).expect("fits");
        }
    }

    /// Whether others keep it waiting: its own limit would let its head in.
    fn is_backlogged(&self, engine: &Engine) -> bool {
        let account = engine.pool.account_stats(self.tenant.account).expect("its account");
        let need = engine.scheduler.config().lifetime_blocks(self.prompt_tokens, self.max_tokens);
        self.tenant.num_waiting() > 0 && account.committed + u64::from(need) <= account.limit
    }

    /// Most service that a token of the pool may cost by then that the requests are gone: itself, and in each step its
    /// part of a block.
    fn weight_of_token(&self, engine: &Engine) -> f64 {
        let config = engine.scheduler.config();
        let chunk = config.max_batch_tokens - config.max_running;
        let steps = self.prompt_tokens.div_ceil(chunk) + self.max_tokens;
        1.0 + f64::from(steps) / f64::from(config.block_size)
    }
}

/// Most service, over its weight, that a tenant gains on another one in any stretch of time in which others keep both
/// waiting.
fn worst_gain(engine: &mut Engine, loads: &[Load], steps: u32) -> f64 {
    let pairs: Vec<_> = (0..loads.len())
        .flat_map(|i| (0..loads.len()).map(move |j| (i, j)))
        .filter(|(i, j)| i != j)
        .collect();
    // The least lead of the present stretch, by pair.
    let mut least: Vec<Option<f64>> = vec![None; pairs.len()];
    let mut worst: f64 = 0.0;
    for step in 0..steps {
        loads.iter().zip(step * 4..).for_each(|(load, seed)| load.refill(engine, seed));
        engine.turn();
        let service = |load: &Load| engine.scheduler.service(&load.tenant).expect("one thread");
        for (&(i, j), least) in pairs.iter().zip(&mut least) {
            if !loads[i].is_backlogged(engine) || !loads[j].is_backlogged(engine) {
                *least = None;
                continue;
            }
            let lead = service(&loads[i]) - service(&loads[j]);
            let from = least.map_or(lead, |least| least.min(lead));
            *least = Some(from);
            worst = worst.max(lead - from);
        }
    }
    worst
}

/// Twice the tokens that the pool holds, each with what it may cost there, over the least weight: no prompt has more.
fn bound(engine: &Engine, loads: &[Load], least_weight: f64) -> f64 {
    let tokens = f64::from(engine.pool.num_blocks() * engine.scheduler.config().block_size);
    let dearest = loads.iter().map(|load| load.weight_of_token(engine)).fold(0.0, f64::max);
    2.0 * tokens * dearest / least_weight
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// As in VTC: tenants that others keep waiting differ by at most twice the larger of what the largest prompt and what
    /// the tokens in the pool cost, over the weight. A token costs itself and its part of a block as long as it stays.
    #[test]
    fn backlogged_tenants_differ_by_a_bounded_service(
        small in (1..8u32, 1..12u32),
        large in prop_oneof![(20..40u32, 1..16u32), (20..100u32, 1..60u32)],
        weights in (1..4u32, 1..4u32),
        num_blocks in 40..70u32,
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
        let mut engine = Engine::new(num_blocks, settings, false);
        let load = |name: &str, (prompt_tokens, max_tokens): (u32, u32), weight: u32| {
            Load { tenant: weighted(&engine, name, f64::from(weight)), prompt_tokens, max_tokens }
        };
        let loads = [load("small", small, weights.0), load("large", large, weights.1)];
        let bound = bound(&engine, &loads, f64::from(weights.0.min(weights.1)));
        let gained = worst_gain(&mut engine, &loads, 1200);
        prop_assert!(gained <= bound, "{gained}, at most {bound}");
    }
}

/// Why a token's steps are in the bound: without them it is VTC's for a service of tokens only, and no scheduler that
/// takes nothing back can keep it. Two requests take the whole pool here, and the third tenant waits for as long as they
/// last.
#[test]
fn no_multiple_of_the_tokens_in_the_pool_bounds_what_requests_cost_that_stay_long() {
    let mut ratios = Vec::new();
    for max_tokens in [9, 25, 57, 121] {
        let need = config(4).lifetime_blocks(8, max_tokens);
        let mut engine = Engine::new(2 * need, config(4), false);
        let load = |name: &str| Load { tenant: engine.tenant(name), prompt_tokens: 8, max_tokens };
        let loads = ["a", "b", "c"].map(load);
        let gained = worst_gain(&mut engine, &loads, 600);
        assert!(gained <= bound(&engine, &loads, 1.0), "{gained}");
        ratios.push(gained / f64::from(2 * engine.pool.num_blocks() * 4));
    }
    println!("over twice the tokens of the pool: {ratios:.2?}");
    assert!(ratios.is_sorted() && ratios[3] > 3.0, "{ratios:?}");
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
fn a_set_gets_its_places_among_single_requests_of_another_tenant() {
    let mut engine = Engine::new(64, config(4), false);
    let (single, set) = (engine.tenant("single"), engine.tenant("set"));
    let (mut waiting, mut ended, mut worst, mut number) = (None, 0, 0, 0);
    for step in 0..1000u32 {
        while single.num_waiting() < 8 {
            // They never end together.
            number += 1;
            engine.submit(&single, &prompt(number, 3), 3 + number % 5).expect("fits");
        }
        let (id, since) = *waiting.get_or_insert_with(|| {
            // All eight places at once.
            let samples = Request { n: 8, ..request(&set, &prompt(step, 4), 3) };
            (engine.submit_request(samples).expect("fits"), step)
        });
        engine.turn();
        if engine.finished.contains_key(&id) {
            (waiting, ended, worst) = (None, ended + 1, worst.max(step - since));
        }
    }
    assert!(ended > 20 && worst < 60, "{ended} ended, the slowest after {worst} steps");
}

#[test]
fn what_is_guaranteed_to_a_tenant_is_there_whoever_waits_and_is_behind() {
    let mut engine = Engine::new(64, config(4), false);
    let sure = engine.tenant_with("sure", 16, 64);
    let behind = engine.tenant("behind");
    for seed in 0..4 {
        engine.submit(&sure, &prompt(seed, 30), 3).expect("fits");
    }
    engine.finish(50);
    // 48 blocks are left for others: one of these runs, and the next waits for it to end.
    for seed in 4..6 {
        engine.submit(&behind, &prompt(seed, 100), 60).expect("fits");
    }
    engine.turn();
    let id = engine.submit(&sure, &prompt(9, 30), 3).expect("fits");
    let service = |tenant| engine.scheduler.service(tenant).expect("one thread");
    assert!(service(&sure) > service(&behind));
    for _ in 0..8 {
        engine.turn();
    }
    assert_eq!(engine.scheduler.stats().num_waiting, 1, "the second of those");
    assert!(engine.finished.contains_key(&id), "it has its 16 blocks");
}

#[test]
fn what_a_tenants_own_limit_holds_back_is_not_made_up_for_at_others_cost() {
    let mut engine = Engine::new(64, config(4), false);
    let (busy, new) = (engine.tenant("busy"), engine.tenant("new"));
    let limited = engine.tenant_with("limited", 0, 6);
    let service = |engine: &Engine, tenant| engine.scheduler.service(tenant).expect("one thread");
    let run = |engine: &mut Engine, tenants: &[&Arc<Tenant>], steps: u32| {
        for step in 0..steps {
            for tenant in tenants {
                while tenant.num_waiting() < 8 {
                    engine.submit(tenant, &prompt(step, 8), 8).expect("fits");
                }
            }
            engine.turn();
        }
    };
    run(&mut engine, &[&busy, &limited], 600);
    // A tenant that comes now, and then the limited one with its limit raised, shares with the busy one at once.
    let before = [&busy, &new].map(|tenant| service(&engine, tenant));
    run(&mut engine, &[&busy, &limited, &new], 200);
    let after = [&busy, &new].map(|tenant| service(&engine, tenant));
    assert!(after[0] - before[0] > 1500.0, "busy: {before:?}, {after:?}");
    let quota = Quota { guaranteed: 0, limit: 64 };
    engine.pool.set_quota(limited.account, quota).expect("the pool has as many");
    run(&mut engine, &[&busy, &limited, &new], 200);
    let raised = [&busy, &new].map(|tenant| service(&engine, tenant));
    assert!(raised[0] - after[0] > 1000.0, "busy: {after:?}, {raised:?}");
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
