//! `NamespaceStats`.

use kvpager_core::prefix_index::NamespaceStats;
use pyo3::prelude::*;

/// Counts of one namespace.
#[pyclass(name = "NamespaceStats", module = "kvpager", frozen)]
pub(crate) struct PyNamespaceStats(NamespaceStats);

impl PyNamespaceStats {
    pub(super) const fn new(stats: NamespaceStats) -> Self {
        Self(stats)
    }
}

#[pymethods]
impl PyNamespaceStats {
    /// Blocks that can be matched.
    #[getter]
    fn num_blocks(&self) -> usize {
        self.0.num_blocks
    }

    /// Nodes that have them.
    #[getter]
    fn num_nodes(&self) -> usize {
        self.0.num_nodes
    }

    /// Blocks that a purge cut off and that are still held.
    #[getter]
    fn num_purged_blocks(&self) -> usize {
        self.0.num_purged_blocks
    }

    /// How often it was purged.
    #[getter]
    fn num_purges(&self) -> u32 {
        self.0.num_purges
    }

    fn __repr__(&self) -> String {
        format!("NamespaceStats(num_blocks={}, num_nodes={})", self.0.num_blocks, self.0.num_nodes)
    }
}
