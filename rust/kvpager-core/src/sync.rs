//! The one place that names atomics, and the locks that models step through: std's, or loom's or shuttle's when the crate is built with `--cfg loom` or
//! `--cfg shuttle`.

#[cfg(loom)]
pub use interleaved::{AtomicI64, AtomicU32, AtomicU64, interleave_loads};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering, fence};
#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

#[cfg(loom)]
pub use loom::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(all(shuttle, not(loom)))]
pub use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(any(loom, shuttle)))]
pub use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Mutexes that loom need not step through, as none of its models has two threads wait for one. Shuttle runs its threads on
/// one of the system's, so whoever waits for what another holds must let it go on.
#[cfg(shuttle)]
pub use shuttle::sync::{Mutex as OuterMutex, MutexGuard as OuterMutexGuard};
#[cfg(not(shuttle))]
pub use std::sync::{Mutex as OuterMutex, MutexGuard as OuterMutexGuard};

/// Locks a mutex whose data is whole even after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Loom's atomics, with loads that can be made points where threads change.
///
/// Loom remembers only the last access of an atomic when it looks for orders that it has not tried. A thread that
/// loads what it is about to exchange hides so that another had loaded it before, and the order in which the
/// exchange comes first is never tried. So each access can be preceded by an exchange of a word beside it, relaxed
/// and so without any other effect, which loom does not overlook.
#[cfg(loom)]
mod interleaved {
    use super::Ordering;
    use std::cell::Cell;

    thread_local! {
        /// Loom runs the threads of a model on one thread.
        static LOADS: Cell<bool> = const { Cell::new(false) };
    }

    /// Whether loads of the models that this thread runs are points where threads change.
    pub fn interleave_loads(on: bool) {
        LOADS.set(on);
    }

    macro_rules! atomic {
        ($name:ident($inner:ty)) => {
            /// As std's.
            #[derive(Debug)]
            pub struct $name {
                value: loom::sync::atomic::$name,
                turn: loom::sync::atomic::AtomicU32,
            }

            impl $name {
                /// As std's.
                pub fn new(value: $inner) -> Self {
                    Self {
                        value: loom::sync::atomic::$name::new(value),
                        turn: loom::sync::atomic::AtomicU32::new(0),
                    }
                }

                /// As std's.
                pub fn load(&self, order: Ordering) -> $inner {
                    if LOADS.get() {
                        self.turn.fetch_add(1, Ordering::Relaxed);
                    }
                    self.value.load(order)
                }

                /// As std's.
                pub fn store(&self, value: $inner, order: Ordering) {
                    if LOADS.get() {
                        self.turn.fetch_add(1, Ordering::Relaxed);
                    }
                    self.value.store(value, order);
                }
            }

            impl std::ops::Deref for $name {
                type Target = loom::sync::atomic::$name;

                fn deref(&self) -> &Self::Target {
                    &self.value
                }
            }
        };
    }

    atomic!(AtomicU32(u32));
    atomic!(AtomicU64(u64));
    atomic!(AtomicI64(i64));
}
