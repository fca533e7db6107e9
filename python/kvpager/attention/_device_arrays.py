"""CuPy arrays and torch tensors on a CUDA device, as addresses and shapes; small arrays on their way there.

Nothing is copied but small arguments that come from the host (lengths, ids, slots).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np

from kvpager.attention import kernels
from kvpager.attention._views import ArrayView
from kvpager.errors import InvalidArgumentError

__all__ = [
    "is_device_array",
    "is_torch",
    "new_array",
    "on_device",
    "on_host",
    "optional_view",
    "scale_view",
    "stream_of",
    "view",
]

_DTYPE_NAMES = {"float8_e4m3fn": "float8_e4m3"}


def is_torch(array: Any) -> bool:
    return hasattr(array, "data_ptr")


def is_device_array(array: Any) -> bool:
    """Whether an array lies on a CUDA device (CuPy, or torch on `cuda`)."""
    return bool(array.is_cuda) if is_torch(array) else hasattr(array, "__cuda_array_interface__")


def view(array: Any, dtype: str | None = None) -> ArrayView:
    """Address, shape and strides of a CuPy or torch array on the device.

    Args:
        array: the array; not copied, must outlive the launch.
        dtype: what its bytes are, when the array's own dtype cannot say it (8-bit floats in uint8).

    Returns:
        The view.

    Raises:
        InvalidArgumentError: The array is not on a device, or `dtype` is given for elements of other widths.
    """
    if not is_device_array(array):
        raise InvalidArgumentError(
            f"all arrays of a call must be on the device, one is {type(array).__name__}"
        )
    itemsize = int(array.dtype.itemsize)
    name = str(array.dtype).removeprefix("torch.") if dtype is None else dtype
    if dtype is not None and itemsize != 1:
        raise InvalidArgumentError(f"kv_dtype {dtype} needs a cache of 1-byte elements, is {array.dtype}")
    name = _DTYPE_NAMES.get(name, name)
    if is_torch(array):  # strides count elements
        return ArrayView(int(array.data_ptr()), tuple(array.shape), tuple(array.stride()), name, itemsize)
    strides = tuple(stride // itemsize for stride in array.strides)
    return ArrayView(int(array.data.ptr), tuple(array.shape), strides, name, itemsize)


def optional_view(array: Any, dtype: str | None = None) -> ArrayView | None:
    """The view of an array that may be None."""
    return None if array is None else view(array, dtype)


def scale_view(scale: Any) -> ArrayView | float | None:
    """A quantisation scale as the launches take it: a number, or an array on the device."""
    if scale is None or isinstance(scale, (int, float)):
        return scale
    if isinstance(scale, (np.floating, np.integer)):
        return float(scale)
    return view(on_device(scale, np.float32))


def on_device(array: Any, dtype: Any = np.int32) -> Any:
    """A small array on the device: itself if it is there, else a copy in the dtype that kernels read."""
    if array is None or is_device_array(array):
        return array
    return kernels.load_cupy().asarray(np.ascontiguousarray(array, dtype=dtype))


def on_host(array: Any) -> Any:
    """A small array on the host; waits for the device if it is there."""
    if array is None:
        return None
    if is_torch(array):
        array = array.cpu().numpy()
    elif is_device_array(array):
        array = array.get()
    return np.ascontiguousarray(array, dtype=np.int32)


def new_array(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """A new array of the same library and device, of the same dtype or a named one."""
    if is_torch(like):
        torch = importlib.import_module("torch")
        return like.new_empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype))
    return kernels.load_cupy().empty(shape, dtype=like.dtype if dtype is None else dtype)


def stream_of(array: Any) -> Any:
    """The caller's stream as a context: torch's current one for its tensors, CuPy's own otherwise."""
    if not is_torch(array):
        return contextlib.nullcontext()
    torch = importlib.import_module("torch")
    stream_class = kernels.load_cupy().cuda.Stream
    return stream_class.from_external(torch.cuda.current_stream(array.device))
