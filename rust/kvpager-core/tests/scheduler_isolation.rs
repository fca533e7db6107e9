//! P9, non-interference, through the scheduler: two runs that differ in what other tenants do.
//!
//! Under `strict` the trace of a tenant is a function of its own requests and quota; the same harness sees the leak
//! under `open`.

mod support;
#[path = "support/traces.rs"]
mod traces;

use kvpager_core::block_pool::PoolConfig;
use kvpager_core::prefix_index::{EvictionPolicy, IndexConfig, Isolation};
use kvpager_core::scheduler::{AdmissionPolicy, HostTierConfig, QueueLimits, SchedulerConfig};
use proptest::prelude::*;
use traces::{Act, NUM_BLOCKS, Peak, acts, difference, flood, groups, policy, regular, run, setting, trace};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_a_strict_tenant_sees_is_a_function_of_its_own_requests(
        policy in policy(),
        layer_groups in groups(),
        host_blocks in prop::sample::select(vec![0, 12, 64]),
        chunk in 0..4u32,
        open in 1..3u32,
        own in acts(24, 40, 3),
        noise in acts(40, 40, 5),
        other_noise in acts(40, 40, 5),
    ) {
        // Short enough that a model of windows alone runs out of homes.
        let max_model_tokens = 64;
        let config =
            SchedulerConfig { layer_groups, max_model_tokens, ..setting(policy, host_blocks, chunk, open) };
        let alone = trace(&config, Isolation::Strict, &own, &[], 0);
        for noise in [&noise, &other_noise] {
            let beside = trace(&config, Isolation::Strict, &own, noise, 0);
            prop_assert_eq!(difference(&alone, &beside), None);
        }
    }
}

#[test]
fn the_same_harness_sees_the_leak_under_open() {
    let config = setting(AdmissionPolicy::Reserve, 0, 0, 1);
    let (own, noise) = (regular(60), flood(60, 13, 8));
    let leaks = |isolation| {
        let (alone, beside) =
            (trace(&config, isolation, &own, &[], 0), trace(&config, isolation, &own, &noise, 1000));
        difference(&alone, &beside).is_some()
    };
    assert!(leaks(Isolation::Open));
    assert!(leaks(Isolation::Scoped), "under memory pressure, as the docs say");
    assert!(!leaks(Isolation::Strict));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// `scoped` hides content: others that ask for the same shapes, for what the tenant asks for or for something
    /// else, look the same while there is room for all.
    #[test]
    fn without_memory_pressure_a_scoped_tenant_sees_no_content_of_others(
        policy in policy(),
        layer_groups in groups(),
        chunk in 0..4u32,
        open in 1..3u32,
        own in acts(9, 30, 2),
        noise in acts(9, 30, 3),
    ) {
        let mut config = SchedulerConfig { layer_groups, ..setting(policy, 0, chunk, open) };
        config.queue = QueueLimits::NONE;
        // Whether a draft is right depends on content, and is not the cache's doing.
        let mut noise = noise;
        noise.iter_mut().for_each(|acts| acts.retain(|act| !matches!(act, Act::Propose(_))));
        let run = |salt| run(600, &config, Isolation::Scoped, &own, &noise, salt).0;
        prop_assert_eq!(difference(&run(0), &run(1000)), None);
    }
}

/// A name; the flood's (length, max_tokens); what the flood reaches; the most of it.
type Bound = (&'static str, [u32; 2], fn(&Peak) -> u64, u64);

/// Every bound that requests share, with a flood of others that reaches it and the most that the flood may have.
///
/// The patterns name every field, so that a new bound does not compile before it is in this list.
fn shared_bounds(config: &SchedulerConfig) -> Vec<Bound> {
    let SchedulerConfig {
        // Of all sequences: divided.
        max_batch_tokens,
        max_running,
        queue: QueueLimits { max_requests, max_tokens },
        host_tier:
            HostTierConfig {
                num_blocks: host_blocks,
                // Speeds: what they are weighed against, the time of copying, is divided as the tokens of a step are.
                bytes_per_block: _,
                link_bytes_per_second: _,
                prefill_tokens_per_second: _,
                max_token_gap: _,
            },
        // Of one sequence or one head.
        block_size: _,
        max_model_tokens: _,
        max_prefill_chunk: _,
        max_bypass: _,
        max_bypass_steps: _,
        max_bypass_seconds: _,
        // Of the engine, whoever is in the step; choices.
        max_open_steps: _,
        ageing_steps: _,
        policy: _,
        urgent_preempts: _,
        zero_blocks: _,
        overflow: _,
        layer_groups: _,
    } = config;
    let PoolConfig { num_blocks: _, max_accounts: _, max_open_steps: _ } = PoolConfig::default();
    // Namespaces of salts are bounded by account, see `PrefixIndex::set_max_salts`.
    let IndexConfig { block_size: _, eviction: _ } =
        IndexConfig { block_size: 4, eviction: EvictionPolicy::Lru };
    let strict = 2;
    vec![
        ("tokens of a step", [30, 1], |peak| peak.tokens, u64::from(max_batch_tokens - strict * 9)),
        ("running places and rows", [1, 13], |peak| peak.rows, u64::from(max_running - strict * 3)),
        ("waiting requests", [1, 13], |peak| peak.waiting, u64::from(max_requests - strict * 3)),
        ("waiting tokens", [20, 8], |peak| peak.waiting_tokens, max_tokens - u64::from(strict) * 40),
        ("blocks", [13, 13], |peak| peak.blocks, u64::from(NUM_BLOCKS - 16 - 8)),
        ("blocks of the host", [13, 13], |peak| peak.host_blocks, u64::from(host_blocks / 2)),
    ]
}

#[test]
fn every_shared_bound_has_a_share_for_a_strict_tenant() {
    let config = setting(AdmissionPolicy::Watermark { free_share: 0.0 }, 24, 0, 1);
    let own = regular(60);
    let (alone, _) = run(NUM_BLOCKS, &config, Isolation::Strict, &own, &[], 0);
    for (bound, [length, max_tokens], reached, most) in shared_bounds(&config) {
        let noise = flood(60, length, max_tokens);
        let (beside, peak) = run(NUM_BLOCKS, &config, Isolation::Strict, &own, &noise, 1000);
        assert_eq!(difference(&alone, &beside), None, "{bound}");
        // The flood is one: it reaches what is left to it, and no more.
        assert!(reached(&peak) <= most, "{bound}: {peak:?}, at most {most}");
        assert!(reached(&peak) + 4 > most, "{bound}: {peak:?} of {most}");
    }
}
