//! The one place that names atomics: std's, or loom's when the crate is built with `--cfg loom`.

#![expect(clippy::disallowed_types, reason = "this module is the switch that the lint points to")]

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
