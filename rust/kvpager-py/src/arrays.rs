//! Arrays across the boundary: integer buffers in, views over Rust-owned memory out.

use crate::args::{Integer, int};
use crate::error::invalid;
use crate::kinds::shown;
use pyo3::buffer::{Element, ElementType, PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyInt};
use std::fmt::Display;

/// Refuses numbers in another byte order than the machine's: a buffer's format says so by its first character, and
/// readers of buffers pass over it.
pub(crate) fn check_byte_order(object: &Bound<'_, PyAny>, name: &str) -> PyResult<()> {
    let Ok(buffer) = PyUntypedBuffer::get(object) else { return Ok(()) };
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    match buffer.format().to_bytes().first() {
        Some(order) if foreign.contains(order) && buffer.item_size() > 1 => Err(invalid(format!(
            "{name} has format {:?}, another byte order than this machine's",
            buffer.format()
        ))),
        _ => Ok(()),
    }
}

/// [`read_ints`] of ids of tokens: the error says what the core takes of them, which checks what is a `T`.
pub(crate) fn read_tokens<T: Element + Integer>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<T>> {
    read_within(object, name, (&0, &i32::MAX))
}

/// Reads a one-dimensional buffer of any integer dtype (or a sequence of ints) into `T`, checking the range.
///
/// `name` is the argument's name, for the error. Booleans, floats and texts are refused, bytes too: their numbers are
/// characters that somebody forgot to make tokens of.
pub(crate) fn read_ints<T: Element + Integer>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<T>> {
    read_within(object, name, (&T::MIN, &T::MAX))
}

/// Lowest and highest number that an error names.
type Bounds<'a> = (&'a dyn Display, &'a dyn Display);

fn read_within<T: Element + Integer>(
    object: &Bound<'_, PyAny>,
    name: &str,
    bounds: Bounds<'_>,
) -> PyResult<Vec<T>> {
    if object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>() {
        return Err(no_array(object, name));
    }
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return read_sequence(object, name, bounds);
    };
    if buffer.dimensions() != 1 {
        return Err(invalid(format!("{name} must have 1 dimension, has {}", buffer.dimensions())));
    }
    check_byte_order(object, name)?;
    let py = object.py();
    if let Ok(typed) = buffer.as_typed::<T>() {
        return typed.to_vec(py);
    }
    let element = ElementType::from_format(buffer.format());
    match (element, buffer.item_size()) {
        (ElementType::SignedInteger { .. }, 1) => convert::<i8, T>(py, buffer, name, bounds),
        (ElementType::SignedInteger { .. }, 2) => convert::<i16, T>(py, buffer, name, bounds),
        (ElementType::SignedInteger { .. }, 4) => convert::<i32, T>(py, buffer, name, bounds),
        (ElementType::SignedInteger { .. }, 8) => convert::<i64, T>(py, buffer, name, bounds),
        (ElementType::UnsignedInteger { .. }, 1) => convert::<u8, T>(py, buffer, name, bounds),
        (ElementType::UnsignedInteger { .. }, 2) => convert::<u16, T>(py, buffer, name, bounds),
        (ElementType::UnsignedInteger { .. }, 4) => convert::<u32, T>(py, buffer, name, bounds),
        (ElementType::UnsignedInteger { .. }, 8) => convert::<u64, T>(py, buffer, name, bounds),
        _ => Err(invalid(format!("{name} must hold integers, has format {:?}", buffer.format()))),
    }
}

fn convert<S, T>(py: Python<'_>, buffer: PyUntypedBuffer, name: &str, bounds: Bounds<'_>) -> PyResult<Vec<T>>
where
    S: Element + Into<i128>,
    T: Integer,
{
    let typed: PyBuffer<S> = buffer
        .into_typed()
        .map_err(|error| invalid(format!("{name} cannot be read: {}", error.value(py))))?;
    checked(typed.to_vec(py)?.into_iter().map(Into::into), name, bounds)
}

fn read_sequence<T: Integer>(
    object: &Bound<'_, PyAny>,
    name: &str,
    (low, high): Bounds<'_>,
) -> PyResult<Vec<T>> {
    let items = object.extract::<Vec<Bound<'_, PyAny>>>().map_err(|_| no_array(object, name))?;
    let item = |(i, item)| {
        int(item).map_err(|_| {
            let is_int = item.is_instance_of::<PyInt>() && !item.is_instance_of::<PyBool>();
            let kind = if is_int { "" } else { "an integer " };
            invalid(format!("{name}[{i}] is {}, must be {kind}{low} to {high}", shown(item)))
        })
    };
    items.iter().enumerate().map(item).collect()
}

fn no_array(object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    invalid(format!("{name} must be an integer array or a sequence of ints, is {}", shown(object)))
}

fn checked<T: Integer>(
    values: impl Iterator<Item = i128>,
    name: &str,
    (low, high): Bounds<'_>,
) -> PyResult<Vec<T>> {
    values
        .enumerate()
        .map(|(i, value)| {
            T::try_from(value)
                .map_err(|_| invalid(format!("{name}[{i}] is {value}, must be {low} to {high}")))
        })
        .collect()
}
