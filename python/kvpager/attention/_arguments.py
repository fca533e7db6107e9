"""Checks of arguments that all backends share: numbers, flags, values a head. What comes out is plain."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.attention._dispatch import is_torch, on_a_device
from kvpager.errors import InvalidArgumentError

__all__ = [
    "attention_options",
    "check_kv_dtype",
    "flag",
    "head_values",
    "integer",
    "number",
    "numbers",
    "shown",
]

_LARGEST = float(np.finfo(np.float32).max)
_BYTES_AS = ("float8_e4m3fn", "float8_e5m2")


def shown(value: Any) -> str:
    """A value as an error shows it."""
    return repr(value)[:80]


def number(name: str, value: Any) -> float:
    """A finite number that float32 holds."""
    plain = not isinstance(value, (bool, np.bool_, str, bytes)) and getattr(value, "ndim", 0) == 0
    try:
        found = float(value) if plain else None
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None:
        raise InvalidArgumentError(f"{name} is {shown(value)}, expected a number")
    if not math.isfinite(found):
        raise InvalidArgumentError(f"{name} is {found}, expected a finite number")
    if abs(found) > _LARGEST:
        raise InvalidArgumentError(f"{name} is {found}, too large for float32")
    return found


def integer(name: str, value: Any, lowest: int = 0, highest: int = 2**31 - 1) -> int:
    """An integer in a range."""
    try:
        found = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not lowest <= found <= highest:
        raise InvalidArgumentError(f"{name} is {shown(value)}, expected an integer {lowest} to {highest}")
    return found


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{name} is {shown(value)}, expected True or False")
    return bool(value)


def numbers(name: str, values: Any) -> npt.NDArray[np.float32]:
    """Numbers on the host in float32; what that cannot hold is refused with its place."""
    try:
        # torch's bfloat16 has no NumPy type; float64 holds every number of the others.
        wide = np.asarray(values.detach().double() if is_torch(values) else values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} is no array of numbers: {error}") from error
    if wide.dtype.kind not in "iufV" or wide.dtype.names:  # V: the small floats of ml_dtypes
        raise InvalidArgumentError(f"{name} has dtype {wide.dtype}, expected numbers")
    try:
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} has dtype {wide.dtype}, expected numbers") from error
    lost = np.argwhere(np.isinf(narrow) & np.isfinite(wide.astype(np.float64)))
    if len(lost):
        place = tuple(int(index) for index in lost[0])
        raise InvalidArgumentError(f"{_item(name, place)} is {wide[place]}, too large for float32")
    return narrow


def _item(name: str, place: tuple[int, ...]) -> str:
    return f"{name}{list(place)}" if place else name


def head_values(name: str, values: Any, *, without: bool = False) -> Any:
    """A number a query head, checked where it lies on the host; arrays on a device as they are.

    Args:
        name: of the argument.
        values: the numbers, or None.
        without: whether -inf may stand for none.

    Returns:
        float32 [num_query_heads], None, or the array on its device.
    """
    if values is None or on_a_device(values):
        return values
    found = numbers(name, values)
    if found.ndim != 1:
        raise InvalidArgumentError(f"{name} has {found.ndim} dimensions, expected 1")
    wrong = np.flatnonzero(np.isnan(found) | np.isposinf(found) | (np.isneginf(found) & (not without)))
    if len(wrong):
        at = int(wrong[0])
        raise InvalidArgumentError(f"{name}[{at}] is {found[at]}, expected a finite number")
    return found


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Refuses what the bytes of a cache cannot be."""
    if kv_dtype is not None and kv_dtype not in _BYTES_AS:
        raise InvalidArgumentError(f"kv_dtype is {shown(kv_dtype)}, expected {' or '.join(_BYTES_AS)}")


def attention_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of an attention call, checked; those that are given keep their names."""
    found = dict(options)
    check_kv_dtype(options.get("kv_dtype"))
    for name in ("scale", "softcap"):
        if options.get(name) is not None:
            found[name] = number(name, options[name])
    if options.get("window") is not None:
        found["window"] = integer("window", options["window"], 1)
    for name in ("causal", "return_lse"):
        if name in options:
            found[name] = flag(name, options[name])
    found["alibi_slopes"] = head_values("alibi_slopes", options.get("alibi_slopes"))
    found["sinks"] = head_values("sinks", options.get("sinks"), without=True)
    return found
