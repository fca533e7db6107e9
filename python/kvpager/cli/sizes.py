"""Byte counts as people write and read them."""

from __future__ import annotations

import re

from kvpager.errors import InvalidArgumentError

__all__ = ["format_bytes", "parse_bytes"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, name: str) -> int:
    """Reads a byte count: `80GiB` and `80G` are binary, `80GB` is decimal, a bare number is bytes.

    Args:
        text: what was written.
        name: the option, for the error.

    Raises:
        InvalidArgumentError: if it is not a size.

    Example:
        >>> parse_bytes("1.5KiB", "--weights")
        1536
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidArgumentError(f"{name} is {text!r}, expected bytes like 80GiB, 512MiB or 1000000")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size >= 1 << 62:
        raise InvalidArgumentError(f"{name} is {text!r}, more than 4 EiB")
    return size


def format_bytes(size: int) -> str:
    """Writes a byte count with a binary unit and three figures.

    Example:
        >>> format_bytes(131072)
        '128 KiB'
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if value == int(value) or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"
