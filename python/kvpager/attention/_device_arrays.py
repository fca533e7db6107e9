"""CuPy arrays and torch tensors on a CUDA device, as addresses and shapes; small arrays on their way there.

Nothing is copied but small arguments that come from the host (lengths, ids, slots).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpager.attention import kernels
from kvpager.attention._views import ArrayView
from kvpager.errors import InvalidArgumentError

__all__ = [
    "floats_on_device",
    "host_ints",
    "ints_on_device",
    "is_device_array",
    "is_torch",
    "new_array",
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
    return view(floats_on_device(scale))


def host_ints(name: str, array: Any, dtype: Any = np.int32) -> Any:
    """Integers that are on the host, in the dtype that kernels read; None for arrays on a device and None.

    Raises:
        InvalidArgumentError: What is there is no array of integers, or one does not fit the dtype.
    """
    if array is None or is_device_array(array):
        return None
    try:
        values = np.asarray(array)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} is no array of integers: {error}") from error
    if values.size and values.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} must have integers, has {values.dtype}")
    limits = np.iinfo(dtype)
    if values.size and not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
        raise InvalidArgumentError(
            f"{name} must fit {limits.dtype}, has {int(values.min())} to {int(values.max())}"
        )
    return np.ascontiguousarray(values, dtype)


def ints_on_device(name: str, array: Any, dtype: Any = np.int32) -> Any:
    """A small array of integers on the device: itself if it is there, else a copy."""
    values = host_ints(name, array, dtype)
    return array if values is None else kernels.load_cupy().asarray(values)


def floats_on_device(array: Any) -> Any:
    """A small array of float32 on the device: itself if it is there, else a copy."""
    if array is None or is_device_array(array):
        return array
    return kernels.load_cupy().asarray(np.ascontiguousarray(array, dtype=np.float32))


def on_host(name: str, array: Any) -> Any:
    """A small array of int32 on the host; waits for the device if it is there."""
    if array is not None and is_device_array(array):
        array = array.cpu().numpy() if is_torch(array) else array.get()
    return host_ints(name, array)


def new_array(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """A new array of the same library and device, of the same dtype or a named one."""
    if is_torch(like):
        torch = importlib.import_module("torch")
        return like.new_empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype))
    return kernels.load_cupy().empty(shape, dtype=like.dtype if dtype is None else dtype)


@contextlib.contextmanager
def stream_of(array: Any) -> Iterator[None]:
    """Makes the array's device current, and for torch tensors torch's current stream there CuPy's."""
    cupy = kernels.load_cupy()
    if not is_torch(array):
        with array.device:
            yield
        return
    torch = importlib.import_module("torch")
    with (
        cupy.cuda.Device(array.device.index),
        cupy.cuda.Stream.from_external(torch.cuda.current_stream(array.device)),
    ):
        yield
