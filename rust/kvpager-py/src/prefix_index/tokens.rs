//! Token arrays in: `uint32` NumPy arrays are read in place, anything else of integers is converted.

use crate::arrays::read_ints;
use crate::error::invalid;
use kvpager_core::prefix_index::Item;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::fmt::Display;

/// Items of a prompt as Python has them: (offset, digest).
pub(crate) fn items(pairs: Option<Vec<(u32, Vec<u8>)>>) -> Vec<Item> {
    let item = |(offset, digest)| Item { offset, digest };
    pairs.unwrap_or_default().into_iter().map(item).collect()
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
