//! Bindings of `kvpager_core::scheduler::Retention`.

use crate::args::{int, optional_int};
use crate::error::IntoPyResult;
use crate::kinds::optional_number;
use kvpager_core::scheduler::{Deadline, Retention};
use pyo3::prelude::*;

/// What of a request is kept after its end.
#[pyclass(name = "Retention", module = "kvpager._core", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct PyRetention(pub(crate) Retention);

#[pymethods]
impl PyRetention {
    #[new]
    #[pyo3(signature = (*, seconds=None, steps=None, num_tokens=None, priority=0))]
    fn new(
        #[pyo3(from_py_with = optional_number)] seconds: Option<f64>,
        #[pyo3(from_py_with = optional_int)] steps: Option<u64>,
        #[pyo3(from_py_with = optional_int)] num_tokens: Option<u32>,
        #[pyo3(from_py_with = int)] priority: i32,
    ) -> PyResult<Self> {
        let retention = Retention { limit: Deadline { steps, seconds }, num_tokens, priority };
        retention.check().py()?;
        Ok(Self(retention))
    }

    #[getter]
    fn seconds(&self) -> Option<f64> {
        self.0.limit.seconds
    }

    #[getter]
    fn steps(&self) -> Option<u64> {
        self.0.limit.steps
    }

    #[getter]
    fn num_tokens(&self) -> Option<u32> {
        self.0.num_tokens
    }

    #[getter]
    fn priority(&self) -> i32 {
        self.0.priority
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let Retention { limit, num_tokens, priority } = self.0;
        let mut hasher = DefaultHasher::new();
        // Seconds are above 0, so equal ones have equal bits.
        (limit.steps, limit.seconds.map(f64::to_bits), num_tokens, priority).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let show = |value: Option<String>| value.unwrap_or_else(|| "None".to_owned());
        let Retention { limit, num_tokens, priority } = self.0;
        format!(
            "Retention(seconds={}, steps={}, num_tokens={}, priority={priority})",
            show(limit.seconds.map(|seconds| format!("{seconds:?}"))),
            show(limit.steps.map(|steps| steps.to_string())),
            show(num_tokens.map(|tokens| tokens.to_string())),
        )
    }
}
