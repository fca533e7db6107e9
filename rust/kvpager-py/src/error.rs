//! Maps the core's errors to the exceptions of `kvpager.errors`. The only place that does.

use kvpager_core::Error;
use pyo3::prelude::*;

/// The exception classes, defined in Python so that they can also be `ValueError`, `RuntimeError` and so on.
mod classes {
    pyo3::import_exception!(kvpager.errors, OutOfBlocksError);
    pyo3::import_exception!(kvpager.errors, OverQuotaError);
    pyo3::import_exception!(kvpager.errors, NeedsReclaimError);
    pyo3::import_exception!(kvpager.errors, OutOfMemoryError);
    pyo3::import_exception!(kvpager.errors, InvalidHandleError);
    pyo3::import_exception!(kvpager.errors, InvalidArgumentError);
    pyo3::import_exception!(kvpager.errors, RefusedError);
    pyo3::import_exception!(kvpager.errors, WrongStateError);
}

/// An `InvalidArgumentError` with this text.
pub(crate) fn invalid(text: impl Into<String>) -> PyErr {
    classes::InvalidArgumentError::new_err(text.into())
}

/// A `WrongStateError` with this text.
pub(crate) fn wrong_state(text: impl Into<String>) -> PyErr {
    classes::WrongStateError::new_err(text.into())
}

/// The exception of a core error. Its text is the error's sentence; the numbers are attributes.
pub(crate) fn to_py(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::OutOfBlocks { needed, available, capacity } => {
            classes::OutOfBlocksError::new_err((text, needed, available, capacity))
        }
        Error::OverQuota { account, needed, available, limit } => {
            classes::OverQuotaError::new_err((text, account.0, needed, available, limit))
        }
        Error::NeedsReclaim { needed, free, cached } => {
            classes::NeedsReclaimError::new_err((text, needed, free, cached))
        }
        Error::OutOfMemory { num_bytes, .. } => classes::OutOfMemoryError::new_err((text, num_bytes)),
        Error::InvalidHandle { .. } => classes::InvalidHandleError::new_err(text),
        Error::InvalidArgument(_) => classes::InvalidArgumentError::new_err(text),
        Error::Refused { retryable, retry_after_steps, .. } => {
            classes::RefusedError::new_err((text, retryable, retry_after_steps))
        }
        Error::WrongState(_) => classes::WrongStateError::new_err(text),
    }
}

/// `result.py()?` in a binding turns a core error into its exception.
pub(crate) trait IntoPyResult<T> {
    fn py(self) -> PyResult<T>;
}

impl<T> IntoPyResult<T> for kvpager_core::Result<T> {
    fn py(self) -> PyResult<T> {
        self.map_err(to_py)
    }
}
