//! Bindings of `kvpager_core::scheduler::Session`.

use crate::scheduler::PyTenant;
use kvpager_core::scheduler::Session;
use pyo3::prelude::*;
use std::sync::Arc;

/// A conversation whose blocks are kept between turns.
#[pyclass(name = "Session", module = "kvpager._core", frozen)]
pub(crate) struct PySession(pub(crate) Arc<Session>);

#[pymethods]
impl PySession {
    #[getter]
    fn tenant(&self) -> PyTenant {
        PyTenant(Arc::clone(&self.0.tenant))
    }

    #[getter]
    fn is_open(&self) -> bool {
        self.0.is_open()
    }

    fn __repr__(&self) -> String {
        format!("Session(tenant={:?}, is_open={})", self.0.tenant.name, self.0.is_open())
    }
}
