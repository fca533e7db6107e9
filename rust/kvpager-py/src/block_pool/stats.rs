//! `PoolStats` and `AccountStats`.

use kvpager_core::block_pool::{AccountStats, PoolStats};
use pyo3::prelude::*;

/// A frozen class of counts that are read by name.
macro_rules! counts {
    ($(#[$doc:meta])* $class:ident($inner:ident, $name:literal), $($field:ident),+) => {
        $(#[$doc])*
        #[pyclass(name = $name, module = "kvpager._core", frozen)]
        pub(crate) struct $class(pub(crate) $inner);

        #[pymethods]
        impl $class {
            $(#[getter]
            fn $field(&self) -> u64 {
                self.0.$field
            })+

            fn __repr__(&self) -> String {
                let fields = [$(format!("{}={}", stringify!($field), self.0.$field)),+];
                format!("{}({})", $name, fields.join(", "))
            }
        }
    };
}

counts! {
    /// Blocks of a pool by state.
    PyPoolStats(PoolStats, "PoolStats"), capacity, held, cached, free, reserved, quarantined, peak_held,
    stranded
}
counts! {
    /// Blocks of one account.
    PyAccountStats(AccountStats, "AccountStats"),
    committed, held, reserved, quarantined, cached, guaranteed, limit
}
