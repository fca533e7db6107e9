//! Bindings of `kvpager_core::block_pool`.
//!
//! Calls of up to [`handles::MAX_ATTACHED`] blocks take a few microseconds and keep the interpreter; larger ones
//! and waits release it.

mod closable;
mod handles;
mod magazine;
mod pool;
mod reservation;
mod stats;
mod wait;

use pyo3::prelude::*;

pub(crate) use pool::PyBlockPool;
pub(crate) use stats::{PyAccountStats, PyPoolStats};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<stats::PyPoolStats>()?;
    module.add_class::<stats::PyAccountStats>()?;
    module.add_class::<reservation::PyReservation>()?;
    module.add_class::<magazine::PyMagazine>()?;
    module.add_class::<PyBlockPool>()
}
