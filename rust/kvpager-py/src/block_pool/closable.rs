//! A value that one thread uses at a time and that can be closed before it is collected.

use crate::error::wrong_state;
use crate::fork::Home;
use pyo3::prelude::*;
use std::sync::{Mutex, TryLockError};

/// What is inside of `Magazine` and `Reservation`.
pub(super) struct Closable<T> {
    /// `None` once it is closed. Only tried, never waited for: it has one user at a time.
    inner: Mutex<Option<T>>,
    home: Home,
    /// What errors call it.
    name: &'static str,
}

impl<T> Closable<T> {
    pub(super) const fn new(inner: T, home: Home, name: &'static str) -> Self {
        Self { inner: Mutex::new(Some(inner)), home, name }
    }

    /// Lends what is inside, `None` if it is closed.
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Option<T>) -> PyResult<R>) -> PyResult<R> {
        self.home.check()?;
        match self.inner.try_lock() {
            Ok(mut inner) => act(&mut inner),
            Err(TryLockError::Poisoned(poisoned)) => act(&mut poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(wrong_state(format!("another thread is using this {}", self.name)))
            }
        }
    }

    /// Lends what is inside; an error if it is closed.
    pub(super) fn open<R>(&self, act: impl FnOnce(&mut T) -> PyResult<R>) -> PyResult<R> {
        self.with(|inner| {
            act(inner.as_mut().ok_or_else(|| wrong_state(format!("the {} is closed", self.name)))?)
        })
    }

    pub(super) fn is_open(&self) -> PyResult<bool> {
        self.with(|inner| Ok(inner.is_some()))
    }

    pub(super) fn close(&self) -> PyResult<()> {
        self.with(|inner| {
            *inner = None;
            Ok(())
        })
    }
}
