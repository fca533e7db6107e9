//! Bindings of `kvpager_core::replay`.

use crate::args::{Integer, int};
use crate::arrays::read_ints;
use crate::error::{IntoPyResult, invalid};
use crate::kinds::{text, texts};
use kvpager_core::Error;
use kvpager_core::prefix_index::EvictionPolicy;
use kvpager_core::replay as core;
use kvpager_core::scheduler::{AdmissionPolicy, HostTierConfig, Overflow};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Columns that Python handed over, copied.
struct Owned {
    arrival: Vec<f64>,
    prompt_tokens: Vec<u32>,
    output_tokens: Vec<u32>,
    tenant: Vec<u32>,
    session: Vec<u64>,
    think_time: Vec<f64>,
    hash_start: Vec<u64>,
    hash_ids: Vec<u64>,
}

impl Owned {
    /// Reads the attributes of a `kvpager.replay.Columns`.
    fn read(columns: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            arrival: floats(columns, "arrival")?,
            prompt_tokens: ints(columns, "prompt_tokens")?,
            output_tokens: ints(columns, "output_tokens")?,
            tenant: ints(columns, "tenant")?,
            session: ints(columns, "session")?,
            think_time: floats(columns, "think_time")?,
            hash_start: ints(columns, "hash_start")?,
            hash_ids: ints(columns, "hash_ids")?,
        })
    }

    fn view(&self) -> core::Columns<'_> {
        core::Columns {
            arrival: &self.arrival,
            prompt_tokens: &self.prompt_tokens,
            output_tokens: &self.output_tokens,
            tenant: &self.tenant,
            session: &self.session,
            think_time: &self.think_time,
            hash_start: &self.hash_start,
            hash_ids: &self.hash_ids,
        }
    }
}

/// A float column. An empty `array` has no aligned memory to look at.
fn floats(columns: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<f64>> {
    let column = columns.getattr(name)?;
    if column.len()? == 0 { Ok(Vec::new()) } else { PyBuffer::<f64>::get(&column)?.to_vec(columns.py()) }
}

/// An integer column, of any integer type.
fn ints<T: Element + Integer>(columns: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<T>> {
    let column = columns.getattr(name)?;
    if column.len()? == 0 { Ok(Vec::new()) } else { read_ints(&column, name) }
}

/// The one caller at a time; a second one is told so instead of waiting.
fn enter<T>(state: &Mutex<T>) -> PyResult<MutexGuard<'_, T>> {
    match state.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::WouldBlock) => {
            Err(crate::error::to_py(Error::WrongState("another thread is in this replay".into())))
        }
        Err(TryLockError::Poisoned(_)) => {
            Err(crate::error::to_py(Error::WrongState("an internal fault ended this replay".into())))
        }
    }
}

/// The attributes of a `kvpager.replay.run.RunSettings`: what all runs of a comparison have in common.
#[derive(FromPyObject)]
struct Settings {
    #[pyo3(from_py_with = int)]
    blocks: u32,
    #[pyo3(from_py_with = int)]
    block_size: u32,
    reuse: bool,
    arrivals: String,
    speed: f64,
    rate: f64,
    #[pyo3(from_py_with = int)]
    seed: u64,
    #[pyo3(from_py_with = int)]
    max_batch_tokens: u32,
    #[pyo3(from_py_with = int)]
    max_running: u32,
    #[pyo3(from_py_with = int)]
    max_model_tokens: u32,
    #[pyo3(from_py_with = int)]
    max_prefill_chunk: u32,
    #[pyo3(from_py_with = int)]
    max_output_tokens: u32,
    /// Seconds: shortest step, a batch token, a context token, a swapped block.
    step_time: (f64, f64, f64, f64),
    overflow: String,
    #[pyo3(from_py_with = int)]
    host_blocks: u32,
}

impl Settings {
    /// Reads the attributes; what is out of an integer's range is named with its field.
    fn read(settings: &Bound<'_, PyAny>) -> PyResult<Self> {
        settings.extract().map_err(|error: PyErr| {
            let py = settings.py();
            let text = error.value(py).to_string();
            let field = text.rsplit_once("Settings.").map_or(text.as_str(), |(_, field)| field);
            let reason = error.cause(py).map_or_else(String::new, |cause| cause.value(py).to_string());
            invalid(format!("{field} {reason}"))
        })
    }

    fn config(&self) -> PyResult<core::ReplayConfig> {
        let (floor, per_token, per_kv_token, per_swapped_block) = self.step_time;
        Ok(core::ReplayConfig {
            reuse: self.reuse,
            max_batch_tokens: self.max_batch_tokens,
            max_running: self.max_running,
            max_model_tokens: self.max_model_tokens,
            max_prefill_chunk: self.max_prefill_chunk,
            max_output_tokens: self.max_output_tokens,
            arrivals: self.arrivals()?,
            step_time: core::StepTime { floor, per_token, per_kv_token, per_swapped_block },
            overflow: Overflow::from_name(&self.overflow).py()?,
            host_tier: self.host_tier(),
            ..core::ReplayConfig::new(self.blocks, self.block_size)
        })
    }

    /// A host tier as fast as the clock says: only the ratio of bytes and link matters.
    fn host_tier(&self) -> HostTierConfig {
        let (_, per_token, _, per_swapped_block) = self.step_time;
        let defaults = HostTierConfig::default();
        HostTierConfig {
            num_blocks: self.host_blocks,
            link_bytes_per_second: (defaults.bytes_per_block as f64 / per_swapped_block).min(f64::MAX),
            prefill_tokens_per_second: per_token.recip().min(f64::MAX),
            ..defaults
        }
    }

    fn arrivals(&self) -> PyResult<core::Arrivals> {
        match self.arrivals.as_str() {
            "recorded" => Ok(core::Arrivals::Recorded { speed: self.speed }),
            "rate" => Ok(core::Arrivals::Rate { per_second: self.rate, seed: self.seed }),
            "saturate" => Ok(core::Arrivals::Saturate),
            other => Err(invalid(format!("arrivals are {other:?}: recorded, rate or saturate"))),
        }
    }
}

/// One run of a workload through scheduler, index and pool, in virtual time.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct Replay(Mutex<core::Replay>);

#[pymethods]
impl Replay {
    #[new]
    #[pyo3(signature = (settings, *, policy, eviction, hash_block, tenants))]
    fn new(
        settings: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text)] policy: &str,
        #[pyo3(from_py_with = text)] eviction: &str,
        #[pyo3(from_py_with = int)] hash_block: u32,
        #[pyo3(from_py_with = texts)] tenants: Vec<String>,
    ) -> PyResult<Self> {
        let config = core::ReplayConfig {
            policy: AdmissionPolicy::from_name(policy).py()?,
            eviction: eviction.parse::<EvictionPolicy>().py()?,
            hash_block,
            tenants,
            ..Settings::read(settings)?.config()?
        };
        core::Replay::new(config).py().map(|replay| Self(Mutex::new(replay)))
    }

    /// Takes more requests, in order of arrival.
    fn push(&self, py: Python<'_>, columns: &Bound<'_, PyAny>) -> PyResult<()> {
        let owned = Owned::read(columns)?;
        let mut guard = enter(&self.0)?;
        let replay = &mut *guard;
        py.detach(|| replay.push(&owned.view())).py()
    }

    /// Says that no more requests will come.
    fn close(&self) -> PyResult<()> {
        enter(&self.0)?.close();
        Ok(())
    }

    /// Does at most so many steps: `running`, `needs_input` or `done`.
    fn advance(&self, py: Python<'_>, #[pyo3(from_py_with = int)] max_steps: u64) -> PyResult<&'static str> {
        let mut guard = enter(&self.0)?;
        let replay = &mut *guard;
        let progress = py.detach(|| replay.advance(max_steps)).py()?;
        Ok(match progress {
            core::Progress::Running => "running",
            core::Progress::NeedsInput => "needs_input",
            core::Progress::Done => "done",
        })
    }

    #[getter]
    fn num_ended(&self) -> PyResult<u64> {
        Ok(enter(&self.0)?.num_ended())
    }

    #[getter]
    fn num_steps(&self) -> PyResult<u64> {
        Ok(enter(&self.0)?.num_steps())
    }

    #[getter]
    fn now(&self) -> PyResult<f64> {
        Ok(enter(&self.0)?.now())
    }

    /// The run as the text of one JSON object, also before its end.
    fn report_json(&self, py: Python<'_>) -> PyResult<String> {
        let guard = enter(&self.0)?;
        let replay = &*guard;
        Ok(py.detach(|| replay.report().to_string()))
    }

    /// Checks the pool and the index.
    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        let guard = enter(&self.0)?;
        let replay = &*guard;
        py.detach(|| replay.check_invariants()).map_err(|text| crate::error::to_py(Error::WrongState(text)))
    }
}

/// Index and pool alone: one request at a time, look up, then insert its full prompt blocks.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct SequentialReplay(Mutex<core::SequentialReplay>);

#[pymethods]
impl SequentialReplay {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, eviction, hash_block, tenants))]
    fn new(
        #[pyo3(from_py_with = int)] num_blocks: u32,
        #[pyo3(from_py_with = int)] block_size: u32,
        #[pyo3(from_py_with = text)] eviction: &str,
        #[pyo3(from_py_with = int)] hash_block: u32,
        #[pyo3(from_py_with = texts)] tenants: Vec<String>,
    ) -> PyResult<Self> {
        let eviction = eviction.parse::<EvictionPolicy>().py()?;
        core::SequentialReplay::new(num_blocks, block_size, eviction, hash_block, &tenants)
            .py()
            .map(|replay| Self(Mutex::new(replay)))
    }

    /// Runs a block of requests.
    fn push(&self, py: Python<'_>, columns: &Bound<'_, PyAny>) -> PyResult<()> {
        let owned = Owned::read(columns)?;
        let mut guard = enter(&self.0)?;
        let replay = &mut *guard;
        py.detach(|| replay.push(&owned.view())).py()
    }

    /// Counts by name.
    fn counts(&self) -> PyResult<Vec<(&'static str, u64)>> {
        let replay = enter(&self.0)?;
        let counts = replay.counts();
        Ok(vec![
            ("requests", counts.requests),
            ("too_long", counts.too_long),
            ("lookup_blocks", counts.lookup_blocks),
            ("hit_blocks", counts.hit_blocks),
            ("prompt_tokens", counts.prompt_tokens),
            ("peak_held", replay.peak_held()),
        ])
    }
}

/// The clairvoyant schedule of a workload: first come, first served, with every output length known.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct Oracle(Mutex<core::Oracle>);

#[pymethods]
impl Oracle {
    #[new]
    fn new(settings: &Bound<'_, PyAny>) -> PyResult<Self> {
        let config = Settings::read(settings)?.config()?;
        core::Oracle::new(&config).py().map(|oracle| Self(Mutex::new(oracle)))
    }

    /// Takes more requests, in order of arrival.
    fn push(&self, py: Python<'_>, columns: &Bound<'_, PyAny>) -> PyResult<()> {
        let owned = Owned::read(columns)?;
        let mut guard = enter(&self.0)?;
        let oracle = &mut *guard;
        py.detach(|| oracle.push(&owned.view())).py()
    }

    /// Says that no more requests will come.
    fn close(&self) -> PyResult<()> {
        enter(&self.0)?.close();
        Ok(())
    }

    /// Does at most so many steps: `running`, `needs_input` or `done`.
    fn advance(&self, py: Python<'_>, #[pyo3(from_py_with = int)] max_steps: u64) -> PyResult<&'static str> {
        let mut guard = enter(&self.0)?;
        let oracle = &mut *guard;
        Ok(match py.detach(|| oracle.advance(max_steps)) {
            core::Progress::Running => "running",
            core::Progress::NeedsInput => "needs_input",
            core::Progress::Done => "done",
        })
    }

    /// `(time, steps, finished, refused, mean_batch, peak_blocks)` so far.
    fn outcome(&self) -> PyResult<(f64, u64, u64, u64, f64, u64)> {
        let outcome = enter(&self.0)?.outcome();
        let core::OracleOutcome { time, steps, finished, refused, mean_batch, peak_blocks } = outcome;
        Ok((time, steps, finished, refused, mean_batch, peak_blocks))
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Replay>()?;
    module.add_class::<SequentialReplay>()?;
    module.add_class::<Oracle>()
}
