"""Which backend serves an array, and what kind an array is.

A backend is a module with the functions of the front and the same arguments. `_numpy` runs on the CPU,
`_cupy` on a GPU; `_torch` lends tensors to either.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from kvpager.errors import InvalidArgumentError

__all__ = ["Array", "backend_of", "is_torch", "on_a_device", "type_name"]

Array = Any
"""A NumPy array, a CuPy array or a torch tensor; what shapes and dtypes each argument takes is in its
text."""

_MODULES = {"host": "_numpy", "cupy": "_cupy", "torch": "_torch"}


def type_name(value: Any) -> str:
    """The type of a value as an error shows it."""
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor, of whichever subclass. Imports nothing."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def on_a_device(value: Any) -> bool:
    """Whether an array lies on a GPU."""
    return bool(value.is_cuda) if is_torch(value) else hasattr(value, "__cuda_array_interface__")


def _kind(name: str, array: Any) -> str:
    """Which backend an array belongs to; what is no array is refused."""
    if type(array) is np.ndarray:
        return "host"
    if is_torch(array):
        return "torch"
    if any(base.__module__.partition(".")[0] == "cupy" for base in type(array).__mro__):
        return "cupy"
    if isinstance(array, np.ndarray) or hasattr(array, "__dlpack__"):
        return "host"
    raise InvalidArgumentError(f"{name} is a {type_name(array)}, expected an array")


def backend_of(required: dict[str, Array], optional: dict[str, Array | None] | None = None) -> ModuleType:
    """The module that handles the arrays of a call; imported when the first such array arrives.

    Args:
        required: the arrays by their names; the first decides.
        optional: those that may be None.

    Returns:
        The backend.

    Raises:
        InvalidArgumentError: something is no array, or of another kind than the first.
    """
    given = required | {name: array for name, array in (optional or {}).items() if array is not None}
    kinds = [(name, _kind(name, array)) for name, array in given.items()]
    first, kind = kinds[0]
    for name, other in kinds:
        if other != kind:
            where = ", so all arrays of the call must be on the device" if kind == "cupy" else ""
            raise InvalidArgumentError(
                f"{name} is a {type_name(given[name])}, but {first} is a {type_name(given[first])}{where}: "
                "all arrays of a call are of one kind"
            )
    return importlib.import_module(f"kvpager.attention.{_MODULES[kind]}")
