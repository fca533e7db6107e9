//! Integer arguments: whatever is passed, either a number in range comes out or an `InvalidArgumentError` that says
//! what was passed and what may be.
//!
//! Every integer parameter of a binding says `#[pyo3(from_py_with = int)]`, or `optional_int` where it may be `None`.
//! PyO3 names the argument to the error, which puts the name in front of its text.

use crate::error::invalid;
use crate::kinds::shown;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBool;
use std::fmt::Display;

/// An integer type with its range.
pub(crate) trait Integer: Sized + TryFrom<i128> + Display {
    const MIN: Self;
    const MAX: Self;
}

macro_rules! integers {
    ($($name:ident),+) => {
        $(impl Integer for $name {
            const MIN: Self = $name::MIN;
            const MAX: Self = $name::MAX;
        })+
    };
}

integers!(u8, u16, u32, u64, usize, i32, i64);

/// An integer argument. Booleans, floats and everything that is no integer are refused.
pub(crate) fn int<T: Integer>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    read(object, |object| slow_int(object, (&T::MIN, &T::MAX)))
}

/// An integer argument of which the core takes `LOW` to `HIGH`, as the error says for what is no `T`; what is one, the
/// core checks.
pub(crate) fn int_of<const LOW: u64, const HIGH: u64, T: Integer>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    read(object, |object| slow_int(object, (&LOW, &HIGH)))
}

/// [`int_of`], or `None`.
pub(crate) fn optional_int_of<const LOW: u64, const HIGH: u64, T: Integer>(
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<T>> {
    if object.is_none() { Ok(None) } else { int_of::<LOW, HIGH, T>(object).map(Some) }
}

fn read<T: Integer>(
    object: &Bound<'_, PyAny>,
    slow: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
) -> PyResult<T> {
    // SAFETY: `object` is a live object and the interpreter is held.
    if unsafe { ffi::PyLong_CheckExact(object.as_ptr()) } != 0 {
        // SAFETY: as above, and it is an int. An int that does not fit sets an error, which is looked at below.
        let value = unsafe { ffi::PyLong_AsLongLong(object.as_ptr()) };
        if value != -1
            && let Ok(value) = T::try_from(value.into())
        {
            return Ok(value);
        }
        if value == -1 {
            drop(PyErr::take(object.py()));
        }
    }
    slow(object)
}

/// The same for everything that is not a small int: large ones, other integer types, and all that is refused.
#[cold]
fn slow_int<T: Integer>(object: &Bound<'_, PyAny>, (low, high): (&dyn Display, &dyn Display)) -> PyResult<T> {
    let outside = || invalid(format!("is {}, must be {low} to {high}", shown(object)));
    if object.is_instance_of::<PyBool>() {
        return Err(invalid("must be an integer, is a bool"));
    }
    let wide = object.extract::<i64>().map(i128::from).or_else(|_| object.extract::<u64>().map(i128::from));
    match wide {
        Ok(value) => T::try_from(value).map_err(|_| outside()),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Err(outside()),
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
            Err(invalid(format!("must be an integer, is {}", shown(&object.get_type()))))
        }
        Err(error) => Err(error),
    }
}

/// An integer that is not an argument by itself, with its name.
pub(crate) fn named_int<T: Integer>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<T> {
    int(object).inspect_err(|error| {
        // As PyO3 does for arguments. If it fails, the error is as it was.
        let _ = error.value(object.py()).call_method1("add_note", (format!("while processing '{name}'"),));
    })
}

/// An integer argument that may be `None`.
pub(crate) fn optional_int<T: Integer>(object: &Bound<'_, PyAny>) -> PyResult<Option<T>> {
    if object.is_none() { Ok(None) } else { int(object).map(Some) }
}
