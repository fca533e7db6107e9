//! Replays end, whatever the pool, and the clairvoyant schedule is the one that can be worked out by hand.

use kvpager_core::replay::{Arrivals, Columns, Oracle, Progress, Replay, ReplayConfig, StepTime};
use kvpager_core::scheduler::AdmissionPolicy;
use proptest::prelude::*;

/// Columns without ids.
#[derive(Default)]
struct Requests {
    arrival: Vec<f64>,
    prompt: Vec<u32>,
    output: Vec<u32>,
    tenant: Vec<u32>,
    session: Vec<u64>,
    think: Vec<f64>,
    hash_start: Vec<u64>,
}

impl Requests {
    fn new(rows: &[(f64, u32, u32, u64)]) -> Self {
        let mut requests = Self { hash_start: vec![0; rows.len() + 1], ..Self::default() };
        for &(arrival, prompt, output, session) in rows {
            requests.arrival.push(arrival);
            requests.prompt.push(prompt);
            requests.output.push(output);
            requests.tenant.push(0);
            requests.session.push(session);
            requests.think.push(0.5);
        }
        requests
    }

    fn columns(&self) -> Columns<'_> {
        Columns {
            arrival: &self.arrival,
            prompt_tokens: &self.prompt,
            output_tokens: &self.output,
            tenant: &self.tenant,
            session: &self.session,
            think_time: &self.think,
            hash_start: &self.hash_start,
            hash_ids: &[],
        }
    }
}

/// A second a step, so that virtual time counts steps.
fn config(num_blocks: u32, arrivals: Arrivals) -> ReplayConfig {
    let step_time = StepTime { floor: 1.0, per_token: 0.0, per_kv_token: 0.0, per_swapped_block: 0.0 };
    ReplayConfig {
        arrivals,
        step_time,
        max_batch_tokens: 64,
        max_running: 8,
        max_model_tokens: 512,
        max_output_tokens: 64,
        ..ReplayConfig::new(num_blocks, 4)
    }
}

fn oracle(num_blocks: u32, rows: &[(f64, u32, u32, u64)]) -> kvpager_core::replay::OracleOutcome {
    let mut oracle = Oracle::new(&config(num_blocks, Arrivals::Recorded { speed: 1.0 })).expect("valid");
    oracle.push(&Requests::new(rows).columns()).expect("valid");
    oracle.close();
    while oracle.advance(100) != Progress::Done {}
    oracle.outcome()
}

#[test]
fn oracle_runs_together_what_fits_together() {
    // Each: 8 prompt tokens and 5 outputs, 12 tokens with KV at its end, 3 blocks of 4.
    let rows = [(0.0, 8, 5, 0), (0.0, 8, 5, 0)];
    let together = oracle(6, &rows);
    assert_eq!((together.steps, together.finished, together.peak_blocks), (5, 2, 6));
    // One block short: the second's prompt, 2 blocks, fits beside the first's last step.
    assert_eq!(oracle(5, &rows).steps, 9);
    assert_eq!(oracle(2, &rows).refused, 2);
}

#[test]
fn oracle_admits_what_fits_only_because_another_ends_first() {
    // The first ends after 2 steps and gives 3 blocks back before the second needs its last ones.
    let rows = [(0.0, 9, 2, 0), (0.0, 9, 20, 0)];
    // 9 tokens: 3 blocks; 28 tokens: 7 blocks; reserving both would take 10.
    let outcome = oracle(7, &rows);
    assert_eq!((outcome.steps, outcome.finished, outcome.peak_blocks), (20, 2, 7));
}

#[test]
fn session_turns_follow_the_answer() {
    let rows = [(0.0, 8, 5, 7), (0.0, 8, 5, 7)];
    // Five steps, half a second of thought, five steps.
    assert!((oracle(64, &rows).time - 10.5).abs() < 1e-9);
}

/// Outputs of 30 to 79 tokens, and between some of them outputs of 1,500 to 2,499, each kind of its own tenant.
/// The mix changes: (every so many one is long, so many requests).
fn changing_mix() -> Requests {
    let mut requests = Requests::new(&[]);
    requests.hash_start.clear();
    for (every, count) in [(u32::MAX, 1500), (2, 300), (20, 1500), (2, 300), (u32::MAX, 500)] {
        for _ in 0..count {
            let i = requests.arrival.len() as u32;
            let is_long = i % every == every - 1;
            requests.arrival.push(0.0);
            requests.prompt.push(100 + i * 104_729 % 200);
            requests.output.push(if is_long { 1500 + i * 7919 % 1000 } else { 30 + i * 7919 % 50 });
            requests.tenant.push(is_long.into());
            requests.session.push(0);
            requests.think.push(0.0);
        }
    }
    requests.hash_start = vec![0; requests.arrival.len() + 1];
    requests
}

/// With what all had shown together 104 were preempted and 83,313 tokens computed again: a long output was taken
/// for a short one after each wave of short ones. As one tenant they are that still.
#[test]
fn a_tenant_of_long_outputs_is_not_taken_for_one_of_short_ones_when_the_mix_changes() {
    let run = |num_tenants: usize| {
        let mut requests = changing_mix();
        requests.tenant.iter_mut().for_each(|tenant| *tenant %= num_tenants as u32);
        let mut replay = Replay::new(ReplayConfig {
            policy: AdmissionPolicy::from_name("forecast").expect("a known policy"),
            reuse: false,
            max_model_tokens: 8192,
            tenants: ["chat", "essays"].map(String::from)[..num_tenants].to_vec(),
            arrivals: Arrivals::Saturate,
            ..ReplayConfig::new(1500, 16)
        })
        .expect("valid");
        replay.push(&requests.columns()).expect("valid");
        replay.close();
        assert_eq!(replay.advance(u64::MAX).expect("it goes on"), Progress::Done);
        let report = replay.report();
        let count = |name: &str| report[name].as_u64().expect("a count");
        assert_eq!(count("finished"), 4100);
        (count("preempted_requests"), count("recomputed_tokens"), report["batch_size"]["mean"].as_f64())
    };
    let (own, together) = (run(2), run(1));
    assert!(own.0 <= 50 && own.1 <= 50_000, "{own:?}, together {together:?}");
}

#[test]
fn wrong_columns_are_refused_whole() {
    let mut replay = Replay::new(config(8, Arrivals::Saturate)).expect("valid");
    let text = replay.push(&Requests::new(&[(0.0, 8, 0, 0)]).columns()).expect_err("no output").to_string();
    assert!(text.contains("output_tokens[0] is 0"), "{text}");
    let text =
        replay.push(&Requests::new(&[(f64::NAN, 8, 1, 0)]).columns()).expect_err("no time").to_string();
    assert!(text.contains("arrival[0] is NaN"), "{text}");
    replay.close();
    assert_eq!(replay.advance(10).expect("nothing to do"), Progress::Done);
}

fn policy() -> impl Strategy<Value = AdmissionPolicy> {
    prop::sample::select(vec!["reserve", "watermark", "forecast"])
        .prop_map(|name| AdmissionPolicy::from_name(name).expect("a known policy"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Liveness and conservation: every request ends or is refused, in tiny pools, under every policy.
    #[test]
    fn every_request_ends_or_is_refused(
        rows in prop::collection::vec((0.0..20.0f64, 1..80u32, 1..70u32, 0..4u64), 1..40),
        num_blocks in 4..60u32,
        policy in policy(),
        reuse in any::<bool>(),
        saturate in any::<bool>(),
    ) {
        let mut rows = rows;
        rows.sort_by(|a, b| a.0.total_cmp(&b.0));
        let arrivals = if saturate { Arrivals::Saturate } else { Arrivals::Recorded { speed: 1.0 } };
        let mut replay = Replay::new(ReplayConfig { policy, reuse, ..config(num_blocks, arrivals) }).expect("valid");
        replay.push(&Requests::new(&rows).columns()).expect("valid");
        replay.close();
        for _ in 0..100 {
            if replay.advance(1000).expect("no fault") == Progress::Done {
                break;
            }
            replay.check_invariants().expect("pool and index are sound");
        }
        replay.check_invariants().expect("pool and index are sound");
        let report = replay.report();
        let count = |name: &str| report[name].as_u64().unwrap_or(0);
        let refused = report["refused"]["never_fits"].as_u64().unwrap_or(0);
        prop_assert_eq!(count("finished") + refused, rows.len() as u64);
        let outputs: u64 = report["output_tokens"].as_u64().unwrap_or(0);
        if refused == 0 {
            prop_assert_eq!(outputs, rows.iter().map(|row| u64::from(row.2.min(64))).sum::<u64>());
        }
        if policy == AdmissionPolicy::Reserve {
            prop_assert_eq!(count("preemptions"), 0);
        }
        prop_assert!(count("peak_held") <= u64::from(num_blocks));
    }
}
