//! Arrays across the boundary: integer buffers in, views over Rust-owned memory out.

use crate::args::{Integer, int, shown};
use crate::error::invalid;
use pyo3::buffer::{Element, ElementType, PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;

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

/// Reads a one-dimensional buffer of any integer dtype (or a sequence of ints) into `T`, checking the range.
///
/// `name` is the argument's name, for the error. Booleans and floats are refused.
pub(crate) fn read_ints<T>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<T>>
where
    T: Element + Integer,
{
    let Ok(buffer) = PyUntypedBuffer::get(object) else {
        return read_sequence(object, name);
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
        (ElementType::SignedInteger { .. }, 1) => convert::<i8, T>(py, buffer, name),
        (ElementType::SignedInteger { .. }, 2) => convert::<i16, T>(py, buffer, name),
        (ElementType::SignedInteger { .. }, 4) => convert::<i32, T>(py, buffer, name),
        (ElementType::SignedInteger { .. }, 8) => convert::<i64, T>(py, buffer, name),
        (ElementType::UnsignedInteger { .. }, 1) => convert::<u8, T>(py, buffer, name),
        (ElementType::UnsignedInteger { .. }, 2) => convert::<u16, T>(py, buffer, name),
        (ElementType::UnsignedInteger { .. }, 4) => convert::<u32, T>(py, buffer, name),
        (ElementType::UnsignedInteger { .. }, 8) => convert::<u64, T>(py, buffer, name),
        _ => Err(invalid(format!("{name} must hold integers, has format {:?}", buffer.format()))),
    }
}

fn convert<S, T>(py: Python<'_>, buffer: PyUntypedBuffer, name: &str) -> PyResult<Vec<T>>
where
    S: Element + Into<i128>,
    T: Integer,
{
    let typed: PyBuffer<S> = buffer
        .into_typed()
        .map_err(|error| invalid(format!("{name} cannot be read: {}", error.value(py))))?;
    checked(typed.to_vec(py)?.into_iter().map(Into::into), name)
}

fn read_sequence<T: Integer>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<T>> {
    if let Ok(values) = object.extract::<Vec<i64>>() {
        return checked(values.into_iter().map(i128::from), name);
    }
    let wrong = |_| invalid(format!("{name} must be an integer array or a sequence of ints"));
    let items = object.extract::<Vec<Bound<'_, PyAny>>>().map_err(wrong)?;
    let item = |(i, item)| {
        int(item).map_err(|_| {
            invalid(format!("{name}[{i}] is {}, must be an integer {} to {}", shown(item), T::MIN, T::MAX))
        })
    };
    items.iter().enumerate().map(item).collect()
}

fn checked<T: Integer>(values: impl Iterator<Item = i128>, name: &str) -> PyResult<Vec<T>> {
    values
        .enumerate()
        .map(|(i, value)| {
            T::try_from(value)
                .map_err(|_| invalid(format!("{name}[{i}] is {value}, must be {} to {}", T::MIN, T::MAX)))
        })
        .collect()
}
