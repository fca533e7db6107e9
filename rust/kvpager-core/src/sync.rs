//! The one place that names atomics: std's, or loom's or shuttle's when the crate is built with `--cfg loom` or
//! `--cfg shuttle`.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};

#[cfg(loom)]
pub use loom::sync::{Mutex, MutexGuard};
#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::{Mutex, MutexGuard};

/// Locks a mutex whose data is whole even after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
