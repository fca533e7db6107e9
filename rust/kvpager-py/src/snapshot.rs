//! `SchedulerSnapshot`.

use super::block_pool::{PyAccountStats, PyPoolStats};
use super::scheduler::PySchedulerStats;
use kvpager_core::scheduler::SchedulerSnapshot;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The counts of a scheduler, its pool and its tenants.
#[pyclass(name = "SchedulerSnapshot", module = "kvpager._core", frozen)]
pub(crate) struct PySchedulerSnapshot(pub(crate) SchedulerSnapshot);

#[pymethods]
impl PySchedulerSnapshot {
    #[getter]
    fn is_exact(&self) -> bool {
        self.0.is_exact
    }

    #[getter]
    fn pool(&self) -> PyPoolStats {
        PyPoolStats(self.0.pool)
    }

    #[getter]
    fn scheduler(&self) -> PySchedulerStats {
        PySchedulerStats(self.0.scheduler)
    }

    #[getter]
    fn accounts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let accounts = PyDict::new(py);
        for (name, account) in &self.0.tenants {
            accounts.set_item(name, PyAccountStats(*account))?;
        }
        Ok(accounts)
    }

    fn __repr__(&self) -> String {
        let (pool, tenants) = (&self.0.pool, self.0.tenants.len());
        format!("SchedulerSnapshot(held={}, capacity={}, tenants={tenants})", pool.held, pool.capacity)
    }
}
