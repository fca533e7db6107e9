"""Arrays as addresses with shapes, and the checks that kernels of all kinds make of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpager.attention.block_sizes import check_block_size
from kvpager.errors import InvalidArgumentError

__all__ = [
    "ArrayView",
    "Scale",
    "cache_strides",
    "check_cache",
    "check_head_values",
    "check_ints",
    "check_rows",
    "fail",
    "resolve_scale",
    "scale_strides",
]


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array lies and how: enough to hand it to a kernel.

    Attributes:
        pointer: address of element 0.
        shape: lengths of the axes.
        strides: elements between neighbours, by axis.
        dtype: name, as in `KV_TYPES`, or an integer type's.
        itemsize: bytes of an element.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int


def fail(text: str) -> InvalidArgumentError:
    """The error of a call whose arguments do not fit."""
    return InvalidArgumentError(text)


def check_rows(name: str, view: ArrayView, axes: int) -> None:
    """The last axis must be dense and every row start at a multiple of 8 elements, at most 16 bytes."""
    if len(view.shape) != axes:
        raise fail(f"{name} must have {axes} dimensions, has {len(view.shape)}")
    if 0 in view.shape:
        return
    align = min(16, 8 * view.itemsize)
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise fail(f"{name} must be contiguous in its last dimension, has stride {view.strides[-1]}")
    if view.pointer % align:
        raise fail(f"{name} must start at a multiple of {align} bytes")
    for axis, (length, stride) in enumerate(zip(view.shape[:-1], view.strides[:-1], strict=True)):
        if length > 1 and stride * view.itemsize % align:
            raise fail(f"{name} has stride {stride} in dimension {axis}: must be a multiple of {align} bytes")


def check_cache(k_cache: ArrayView, v_cache: ArrayView) -> int:
    """Checks a pair of caches; returns log2 of the block size."""
    check_rows("k_cache", k_cache, 4)
    check_rows("v_cache", v_cache, 4)
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise fail(
            f"k_cache {k_cache.shape} {k_cache.dtype} and v_cache {v_cache.shape} {v_cache.dtype} "
            "must be alike"
        )
    block_size = k_cache.shape[1]
    check_block_size(block_size)
    return block_size.bit_length() - 1


def check_ints(name: str, view: ArrayView, dtype: str, axes: int, length: int | None = None) -> None:
    """Checks an integer array that kernels read."""
    if view.dtype != dtype or len(view.shape) != axes:
        raise fail(f"{name} must be {dtype} with {axes} dimensions, is {view.dtype} {view.shape}")
    if 0 not in view.shape and view.shape[-1] > 1 and view.strides[-1] != 1:
        raise fail(f"{name} must be contiguous in its last dimension")
    if length is not None and view.shape[0] != length:
        raise fail(f"{name} must have length {length}, has {view.shape[0]}")


def check_head_values(name: str, view: ArrayView | None, num_heads: int) -> None:
    """Checks a number a query head."""
    if view is None:
        return
    if view.dtype != "float32" or view.shape != (num_heads,) or (num_heads > 1 and view.strides[0] != 1):
        raise fail(f"{name} must be float32 [{num_heads}], is {view.dtype} {view.shape}")


@dataclass(frozen=True, slots=True)
class Scale:
    """A quantisation scale as the kernels take it: a factor, and an array or null."""

    value: float
    pointer: int
    strides: tuple[int, int, int]


def resolve_scale(name: str, scale: ArrayView | float | None, cache: ArrayView) -> Scale:
    """Checks a scale: one number, one a KV head (8-bit floats), or one a slot and head (int8)."""
    blocks, block_size, heads, _ = cache.shape
    if cache.dtype == "int8":
        if not isinstance(scale, ArrayView):
            raise fail(
                f"{name} of an int8 cache must be a float32 array [num_blocks, block_size, num_kv_heads]"
            )
        if scale.dtype != "float32" or scale.shape != (blocks, block_size, heads):
            raise fail(
                f"{name} must be float32 {(blocks, block_size, heads)}, is {scale.dtype} {scale.shape}"
            )
        return Scale(1.0, scale.pointer, (scale.strides[0], scale.strides[1], scale.strides[2]))
    if scale is None:
        return Scale(1.0, 0, (0, 0, 0))
    if not cache.dtype.startswith("float8"):
        raise fail(f"{name} is given, but the cache is {cache.dtype}: only 8-bit caches have scales")
    if isinstance(scale, ArrayView):
        if scale.dtype != "float32" or scale.shape != (heads,):
            raise fail(f"{name} must be a number or float32 [{heads}], is {scale.dtype} {scale.shape}")
        return Scale(1.0, scale.pointer, (0, 0, scale.strides[0]))
    if isinstance(scale, bool) or not (0 < scale < math.inf):
        raise fail(f"{name} must be a positive number, is {scale}")
    return Scale(float(scale), 0, (0, 0, 0))


def cache_strides(k_cache: ArrayView, v_cache: ArrayView) -> dict[str, object]:
    """The strides of a pair of caches, by the names of the kernels' parameters."""
    names = ("block_stride", "slot_stride", "head_stride")
    found: dict[str, object] = {f"k_{n}": s for n, s in zip(names, k_cache.strides[:3], strict=True)}
    return found | {f"v_{n}": s for n, s in zip(names, v_cache.strides[:3], strict=True)}


def scale_strides(k_scale: Scale, v_scale: Scale) -> dict[str, object]:
    """The same for their scales."""
    names = ("block_stride", "slot_stride", "head_stride")
    found: dict[str, object] = {f"k_scale_{n}": s for n, s in zip(names, k_scale.strides, strict=True)}
    return found | {f"v_scale_{n}": s for n, s in zip(names, v_scale.strides, strict=True)}
