//! `Match`: a pinned prefix that releases itself.

use super::place::Pinned;
use crate::error::IntoPyResult;
use crate::fork::Home;
use kvpager_core::{BlockHandle, Error};
use numpy::PyArray1;
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pinned prefix. Its blocks cannot be evicted until `release`, the end of a `with` block, or its end.
#[pyclass(name = "Match", module = "kvpager", frozen)]
pub(crate) struct PyMatch {
    held: Mutex<Option<Held>>,
    namespace: u32,
    block_size: usize,
    home: Home,
}

impl Drop for PyMatch {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.home.check().is_err() {
            // The parent's to release; here its locks may be taken for ever.
            std::mem::forget(held);
        }
    }
}

/// What an unreleased match has.
pub(super) struct Held {
    pub(super) pin: Pinned,
    pub(super) blocks: Vec<BlockHandle>,
}

impl PyMatch {
    pub(super) fn new(pin: Pinned, blocks: Vec<BlockHandle>, block_size: usize, home: Home) -> Self {
        let namespace = pin.namespace().0;
        Self { held: Mutex::new(Some(Held { pin, blocks })), namespace, block_size, home }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on what is held, or says that the match was released.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Held) -> kvpager_core::Result<T>) -> PyResult<T> {
        self.home.check()?;
        let released = || Error::WrongState("the match was released".into());
        self.lock().as_mut().ok_or_else(released).and_then(f).py()
    }
}

#[pymethods]
impl PyMatch {
    /// Tokens of the pinned prefix.
    #[getter]
    fn num_tokens(&self) -> PyResult<usize> {
        self.with(|held| Ok(held.pin.num_blocks() * self.block_size))
    }

    /// Blocks of the pinned prefix.
    #[getter]
    fn num_blocks(&self) -> PyResult<usize> {
        self.with(|held| Ok(held.pin.num_blocks()))
    }

    /// (namespace, blocks) of each part, first to last: one part for a match in one namespace.
    #[getter]
    fn parts(&self) -> PyResult<Vec<(u32, usize)>> {
        self.with(|held| Ok(held.pin.parts()))
    }

    /// The namespace it was matched in; of a chain, the most private one.
    #[getter]
    fn namespace(&self) -> u32 {
        self.namespace
    }

    /// Ids of the blocks, first to last.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let ids = self.with(|held| Ok(held.blocks.iter().map(|block| block.id().0 as i32).collect()))?;
        Ok(PyArray1::from_vec(py, ids))
    }

    /// Handles of the blocks, first to last.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let bits = self.with(|held| Ok(held.blocks.iter().map(|block| block.to_bits()).collect()))?;
        Ok(PyArray1::from_vec(py, bits))
    }

    /// Whether it was released.
    #[getter]
    fn is_released(&self) -> PyResult<bool> {
        self.home.check()?;
        Ok(self.lock().is_none())
    }

    /// Releases the pin now. Again is nothing.
    fn release(&self) -> PyResult<()> {
        self.home.check()?;
        drop(self.lock().take());
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.release()
    }

    fn __repr__(&self) -> String {
        if self.home.check().is_err() {
            return format!("Match(namespace={}, of a parent process)", self.namespace);
        }
        match &*self.lock() {
            Some(held) => {
                format!("Match(namespace={}, num_blocks={})", self.namespace, held.pin.num_blocks())
            }
            None => format!("Match(namespace={}, released)", self.namespace),
        }
    }
}
