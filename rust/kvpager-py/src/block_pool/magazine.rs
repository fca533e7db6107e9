//! `Magazine`.

use super::closable::Closable;
use super::pool::PyBlockPool;
use crate::args::int;
use crate::error::IntoPyResult;
use crate::kinds::instance;
use kvpager_core::block_pool::Magazine;
use kvpager_core::{AccountId, BlockHandle};
use pyo3::prelude::*;

/// A thread's own store of free blocks.
#[pyclass(name = "Magazine", module = "kvpager._core", frozen)]
pub(crate) struct PyMagazine {
    inner: Closable<Magazine>,
}

#[pymethods]
impl PyMagazine {
    #[new]
    fn new(
        #[pyo3(from_py_with = instance)] pool: &PyBlockPool,
        #[pyo3(from_py_with = int)] account: u32,
    ) -> PyResult<Self> {
        let inner = Magazine::new(pool.here()?, AccountId(account)).py()?;
        Ok(Self { inner: Closable::new(inner, pool.home, "magazine") })
    }

    #[getter]
    fn num_blocks(&self) -> PyResult<usize> {
        self.inner.with(|inner| Ok(inner.as_ref().map_or(0, Magazine::num_blocks)))
    }

    #[getter]
    fn is_open(&self) -> PyResult<bool> {
        self.inner.is_open()
    }

    fn allocate_one(&self) -> PyResult<u64> {
        self.inner.open(|inner| Ok(inner.allocate().py()?.to_bits()))
    }

    fn release_one(&self, #[pyo3(from_py_with = int)] block: u64) -> PyResult<()> {
        self.inner.open(|inner| inner.release(BlockHandle::from_bits(block)).py())
    }

    fn close(&self) -> PyResult<()> {
        self.inner.close()
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().inner.open(|_| Ok(()))?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close()
    }

    fn __repr__(&self) -> PyResult<String> {
        self.inner.with(|inner| {
            Ok(inner.as_ref().map_or_else(
                || "Magazine(closed)".to_owned(),
                |inner| format!("Magazine(num_blocks={})", inner.num_blocks()),
            ))
        })
    }
}
