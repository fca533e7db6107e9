"""Arrays on the host as the native kernels take them: named element types, checked integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.attention._arguments import number, numbers
from kvpager.attention._dispatch import is_torch, on_a_device, type_name
from kvpager.errors import InvalidArgumentError

__all__ = ["Named", "array_of", "cache_of", "check_apart", "elements_of", "ints", "named", "scale_of"]

Array = npt.NDArray[Any]
Named = tuple[Array, str]
"""An array and the name of its element type."""

_BY_SIZE = {1: "int8", 2: "float16", 4: "float32"}
_MOST_WORK = 10_000
"""Steps of looking for an element that two arrays share; where it takes more they count as overlapping."""


def array_of(name: str, array: Any, ndim: int | None = None) -> Array:
    """The array itself, or a view of what DLPack lends."""
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise InvalidArgumentError(f"{name} is a {type_name(array)}, expected an array")
        try:
            array = np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{name} is a {type_name(array)} that NumPy cannot read: {error}"
            ) from error
    if ndim is not None and array.ndim != ndim:
        raise InvalidArgumentError(f"{name} has {array.ndim} dimensions, expected {ndim}")
    found: Array = array
    return found


def named(name: str, array: Any, ndim: int | None = None) -> Named:
    """An array with the name of its element type."""
    found = array_of(name, array, ndim)
    return found, found.dtype.name


def cache_of(name: str, cache: Any, kv_dtype: str | None) -> Named:
    """A cache with its element type: its own, or for plain bytes what the caller says they are."""
    array, dtype = named(name, cache, 4)
    if kv_dtype is None or kv_dtype == dtype:
        return array, dtype
    if dtype != "uint8":
        raise InvalidArgumentError(f"{name} of {dtype} cannot be read as {kv_dtype}; uint8 can")
    return array, kv_dtype


def elements_of(name: str, array: Any, like: Any = None) -> Named:
    """An array whose elements are only moved: any dtype of 1, 2 or 4 bytes, that of `like` if given."""
    array = array_of(name, array)
    if like is not None and array.dtype != like.dtype:
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}, expected {like.dtype}")
    if array.ndim == 0:
        raise InvalidArgumentError(f"{name} has 0 dimensions, expected 1 to 4")
    if array.dtype.itemsize not in _BY_SIZE:
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}, expected elements of 1, 2 or 4 bytes")
    return array, _BY_SIZE[array.dtype.itemsize]


def ints(name: str, values: Any, dtype: type[np.signedinteger[Any]], ndim: int = 1) -> Array:
    """Integers of a dtype: the array itself where it has it, else a checked conversion."""
    array = values if isinstance(values, np.ndarray) else _plain_ints(name, values)
    if array.ndim != ndim and array.size > 0:
        raise InvalidArgumentError(f"{name} has {array.ndim} dimensions, expected {ndim}")
    if array.dtype == dtype and array.ndim == ndim:
        return array
    if array.size == 0:
        return np.zeros(array.shape if array.ndim == ndim else (0,) * ndim, dtype)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}, expected integers")
    limits = np.iinfo(dtype)
    outside = (array < limits.min) | (array > limits.max)
    if outside.any():
        place = [int(index) for index in np.argwhere(outside)[0]]
        raise InvalidArgumentError(
            f"{name}{place} is {array[tuple(place)]}, must be {limits.min} to {limits.max}"
        )
    return array.astype(dtype)


def _plain_ints(name: str, values: Any) -> Array:
    if on_a_device(values):
        raise InvalidArgumentError(f"{name} is a {type_name(values)} on a device, expected it on the host")
    try:
        return np.asarray(values.detach() if is_torch(values) else values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} is no array of integers: {error}") from error


def scale_of(name: str, scale: Any) -> list[float] | Named | None:
    """Factors of a float8 cache, or the array of an int8 cache."""
    if scale is None:
        return None
    if isinstance(scale, np.ndarray) or hasattr(scale, "__dlpack__"):
        array = array_of(name, scale)
        if array.ndim == 3:
            return named(name, array)
        scale = array
    elif not isinstance(scale, (list, tuple)):
        return [number(name, scale)]
    found = numbers(name, scale)
    if found.ndim > 1:
        raise InvalidArgumentError(f"{name} has {found.ndim} dimensions, expected 0, 1 or 3")
    factors: list[float] = found.reshape(-1).tolist()
    return factors


def check_apart(name: str, written: Array, others: Mapping[str, Array | None]) -> None:
    """Refuses to write memory that is read in the same call."""
    for other_name, other in others.items():
        if other is not None and _share(written, other):
            distance = written.ctypes.data - other.ctypes.data
            raise InvalidArgumentError(
                f"{name} and {other_name} share memory: {name}, of {written.nbytes} bytes, begins "
                f"{abs(distance)} bytes {'after' if distance >= 0 else 'before'} {other_name}"
            )


def _share(a: Array, b: Array) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_MOST_WORK)  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True
