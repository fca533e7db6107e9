"""Device memory that the caller brings for partial results."""

from __future__ import annotations

from typing import Any

from kvpager.attention._device_arrays import view
from kvpager.attention._plan import ALIGNMENT
from kvpager.errors import InvalidArgumentError

__all__ = ["workspace_start"]


def workspace_start(workspace: Any, needed: int) -> int:
    """Address of a workspace that has the bytes that are needed.

    Raises:
        InvalidArgumentError: it is not on a device, has gaps, is too small or not aligned.
    """
    memory = view(workspace)
    dense = 1
    for length, stride in zip(reversed(memory.shape), reversed(memory.strides), strict=True):
        if length > 1 and stride != dense:
            raise InvalidArgumentError(
                f"workspace must be contiguous, has shape {memory.shape} and strides {memory.strides}"
            )
        dense *= length
    if dense * memory.itemsize < needed:
        raise InvalidArgumentError(f"workspace has {dense * memory.itemsize} bytes, this plan needs {needed}")
    if needed and memory.pointer % ALIGNMENT:
        raise InvalidArgumentError(f"workspace must start at a multiple of {ALIGNMENT} bytes")
    return memory.pointer
