//! The one place that names atomics: std's, or loom's when the crate is built with `--cfg loom`.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
