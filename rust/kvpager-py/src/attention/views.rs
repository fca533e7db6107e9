//! Arrays of a call as the core sees them.
//!
//! Arrays come as pairs (ndarray, element type name): the memory, shape and strides are the array's own, and the
//! name says what its bytes are, since NumPy itself has no bf16 or fp8.

use crate::arrays::read_ints;
use crate::error::invalid;
use kvpager_core::attention::{Dtype, Int32Matrix, KvScale, Tensor};
use numpy::npyffi::flags::{NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE};
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use std::mem::MaybeUninit;

/// An array and the name of its element type.
pub(super) type Named<'py> = (Bound<'py, PyUntypedArray>, String);

/// A scale as the front passes it: nothing, factors (one, or one a head), or an array a token and head.
#[derive(FromPyObject)]
pub(super) enum ScaleArg<'py> {
    Factors(Vec<f32>),
    Array(Named<'py>),
}

/// Address and whether the array may be written.
fn raw(array: &Bound<'_, PyUntypedArray>) -> (*mut u8, bool) {
    (data(array), has_flags(array, NPY_ARRAY_WRITEABLE))
}

fn data(array: &Bound<'_, PyUntypedArray>) -> *mut u8 {
    // SAFETY: a live NumPy array; the field is plain.
    unsafe { (*array.as_array_ptr()).fields.data.cast() }
}

fn has_flags(array: &Bound<'_, PyUntypedArray>, flags: i32) -> bool {
    // SAFETY: as above.
    let own = unsafe { (*array.as_array_ptr()).fields.flags };
    own & flags == flags
}

/// Refuses numbers in another byte order than the machine's, which would be read as other numbers.
fn check_byte_order(name: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
    let dtype = array.dtype();
    if dtype.is_native_byteorder() != Some(false) {
        return Ok(());
    }
    let order = char::from(dtype.byteorder());
    Err(invalid(format!(
        "{name} has dtype {order}{}{}, another byte order than this machine's",
        char::from(dtype.kind()),
        dtype.itemsize()
    )))
}

/// Memory of an array that a call may use as it likes: contiguous, writable bytes, for as long as the array lives.
pub(super) fn workspace(array: &Bound<'_, PyUntypedArray>) -> PyResult<*mut [MaybeUninit<u8>]> {
    if !has_flags(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE) {
        return Err(invalid("workspace must be contiguous and writable"));
    }
    let bytes = array.len() * array.dtype().itemsize();
    Ok(std::ptr::slice_from_raw_parts_mut(data(array).cast(), bytes))
}

/// A view of an array as `N` dimensions; missing trailing dimensions count 1.
pub(super) fn tensor<const N: usize>(name: &str, named: &Named<'_>, exact: bool) -> PyResult<Tensor<N>> {
    let (array, dtype_name) = named;
    let dtype = Dtype::from_name(dtype_name)
        .ok_or_else(|| invalid(format!("{name} has dtype {dtype_name}, which attention does not know")))?;
    let ndim = array.ndim();
    if ndim > N || (exact && ndim < N) || ndim == 0 {
        let expected = if exact { format!("{N}") } else { format!("1 to {N}") };
        return Err(invalid(format!("{name} has {ndim} dimensions, expected {expected}")));
    }
    if array.dtype().itemsize() != dtype.size() {
        return Err(invalid(format!(
            "{name} has items of {} bytes, not {dtype_name}",
            array.dtype().itemsize()
        )));
    }
    check_byte_order(name, array)?;
    let (mut shape, mut strides) = ([1; N], [dtype.size() as isize; N]);
    shape[..ndim].copy_from_slice(array.shape());
    strides[..ndim].copy_from_slice(array.strides());
    let (data, writable) = raw(array);
    // SAFETY: NumPy's shape and strides stay inside the array's memory, which lives as long as the caller's
    // reference. That nobody else writes it meanwhile is the documented rule of the attention front.
    Ok(unsafe { Tensor::from_raw(data, dtype, shape, strides, writable) })
}

pub(super) fn table(array: &Bound<'_, PyUntypedArray>) -> PyResult<Int32Matrix> {
    let dtype = array.dtype();
    if array.ndim() != 2 || dtype.itemsize() != 4 || dtype.kind() != b'i' || dtype.alignment() != 4 {
        return Err(invalid(format!(
            "block_tables must be a 2-dimensional int32 array, has {} dimensions of {dtype}",
            array.ndim()
        )));
    }
    check_byte_order("block_tables", array)?;
    let data = data(array);
    let strides = [array.strides()[0], array.strides()[1]];
    if !(data as usize).is_multiple_of(4) || strides.iter().any(|stride| stride % 4 != 0) {
        return Err(invalid("block_tables is not aligned to 4 bytes"));
    }
    // SAFETY: as in `tensor`; the alignment was checked.
    Ok(unsafe { Int32Matrix::from_raw(data.cast(), [array.shape()[0], array.shape()[1]], strides) })
}

pub(super) fn scale<'a>(name: &str, argument: &'a Option<ScaleArg<'_>>) -> PyResult<KvScale<'a>> {
    Ok(match argument {
        None => KvScale::One,
        Some(ScaleArg::Factors(factors)) => match factors.as_slice() {
            [factor] => KvScale::Whole(*factor),
            factors => KvScale::Head(factors),
        },
        Some(ScaleArg::Array(array)) => KvScale::TokenHead(tensor(&format!("{name}_scale"), array, true)?),
    })
}

pub(super) fn ints(name: &str, object: &Option<Bound<'_, PyAny>>) -> PyResult<Option<Vec<i32>>> {
    object.as_ref().map(|object| read_ints::<i32>(object, name)).transpose()
}
