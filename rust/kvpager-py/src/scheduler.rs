//! Bindings of `kvpager_core::scheduler`.

use crate::args::{int, int_of, optional_int, optional_int_of};
use crate::arrays::{read_ints, read_tokens};
use crate::batch::{PyBatch, PyGroupBatch};
use crate::block_pool::PyBlockPool;
use crate::error::{IntoPyResult, invalid};
use crate::fork::Home;
use crate::kinds::{flag, instance, number, optional_bytes, optional_instance, optional_number, text};
use crate::phases::PyPhaseTimes;
use crate::prefix_index::{PyFingerprint, PyPrefixIndex};
use crate::retention::PyRetention;
use crate::session::PySession;
use crate::snapshot::PySchedulerSnapshot;
use kvpager_core::prefix_index::{Isolation, Item};
use kvpager_core::scheduler::{
    AdmissionPolicy, CommitOutcome, Deadline, FinishedRequest, HostTierConfig, Overflow, QueueLimits,
    Request, Retention, Scheduler, SchedulerConfig, SchedulerStats, Share, Sharing, Tenant, TenantConfig,
    TenantScope, ZeroBlocks,
};
use kvpager_core::{SequenceId, StepId};
use pyo3::prelude::*;
use std::sync::Arc;

const MAX_U32: u64 = u32::MAX as u64;
const MAX_U64: u64 = u64::MAX;
const MAX_TOKENS: u64 = kvpager_core::scheduler::MAX_TOKENS as u64;
const MAX_OPEN_STEPS: u64 = kvpager_core::block_pool::MAX_OPEN_STEPS as u64;

/// A tenant of one scheduler: the handle that requests are submitted with.
#[pyclass(name = "Tenant", module = "kvpager._core", frozen)]
pub(crate) struct PyTenant(pub(crate) Arc<Tenant>);

#[pymethods]
impl PyTenant {
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    #[getter]
    fn account(&self) -> u32 {
        self.0.account.0
    }

    #[getter]
    fn weight(&self) -> f64 {
        self.0.weight
    }

    #[getter]
    fn num_waiting(&self) -> u32 {
        self.0.num_waiting()
    }

    #[getter]
    fn num_kept_blocks(&self) -> u64 {
        self.0.num_kept_blocks()
    }

    #[getter]
    fn max_running(&self) -> Option<u32> {
        self.0.max_running()
    }

    #[getter]
    fn num_waiting_tokens(&self) -> u64 {
        self.0.num_waiting_tokens()
    }

    #[getter]
    fn max_waiting(&self) -> Option<u32> {
        self.0.max_waiting()
    }

    #[getter]
    fn isolation(&self) -> &'static str {
        self.0.isolation.name()
    }

    #[getter]
    fn scope(&self) -> &'static str {
        self.0.scope().name()
    }

    #[getter]
    fn namespace(&self) -> Option<u32> {
        self.0.namespace().map(|id| id.0)
    }

    fn __repr__(&self) -> String {
        format!("Tenant({:?})", self.0.name)
    }
}

/// The account of an ended request.
#[pyclass(name = "FinishedRequest", module = "kvpager._core", frozen)]
pub(crate) struct PyFinishedRequest(FinishedRequest);

impl PyFinishedRequest {
    pub(crate) const fn new(finished: FinishedRequest) -> Self {
        Self(finished)
    }
}

#[pymethods]
impl PyFinishedRequest {
    #[getter]
    fn request_id(&self) -> u64 {
        self.0.id.0 - u64::from(self.0.branch)
    }

    #[getter]
    fn sequence_id(&self) -> u64 {
        self.0.id.0
    }

    #[getter]
    fn branch(&self) -> u32 {
        self.0.branch
    }

    #[getter]
    fn tenant(&self) -> PyTenant {
        PyTenant(Arc::clone(&self.0.tenant))
    }

    #[getter]
    fn reason(&self) -> &'static str {
        self.0.reason.name()
    }

    #[getter]
    fn detail(&self) -> Option<&str> {
        self.0.detail.as_deref()
    }

    #[getter]
    fn prompt_tokens(&self) -> u32 {
        self.0.prompt_tokens
    }

    #[getter]
    fn cached_tokens(&self) -> u32 {
        self.0.cached_tokens
    }

    #[getter]
    fn output_tokens(&self) -> u32 {
        self.0.output_tokens
    }

    #[getter]
    fn steps(&self) -> u64 {
        self.0.steps
    }

    #[getter]
    fn queue_steps(&self) -> u64 {
        self.0.queue_steps
    }

    #[getter]
    fn preemptions(&self) -> u64 {
        self.0.preemptions
    }

    fn __repr__(&self) -> String {
        let (id, branch, reason) = (self.request_id(), self.0.branch, self.reason());
        format!("FinishedRequest(request_id={id}, branch={branch}, reason={reason:?})")
    }
}

/// What the end of a step did.
#[pyclass(name = "CommitOutcome", module = "kvpager._core", frozen)]
pub(crate) struct PyCommitOutcome(CommitOutcome);

#[pymethods]
impl PyCommitOutcome {
    #[getter]
    fn finished(&self) -> Vec<PyFinishedRequest> {
        self.0.finished.iter().cloned().map(PyFinishedRequest).collect()
    }

    #[getter]
    fn dropped_tokens(&self) -> u64 {
        self.0.dropped_tokens
    }
}

/// Counts of a scheduler.
#[pyclass(name = "SchedulerStats", module = "kvpager._core", frozen)]
pub(crate) struct PySchedulerStats(pub(crate) SchedulerStats);

#[pymethods]
impl PySchedulerStats {
    #[getter]
    fn num_running(&self) -> u64 {
        self.0.num_running
    }

    #[getter]
    fn num_waiting(&self) -> u64 {
        self.0.num_waiting
    }

    #[getter]
    fn steps(&self) -> u64 {
        self.0.steps
    }

    #[getter]
    fn computed_tokens(&self) -> u64 {
        self.0.computed_tokens
    }

    #[getter]
    fn dropped_tokens(&self) -> u64 {
        self.0.dropped_tokens
    }

    #[getter]
    fn recomputed_tokens(&self) -> u64 {
        self.0.recomputed_tokens
    }

    #[getter]
    fn num_preemptions(&self) -> u64 {
        self.0.num_preemptions
    }

    #[getter]
    fn num_parked(&self) -> u64 {
        self.0.num_parked
    }

    #[getter]
    fn swapped_out_blocks(&self) -> u64 {
        self.0.swapped_out_blocks
    }

    #[getter]
    fn swapped_in_blocks(&self) -> u64 {
        self.0.swapped_in_blocks
    }

    #[getter]
    fn num_paused(&self) -> u64 {
        self.0.num_paused
    }

    #[getter]
    fn num_forced_out(&self) -> u64 {
        self.0.num_forced_out
    }

    #[getter]
    fn num_sessions_kept(&self) -> u64 {
        self.0.num_sessions_kept
    }

    #[getter]
    fn num_retained(&self) -> u64 {
        self.0.num_retained
    }

    #[getter]
    fn num_kept_blocks(&self) -> u64 {
        self.0.num_kept_blocks
    }

    fn __repr__(&self) -> String {
        format!(
            "SchedulerStats(num_running={}, num_waiting={}, steps={})",
            self.0.num_running, self.0.num_waiting, self.0.steps
        )
    }
}

/// The scheduler of one engine.
#[pyclass(name = "Scheduler", module = "kvpager._core", frozen)]
pub(crate) struct PyScheduler(Arc<Scheduler>, Home);

impl PyScheduler {
    /// The scheduler, unless this is a child of its process.
    fn here(&self) -> PyResult<&Scheduler> {
        self.1.check()?;
        Ok(&self.0)
    }
}

impl Drop for PyScheduler {
    fn drop(&mut self) {
        if self.1.check().is_err() {
            // The parent's pins are released under locks that may be taken here for ever.
            std::mem::forget(Arc::clone(&self.0));
        }
    }
}

#[pymethods]
impl PyScheduler {
    #[new]
    #[pyo3(signature = (pool, index=None, *, block_size=16, max_batch_tokens=512, max_running=64,
        max_model_tokens=8192, layer_groups=None, max_waiting=1024, max_waiting_tokens=None, ageing_steps=1024,
        max_open_steps=1,
        max_prefill_chunk=None, policy="reserve",
        urgent_preempts=false, max_bypass=64, max_bypass_steps=4096, max_bypass_seconds=300.0, zero_blocks="on_tenant_change",
        overflow="auto", host_blocks=0,
        kv_bytes_per_block=2_097_152, link_bytes_per_second=25e9, prefill_tokens_per_second=25e3,
        max_token_gap=1.4))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python constructor")]
    fn new(
        #[pyo3(from_py_with = instance)] pool: &PyBlockPool,
        #[pyo3(from_py_with = optional_instance)] index: Option<&PyPrefixIndex>,
        #[pyo3(from_py_with = int_of::<1, MAX_U32, _>)] block_size: u32,
        #[pyo3(from_py_with = int_of::<1, MAX_TOKENS, _>)] max_batch_tokens: u32,
        #[pyo3(from_py_with = int_of::<1, MAX_TOKENS, _>)] max_running: u32,
        #[pyo3(from_py_with = int_of::<1, MAX_TOKENS, _>)] max_model_tokens: u32,
        layer_groups: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = int_of::<1, MAX_U32, _>)] max_waiting: u32,
        #[pyo3(from_py_with = optional_int_of::<1, MAX_U64, _>)] max_waiting_tokens: Option<u64>,
        #[pyo3(from_py_with = int)] ageing_steps: u32,
        #[pyo3(from_py_with = int_of::<1, MAX_OPEN_STEPS, _>)] max_open_steps: u32,
        #[pyo3(from_py_with = optional_int_of::<1, MAX_U32, _>)] max_prefill_chunk: Option<u32>,
        #[pyo3(from_py_with = text)] policy: &str,
        #[pyo3(from_py_with = flag)] urgent_preempts: bool,
        #[pyo3(from_py_with = int)] max_bypass: u32,
        #[pyo3(from_py_with = int)] max_bypass_steps: u64,
        #[pyo3(from_py_with = number)] max_bypass_seconds: f64,
        #[pyo3(from_py_with = text)] zero_blocks: &str,
        #[pyo3(from_py_with = text)] overflow: &str,
        #[pyo3(from_py_with = int)] host_blocks: u32,
        #[pyo3(from_py_with = int)] kv_bytes_per_block: u64,
        #[pyo3(from_py_with = number)] link_bytes_per_second: f64,
        #[pyo3(from_py_with = number)] prefill_tokens_per_second: f64,
        #[pyo3(from_py_with = number)] max_token_gap: f64,
    ) -> PyResult<Self> {
        if max_prefill_chunk == Some(0) {
            return Err(invalid("max_prefill_chunk is 0, must be at least 1 or None for no limit"));
        }
        let config = SchedulerConfig {
            block_size,
            layer_groups: crate::layer_groups::read(layer_groups)?,
            max_batch_tokens,
            max_running,
            max_model_tokens,
            queue: queue_limits(Some(max_waiting), max_waiting_tokens),
            ageing_steps,
            max_open_steps,
            max_prefill_chunk: max_prefill_chunk.unwrap_or(0),
            urgent_preempts,
            max_bypass,
            max_bypass_steps,
            max_bypass_seconds,
            policy: AdmissionPolicy::from_name(policy).py()?,
            zero_blocks: ZeroBlocks::from_name(zero_blocks).py()?,
            overflow: Overflow::from_name(overflow).py()?,
            host_tier: HostTierConfig {
                num_blocks: host_blocks,
                bytes_per_block: kv_bytes_per_block,
                link_bytes_per_second,
                prefill_tokens_per_second,
                max_token_gap,
            },
        };
        let index = index.map(|index| index.index().cloned()).transpose()?;
        Ok(Self(Arc::new(Scheduler::new(Arc::clone(pool.here()?), index, config).py()?), Home::here()))
    }

    #[pyo3(signature = (name, *, guaranteed=0, limit=None, weight=1.0, fingerprint=None, isolation="scoped",
        scope="private", group=None, public=None, max_waiting=None, max_waiting_tokens=None, max_running=None,
        max_batch_tokens=None, max_kept_blocks=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python method")]
    fn add_tenant(
        &self,
        #[pyo3(from_py_with = text)] name: &str,
        #[pyo3(from_py_with = int)] guaranteed: u32,
        #[pyo3(from_py_with = optional_int)] limit: Option<u32>,
        #[pyo3(from_py_with = number)] weight: f64,
        #[pyo3(from_py_with = optional_instance)] fingerprint: Option<&PyFingerprint>,
        #[pyo3(from_py_with = text)] isolation: &str,
        #[pyo3(from_py_with = text)] scope: &str,
        #[pyo3(from_py_with = optional_instance)] group: Option<&PyTenant>,
        #[pyo3(from_py_with = optional_instance)] public: Option<&PyTenant>,
        #[pyo3(from_py_with = optional_int)] max_waiting: Option<u32>,
        #[pyo3(from_py_with = optional_int)] max_waiting_tokens: Option<u64>,
        #[pyo3(from_py_with = optional_int)] max_running: Option<u32>,
        #[pyo3(from_py_with = optional_int)] max_batch_tokens: Option<u32>,
        #[pyo3(from_py_with = optional_int)] max_kept_blocks: Option<u32>,
    ) -> PyResult<PyTenant> {
        let isolation = isolation.parse().py()?;
        let default_limit = if isolation == Isolation::Strict { guaranteed } else { self.0.num_blocks() };
        let config = TenantConfig {
            name: name.to_owned(),
            guaranteed_blocks: guaranteed,
            limit_blocks: limit.unwrap_or(default_limit),
            weight,
            fingerprint: fingerprint.map(|fingerprint| fingerprint.inner.clone()).unwrap_or_default(),
            queue: queue_limits(max_waiting, max_waiting_tokens),
            share: Share { max_running, max_batch_tokens },
            max_kept_blocks,
            sharing: Sharing {
                isolation,
                scope: TenantScope::from_name(scope).py()?,
                group: group.map(|tenant| Arc::clone(&tenant.0)),
                public: public.map(|tenant| Arc::clone(&tenant.0)),
            },
        };
        Ok(PyTenant(self.here()?.add_tenant(&config).py()?))
    }

    #[pyo3(signature = (tenant, prompt_ids, *, max_tokens=64, min_tokens=0, stop_token_ids=None, priority=0,
        reuse=true, partial=false, salt=None, items=None, deadline_steps=None, deadline_seconds=None, n=1,
        session=None, retention=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python method")]
    fn submit(
        &self,
        #[pyo3(from_py_with = instance)] tenant: &PyTenant,
        prompt_ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = int_of::<1, MAX_U32, _>)] max_tokens: u32,
        #[pyo3(from_py_with = int)] min_tokens: u32,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = int)] priority: i32,
        #[pyo3(from_py_with = flag)] reuse: bool,
        #[pyo3(from_py_with = flag)] partial: bool,
        #[pyo3(from_py_with = optional_bytes)] salt: Option<Vec<u8>>,
        #[pyo3(from_py_with = crate::prefix_index::optional_items)] items: Option<Vec<Item>>,
        #[pyo3(from_py_with = optional_int)] deadline_steps: Option<u64>,
        #[pyo3(from_py_with = optional_number)] deadline_seconds: Option<f64>,
        #[pyo3(from_py_with = int_of::<1, MAX_U32, _>)] n: u32,
        #[pyo3(from_py_with = optional_instance)] session: Option<&PySession>,
        #[pyo3(from_py_with = optional_instance)] retention: Option<&PyRetention>,
    ) -> PyResult<u64> {
        let stop_token_ids = match stop_token_ids {
            Some(ids) => read_tokens(ids, "stop_token_ids")?,
            None => Vec::new(),
        };
        let request = Request {
            tenant: Arc::clone(&tenant.0),
            prompt: read_tokens(prompt_ids, "prompt_ids")?,
            max_tokens,
            min_tokens,
            stop_token_ids,
            priority,
            reuse,
            partial,
            deadline: Deadline { steps: deadline_steps, seconds: deadline_seconds },
            n,
            session: session.map(|session| Arc::clone(&session.0)),
            retention: retention.map(|retention| retention.0),
            salt,
            items: items.unwrap_or_default(),
        };
        Ok(self.here()?.submit(request).py()?.0)
    }

    #[pyo3(signature = (tenant, *, idle_steps=None, idle_seconds=None, priority=0))]
    fn open_session(
        &self,
        #[pyo3(from_py_with = instance)] tenant: &PyTenant,
        #[pyo3(from_py_with = optional_int)] idle_steps: Option<u64>,
        #[pyo3(from_py_with = optional_number)] idle_seconds: Option<f64>,
        #[pyo3(from_py_with = int)] priority: i32,
    ) -> PyResult<PySession> {
        let limit = Deadline { steps: idle_steps, seconds: idle_seconds };
        let retention = Retention { limit, num_tokens: None, priority };
        Ok(PySession(self.here()?.open_session(&tenant.0, retention).py()?))
    }

    fn close_session(&self, #[pyo3(from_py_with = instance)] session: &PySession) -> PyResult<bool> {
        Ok(self.here()?.close_session(&session.0))
    }

    /// Tokens computed and blocks x steps held, over the tenant's weight.
    fn service(&self, #[pyo3(from_py_with = instance)] tenant: &PyTenant) -> PyResult<f64> {
        self.here()?.service(&tenant.0).py()
    }

    fn unpublish(&self, #[pyo3(from_py_with = instance)] tenant: &PyTenant) -> PyResult<usize> {
        self.here()?.unpublish(&tenant.0).py()
    }

    fn abort(&self, #[pyo3(from_py_with = int)] request_id: u64) -> PyResult<bool> {
        self.here()?.abort(SequenceId(request_id)).py()
    }

    fn pause(&self, #[pyo3(from_py_with = int)] request_id: u64) -> PyResult<bool> {
        self.here()?.pause(SequenceId(request_id)).py()
    }

    fn resume(&self, #[pyo3(from_py_with = int)] request_id: u64) -> PyResult<bool> {
        self.here()?.resume(SequenceId(request_id)).py()
    }

    #[pyo3(signature = (request_id, count=1))]
    fn fork(
        &self,
        #[pyo3(from_py_with = int)] request_id: u64,
        #[pyo3(from_py_with = int)] count: u32,
    ) -> PyResult<Vec<u64>> {
        let forked = self.here()?.fork(SequenceId(request_id), count).py()?;
        Ok(forked.into_iter().map(|id| id.0).collect())
    }

    fn reorder(
        &self,
        sequence_ids: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let read =
            |ids, name| Ok::<_, PyErr>(read_ints::<u64>(ids, name)?.into_iter().map(SequenceId).collect());
        let ids: Vec<SequenceId> = read(sequence_ids, "sequence_ids")?;
        let parents: Vec<SequenceId> = read(parents, "parents")?;
        self.here()?.reorder(&ids, &parents, &read_tokens::<i32>(tokens, "tokens")?).py()
    }

    fn propose(
        &self,
        sequence_ids: &Bound<'_, PyAny>,
        draft_start: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let ids = read_ints::<u64>(sequence_ids, "sequence_ids")?.into_iter().map(SequenceId);
        let draft_start = read_ints::<i32>(draft_start, "draft_start")?;
        let tokens = read_tokens::<i32>(tokens, "tokens")?;
        self.here()?.propose(&ids.collect::<Vec<_>>(), &draft_start, &tokens).py()
    }

    fn draft_counts(&self) -> PyResult<(Vec<u64>, Vec<u64>)> {
        let counts = self.here()?.draft_counts().py()?;
        Ok((counts.verified, counts.accepted))
    }

    #[pyo3(signature = (*, deadline_steps=None, deadline_seconds=None))]
    fn drain(
        &self,
        #[pyo3(from_py_with = optional_int)] deadline_steps: Option<u64>,
        #[pyo3(from_py_with = optional_number)] deadline_seconds: Option<f64>,
    ) -> PyResult<()> {
        self.here()?.drain(Deadline { steps: deadline_steps, seconds: deadline_seconds }).py()
    }

    #[pyo3(signature = (*, requeue_running=false))]
    fn reset_cache(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = flag)] requeue_running: bool,
    ) -> PyResult<(u32, u32)> {
        let scheduler = self.here()?;
        let reset = py.detach(|| scheduler.reset_cache(requeue_running)).py()?;
        Ok((reset.num_evicted, reset.num_requeued))
    }

    #[pyo3(signature = (*, pad_to=0, now=None))]
    fn step(
        &self,
        #[pyo3(from_py_with = int)] pad_to: usize,
        #[pyo3(from_py_with = optional_number)] now: Option<f64>,
    ) -> PyResult<PyBatch> {
        let batch = match now {
            Some(now) => self.here()?.step_at(pad_to, now),
            None => self.here()?.step(pad_to),
        };
        Ok(PyBatch::new(batch.py()?, Arc::clone(&self.0)))
    }

    fn commit(
        &self,
        #[pyo3(from_py_with = int)] step_id: u64,
        token_start: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<PyCommitOutcome> {
        let token_start = read_ints::<i32>(token_start, "token_start")?;
        let tokens = read_tokens::<i32>(tokens, "tokens")?;
        Ok(PyCommitOutcome(self.here()?.commit(StepId(step_id), &token_start, &tokens).py()?))
    }

    #[pyo3(signature = (step_id, reason, *, fail=false))]
    fn abandon(
        &self,
        #[pyo3(from_py_with = int)] step_id: u64,
        #[pyo3(from_py_with = text)] reason: &str,
        #[pyo3(from_py_with = flag)] fail: bool,
    ) -> PyResult<PyCommitOutcome> {
        Ok(PyCommitOutcome(self.here()?.abandon(StepId(step_id), reason, fail).py()?))
    }

    fn has_work(&self) -> PyResult<bool> {
        self.here()?.has_work().py()
    }

    #[pyo3(signature = (*, max_spans=0))]
    fn begin_phases(&self, #[pyo3(from_py_with = int)] max_spans: usize) -> PyResult<()> {
        self.here()?.begin_phases(max_spans).py()
    }

    fn end_phases(&self) -> PyResult<Option<PyPhaseTimes>> {
        Ok(self.here()?.end_phases().py()?.map(PyPhaseTimes::new))
    }

    fn snapshot(&self, py: Python<'_>) -> PyResult<PySchedulerSnapshot> {
        let scheduler = self.here()?;
        let first = scheduler.read_once().py()?;
        if first.is_exact {
            return Ok(PySchedulerSnapshot(first));
        }
        Ok(PySchedulerSnapshot(py.detach(|| scheduler.snapshot()).py()?))
    }

    fn stats(&self) -> PySchedulerStats {
        PySchedulerStats(self.0.stats())
    }

    #[getter]
    fn num_running(&self) -> u64 {
        self.0.stats().num_running
    }

    #[getter]
    fn num_waiting(&self) -> u64 {
        self.0.stats().num_waiting
    }

    #[getter]
    fn block_size(&self) -> u32 {
        self.0.config().block_size
    }
}

fn queue_limits(max_requests: Option<u32>, max_tokens: Option<u64>) -> QueueLimits {
    QueueLimits {
        max_requests: max_requests.unwrap_or(QueueLimits::NONE.max_requests),
        max_tokens: max_tokens.unwrap_or(QueueLimits::NONE.max_tokens),
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTenant>()?;
    module.add_class::<PySession>()?;
    module.add_class::<PyRetention>()?;
    module.add_class::<PyFinishedRequest>()?;
    module.add_class::<PyCommitOutcome>()?;
    module.add_class::<PySchedulerStats>()?;
    module.add_class::<PySchedulerSnapshot>()?;
    module.add_class::<PyBatch>()?;
    module.add_class::<PyGroupBatch>()?;
    module.add_class::<PyPhaseTimes>()?;
    module.add_class::<PyScheduler>()
}
