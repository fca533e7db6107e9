//! Numbers and arrays of handles across the boundary: checked, never trusted.

use crate::arrays::read_ints;
use crate::error::invalid;
use kvpager_core::BlockHandle;
use numpy::{PyArray1, PyArrayMethods};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

/// Calls of more blocks than this run with the interpreter released.
pub(crate) const MAX_ATTACHED: usize = 4096;

/// An integer argument; anything else, or one out of range, is an `InvalidArgumentError`.
pub(crate) fn int<T: TryFrom<u64>>(object: &Bound<'_, PyAny>, name: &str) -> PyResult<T> {
    let outside =
        || invalid(format!("{name} is {}, outside 0 to 2^{} - 1", shown(object), size_of::<T>() * 8));
    if object.is_instance_of::<PyBool>() {
        return Err(invalid(format!("{name} must be an integer, is a bool")));
    }
    match object.extract::<u64>() {
        Ok(value) => T::try_from(value).map_err(|_| outside()),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Err(outside()),
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
            Err(invalid(format!("{name} must be an integer, is {}", shown(&object.get_type()))))
        }
        Err(error) => Err(error),
    }
}

fn shown(object: &Bound<'_, PyAny>) -> String {
    // An object whose `str` fails still gets an error of ours.
    let text = object.str().map(|text| text.to_string_lossy().chars().take(80).collect());
    text.unwrap_or_else(|_| "an object".to_owned())
}

/// Calls `act` with the handles of `object`: a contiguous `uint64` buffer is read in place, anything else of
/// integers is converted. Large ones are copied, and `act` runs with the interpreter released.
pub(crate) fn with_handles<R: Send>(
    object: &Bound<'_, PyAny>,
    act: impl FnOnce(&[BlockHandle]) -> R + Send,
) -> PyResult<R> {
    let py = object.py();
    if let Ok(buffer) = PyBuffer::<u64>::get(object)
        && buffer.dimensions() == 1
        && buffer.item_count() <= MAX_ATTACHED
        && buffer.is_c_contiguous()
    {
        if buffer.item_count() == 0 {
            return Ok(act(&[]));
        }
        // SAFETY: the buffer is contiguous, aligned (checked by `get`) and exported until `buffer` is dropped.
        // The interpreter is held, so nobody writes to it; on a free-threaded build the caller must not, as
        // with every array that NumPy reads.
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

/// Where an allocation goes: a new array, or the caller's `uint64` buffer.
pub(crate) enum Target<'py> {
    New(usize),
    Buffer(Bound<'py, PyAny>, PyBuffer<u64>),
}

impl<'py> Target<'py> {
    /// Reads `num_blocks` and `out`, of which one must be given.
    pub(crate) fn read(
        num_blocks: Option<&Bound<'py, PyAny>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let (None, Some(out)) = (num_blocks, &out) else {
            return match (num_blocks, out) {
                (Some(count), None) => Ok(Self::New(int(count, "num_blocks")?)),
                _ => Err(invalid("give either num_blocks or out")),
            };
        };
        let wrong = || invalid("out must be a contiguous, writable buffer of uint64 with 1 dimension");
        let buffer = PyBuffer::<u64>::get(out).map_err(|_| wrong())?;
        if buffer.dimensions() != 1 || !buffer.is_c_contiguous() || buffer.readonly() {
            return Err(wrong());
        }
        Ok(Self::Buffer(out.clone(), buffer))
    }

    /// Blocks to allocate.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::New(count) => *count,
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
            let mut bits = vec![0u64; count];
            py.detach(|| act(BlockHandle::slice_from_bits_mut(&mut bits)))?;
            return match self {
                Self::New(_) => Ok(PyArray1::from_vec(py, bits).into_any()),
                Self::Buffer(out, buffer) => buffer.copy_from_slice(py, &bits).map(|()| out),
            };
        }
        match self {
            Self::New(_) => {
                let array = PyArray1::<u64>::zeros(py, count, false);
                // SAFETY: the array is new, so nobody else has it yet.
                let bits = unsafe { array.as_slice_mut() };
                let bits = bits.map_err(|_| invalid("a new array is not contiguous"))?;
                act(BlockHandle::slice_from_bits_mut(bits))?;
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
}
