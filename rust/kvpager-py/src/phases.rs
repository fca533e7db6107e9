//! Bindings of `kvpager_core::scheduler::PhaseTimes`.

use crate::error::invalid;
use crate::kinds::{number, optional_text};
use kvpager_core::scheduler::{Phase, PhaseTimes};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;

/// How long each phase of a step took, as recorded.
#[pyclass(name = "PhaseTimes", module = "kvpager._core", frozen)]
pub(crate) struct PyPhaseTimes(PhaseTimes);

impl PyPhaseTimes {
    pub(crate) const fn new(times: PhaseTimes) -> Self {
        Self(times)
    }

    /// Values of `of` over the recorded spans, as an array.
    fn column<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        of: impl Fn(&kvpager_core::scheduler::PhaseSpan) -> T,
    ) -> Bound<'py, PyArray1<T>> {
        self.0.spans.iter().map(of).collect::<Vec<_>>().into_pyarray(py)
    }
}

#[pymethods]
impl PyPhaseTimes {
    /// Names of the phases, in the order of a step.
    #[classattr]
    #[pyo3(name = "PHASES")]
    fn names() -> [&'static str; Phase::ALL.len()] {
        Phase::ALL.map(Phase::name)
    }

    #[getter]
    fn num_steps(&self) -> u64 {
        self.0.steps.len()
    }

    #[pyo3(signature = (percentile, phase=None))]
    fn percentile_ns(
        &self,
        #[pyo3(from_py_with = number)] percentile: f64,
        #[pyo3(from_py_with = optional_text)] phase: Option<&str>,
    ) -> PyResult<u64> {
        if !(0.0..=100.0).contains(&percentile) {
            return Err(invalid(format!("percentile is {percentile}, must be from 0 to 100")));
        }
        let Some(name) = phase else { return Ok(self.0.steps.value_at_percentile(percentile)) };
        let position = Phase::ALL.iter().position(|phase| phase.name() == name).ok_or_else(|| {
            invalid(format!("phase is {name:?}, must be one of {:?}", Phase::ALL.map(Phase::name)))
        })?;
        Ok(self.0.phases[position].value_at_percentile(percentile))
    }

    #[getter]
    fn span_step_ids<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        self.column(py, |span| span.step_id)
    }

    #[getter]
    fn span_phases<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        self.column(py, |span| span.phase as u8)
    }

    #[getter]
    fn span_starts_ns<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        self.column(py, |span| span.start_ns)
    }

    #[getter]
    fn span_durations_ns<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        self.column(py, |span| span.duration_ns)
    }

    #[getter]
    fn dropped_spans(&self) -> u64 {
        self.0.dropped_spans
    }

    fn __repr__(&self) -> String {
        format!("PhaseTimes(num_steps={}, spans={})", self.0.steps.len(), self.0.spans.len())
    }
}
