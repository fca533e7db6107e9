//! Arrays of handles across the boundary: checked, never trusted.

use crate::arrays::{check_byte_order, read_ints};
use crate::error::invalid;
use kvpager_core::BlockHandle;
use numpy::npyffi::flags::NPY_ARRAY_WRITEABLE;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

/// Calls of more blocks than this run with the interpreter released.
pub(crate) const MAX_ATTACHED: usize = 4096;

/// Calls `act` with the handles of `object`: a contiguous `uint64` array or buffer is read in place, anything else
/// of integers is converted. Large ones are copied, and `act` runs with the interpreter released.
pub(crate) fn with_handles<R: Send>(
    object: &Bound<'_, PyAny>,
    act: impl FnOnce(&[BlockHandle]) -> R + Send,
) -> PyResult<R> {
    let py = object.py();
    // NumPy's own arrays need no buffer, whose description costs more than a small call.
    if let Ok(array) = object.cast::<PyArray1<u64>>()
        && array.len() <= MAX_ATTACHED
        // SAFETY: the interpreter is held, so nobody writes to it; on a free-threaded build the caller must not, as
        // with every array that NumPy reads. The slice is not used after this call, during which `object` lives.
        && let Ok(bits) = unsafe { array.as_slice() }
    {
        return Ok(act(BlockHandle::slice_from_bits(bits)));
    }
    check_byte_order(object, "blocks")?;
    if let Ok(buffer) = PyBuffer::<u64>::get(object)
        && buffer.dimensions() == 1
        && buffer.item_count() <= MAX_ATTACHED
        && buffer.is_c_contiguous()
    {
        if buffer.item_count() == 0 {
            return Ok(act(&[]));
        }
        // SAFETY: the buffer is contiguous, aligned (checked by `get`) and exported until `buffer` is dropped.
        // Nobody writes to it, as above.
        let bits = unsafe { std::slice::from_raw_parts(buffer.buf_ptr() as *const u64, buffer.item_count()) };
        return Ok(act(BlockHandle::slice_from_bits(bits)));
    }
    let bits: Vec<u64> = read_ints(object, "blocks")?;
    let blocks = BlockHandle::slice_from_bits(&bits);
    if blocks.len() <= MAX_ATTACHED {
        return Ok(act(blocks));
    }
    Ok(py.detach(|| act(blocks)))
}

/// Where an allocation goes: a new array, or the caller's `uint64` array or buffer.
pub(crate) enum Target<'py> {
    New(usize),
    Array(Bound<'py, PyArray1<u64>>),
    Buffer(Bound<'py, PyAny>, PyBuffer<u64>),
}

impl<'py> Target<'py> {
    /// Reads `num_blocks` and `out`, of which one must be given.
    pub(crate) fn read(num_blocks: Option<usize>, out: Option<Bound<'py, PyAny>>) -> PyResult<Self> {
        let out = match (num_blocks, out) {
            (None, Some(out)) => out,
            (Some(count), None) => return Ok(Self::New(count)),
            _ => return Err(invalid("give either num_blocks or out")),
        };
        let wrong = || invalid("out must be a contiguous, writable buffer of uint64 with 1 dimension");
        let out = match out.cast_into::<PyArray1<u64>>() {
            Ok(array) if is_writable(&array) && array.is_contiguous() && array.is_aligned() => {
                return Ok(Self::Array(array));
            }
            Ok(_) => return Err(wrong()),
            Err(error) => error.into_inner(),
        };
        check_byte_order(&out, "out")?;
        let buffer = PyBuffer::<u64>::get(&out).map_err(|_| wrong())?;
        if buffer.dimensions() != 1 || !buffer.is_c_contiguous() || buffer.readonly() {
            return Err(wrong());
        }
        Ok(Self::Buffer(out, buffer))
    }

    /// Blocks to allocate.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::New(count) => *count,
            Self::Array(array) => array.len(),
            Self::Buffer(_, buffer) => buffer.item_count(),
        }
    }

    /// Has `act` fill the target, and returns it; nothing is written if `act` fails.
    ///
    /// The caller has checked that the length is no more than the pool's blocks.
    pub(crate) fn fill(
        self,
        py: Python<'py>,
        act: impl FnOnce(&mut [BlockHandle]) -> PyResult<()> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let count = self.len();
        if count > MAX_ATTACHED {
            return self.fill_large(py, act);
        }
        match self {
            Self::New(_) => {
                let array = PyArray1::<u64>::zeros(py, count, false);
                fill_array(&array, act)?;
                Ok(array.into_any())
            }
            Self::Array(array) => {
                fill_array(&array, act)?;
                Ok(array.into_any())
            }
            Self::Buffer(out, _) if count == 0 => act(&mut []).map(|()| out),
            Self::Buffer(out, buffer) => {
                // SAFETY: the buffer is contiguous, writable, aligned and exported until it is dropped; the
                // interpreter is held, as in `with_handles`.
                let bits = unsafe { std::slice::from_raw_parts_mut(buffer.buf_ptr().cast::<u64>(), count) };
                act(BlockHandle::slice_from_bits_mut(bits))?;
                Ok(out)
            }
        }
    }

    /// By way of memory of our own, so that the interpreter can be released.
    fn fill_large(
        self,
        py: Python<'py>,
        act: impl FnOnce(&mut [BlockHandle]) -> PyResult<()> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut bits = vec![0u64; self.len()];
        py.detach(|| act(BlockHandle::slice_from_bits_mut(&mut bits)))?;
        match self {
            Self::New(_) => Ok(PyArray1::from_vec(py, bits).into_any()),
            Self::Array(array) => {
                let copy = |out: &mut [BlockHandle]| {
                    // Its size cannot have changed: NumPy refuses to resize an array that others refer to.
                    out.copy_from_slice(BlockHandle::slice_from_bits(&bits));
                    Ok(())
                };
                fill_array(&array, copy)?;
                Ok(array.into_any())
            }
            Self::Buffer(out, buffer) => buffer.copy_from_slice(py, &bits).map(|()| out),
        }
    }
}

/// Has `act` fill a contiguous, writable array.
fn fill_array(
    array: &Bound<'_, PyArray1<u64>>,
    act: impl FnOnce(&mut [BlockHandle]) -> PyResult<()>,
) -> PyResult<()> {
    // SAFETY: the interpreter is held, as in `with_handles`, and `act` calls no Python.
    let bits = unsafe { array.as_slice_mut() }.map_err(|_| invalid("out is not contiguous"))?;
    act(BlockHandle::slice_from_bits_mut(bits))
}

fn is_writable(array: &Bound<'_, PyArray1<u64>>) -> bool {
    // SAFETY: it is a live NumPy array; the flags are a plain field.
    unsafe { (*array.as_array_ptr()).fields.flags & NPY_ARRAY_WRITEABLE != 0 }
}
