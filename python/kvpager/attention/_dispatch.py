"""Which backend serves an array, and the checks that all backends share.

A backend is a module with the functions of the front and the same arguments. `_numpy` runs on the CPU,
`_cupy` on a GPU; `_torch` lends tensors to either.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from kvpager.errors import InvalidArgumentError

__all__ = ["Array", "backend_of", "check_kv_dtype", "check_window"]

Array = Any
"""A NumPy array, a CuPy array or a torch tensor; what shapes and dtypes each argument takes is in its
text."""

_BACKENDS = {"cupy": "_cupy", "torch": "_torch"}
_BYTES_AS = ("float8_e4m3fn", "float8_e5m2")


def backend_of(array: Array) -> ModuleType:
    """The module that handles arrays of this type; imported when the first such array arrives."""
    package = type(array).__module__.partition(".")[0]
    return importlib.import_module(f"kvpager.attention.{_BACKENDS.get(package, '_numpy')}")


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Refuses what the bytes of a cache cannot be."""
    if kv_dtype is not None and kv_dtype not in _BYTES_AS:
        raise InvalidArgumentError(f"kv_dtype is {kv_dtype!r}, expected {' or '.join(_BYTES_AS)}")


def check_window(window: int | None) -> None:
    """Refuses windows that see nothing or do not fit the kernels' integers."""
    if window is not None and not 1 <= window < 2**31:
        raise InvalidArgumentError(f"window is {window}, expected 1 to {2**31 - 1}")
