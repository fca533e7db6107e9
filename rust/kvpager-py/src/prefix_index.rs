//! Bindings of `kvpager_core::prefix_index`.

mod events;
mod identity;
mod index;
mod pinned;
mod place;
mod stats;
mod tokens;

use pyo3::prelude::*;

pub(crate) use identity::PyFingerprint;
pub(crate) use index::PyPrefixIndex;
pub(crate) use tokens::{items, optional_items};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPrefixIndex>()?;
    module.add_class::<pinned::PyMatch>()?;
    module.add_class::<place::PyScopeChain>()?;
    module.add_class::<events::PyEventBatch>()?;
    module.add_class::<events::PySnapshot>()?;
    module.add_class::<stats::PyNamespaceStats>()?;
    module.add_class::<stats::PySaltStats>()?;
    module.add_class::<PyFingerprint>()?;
    module.add_class::<identity::PyShareScope>()
}
