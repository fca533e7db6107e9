//! What one tenant sees of a run, to be compared with another run that differs in what others do.
//!
//! A tenant's *trace* is all that it can observe: what its calls return, ids and estimates included, what of it each
//! step computes, the accounts of its ended requests, its queue and its pool account.

#![allow(dead_code, clippy::allow_attributes, unreachable_pub, reason = "each test binary uses its own part")]

use super::support::{Engine, config, request};
use kvpager_core::SequenceId;
use kvpager_core::block_pool::AccountStats;
use kvpager_core::geometry::Span;
use kvpager_core::prefix_index::Isolation;
use kvpager_core::scheduler::{
    AdmissionPolicy, Batch, Deadline, ForecastConfig, HostTierConfig, Overflow, QueueLimits, Retention,
    SchedulerConfig, Share, Sharing, Tenant, TenantConfig,
};
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::Arc;

pub const NUM_BLOCKS: u32 = 48;

/// What a tenant does before a step.
#[derive(Clone, Debug)]
pub enum Act {
    Submit {
        family: u32,
        length: u32,
        max_tokens: u32,
        n: u32,
        priority: i32,
        deadline: Option<u64>,
        retention: Option<Retention>,
    },
    Abort(usize),
    Pause(usize),
    Resume(usize),
    Fork(usize),
    Propose(usize),
}

/// A tenant, and the requests that it knows.
pub struct Client {
    tenant: Arc<Tenant>,
    requests: Vec<SequenceId>,
    /// Ids of its sequences.
    sequences: HashSet<u64>,
}

/// What the tenant sees of one step.
#[derive(Debug, PartialEq)]
pub struct Seen {
    answers: Vec<String>,
    /// (sequence, first position, tokens) of its rows.
    rows: Vec<(u64, i32, i32)>,
    ended: Vec<String>,
    waiting: (u32, u64),
    kept: u64,
    account: AccountStats,
}

/// Mostly none; else for some steps or until the room is needed, of all or of a part.
pub fn retention() -> impl Strategy<Value = Option<Retention>> {
    prop::option::weighted(0.3, crate::support::retention(prop::option::weighted(0.7, 1..20u64), 20, 0..3))
}

fn act(longest: u32) -> impl Strategy<Value = Act> {
    let which = || 0..8usize;
    let deadline = prop::option::weighted(0.1, 2..30u64);
    let n = prop::sample::select(vec![1, 1, 1, 2]);
    let submit = (0..3u32, 1..longest, 1..14u32, n, 0..2i32, deadline, retention()).prop_map(
        |(family, length, max_tokens, n, priority, deadline, retention)| Act::Submit {
            family,
            length,
            max_tokens,
            n,
            priority,
            deadline,
            retention,
        },
    );
    prop_oneof![
        8 => submit,
        1 => which().prop_map(Act::Abort),
        1 => which().prop_map(Act::Pause),
        1 => which().prop_map(Act::Resume),
        1 => which().prop_map(Act::Fork),
        1 => which().prop_map(Act::Propose),
    ]
}

/// By step, what is done before it.
pub fn acts(longest: u32, steps: usize, most: usize) -> impl Strategy<Value = Vec<Vec<Act>>> {
    prop::collection::vec(prop::collection::vec(act(longest), 0..most), steps)
}

fn add(engine: &Engine, name: &str, isolation: Isolation, quota: (u32, u32)) -> Client {
    let is_strict = isolation == Isolation::Strict;
    let config = TenantConfig {
        guaranteed_blocks: quota.0,
        queue: QueueLimits { max_requests: 3, max_tokens: 40 },
        sharing: Sharing { isolation, ..Sharing::default() },
        max_kept_blocks: Some(12),
        share: if is_strict {
            Share { max_running: Some(3), max_batch_tokens: Some(9) }
        } else {
            Share::default()
        },
        ..TenantConfig::new(name, quota.1)
    };
    Client {
        tenant: engine.scheduler.add_tenant(&config).expect("the shares fit"),
        requests: Vec::new(),
        sequences: HashSet::new(),
    }
}

impl Client {
    fn act(&mut self, engine: &mut Engine, act: &Act, salt: u32) -> String {
        let pick =
            |requests: &[SequenceId], which: usize| requests.get(which % requests.len().max(1)).copied();
        match *act {
            Act::Submit { family, length, max_tokens, n, priority, deadline, retention } => {
                let prompt: Vec<u32> = (0..length).map(|i| salt + family * 100 + i % 7).collect();
                let mut request = request(&self.tenant, &prompt, max_tokens);
                (request.n, request.priority, request.retention) = (n, priority, retention);
                request.deadline = Deadline { steps: deadline, seconds: None };
                let answer = engine.submit_request(request);
                self.requests.extend(answer.as_ref().ok());
                self.sequences.extend(answer.iter().flat_map(|id| id.0..id.0 + u64::from(n)));
                format!("{answer:?}")
            }
            Act::Fork(which) => match pick(&self.requests, which) {
                None => String::new(),
                Some(id) => {
                    let forked = engine.fork(id, 1);
                    self.requests.extend(forked.iter().flatten());
                    self.sequences.extend(forked.iter().flatten().map(|id| id.0));
                    format!("{forked:?}")
                }
            },
            Act::Propose(which) => match pick(&self.requests, which) {
                None => String::new(),
                Some(id) => format!("{:?}", engine.scheduler.propose(&[id], &[0, 2], &[1, 2])),
            },
            Act::Abort(which) | Act::Pause(which) | Act::Resume(which) => match pick(&self.requests, which) {
                None => String::new(),
                Some(id) => {
                    let scheduler = &engine.scheduler;
                    format!(
                        "{:?}",
                        match act {
                            Act::Abort(_) => scheduler.abort(id),
                            Act::Pause(_) => scheduler.pause(id),
                            _ => scheduler.resume(id),
                        }
                    )
                }
            },
        }
    }
}

/// One turn on a clock that is the same in every run, or, where two steps may be open, the take-off of one and the
/// landing of the one before it. What of the tenant was in the step, and what of it ended.
fn turn(engine: &mut Engine, step: usize, client: &Client) -> (Batch, Vec<(u64, i32, i32)>, Vec<String>) {
    let before: HashSet<SequenceId> = engine.finished.keys().copied().collect();
    let batch = if engine.scheduler.config().max_open_steps > 1 {
        engine.take_off();
        let batch = engine.flights.back().expect("just taken off").batch.clone();
        if engine.flights.len() > 1 {
            engine.land();
        }
        batch
    } else {
        let batch = engine.scheduler.step_at(0, step as f64 * 0.3).expect("no step is open");
        let (token_start, tokens) = engine.run(&batch);
        let outcome = engine.scheduler.commit(batch.step_id, &token_start, &tokens).expect("as planned");
        engine.note(batch.arrays.finished.iter().cloned().chain(outcome.finished));
        engine.check();
        batch
    };
    let arrays = &batch.arrays;
    let is_own = |id: u64| client.sequences.contains(&id);
    let rows = (0..arrays.sequence_ids.len()).filter(|&row| is_own(arrays.sequence_ids[row])).map(|row| {
        let (start, end) = (arrays.query_start[row], arrays.query_start[row + 1]);
        (arrays.sequence_ids[row], arrays.positions[start as usize], end - start)
    });
    let ended = engine
        .finished
        .values()
        .filter(|finished| Arc::ptr_eq(&finished.tenant, &client.tenant) && !before.contains(&finished.id));
    let mut ended: Vec<String> = ended
        .map(|finished| {
            format!(
                "{} {} {:?} {} {} {} {} {} {} {:?}",
                finished.id,
                finished.branch,
                finished.reason,
                finished.prompt_tokens,
                finished.cached_tokens,
                finished.output_tokens,
                finished.steps,
                finished.queue_steps,
                finished.preemptions,
                engine.outputs.get(&finished.id),
            )
        })
        .collect();
    ended.sort();
    let rows = rows.collect();
    (batch, rows, ended)
}

/// The trace of tenant `v` over a run in which others do `noise`, with their tokens shifted by `salt`.
pub fn trace(
    config: &SchedulerConfig,
    isolation: Isolation,
    own: &[Vec<Act>],
    noise: &[Vec<Act>],
    salt: u32,
) -> Vec<Seen> {
    run(NUM_BLOCKS, config, isolation, own, noise, salt).0
}

/// The most that tenants which are not strict had at once of what is shared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peak {
    pub tokens: u64,
    pub rows: u64,
    pub waiting: u64,
    pub waiting_tokens: u64,
    pub blocks: u64,
    pub host_blocks: u64,
}

impl Peak {
    fn note(&mut self, engine: &Engine, others: &[Client], batch: &Batch) {
        let common: Vec<&Client> =
            others.iter().filter(|other| other.tenant.isolation != Isolation::Strict).collect();
        let arrays = &batch.arrays;
        let is_common = |row: &usize| common.iter().any(|o| o.sequences.contains(&arrays.sequence_ids[*row]));
        let rows: Vec<usize> = (0..arrays.sequence_ids.len()).filter(is_common).collect();
        let tokens =
            rows.iter().map(|&row| arrays.query_start[row + 1] - arrays.query_start[row]).sum::<i32>();
        let sum = |count: &dyn Fn(&Client) -> u64| common.iter().map(|other| count(other)).sum::<u64>();
        let committed =
            |other: &Client| engine.pool.account_stats(other.tenant.account).expect("its account");
        let host = engine.scheduler.host_pool().map_or(0, |host| host.stats().capacity - host.stats().free);
        self.tokens = self.tokens.max(tokens as u64);
        self.rows = self.rows.max(rows.len() as u64);
        self.waiting = self.waiting.max(sum(&|other| u64::from(other.tenant.num_waiting())));
        self.waiting_tokens = self.waiting_tokens.max(sum(&|other| other.tenant.num_waiting_tokens()));
        self.blocks = self.blocks.max(sum(&|other| committed(other).committed));
        self.host_blocks = self.host_blocks.max(host);
    }
}

pub fn run(
    num_blocks: u32,
    config: &SchedulerConfig,
    isolation: Isolation,
    own: &[Vec<Act>],
    noise: &[Vec<Act>],
    salt: u32,
) -> (Vec<Seen>, Peak) {
    let mut engine = Engine::new(num_blocks, config.clone(), true);
    let quota = if isolation == Isolation::Strict { (16, 16) } else { (0, num_blocks) };
    let mut client = add(&engine, "v", isolation, quota);
    let mut others = [
        add(&engine, "w", Isolation::Strict, (8, 8)),
        add(&engine, "a", Isolation::Scoped, (0, num_blocks)),
        add(&engine, "b", Isolation::Open, (4, num_blocks)),
    ];
    let (mut trace, mut peak) = (Vec::new(), Peak::default());
    for step in 0..own.len() + 12 {
        let acts = own.get(step).map_or(&[][..], Vec::as_slice);
        let around = noise.get(step).map_or(&[][..], Vec::as_slice);
        let mut noise = around.iter().enumerate();
        let mut answers = Vec::new();
        for act in acts {
            if let Some((i, other)) = noise.next() {
                others[i % 3].act(&mut engine, other, salt);
            }
            answers.push(client.act(&mut engine, act, 0));
        }
        for (i, other) in noise {
            others[i % 3].act(&mut engine, other, salt);
        }
        let (batch, rows, ended) = turn(&mut engine, step + 1, &client);
        peak.note(&engine, &others, &batch);
        trace.push(Seen {
            answers,
            rows,
            ended,
            waiting: (client.tenant.num_waiting(), client.tenant.num_waiting_tokens()),
            kept: client.tenant.num_kept_blocks(),
            account: engine.pool.account_stats(client.tenant.account).expect("its account"),
        });
    }
    (trace, peak)
}

/// The first step of two runs in which the tenant sees something else.
pub fn difference(one: &[Seen], other: &[Seen]) -> Option<String> {
    let differs = one.iter().zip(other).position(|(one, other)| one != other);
    differs.map(|step| format!("step {}:\n{:?}\n{:?}", step + 1, one[step], other[step]))
}

pub fn policy() -> impl Strategy<Value = AdmissionPolicy> {
    prop::sample::select(vec![
        AdmissionPolicy::Reserve,
        AdmissionPolicy::Watermark { free_share: 0.0 },
        AdmissionPolicy::Forecast(ForecastConfig { free_share: 0.0, deviations: 0.0, growth_spread: 0.0 }),
        AdmissionPolicy::Forecast(ForecastConfig::default()),
    ])
}

/// Mostly one full group; else windows with one, or windows alone.
pub fn groups() -> impl Strategy<Value = Box<[Span]>> {
    prop_oneof![
        2 => Just(vec![Span::Full]),
        1 => Just(vec![Span::Full, Span::Sliding(6)]),
        1 => Just(vec![Span::Sliding(7)]),
        1 => Just(vec![Span::Chunked(8), Span::Sliding(5)]),
    ]
    .prop_map(Vec::into_boxed_slice)
}

pub fn setting(policy: AdmissionPolicy, host_blocks: u32, chunk: u32, open: u32) -> SchedulerConfig {
    let mut config = config(4);
    config.max_running = 10;
    config.max_batch_tokens = 32;
    config.max_prefill_chunk = chunk;
    config.max_open_steps = if host_blocks > 0 { 1 } else { open };
    config.queue = QueueLimits { max_requests: 10, max_tokens: 140 };
    config.max_bypass = 2;
    config.max_bypass_steps = 6;
    config.policy = policy;
    config.overflow = if host_blocks > 0 { Overflow::Swap } else { Overflow::Auto };
    config.host_tier =
        HostTierConfig { num_blocks: host_blocks, max_token_gap: 1.0, ..HostTierConfig::default() };
    config
}

/// A tenant that asks for one long prompt again and again.
pub fn regular(steps: usize) -> Vec<Vec<Act>> {
    let submit = Act::Submit {
        family: 1,
        length: 23,
        max_tokens: 3,
        n: 1,
        priority: 0,
        deadline: None,
        retention: None,
    };
    (0..steps).map(|step| if step % 8 == 0 { vec![submit.clone()] } else { Vec::new() }).collect()
}

/// Others that ask for as much as their queues take, always something else.
pub fn flood(steps: usize, length: u32, max_tokens: u32) -> Vec<Vec<Act>> {
    let submit = |step: usize| Act::Submit {
        family: step as u32,
        length,
        max_tokens,
        n: 1,
        priority: 0,
        deadline: None,
        retention: None,
    };
    (0..steps).map(|step| (0..9).map(|i| submit(step * 9 + i)).collect()).collect()
}
