//! `kvpager._core`: converts, releases the interpreter, maps errors, decides nothing.

use pyo3::prelude::*;

mod allocations;
mod args;
mod arrays;
mod attention;
mod batch;
mod block_pool;
mod error;
mod fork;
mod geometry;
mod kinds;
mod layer_groups;
mod phases;
mod prefix_index;
mod replay;
mod retention;
mod scheduler;
mod session;
mod snapshot;
mod split_plan;
mod stress;

/// The compiled core of kvpager.
#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    fork::watch();
    allocations::register(module)?;
    geometry::register(module)?;
    block_pool::register(module)?;
    prefix_index::register(module)?;
    replay::register(module)?;
    scheduler::register(module)?;
    split_plan::register(module)?;
    stress::register(module)?;
    attention::register(module)?;
    // PyO3 collects the names; the module is private, and the stub has none.
    module.delattr("__all__")
}
