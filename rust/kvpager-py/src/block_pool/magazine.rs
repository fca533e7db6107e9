//! `Magazine`.

use super::pool::PyBlockPool;
use crate::args::int;
use crate::error::{IntoPyResult, wrong_state};
use crate::fork::Home;
use kvpager_core::block_pool::Magazine;
use kvpager_core::{AccountId, BlockHandle};
use pyo3::prelude::*;
use std::sync::{Mutex, TryLockError};

/// A thread's own store of free blocks.
#[pyclass(name = "Magazine", module = "kvpager._core", frozen)]
pub(crate) struct PyMagazine {
    /// `None` once it is closed. Only tried, never waited for: a magazine has one user at a time.
    inner: Mutex<Option<Magazine>>,
    home: Home,
}

impl PyMagazine {
    fn with<R>(&self, act: impl FnOnce(&mut Option<Magazine>) -> PyResult<R>) -> PyResult<R> {
        self.home.check()?;
        match self.inner.try_lock() {
            Ok(mut inner) => act(&mut inner),
            Err(TryLockError::Poisoned(poisoned)) => act(&mut poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(wrong_state("another thread is using this magazine")),
        }
    }

    fn open<R>(&self, act: impl FnOnce(&mut Magazine) -> PyResult<R>) -> PyResult<R> {
        self.with(|inner| act(inner.as_mut().ok_or_else(|| wrong_state("the magazine is closed"))?))
    }
}

#[pymethods]
impl PyMagazine {
    #[new]
    fn new(pool: &PyBlockPool, #[pyo3(from_py_with = int)] account: u32) -> PyResult<Self> {
        let inner = Magazine::new(pool.here()?, AccountId(account)).py()?;
        Ok(Self { inner: Mutex::new(Some(inner)), home: pool.home })
    }

    #[getter]
    fn num_blocks(&self) -> PyResult<usize> {
        self.with(|inner| Ok(inner.as_ref().map_or(0, Magazine::num_blocks)))
    }

    #[getter]
    fn is_open(&self) -> PyResult<bool> {
        self.with(|inner| Ok(inner.is_some()))
    }

    fn allocate_one(&self) -> PyResult<u64> {
        self.open(|inner| Ok(inner.allocate().py()?.to_bits()))
    }

    fn release_one(&self, #[pyo3(from_py_with = int)] block: u64) -> PyResult<()> {
        self.open(|inner| inner.release(BlockHandle::from_bits(block)).py())
    }

    fn close(&self) -> PyResult<()> {
        self.with(|inner| {
            *inner = None;
            Ok(())
        })
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().open(|_| Ok(()))?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close()
    }

    fn __repr__(&self) -> PyResult<String> {
        self.with(|inner| {
            Ok(inner.as_ref().map_or_else(
                || "Magazine(closed)".to_owned(),
                |inner| format!("Magazine(num_blocks={})", inner.num_blocks()),
            ))
        })
    }
}
