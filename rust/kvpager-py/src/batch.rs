//! `Batch`: NumPy views of a step's arrays, without a copy.

use crate::scheduler::PyFinishedRequest;
use kvpager_core::block_tables::TableArena;
use kvpager_core::geometry::Span;
use kvpager_core::scheduler::{Batch, Scheduler};
use numpy::ndarray::{ArrayView1, ArrayView2};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use std::sync::Arc;

/// One planned step. Its arrays are read-only views of memory that is not reused while the batch or a view
/// of it is alive.
#[pyclass(name = "Batch", module = "kvpager._core", frozen)]
pub(crate) struct PyBatch {
    batch: Batch,
    scheduler: Arc<Scheduler>,
}

impl PyBatch {
    pub(crate) const fn new(batch: Batch, scheduler: Arc<Scheduler>) -> Self {
        Self { batch, scheduler }
    }

    fn arena(&self, group: usize) -> &TableArena {
        &self.scheduler.arenas()[group]
    }
}

/// What one layer group has in a batch.
#[pyclass(name = "GroupBatch", module = "kvpager._core", frozen)]
pub(crate) struct PyGroupBatch {
    batch: Py<PyBatch>,
    group: usize,
}

#[pymethods]
impl PyGroupBatch {
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        let owner = self.batch.bind(py);
        let arrays = &owner.get().batch.arrays;
        let slots = match self.group {
            0 => &arrays.slot_mapping,
            other => &arrays.groups[other - 1].slot_mapping,
        };
        view(owner, slots)
    }

    #[getter]
    fn table_rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        PyBatch::table_rows(self.batch.bind(py))
    }

    #[getter]
    fn table_changes<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<i32>> {
        let owner = self.batch.bind(py);
        let arrays = &owner.get().batch.arrays;
        let changes = match self.group {
            0 => &arrays.table_changes,
            other => &arrays.groups[other - 1].table_changes,
        };
        view_rows(owner, changes)
    }

    #[getter]
    fn block_tables<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray2<i32>> {
        block_tables(self.batch.bind(py), self.group)
    }

    #[getter]
    fn span(&self) -> &'static str {
        self.layer_span().name()
    }

    #[getter]
    fn window(&self) -> Option<u64> {
        self.layer_span().window()
    }
}

impl PyGroupBatch {
    fn layer_span(&self) -> Span {
        self.batch.get().scheduler.config().layer_groups[self.group]
    }
}

fn block_tables<'py>(owner: &Bound<'py, PyBatch>, group: usize) -> Bound<'py, PyArray2<i32>> {
    let arena = owner.get().arena(group);
    // SAFETY: the arena has this many entries, never moves, and `owner` keeps it alive. Its entries are
    // atomics that the engine thread writes; a reader elsewhere sees some whole value of each.
    let entries = unsafe { ArrayView2::from_shape_ptr(arena.shape(), arena.as_ptr()) };
    // SAFETY: as above.
    let array = unsafe { PyArray2::borrow_from_array(&entries, owner.clone().into_any()) };
    array.readwrite().make_nonwriteable();
    array
}

fn view<'py, T: Element>(owner: &Bound<'py, PyBatch>, data: &[T]) -> Bound<'py, PyArray1<T>> {
    let data = ArrayView1::from(data);
    // SAFETY: `data` lies in the arrays that `owner` keeps alive, which are not changed or reallocated while
    // an `Arc` of them exists besides the scheduler's.
    let array = unsafe { PyArray1::borrow_from_array(&data, owner.clone().into_any()) };
    array.readwrite().make_nonwriteable();
    array
}

fn view_rows<'py, const N: usize>(
    owner: &Bound<'py, PyBatch>,
    data: &[[i32; N]],
) -> Bound<'py, PyArray2<i32>> {
    let data = ArrayView2::from(data);
    // SAFETY: as in `view`.
    let array = unsafe { PyArray2::borrow_from_array(&data, owner.clone().into_any()) };
    array.readwrite().make_nonwriteable();
    array
}

#[pymethods]
impl PyBatch {
    #[getter]
    fn step_id(&self) -> u64 {
        self.batch.step_id.0
    }

    #[getter]
    fn num_sequences(&self) -> usize {
        self.batch.arrays.sequence_ids.len()
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.batch.arrays.token_ids.len()
    }

    #[getter]
    fn sequence_ids<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<u64>> {
        view(slf, &slf.get().batch.arrays.sequence_ids)
    }

    #[getter]
    fn query_start<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.query_start)
    }

    #[getter]
    fn token_ids<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.token_ids)
    }

    #[getter]
    fn positions<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.positions)
    }

    #[getter]
    fn token_source<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.token_source)
    }

    #[getter]
    fn sample_rows<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.sample_rows)
    }

    #[getter]
    fn slot_mapping<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i64>> {
        view(slf, &slf.get().batch.arrays.slot_mapping)
    }

    #[getter]
    fn context_lens<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.context_lens)
    }

    #[getter]
    fn table_rows<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.table_rows)
    }

    #[getter]
    fn table_changes<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray2<i32>> {
        view_rows(slf, &slf.get().batch.arrays.table_changes)
    }

    #[getter]
    fn block_tables<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray2<i32>> {
        block_tables(slf, 0)
    }

    #[getter]
    fn groups(slf: &Bound<'_, Self>) -> Vec<PyGroupBatch> {
        let num_groups = slf.get().scheduler.arenas().len();
        (0..num_groups).map(|group| PyGroupBatch { batch: slf.clone().unbind(), group }).collect()
    }

    #[getter]
    fn block_copies<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray2<i32>> {
        view_rows(slf, &slf.get().batch.arrays.block_copies)
    }

    #[getter]
    fn swap_out<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray2<i32>> {
        view_rows(slf, &slf.get().batch.arrays.swap_out)
    }

    #[getter]
    fn swap_in<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray2<i32>> {
        view_rows(slf, &slf.get().batch.arrays.swap_in)
    }

    #[getter]
    fn block_zeros<'py>(slf: &Bound<'py, Self>) -> Bound<'py, PyArray1<i32>> {
        view(slf, &slf.get().batch.arrays.block_zeros)
    }

    #[getter]
    fn finished(&self) -> Vec<PyFinishedRequest> {
        self.batch.arrays.finished.iter().cloned().map(PyFinishedRequest::new).collect()
    }

    fn __repr__(&self) -> String {
        format!(
            "Batch(step_id={}, num_sequences={}, num_tokens={})",
            self.step_id(),
            self.num_sequences(),
            self.num_tokens()
        )
    }
}
