//! What is published stays whoever is short: a request that does not fit beside it is refused or ends, and nobody waits
//! for it.

mod support;

use kvpager_core::block_pool::Quota;
use kvpager_core::scheduler::{AdmissionPolicy, FinishReason, Sharing, Tenant, TenantScope};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use std::sync::Arc;
use support::{Engine, config, expected_sample, prompt, request, tenant_config};

fn policies() -> [AdmissionPolicy; 3] {
    ["reserve", "watermark", "forecast"].map(|name| AdmissionPolicy::from_name(name).expect("a policy"))
}

fn engine(num_blocks: u32, policy: AdmissionPolicy) -> Engine {
    let mut settings = config(4);
    settings.policy = policy;
    Engine::new(num_blocks, settings, true)
}

fn system(engine: &Engine, limit: u32) -> Arc<Tenant> {
    let mut config = tenant_config("system", 0, limit);
    config.sharing = Sharing { scope: TenantScope::Public, ..Sharing::default() };
    engine.scheduler.add_tenant(&config).expect("a public scope")
}

fn guest(engine: &Engine, name: &str, public: &Arc<Tenant>, limit: u32) -> Arc<Tenant> {
    let mut config = tenant_config(name, 0, limit);
    config.sharing = Sharing { public: Some(Arc::clone(public)), ..Sharing::default() };
    engine.scheduler.add_tenant(&config).expect("a tenant")
}

fn reason(engine: &Engine, id: SequenceId) -> FinishReason {
    engine.finished[&id].reason
}

#[test]
fn a_request_that_does_not_fit_beside_what_is_published_is_refused_with_the_numbers() {
    for policy in policies() {
        let mut engine = engine(10, policy);
        let system = system(&engine, 4);
        let tenant = engine.tenant("a");
        engine.submit(&system, &prompt(1, 12), 1).expect("a publication");
        engine.finish(20);
        assert_eq!(engine.held(), 3);
        let refused = engine.submit(&tenant, &prompt(2, 5), 36).expect_err("10 blocks of 7");
        assert!(
            refused.to_string().contains("need 10 blocks") && refused.to_string().contains("may have 7"),
            "{refused}"
        );
        // What is withdrawn is there again.
        engine.scheduler.unpublish(&system).expect("a public scope");
        engine.submit(&tenant, &prompt(2, 5), 36).expect("10 blocks of 10");
        engine.finish(200);
        engine.check_idle();
    }
}

#[test]
fn samples_of_a_prompt_that_is_published_as_a_whole_need_what_was_promised_to_them() {
    let published = prompt(1, 16);
    let shapes = policies().into_iter().flat_map(|policy| (2..5).map(move |n| (policy, n)));
    for (policy, n) in shapes {
        for (length, num_blocks) in
            [4, 8, 12, 13].into_iter().flat_map(|length| (4..24).map(move |b| (length, b)))
        {
            let mut engine = engine(num_blocks, policy);
            let system = system(&engine, num_blocks);
            engine.submit(&system, &published, 1).expect("a publication");
            engine.finish(30);
            let guest = guest(&engine, "a", &system, num_blocks);
            let mut wanted = request(&guest, &published[..length], 6);
            wanted.n = n;
            let Ok(first) = engine.submit_request(wanted) else { continue };
            engine.finish(200);
            for branch in 0..u64::from(n) {
                let expected = expected_sample(&published[..length], 6, branch);
                let case = format!("{policy:?}: {n} samples of {length} tokens in {num_blocks} blocks");
                assert_eq!(engine.outputs[&SequenceId(first.0 + branch)], expected, "{case}");
            }
        }
    }
}

#[test]
fn a_request_that_was_accepted_before_a_publication_ends_and_nobody_waits_for_it() {
    for policy in policies() {
        for steps_before in 0..4 {
            let mut engine = engine(10, policy);
            let system = system(&engine, 4);
            let (large, other) = (engine.tenant("large"), engine.tenant("other"));
            let id = engine.submit(&large, &prompt(2, 5), 36).expect("a request");
            for _ in 0..steps_before {
                engine.turn();
            }
            engine.submit(&system, &prompt(1, 12), 1).expect("a publication");
            let ids: Vec<_> =
                (0..20).map(|i| engine.submit(&other, &prompt(9 + i, 6), 3).expect("small")).collect();
            engine.finish(600);
            assert!([FinishReason::Length, FinishReason::Capacity].contains(&reason(&engine, id)));
            assert!(
                ids.iter().all(|&id| reason(&engine, id) == FinishReason::Length),
                "{policy:?} {steps_before}"
            );
            engine.scheduler.unpublish(&system).expect("a public scope");
            engine.check_idle();
        }
    }
}

#[test]
fn what_is_published_of_a_requests_own_prompt_counts_for_it() {
    for policy in policies() {
        let mut engine = engine(10, policy);
        let system = system(&engine, 4);
        let tenant = guest(&engine, "a", &system, 10);
        engine.submit(&system, &prompt(1, 12), 1).expect("a publication");
        engine.finish(20);
        let mut longer = prompt(1, 12);
        longer.extend(prompt(2, 5));
        let id = engine.submit(&tenant, &longer, 24).expect("10 blocks, three of them published");
        engine.finish(200);
        assert_eq!(reason(&engine, id), FinishReason::Length);
        assert_eq!(engine.finished[&id].cached_tokens, 12);
        engine.scheduler.unpublish(&system).expect("a public scope");
        engine.check_idle();
    }
}

#[test]
fn of_two_publications_that_outgrow_their_limit_together_one_ends_with_capacity() {
    for policy in policies() {
        let mut engine = engine(20, policy);
        let system = system(&engine, 5);
        let tenant = engine.tenant("a");
        let ids = [
            engine.submit(&system, &prompt(1, 16), 4).expect("a publication"),
            engine.submit(&system, &prompt(2, 4), 8).expect("a publication"),
        ];
        let other = engine.submit(&tenant, &prompt(3, 10), 5).expect("a request");
        engine.finish(200);
        let lost = ids.iter().filter(|&&id| reason(&engine, id) == FinishReason::Capacity).count();
        assert_eq!((lost, reason(&engine, other)), (1, FinishReason::Length), "{policy:?}");
        engine.scheduler.unpublish(&system).expect("a public scope");
        engine.check_idle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Tiny pools, publications, guests and strangers: every accepted request ends.
    #[test]
    fn every_accepted_request_ends_beside_publications(
        policy in prop::sample::select(policies().to_vec()),
        num_blocks in 6u32..16,
        limits in (2u32..8, 2u32..16),
        work in prop::collection::vec((0u32..4, 0u32..4, 1u32..24, 1u32..30, 0u32..3), 1..24),
    ) {
        let mut engine = engine(num_blocks, policy);
        let system = system(&engine, limits.0.min(num_blocks));
        let guest = guest(&engine, "guest", &system, limits.1.min(num_blocks));
        let stranger = engine.tenant("stranger");
        for (who, seed, length, max_tokens, turns) in work {
            if who == 3 && turns == 0 {
                engine.scheduler.unpublish(&system).expect("a public scope");
            }
            let tenant = [&system, &guest, &stranger, &guest][who as usize];
            match engine.submit(tenant, &prompt(seed, length), max_tokens) {
                Ok(_) | Err(Error::Refused { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            for _ in 0..turns {
                engine.turn();
                engine.check();
            }
        }
        engine.finish(2000);
        engine.scheduler.unpublish(&system).expect("a public scope");
        engine.check_idle();
        let quota = Quota { guaranteed: 0, limit: num_blocks };
        engine.pool.set_quota(stranger.account, quota).expect("as it was");
        prop_assert_eq!(engine.pool.reachable(stranger.account).expect("an account"), num_blocks);
    }
}
