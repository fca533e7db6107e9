//! `Reservation`.

use super::closable::Closable;
use super::handles::{Target, with_handles};
use crate::args::{int, optional_int};
use crate::error::{IntoPyResult, invalid};
use crate::fork::Home;
use kvpager_core::BlockHandle;
use kvpager_core::block_pool::Reservation;
use kvpager_core::{BlockId, count_of};
use pyo3::prelude::*;

/// Blocks promised to an account and not yet taken.
#[pyclass(name = "Reservation", module = "kvpager._core", frozen)]
pub(crate) struct PyReservation {
    inner: Closable<Reservation>,
}

impl PyReservation {
    pub(crate) fn new(reservation: Reservation, home: Home) -> Self {
        Self { inner: Closable::new(reservation, home, "reservation") }
    }
}

#[pymethods]
impl PyReservation {
    #[getter]
    fn num_blocks(&self) -> PyResult<u32> {
        self.inner.with(|inner| Ok(inner.as_ref().map_or(0, Reservation::num_blocks)))
    }

    #[getter]
    fn account(&self) -> PyResult<u32> {
        self.inner.open(|inner| Ok(inner.account().0))
    }

    #[getter]
    fn is_open(&self) -> PyResult<bool> {
        self.inner.is_open()
    }

    #[pyo3(signature = (num_blocks=None, *, out=None))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = optional_int)] num_blocks: Option<usize>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let target = Target::read(num_blocks, out)?;
        self.inner.open(|inner| {
            if target.len() > inner.num_blocks() as usize {
                return Err(invalid(format!(
                    "{} asked of a reservation of {}",
                    count_of(target.len(), "block"),
                    inner.num_blocks()
                )));
            }
            target.fill(py, |blocks| inner.allocate(blocks).py())
        })
    }

    fn allocate_one(&self) -> PyResult<u64> {
        let mut block = [BlockHandle::new(0, BlockId(0))];
        self.inner.open(|inner| inner.allocate(&mut block).py())?;
        Ok(block[0].to_bits())
    }

    fn put_back(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        self.inner.open(|inner| with_handles(blocks, |blocks| inner.put_back(blocks))?.py())
    }

    fn grow(&self, #[pyo3(from_py_with = int)] num_blocks: u32) -> PyResult<()> {
        self.inner.open(|inner| inner.grow(num_blocks).py())
    }

    fn shrink(&self, #[pyo3(from_py_with = int)] num_blocks: u32) -> PyResult<()> {
        self.inner.open(|inner| inner.shrink(num_blocks).py())
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
                || "Reservation(closed)".to_owned(),
                |inner| {
                    format!("Reservation(account={}, num_blocks={})", inner.account(), inner.num_blocks())
                },
            ))
        })
    }
}
