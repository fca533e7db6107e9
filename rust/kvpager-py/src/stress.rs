//! Bindings of `kvpager_core::stress`.

use crate::args::int;
use crate::error::{IntoPyResult, invalid, wrong_state};
use crate::kinds::{number, optional_text, text};
use kvpager_core::stress as core;
use pyo3::prelude::*;
use std::sync::Mutex;
use std::time::Duration;

/// A run of threads that work on pools at once, in rounds.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct Stress(Mutex<core::Stress>);

impl Stress {
    fn with<R>(&self, act: impl FnOnce(&mut core::Stress) -> R) -> PyResult<R> {
        match self.0.try_lock() {
            Ok(mut stress) => Ok(act(&mut stress)),
            Err(_) => Err(wrong_state("another thread is in this run")),
        }
    }
}

/// A time of at most an hour; what is no number is none.
fn time(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.clamp(0.0, 3600.0)).unwrap_or_default()
}

#[pymethods]
impl Stress {
    #[new]
    #[pyo3(signature = (*, threads, blocks, tenants, mix, seed, fault=None, shrink_seconds=10.0))]
    fn new(
        #[pyo3(from_py_with = int)] threads: u32,
        #[pyo3(from_py_with = int)] blocks: u32,
        #[pyo3(from_py_with = int)] tenants: u32,
        #[pyo3(from_py_with = text)] mix: &str,
        #[pyo3(from_py_with = int)] seed: u64,
        #[pyo3(from_py_with = optional_text)] fault: Option<&str>,
        #[pyo3(from_py_with = number)] shrink_seconds: f64,
    ) -> PyResult<Self> {
        let config = core::StressConfig::new((threads, blocks, tenants), mix, seed, fault).py()?;
        let config = core::StressConfig { shrink_time: time(shrink_seconds), ..config };
        Ok(Self(Mutex::new(core::Stress::new(config))))
    }

    /// Runs a round for at most so many seconds.
    fn advance(&self, py: Python<'_>, #[pyo3(from_py_with = number)] seconds: f64) -> PyResult<()> {
        py.detach(|| self.with(|stress| stress.advance(time(seconds))))
    }

    #[getter]
    fn is_sound(&self) -> PyResult<bool> {
        self.with(|stress| stress.is_sound())
    }

    #[getter]
    fn num_operations(&self) -> PyResult<u64> {
        self.with(|stress| stress.num_operations())
    }

    #[getter]
    fn num_rounds(&self) -> PyResult<u64> {
        self.with(|stress| stress.num_rounds())
    }

    /// What was found so far, as the text of one JSON object.
    fn report_json(&self) -> PyResult<String> {
        self.with(|stress| stress.report().to_string())
    }

    /// Faults that can be planted.
    #[staticmethod]
    fn fault_names() -> Vec<&'static str> {
        core::fault_names().collect()
    }
}

/// Latencies by family of operations, for runs that work through the bindings.
#[pyclass(frozen, module = "kvpager._core")]
pub(crate) struct StressLatencies(Mutex<core::Latencies>);

impl StressLatencies {
    /// One thread records into it at a time, so nobody waits here for long.
    fn lock(&self) -> std::sync::MutexGuard<'_, core::Latencies> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[pymethods]
impl StressLatencies {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(core::Latencies::default()))
    }

    /// Records one latency.
    fn record(
        &self,
        #[pyo3(from_py_with = text)] family: &str,
        #[pyo3(from_py_with = int)] nanoseconds: u64,
    ) -> PyResult<()> {
        match self.lock().record_named(family, nanoseconds) {
            true => Ok(()),
            false => Err(invalid(format!("{family:?} is no family of operations"))),
        }
    }

    /// All latencies and those of each family, as the text of two JSON objects.
    fn report_json(&self) -> (String, String) {
        let (all, by_family) = self.lock().to_json();
        (all.to_string(), by_family.to_string())
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Stress>()?;
    module.add_class::<StressLatencies>()
}
