//! Counts of a run, and the JSON object that they make.

use super::active::Active;
use super::burst::Bursts;
use super::config::ReplayConfig;
use super::fairness::ServiceGaps;
use super::measure::{CONTEXT_CLASSES, Latencies, MemoryOverTime, Quantiles, StepMemory, round};
use crate::block_pool::PoolStats;
use crate::scheduler::{FinishReason, FinishedRequest, SchedulerStats};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// One tenant's share of a run.
struct TenantRecord {
    latencies: Latencies,
    finished: u64,
    prompt_tokens: u64,
    hit_tokens: u64,
    output_tokens: u64,
    service: u64,
}

/// Everything that a run counts.
pub(super) struct Record {
    requests: u64,
    finished: u64,
    refused: BTreeMap<&'static str, u64>,
    first_refusal: Option<String>,
    ended_otherwise: BTreeMap<&'static str, u64>,
    cut_outputs: u64,
    /// Tokens computed again, or for requests that did not end as wanted.
    lost_tokens: u64,
    lookup_blocks: u64,
    hit_blocks: u64,
    prompt_tokens: u64,
    hit_tokens: u64,
    output_tokens: u64,
    preempted_requests: u64,
    swapped_tokens: u64,
    steps: u64,
    empty_steps: u64,
    worst_token_gap: f64,
    overall: Latencies,
    by_context: Vec<Latencies>,
    tenants: Vec<TenantRecord>,
    bursts: Bursts,
    gaps: ServiceGaps,
    /// Of the current step: service of each tenant, and whether it had requests waiting.
    served: Vec<u64>,
    backlogged: Vec<bool>,
    memory: MemoryOverTime,
    step_nanoseconds: Quantiles,
    step_time: Duration,
}

impl Record {
    pub(super) fn new(num_tenants: usize) -> Self {
        let tenant = || TenantRecord {
            latencies: Latencies::new(),
            finished: 0,
            prompt_tokens: 0,
            hit_tokens: 0,
            output_tokens: 0,
            service: 0,
        };
        Self {
            requests: 0,
            finished: 0,
            refused: BTreeMap::new(),
            first_refusal: None,
            ended_otherwise: BTreeMap::new(),
            cut_outputs: 0,
            lost_tokens: 0,
            lookup_blocks: 0,
            hit_blocks: 0,
            prompt_tokens: 0,
            hit_tokens: 0,
            output_tokens: 0,
            preempted_requests: 0,
            swapped_tokens: 0,
            steps: 0,
            empty_steps: 0,
            worst_token_gap: 0.0,
            overall: Latencies::new(),
            by_context: CONTEXT_CLASSES.iter().map(|_| Latencies::new()).collect(),
            tenants: (0..num_tenants).map(|_| tenant()).collect(),
            bursts: Bursts::new(),
            gaps: ServiceGaps::new(num_tenants),
            served: vec![0; num_tenants],
            backlogged: vec![false; num_tenants],
            memory: MemoryOverTime::new(),
            step_nanoseconds: Quantiles::new(1e-3),
            step_time: Duration::ZERO,
        }
    }

    pub(super) fn finished(&self) -> u64 {
        self.finished + self.ended_otherwise.values().sum::<u64>() + self.refused.values().sum::<u64>()
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    pub(super) fn note_arrival(&mut self, time: f64) {
        self.bursts.arrive(time);
    }

    pub(super) fn note_request(&mut self, was_cut: bool) {
        self.requests += 1;
        self.cut_outputs += u64::from(was_cut);
    }

    /// Notes who has requests waiting as a step begins.
    pub(super) fn note_backlog(&mut self, is_backlogged: impl Fn(usize) -> bool) {
        for (tenant, backlogged) in self.backlogged.iter_mut().enumerate() {
            *backlogged = is_backlogged(tenant);
        }
        self.served.fill(0);
    }

    /// Notes service that the current step gives a tenant, as the scheduler counts it: tokens computed and blocks
    /// held.
    pub(super) fn note_service(&mut self, tenant: u32, service: u64) {
        self.served[tenant as usize] += service;
        self.tenants[tenant as usize].service += service;
    }

    /// Notes a refusal of a kind; the first one is kept in the scheduler's words.
    pub(super) fn note_refusal(&mut self, arrival: f64, kind: &'static str, reason: String) {
        self.bursts.refuse(arrival);
        *self.refused.entry(kind).or_insert(0) += 1;
        self.first_refusal.get_or_insert(reason);
    }

    /// Notes a request that ended while `held` blocks were held.
    pub(super) fn note_end(
        &mut self,
        ended: &FinishedRequest,
        request: &Active,
        config: &ReplayConfig,
        held: u64,
    ) {
        let as_wanted = matches!(ended.reason, FinishReason::Stop | FinishReason::Length);
        let lost = request.lost_tokens(ended.cached_tokens, as_wanted);
        self.lost_tokens += lost;
        self.bursts.end(ended, request, as_wanted, lost, held);
        if !as_wanted {
            *self.ended_otherwise.entry(ended.reason.name()).or_insert(0) += 1;
            return;
        }
        self.finished += 1;
        let (prompt, hit) = (u64::from(ended.prompt_tokens), u64::from(ended.cached_tokens));
        let output = u64::from(ended.output_tokens);
        self.prompt_tokens += prompt;
        self.output_tokens += output;
        if config.reuse {
            self.lookup_blocks += prompt / u64::from(config.block_size);
            self.hit_blocks += hit / u64::from(config.block_size);
            self.hit_tokens += hit;
        }
        self.preempted_requests += u64::from(ended.preemptions > 0);
        self.worst_token_gap = self.worst_token_gap.max(request.worst_gap);
        self.overall.record(request);
        let class = CONTEXT_CLASSES.partition_point(|&limit| limit < request.prompt_tokens);
        self.by_context[class].record(request);
        let tenant = &mut self.tenants[request.tenant as usize];
        tenant.latencies.record(request);
        tenant.finished += 1;
        tenant.prompt_tokens += prompt;
        tenant.hit_tokens += hit;
        tenant.output_tokens += output;
    }

    /// Notes a step that took `seconds` of virtual time and `wall` in the scheduler.
    pub(super) fn note_step(
        &mut self,
        (now, seconds, wall): (f64, f64, Duration),
        pool: PoolStats,
        step: StepMemory,
        swapped_blocks: u64,
        block_size: u32,
    ) {
        self.steps += 1;
        self.empty_steps += u64::from(step.num_sequences == 0);
        self.swapped_tokens += swapped_blocks * u64::from(block_size);
        self.step_nanoseconds.record(wall.as_nanos() as u64, 1);
        self.step_time += wall;
        self.gaps.record(&self.served, &self.backlogged);
        self.memory.record(now, seconds, pool, step, block_size);
    }

    pub(super) fn report(
        &self,
        config: &ReplayConfig,
        virtual_time: f64,
        pool: PoolStats,
        scheduler: SchedulerStats,
    ) -> Value {
        let mut object = self.counts(config, scheduler);
        let busy = self.step_time.as_secs_f64();
        let more = json!({
            "virtual_time": round(virtual_time),
            "worst_token_gap": round(self.worst_token_gap),
            "peak_held": pool.peak_held,
            "mean_held": round(self.memory.mean_held()),
            "batch_size": self.memory.batch_report(),
            "memory": self.memory.report(pool.peak_held),
            "out_of_memory": self.memory.over_capacity(),
            "out_of_memory_if_short": self.memory.overrun_report(),
            "latency": self.overall.report(),
            "latency_by_context": self.contexts(),
            "tenants": self.tenant_reports(config),
            "burst": self.bursts.report(),
            "timeline": self.memory.timeline(),
            "step_us": self.step_nanoseconds.report(),
            "scheduler_time": round(busy),
            "steps_per_second": if busy > 0.0 { round(self.steps as f64 / busy) } else { 0.0 },
        });
        if let Value::Object(more) = more {
            object.extend(more);
        }
        Value::Object(object)
    }

    fn counts(&self, config: &ReplayConfig, scheduler: SchedulerStats) -> Map<String, Value> {
        let value = json!({
            "policy": config.policy.name(),
            "block_size": config.block_size,
            "blocks": config.num_blocks,
            "requests": self.requests,
            "finished": self.finished,
            "refused": self.refused,
            "first_refusal": self.first_refusal,
            "ended_otherwise": self.ended_otherwise,
            "cut_outputs": self.cut_outputs,
            "lookup_blocks": self.lookup_blocks,
            "hit_blocks": self.hit_blocks,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "output_tokens": self.output_tokens,
            "preempted_requests": self.preempted_requests,
            "preemptions": scheduler.num_preemptions,
            "recomputed_tokens": scheduler.recomputed_tokens,
            "lost_tokens": self.lost_tokens,
            "swapped_tokens": self.swapped_tokens,
            "steps": self.steps,
            "empty_steps": self.empty_steps,
        });
        if let Value::Object(map) = value { map } else { Map::new() }
    }

    fn contexts(&self) -> Value {
        let row = |(latencies, &limit): (&Latencies, &u32)| {
            let at_most = if limit == u32::MAX { Value::Null } else { json!(limit) };
            json!({"prompt_tokens_at_most": at_most, "latency": latencies.report()})
        };
        self.by_context.iter().zip(&CONTEXT_CLASSES).map(row).collect()
    }

    fn tenant_reports(&self, config: &ReplayConfig) -> Value {
        let row = |(number, (tenant, name)): (usize, (&TenantRecord, &String))| {
            json!({
                "tenant": name,
                "finished": tenant.finished,
                "prompt_tokens": tenant.prompt_tokens,
                "hit_tokens": tenant.hit_tokens,
                "output_tokens": tenant.output_tokens,
                "service": tenant.service,
                "worst_service_gap": self.gaps.worst(number),
                "latency": tenant.latencies.report(),
            })
        };
        self.tenants.iter().zip(&config.tenants).enumerate().map(row).collect()
    }
}
