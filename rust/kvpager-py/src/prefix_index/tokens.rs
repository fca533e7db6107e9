//! Token arrays in: `uint32` NumPy arrays are read in place, anything else of integers is converted.

use crate::args::int;
use crate::arrays::read_ints;
use crate::error::invalid;
use crate::kinds::{bytes, sequence, shown};
use kvpager_core::prefix_index::Item;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::fmt::Display;

/// Items of a prompt as Python has them, (offset, digest).
pub(crate) fn items(object: &Bound<'_, PyAny>) -> PyResult<Vec<Item>> {
    sequence(object)?.iter().enumerate().map(|(i, pair)| item(i, pair)).collect()
}

/// [`items`], or `None`.
pub(crate) fn optional_items(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<Item>>> {
    if object.is_none() { Ok(None) } else { items(object).map(Some) }
}

fn item(number: usize, pair: &Bound<'_, PyAny>) -> PyResult<Item> {
    let read = || {
        let (offset, digest) = pair.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        Ok::<_, PyErr>(Item { offset: int(&offset)?, digest: bytes(&digest)? })
    };
    let wrong = |_| {
        let digest = format!("pairs (offset, digest) of an int from 0 to {} and bytes", u32::MAX);
        invalid(format!("must be {digest}, has {} at {number}", shown(pair)))
    };
    read().map_err(wrong)
}

/// Token ids as a caller passed them.
pub(super) enum Tokens<'py> {
    /// A contiguous `uint32` array, read in place.
    Borrowed(Bound<'py, PyArray1<u32>>),
    /// Converted ids.
    Converted(Vec<u32>),
}

impl<'py> Tokens<'py> {
    /// Reads one prompt. `name` is the argument's name, for errors.
    pub(super) fn read(object: &Bound<'py, PyAny>, name: impl Display) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray1<u32>>()
            && array.is_c_contiguous()
            && array.data().is_aligned()
        {
            return Ok(Self::Borrowed(array.clone()));
        }
        Ok(Self::Converted(read_ints(object, &name.to_string())?))
    }

    /// The ids.
    pub(super) fn as_slice(&self) -> PyResult<&[u32]> {
        match self {
            // SAFETY: the array is kept alive by the reference, and is contiguous and aligned. Python must not write it during
            // the call, as the docstring says: nothing could keep another thread's Python from it. (Counting
            // borrows, as the `numpy` crate can, keeps out only other Rust code, and takes longer than a match.)
            Self::Borrowed(array) => unsafe { array.as_slice() }.map_err(|error| invalid(error.to_string())),
            Self::Converted(ids) => Ok(ids),
        }
    }
}
