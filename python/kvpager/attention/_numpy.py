"""The NumPy backend: hands arrays to the native kernels and allocates what the caller did not bring."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.errors import InvalidArgumentError

__all__ = [
    "append_kv",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "scatter_blocks",
    "zero_blocks",
]

Array = npt.NDArray[Any]
Named = tuple[Array, str]
"""An array and the name of its element type."""


class _Caches(NamedTuple):
    k_cache: Named
    v_cache: Named
    k_scale: list[float] | Named | None
    v_scale: list[float] | Named | None


class _Batch(NamedTuple):
    block_tables: Array
    table_rows: Array | None
    query_start: Array
    context_lens: Array
    group_start: Array | None = None
    group_sequences: Array | None = None
    prefix_lens: Array | None = None


class _Options(NamedTuple):
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    alibi_slopes: list[float] | None
    sinks: list[float] | None
    instruction_set: str | None


instruction_set: str | None = None
"""Kernels to use instead of the fastest, for tests and benchmarks: one of `instruction_sets()`."""


def _array(name: str, array: Any) -> Array:
    """The array itself, or a view of whatever offers DLPack from host memory."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "__dlpack__"):
        return np.from_dlpack(array)
    raise InvalidArgumentError(f"{name} is a {type(array).__name__}, expected an array")


def _named(name: str, array: Any) -> Named:
    array = _array(name, array)
    return array, array.dtype.name


def _cache(name: str, cache: Any, kv_dtype: str | None) -> Named:
    """A cache with its element type: its own, or for plain bytes what the caller says they are."""
    array, dtype = _named(name, cache)
    if kv_dtype is None or kv_dtype == dtype:
        return array, dtype
    if dtype != "uint8":
        raise InvalidArgumentError(f"{name} of {dtype} cannot be read as {kv_dtype}; uint8 can")
    return array, kv_dtype


_BY_SIZE = {1: "int8", 2: "float16", 4: "float32"}


def _elements(name: str, array: Any, like: Any = None) -> Named:
    """An array whose elements are only moved: any dtype of 1, 2 or 4 bytes, that of `like` if given."""
    array = _array(name, array)
    if like is not None and array.dtype != like.dtype:
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}, expected {like.dtype}")
    if array.dtype.itemsize not in _BY_SIZE:
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}, expected elements of 1, 2 or 4 bytes")
    return array, _BY_SIZE[array.dtype.itemsize]


def _ints(name: str, values: Any, dtype: type[np.signedinteger[Any]], ndim: int = 1) -> Array:
    """Integers of a dtype: the array itself where it has it, else a checked conversion."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.ndim != ndim and array.size > 0:
        raise InvalidArgumentError(f"{name} has {array.ndim} dimensions, expected {ndim}")
    if array.dtype == dtype and array.ndim == ndim:
        return array
    if array.size == 0:
        return np.zeros(array.shape if array.ndim == ndim else (0,) * ndim, dtype)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}, expected integers")
    limits = np.iinfo(dtype)
    if int(array.min()) < limits.min or int(array.max()) > limits.max:
        raise InvalidArgumentError(f"{name} has a value outside {limits.min}..={limits.max}")
    return array.astype(dtype)


def _optional_ints(name: str, values: Any) -> Array | None:
    return None if values is None else _ints(name, values, np.int32)


def _floats(name: str, values: Any) -> list[float] | None:
    if values is None:
        return None
    array = np.asarray(values, np.float32)
    if array.ndim != 1:
        raise InvalidArgumentError(f"{name} has {array.ndim} dimensions, expected 1")
    numbers: list[float] = array.tolist()
    return numbers


def _scale(name: str, scale: Any) -> list[float] | Named | None:
    """Factors of a float8 cache, or the array of an int8 cache."""
    if scale is None:
        return None
    if isinstance(scale, np.ndarray) or hasattr(scale, "__dlpack__"):
        array = _array(name, scale)
        if array.ndim == 3:
            return _named(name, array)
        scale = array
    numbers = np.asarray(scale, np.float32)
    if numbers.ndim > 1:
        raise InvalidArgumentError(f"{name} has {numbers.ndim} dimensions, expected 0, 1 or 3")
    factors: list[float] = numbers.reshape(-1).tolist()
    return factors


def append_kv(
    key: Any,
    value: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
) -> None:
    """See `kvpager.attention.append_kv`."""
    pairs = [("k", _named("key", key), _cache("k_cache", k_cache, kv_dtype), _scale("k_scale", k_scale))]
    if value is not None:
        pairs.append(
            ("v", _named("value", value), _cache("v_cache", v_cache, kv_dtype), _scale("v_scale", v_scale))
        )
    _core._append_kv(pairs, _ints("slot_mapping", slot_mapping, np.int64))


def _attend(
    query: Any,
    caches: _Caches,
    batch: _Batch,
    options: _Options,
    out: Any,
    lse: Any,
    return_lse: bool,
) -> Any:
    query, values = _named("query", query), caches.v_cache
    if out is None:
        out = np.empty((*query[0].shape[:-1], values[0].shape[-1]), query[0].dtype)
    if lse is None and return_lse:
        lse = np.empty(query[0].shape[:-1], np.float32)
    _core._paged_attention(
        query, caches, batch, options, _named("out", out), None if lse is None else _named("lse", lse)
    )
    return (out, lse) if return_lse else out


def _default_scale(query: Any, scale: float | None) -> float:
    if scale is not None:
        return scale
    dim = query.shape[-1] if query.ndim else 0
    return float(dim) ** -0.5 if dim else 1.0


def paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    block_tables: Any,
    table_rows: Any = None,
    query_start: Any,
    context_lens: Any,
    groups: tuple[Array, Array, Array] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    causal: bool = True,
    plan: Any = None,
) -> Any:
    """See `kvpager.attention.paged_attention`. `groups`: start, sequences and prefix lengths of a cascade."""
    if plan is not None:
        raise InvalidArgumentError("plan is given, but the arrays are on the host, where none is needed")
    batch = _Batch(
        _ints("block_tables", block_tables, np.int32, 2),
        _optional_ints("table_rows", table_rows),
        _ints("query_start", query_start, np.int32),
        _ints("context_lens", context_lens, np.int32),
        *(groups or ()),
    )
    caches = _Caches(
        _cache("k_cache", k_cache, kv_dtype),
        _cache("v_cache", v_cache, kv_dtype),
        _scale("k_scale", k_scale),
        _scale("v_scale", v_scale),
    )
    options = _Options(
        _default_scale(_array("query", query), scale),
        causal,
        window,
        softcap,
        _floats("alibi_slopes", alibi_slopes),
        _floats("sinks", sinks),
        instruction_set,
    )
    return _attend(query, caches, batch, options, out, lse, return_lse)


def cascade_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    group_start: Any,
    group_sequences: Any,
    prefix_lens: Any,
    **options: Any,
) -> Any:
    """See `kvpager.attention.cascade_attention`."""
    groups = (
        _ints("group_start", group_start, np.int32),
        _ints("group_sequences", group_sequences, np.int32),
        _ints("prefix_lens", prefix_lens, np.int32),
    )
    return paged_attention(query, k_cache, v_cache, groups=groups, **options)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Array, Array]:
    """See `kvpager.attention.merge_states`."""
    left = (_named("out_a", out_a), _named("lse_a", lse_a))
    out = np.empty_like(left[0][0]) if out is None else out
    lse = np.empty_like(left[1][0]) if lse is None else lse
    right = (_named("out_b", out_b), _named("lse_b", lse_b))
    _core._merge_states(left, right, (_named("out", out), _named("lse", lse)))
    return out, lse


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """See `kvpager.attention.copy_blocks`."""
    pairs = _ints("block_copies", block_copies, np.int32, 2)
    arrays = [("k_cache", _elements("k_cache", k_cache))]
    if v_cache is not None:
        arrays.append(("v_cache", _elements("v_cache", v_cache)))
    _core._copy_blocks(arrays, np.ascontiguousarray(pairs).reshape(-1))


def zero_blocks(cache: Any, block_ids: Any) -> None:
    """See `kvpager.attention.zero_blocks`."""
    _core._zero_blocks(_elements("cache", cache), _ints("block_ids", block_ids, np.int32))


def gather_blocks(cache: Any, block_ids: Any, *, out: Any = None) -> Array:
    """See `kvpager.attention.gather_blocks`."""
    named, ids = _elements("cache", cache), _ints("block_ids", block_ids, np.int32)
    result: Array = np.empty((len(ids), *named[0].shape[1:]), named[0].dtype) if out is None else out
    _core._gather_blocks(named, ids, _elements("out", result, named[0]))
    return result


def scatter_blocks(cache: Any, block_ids: Any, values: Any) -> None:
    """See `kvpager.attention.scatter_blocks`."""
    named = _elements("cache", cache)
    ids = _ints("block_ids", block_ids, np.int32)
    _core._scatter_blocks(named, ids, _elements("values", values, named[0]))
