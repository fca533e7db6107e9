//! Counts: `NamespaceStats`, `SaltStats`.

use kvpager_core::prefix_index::{NamespaceStats, SaltStats};
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

/// Counts of the namespaces that clients' salts made.
#[pyclass(name = "SaltStats", module = "kvpager", frozen)]
pub(crate) struct PySaltStats(SaltStats);

impl PySaltStats {
    pub(super) const fn new(stats: SaltStats) -> Self {
        Self(stats)
    }
}

#[pymethods]
impl PySaltStats {
    /// There now, of the account.
    #[getter]
    fn num_salted(&self) -> usize {
        self.0.num_salted
    }

    /// Most that an account may have.
    #[getter]
    fn max_salted(&self) -> u32 {
        self.0.max_salted
    }

    /// Given to another salt so far, in the index.
    #[getter]
    fn num_reclaimed(&self) -> u64 {
        self.0.num_reclaimed
    }

    fn __repr__(&self) -> String {
        format!("SaltStats(num_salted={}, max_salted={})", self.0.num_salted, self.0.max_salted)
    }
}
