//! Bindings of `kvpager_core::block_pool`.

use crate::error::IntoPyResult;
use kvpager_core::block_pool::{BlockPool, PoolConfig, PoolStats};
use pyo3::prelude::*;
use std::sync::Arc;

/// Blocks of a pool by state.
#[pyclass(name = "PoolStats", module = "kvpager._core", frozen)]
pub(crate) struct PyPoolStats(PoolStats);

#[pymethods]
impl PyPoolStats {
    #[getter]
    fn capacity(&self) -> u64 {
        self.0.capacity
    }

    #[getter]
    fn held(&self) -> u64 {
        self.0.held
    }

    #[getter]
    fn cached(&self) -> u64 {
        self.0.cached
    }

    #[getter]
    fn free(&self) -> u64 {
        self.0.free
    }

    #[getter]
    fn reserved(&self) -> u64 {
        self.0.reserved
    }

    #[getter]
    fn quarantined(&self) -> u64 {
        self.0.quarantined
    }

    #[getter]
    fn peak_held(&self) -> u64 {
        self.0.peak_held
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// The blocks of a device.
#[pyclass(name = "BlockPool", module = "kvpager._core", frozen)]
pub(crate) struct PyBlockPool {
    pub(crate) inner: Arc<BlockPool>,
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, *, max_accounts=64, max_open_steps=8))]
    fn new(num_blocks: u32, max_accounts: u32, max_open_steps: u32) -> PyResult<Self> {
        Ok(Self { inner: BlockPool::new(PoolConfig { num_blocks, max_accounts, max_open_steps }).py()? })
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks()
    }

    fn stats(&self) -> PyPoolStats {
        PyPoolStats(self.inner.stats())
    }

    fn check_invariants(&self) -> PyResult<()> {
        self.inner.check_invariants().map_err(pyo3::exceptions::PyAssertionError::new_err)
    }
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPoolStats>()?;
    module.add_class::<PyBlockPool>()
}
