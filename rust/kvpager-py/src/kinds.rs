//! Arguments that are no integers: whatever is passed, either a value of the kind comes out or an
//! `InvalidArgumentError` that says what is needed and what was passed.
//!
//! Every such parameter of a binding names one of these by `#[pyo3(from_py_with = ...)]`, as integers do
//! (`args.rs`), so that the error begins with the argument's name.

use crate::error::invalid;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyString};
use pyo3::{PyClass, PyTypeInfo};

/// The error for an argument of another kind.
#[cold]
pub(crate) fn wrong_kind(object: &Bound<'_, PyAny>, needed: &str) -> PyErr {
    invalid(format!("must be {needed}, is {}", shown(object)))
}

/// A value as Python would write it, on one line, of any length and whatever its `repr` does.
pub(crate) fn shown(object: &Bound<'_, PyAny>) -> String {
    const LONGEST: usize = 60;
    let Ok(text) = object.repr() else { return "an object whose repr fails".to_owned() };
    let text = text.to_string_lossy();
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// A text.
pub(crate) fn text<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let text = object.cast::<PyString>().map_err(|_| wrong_kind(object, "a str"))?;
    text.to_str().map_err(|_| wrong_kind(object, "a str without surrogates"))
}

/// A text that may be `None`.
pub(crate) fn optional_text<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a str>> {
    optional(object, text)
}

/// A text of its own.
pub(crate) fn owned_text(object: &Bound<'_, PyAny>) -> PyResult<String> {
    text(object).map(str::to_owned)
}

/// A text of its own, or `None`.
pub(crate) fn optional_owned_text(object: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    optional(object, owned_text)
}

/// Texts, of a list or another sequence.
pub(crate) fn texts(object: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    let wrong = |item| invalid(format!("must be a sequence of str, has {}", shown(item)));
    sequence(object)?.iter().map(|item| owned_text(item).map_err(|_| wrong(item))).collect()
}

/// A number that may have a fraction. Booleans and texts are none.
pub(crate) fn number(object: &Bound<'_, PyAny>) -> PyResult<f64> {
    if object.is_instance_of::<PyBool>() {
        return Err(wrong_kind(object, "a number"));
    }
    object.extract().map_err(|_| wrong_kind(object, "a number"))
}

/// A number that may be `None`.
pub(crate) fn optional_number(object: &Bound<'_, PyAny>) -> PyResult<Option<f64>> {
    optional(object, number)
}

/// `True` or `False`, of Python or NumPy.
pub(crate) fn flag(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    object.extract().map_err(|_| wrong_kind(object, "True or False"))
}

/// Bytes.
pub(crate) fn bytes(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>() {
        return object.extract();
    }
    Err(wrong_kind(object, "bytes"))
}

/// Bytes that may be `None`.
pub(crate) fn optional_bytes(object: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    optional(object, bytes)
}

/// An object of one of the module's classes.
pub(crate) fn instance<'a, T>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a T>
where
    T: PyClass<Frozen = True> + Sync,
{
    object.cast::<T>().map(Bound::get).map_err(|_| wrong_kind(object, &class_name::<T>(object.py())))
}

/// An object of one of the module's classes, or `None`.
pub(crate) fn optional_instance<'a, T>(object: &'a Bound<'_, PyAny>) -> PyResult<Option<&'a T>>
where
    T: PyClass<Frozen = True> + Sync,
{
    optional(object, instance)
}

/// What a list or another sequence holds. A text is none.
pub(crate) fn sequence<'py>(object: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    object.extract().map_err(|_| wrong_kind(object, "a sequence"))
}

/// What an argument holds that is a sequence or `None`.
pub(crate) fn optional_sequence<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    if object.is_none() { Ok(None) } else { sequence(object).map(Some) }
}

fn optional<'a, 'py, T>(
    object: &'a Bound<'py, PyAny>,
    read: impl FnOnce(&'a Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    if object.is_none() { Ok(None) } else { read(object).map(Some) }
}

fn class_name<T: PyTypeInfo>(py: Python<'_>) -> String {
    let name = T::type_object(py).name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let article = if name.starts_with(['A', 'E', 'I', 'O', 'U']) { "an" } else { "a" };
    format!("{article} {name}")
}
