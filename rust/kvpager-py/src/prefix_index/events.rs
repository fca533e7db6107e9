//! The event stream as arrays: one crossing for a batch of events.

use kvpager_core::prefix_index::{Digest, EventBatch, EventKind, Snapshot};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

const DIGEST_BYTES: usize = size_of::<Digest>();

fn digests(py: Python<'_>, flat: Vec<u8>) -> PyResult<Bound<'_, PyArray2<u8>>> {
    let rows = flat.len() / DIGEST_BYTES;
    PyArray1::from_vec(py, flat).reshape([rows, DIGEST_BYTES])
}

/// Events in order, as arrays.
#[pyclass(name = "EventBatch", module = "kvpager", frozen)]
pub(crate) struct PyEventBatch(EventBatch);

impl PyEventBatch {
    pub(super) const fn new(batch: EventBatch) -> Self {
        Self(batch)
    }
}

#[pymethods]
impl PyEventBatch {
    /// Whether events were lost before these.
    #[getter]
    fn must_resync(&self) -> bool {
        self.0.must_resync
    }

    fn __len__(&self) -> usize {
        self.0.events.len()
    }

    /// Numbers of the events.
    #[getter]
    fn numbers<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_iter(py, self.0.events.iter().map(|event| event.number))
    }

    /// Where they happened.
    #[getter]
    fn namespaces<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_iter(py, self.0.events.iter().map(|event| event.namespace.0))
    }

    /// What happened: 0 stored, 1 removed, 2 cleared, 3 attached, 4 detached.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u8>> {
        let kind = |kind: &EventKind| match kind {
            EventKind::Stored { .. } => 0,
            EventKind::Removed { .. } => 1,
            EventKind::Cleared => 2,
            EventKind::Attached { .. } => 3,
            EventKind::Detached { .. } => 4,
        };
        PyArray1::from_iter(py, self.0.events.iter().map(|event| kind(&event.kind)))
    }

    /// The layer group that was attached or detached; 0, the first one, for other kinds.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        let group = |kind: &EventKind| match kind {
            EventKind::Attached { group, .. } | EventKind::Detached { group, .. } => *group,
            _ => 0,
        };
        PyArray1::from_iter(py, self.0.events.iter().map(|event| group(&event.kind)))
    }

    /// Digest that the first stored block continues; zeros for other kinds.
    #[getter]
    fn parents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u8>>> {
        let parent = |kind: &EventKind| match kind {
            EventKind::Stored { parent, .. } => *parent,
            _ => [0; DIGEST_BYTES],
        };
        digests(py, self.0.events.iter().flat_map(|event| parent(&event.kind)).collect())
    }

    /// Where each event's digests start; one more entry for the end.
    #[getter]
    fn digest_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        starts(py, self.0.events.iter().map(|event| digests_of(&event.kind).len()))
    }

    /// Digests of the blocks stored or removed, or at which a further group has its own.
    #[getter]
    fn digests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u8>>> {
        let all = self.0.events.iter().flat_map(|event| digests_of(&event.kind));
        digests(py, all.flatten().copied().collect())
    }

    /// Where each event's tokens start; one more entry for the end.
    #[getter]
    fn token_start<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        starts(py, self.0.events.iter().map(|event| tokens_of(&event.kind).len()))
    }

    /// Tokens of the blocks stored; empty unless the stream carries them.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        let all = self.0.events.iter().flat_map(|event| tokens_of(&event.kind));
        PyArray1::from_vec(py, all.copied().collect())
    }

    fn __repr__(&self) -> String {
        let (count, resync) = (self.0.events.len(), self.0.must_resync);
        format!("EventBatch({count} events, must_resync={})", if resync { "True" } else { "False" })
    }
}

fn digests_of(kind: &EventKind) -> &[Digest] {
    match kind {
        EventKind::Stored { digests, .. }
        | EventKind::Removed { digests }
        | EventKind::Attached { digests, .. }
        | EventKind::Detached { digests, .. } => digests,
        EventKind::Cleared => &[],
    }
}

fn tokens_of(kind: &EventKind) -> &[u32] {
    match kind {
        EventKind::Stored { tokens, .. } => tokens,
        _ => &[],
    }
}

fn starts(py: Python<'_>, lengths: impl Iterator<Item = usize>) -> Bound<'_, PyArray1<i64>> {
    let mut total = 0;
    let ends = lengths.map(|length| {
        total += length as i64;
        total
    });
    PyArray1::from_vec(py, std::iter::once(0).chain(ends).collect())
}

/// Everything that is matchable at one moment, as arrays.
#[pyclass(name = "Snapshot", module = "kvpager", frozen)]
pub(crate) struct PySnapshot(Snapshot);

impl PySnapshot {
    pub(super) const fn new(snapshot: Snapshot) -> Self {
        Self(snapshot)
    }
}

#[pymethods]
impl PySnapshot {
    /// Number of the first event that is not in it.
    #[getter]
    fn next_number(&self) -> u64 {
        self.0.next
    }

    fn __len__(&self) -> usize {
        self.0.blocks.len()
    }

    /// Namespace of each block.
    #[getter]
    fn namespaces<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_iter(py, self.0.blocks.iter().map(|(namespace, ..)| namespace.0))
    }

    /// Digest that each block continues.
    #[getter]
    fn parents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u8>>> {
        digests(py, self.0.blocks.iter().flat_map(|(_, parent, _)| *parent).collect())
    }

    /// Digest of each block, parents before children.
    #[getter]
    fn digests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u8>>> {
        digests(py, self.0.blocks.iter().flat_map(|(.., digest)| *digest).collect())
    }

    /// Namespace of each block at which a further layer group has its own.
    #[getter]
    fn attached_namespaces<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_iter(py, self.0.attached.iter().map(|(namespace, ..)| namespace.0))
    }

    /// Digest of each block at which a further layer group has its own.
    #[getter]
    fn attached_digests<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u8>>> {
        digests(py, self.0.attached.iter().flat_map(|(_, digest, _)| *digest).collect())
    }

    /// Which layer group that is, each from 1.
    #[getter]
    fn attached_groups<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_iter(py, self.0.attached.iter().map(|(.., group)| *group))
    }

    fn __repr__(&self) -> String {
        format!("Snapshot({} blocks, next_number={})", self.0.blocks.len(), self.0.next)
    }
}
