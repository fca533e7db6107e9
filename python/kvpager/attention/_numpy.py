"""The NumPy backend: hands arrays to the native kernels and allocates what the caller did not bring."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.attention._host_arrays import (
    Named,
    array_of,
    cache_of,
    check_apart,
    elements_of,
    ints,
    named,
    scale_of,
)
from kvpager.errors import InvalidArgumentError

__all__ = [
    "append_kv",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "scatter_blocks",
    "workspace_bytes",
    "zero_blocks",
]

Array = npt.NDArray[Any]


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


_GROUPS = ("group_start", "group_sequences", "prefix_lens")

instruction_set: str | None = None
"""Kernels to use instead of the fastest, for tests and benchmarks: one of `instruction_sets()`."""


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
    pairs = [(named("key", key), cache_of("k_cache", k_cache, kv_dtype), scale_of("k_scale", k_scale))]
    if value is not None:
        pairs.append(
            (named("value", value), cache_of("v_cache", v_cache, kv_dtype), scale_of("v_scale", v_scale))
        )
    sources = {name: pair[0][0] for name, pair in zip(("key", "value"), pairs, strict=False)}
    for name, pair in zip(("k_cache", "v_cache"), pairs, strict=False):
        check_apart(name, pair[1][0], sources)
    if len(pairs) == 2:
        check_apart("v_cache", pairs[1][1][0], {"k_cache": pairs[0][1][0]})
    _core._append_kv(pairs, ints("slot_mapping", slot_mapping, np.int64))


class _Results(NamedTuple):
    out: Named
    lse: Named | None


class _Call(NamedTuple):
    """One call of attention, as the extension takes it."""

    query: Named
    caches: _Caches
    batch: _Batch
    options: _Options
    results: _Results


def _call(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    block_tables: Any,
    table_rows: Any = None,
    query_start: Any,
    context_lens: Any,
    groups: tuple[Any, Any, Any] | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    plan: Any = None,
    **scores: Any,
) -> _Call:
    """The arguments of `paged_attention`, converted; results that the caller did not bring are made."""
    if plan is not None:
        raise InvalidArgumentError("plan is given, but the arrays are on the host, where none is needed")
    rows = named("query", query, 3)
    caches = _Caches(
        cache_of("k_cache", k_cache, kv_dtype),
        cache_of("v_cache", v_cache, kv_dtype),
        scale_of("k_scale", k_scale),
        scale_of("v_scale", v_scale),
    )
    batch = _Batch(
        ints("block_tables", block_tables, np.int32, 2),
        None if table_rows is None else ints("table_rows", table_rows, np.int32),
        ints("query_start", query_start, np.int32),
        ints("context_lens", context_lens, np.int32),
        *(ints(name, values, np.int32) for name, values in zip(_GROUPS, groups or (), strict=False)),
    )
    if out is None:
        out = np.empty((*rows[0].shape[:-1], caches.v_cache[0].shape[-1]), rows[0].dtype)
    if lse is None and return_lse:
        lse = np.empty(rows[0].shape[:-1], np.float32)
    results = _Results(named("out", out), None if lse is None else named("lse", lse))
    return _Call(rows, caches, batch, _options(rows[0].shape[-1], **scores), results)


def _options(
    head_dim: int,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> _Options:
    if scale is None:
        scale = float(head_dim) ** -0.5 if head_dim else 1.0
    slopes = None if alibi_slopes is None else alibi_slopes.tolist()
    scores = None if sinks is None else sinks.tolist()
    return _Options(scale, causal, window, softcap, slopes, scores, instruction_set)


def paged_attention(query: Any, k_cache: Any, v_cache: Any, *, workspace: Any = None, **options: Any) -> Any:
    """See `kvpager.attention.paged_attention`.

    One more option, `groups`: start, sequences and prefix lengths of a cascade.
    """
    call = _call(query, k_cache, v_cache, **options)
    caches = {"k_cache": call.caches.k_cache[0], "v_cache": call.caches.v_cache[0]}
    check_apart("out", call.results.out[0], caches)
    memory = None if workspace is None else array_of("workspace", workspace)
    if memory is not None:
        check_apart("workspace", memory, _arrays_of(call))
    _core._paged_attention(call, memory)
    out, lse = options.get("out"), options.get("lse")
    out = call.results.out[0] if out is None else out
    if not options.get("return_lse"):
        return out
    if lse is None and call.results.lse is not None:
        lse = call.results.lse[0]
    return out, lse


def workspace_bytes(query: Any, k_cache: Any, v_cache: Any, **options: Any) -> int:
    """See `kvpager.attention.workspace_bytes`."""
    if "group_start" in options:
        options["groups"] = tuple(options.pop(name) for name in _GROUPS)
    return _core._workspace_bytes(_call(query, k_cache, v_cache, **options))


def _arrays_of(call: _Call) -> dict[str, Array | None]:
    """The arrays that a call reads or writes while it works."""
    lse = call.results.lse
    return {
        "query": call.query[0],
        "k_cache": call.caches.k_cache[0],
        "v_cache": call.caches.v_cache[0],
        "out": call.results.out[0],
        "lse": None if lse is None else lse[0],
    }


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
    groups = (group_start, group_sequences, prefix_lens)
    return paged_attention(query, k_cache, v_cache, groups=groups, **options)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Array, Array]:
    """See `kvpager.attention.merge_states`."""
    left = (named("out_a", out_a), named("lse_a", lse_a))
    out = np.empty_like(left[0][0]) if out is None else out
    lse = np.empty_like(left[1][0]) if lse is None else lse
    right = (named("out_b", out_b), named("lse_b", lse_b))
    _core._merge_states(left, right, (named("out", out), named("lse", lse)))
    return out, lse


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """See `kvpager.attention.copy_blocks`."""
    pairs = ints("block_copies", block_copies, np.int32, 2)
    if pairs.size and pairs.shape[1] != 2:
        raise InvalidArgumentError(f"block_copies has shape {pairs.shape}, expected [num_copies, 2]")
    arrays = [("k_cache", elements_of("k_cache", k_cache))]
    if v_cache is not None:
        arrays.append(("v_cache", elements_of("v_cache", v_cache)))
    _core._copy_blocks(arrays, np.ascontiguousarray(pairs).reshape(-1))


def zero_blocks(cache: Any, block_ids: Any) -> None:
    """See `kvpager.attention.zero_blocks`."""
    _core._zero_blocks(elements_of("cache", cache), ints("block_ids", block_ids, np.int32))


def gather_blocks(cache: Any, block_ids: Any, *, out: Any = None) -> Array:
    """See `kvpager.attention.gather_blocks`."""
    source, ids = elements_of("cache", cache), ints("block_ids", block_ids, np.int32)
    result: Array = np.empty((len(ids), *source[0].shape[1:]), source[0].dtype) if out is None else out
    target = elements_of("out", result, source[0])
    check_apart("out", target[0], {"cache": source[0]})
    _core._gather_blocks(source, ids, target)
    return result


def scatter_blocks(cache: Any, block_ids: Any, values: Any) -> None:
    """See `kvpager.attention.scatter_blocks`."""
    target, ids = elements_of("cache", cache), ints("block_ids", block_ids, np.int32)
    source = elements_of("values", values, target[0])
    check_apart("cache", target[0], {"values": source[0]})
    _core._scatter_blocks(target, ids, source)
