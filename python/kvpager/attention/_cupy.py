"""The CUDA backend: views of CuPy (or torch) arrays, plans in device memory, launches on the caller's stream.

Functions have the arguments of the front `kvpager.attention`; what they hand on is in `**options`, by its
names. Nothing is copied but the plan's kilobytes and small arguments that come from the host (lengths, ids,
slots). CuPy arrays use CuPy's current stream, torch tensors torch's, on the device where they are. Lengths,
tables, ids and slots on the host are checked as the native kernels check them; those on the device already
are trusted, since looking at them would wait for it (compile with `-DKV_DEBUG` to trap on wrong ones).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.attention import _memory_launch, kernels
from kvpager.attention._cascade import cut_cascade
from kvpager.attention._device_arrays import (
    floats_on_device,
    host_ints,
    ints_on_device,
    is_torch,
    new_array,
    on_host,
    optional_view,
    scale_view,
    stream_of,
    view,
)
from kvpager.attention._launch import AttentionCall
from kvpager.attention.device_plan import AttentionPlan
from kvpager.errors import InvalidArgumentError

__all__ = [
    "AttentionPlan",
    "append_kv",
    "attention_call",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "scatter_blocks",
    "view",
    "zero_blocks",
]

_NO_IDS = np.zeros(0, np.int32)

_INTEGERS = ("block_tables", "query_start", "context_lens", "table_rows")
_FLOATS = ("alibi_slopes", "sinks")
"""Arrays of a batch, which may come from the host."""


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
    with stream_of(k_cache):
        _check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
        slots = ints_on_device("slot_mapping", slot_mapping, np.int64)
        launches = _memory_launch.append_launches(
            view(key),
            optional_view(value),
            view(k_cache, kv_dtype),
            optional_view(v_cache, kv_dtype),
            view(slots),
            k_scale=scale_view(k_scale),
            v_scale=scale_view(v_scale),
        )
        kernels.launch(launches)


def attention_call(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    out: Any,
    lse: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    **options: Any,
) -> AttentionCall:
    """The arguments of `paged_attention`, all on the device, as addresses; a plan is made from them."""
    arrays: dict[str, Any] = {name: optional_view(options.pop(name, None)) for name in (*_INTEGERS, *_FLOATS)}
    return AttentionCall(
        query=view(query),
        k_cache=view(k_cache, kv_dtype),
        v_cache=view(v_cache, kv_dtype),
        out=view(out),
        lse=optional_view(lse),
        k_scale=scale_view(k_scale),
        v_scale=scale_view(v_scale),
        **arrays,
        **options,
    )


def paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    kv_starts: npt.NDArray[np.int32] | None = None,
    **options: Any,
) -> Any:
    """See `kvpager.attention.paged_attention`; with a `plan` and an `out` nothing here copies or allocates.

    One more argument, `kv_starts`: positions that are left out at the front of each sequence, on the host.
    """
    with stream_of(query):
        _check_batch(query, k_cache, options)
        result = new_array(query, (*query.shape[:2], v_cache.shape[3])) if out is None else out
        if lse is None and return_lse:
            lse = new_array(query, tuple(query.shape[:2]), "float32")
        arrays = {name: ints_on_device(name, options.get(name)) for name in _INTEGERS}
        arrays |= {name: floats_on_device(options.get(name)) for name in _FLOATS}
        call = attention_call(query, k_cache, v_cache, out=result, lse=lse, **(options | arrays))
        if plan is None:
            starts, lens = (on_host(name, options[name]) for name in ("query_start", "context_lens"))
            plan = AttentionPlan.for_lengths(call, starts, lens, kv_starts)
        kernels.launch(plan.launches(call))
        # Launches hold addresses only; freed memory is reused in stream order, so it may go now.
        del arrays
    return (result, lse) if return_lse else result


def cascade_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    group_start: Any,
    group_sequences: Any,
    prefix_lens: Any,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """See `kvpager.attention.cascade_attention`. Waits for the device if lengths or groups are there."""
    host = {name: on_host(name, options.get(name)) for name in ("query_start", "context_lens", "table_rows")}
    groups = [
        on_host("group_start", group_start),
        on_host("group_sequences", group_sequences),
        on_host("prefix_lens", prefix_lens),
    ]
    tables = host_ints("block_tables", options["block_tables"])
    cascade = cut_cascade(*groups, block_size=int(k_cache.shape[1]), block_tables=tables, **host)
    # With a window or ALiBi a prefix looks different to every row: nothing to share.
    if options.get("window") is not None or options.get("alibi_slopes") is not None or not len(cascade.rows):
        whole = {"out": out, "lse": lse, "return_lse": return_lse}
        return paged_attention(query, k_cache, v_cache, **whole, **options)
    with stream_of(query):
        shape = (*query.shape[:2], v_cache.shape[3])
        result = new_array(query, shape) if out is None else out
        if lse is None:
            lse = new_array(query, shape[:2], "float32")
        # Both passes write fp32, so that outputs of 16 bits are rounded once.
        rest = {"out": new_array(query, shape, "float32"), "return_lse": True, "kv_starts": cascade.kv_starts}
        rest_out, rest_lse = paged_attention(query, k_cache, v_cache, **rest, **options)
        prefix: dict[str, Any] = {
            "query_start": cascade.query_start,
            "context_lens": cascade.context_lens,
            "table_rows": cascade.table_rows,
            "out": new_array(query, (len(cascade.rows), *shape[1:]), "float32"),
            "return_lse": True,
            "causal": False,
            "sinks": None,
        }
        rows = query[_index(query, cascade.rows)]
        prefix_out, prefix_lse = paged_attention(rows, k_cache, v_cache, **(options | prefix))
        prefix_rows = ints_on_device("rows", cascade.rows_of_tokens(query.shape[0]))
        views = (
            view(array) for array in (rest_out, rest_lse, prefix_out, prefix_lse, result, lse, prefix_rows)
        )
        kernels.launch(_memory_launch.merge_states_launches(*views))
    return (result, lse) if return_lse else result


def _index(like: Any, rows: npt.NDArray[np.int32]) -> Any:
    """An index on the device for arrays of this library."""
    if is_torch(like):
        torch = importlib.import_module("torch")
        return torch.as_tensor(rows.astype(np.int64), device=like.device)
    return kernels.load_cupy().asarray(rows)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """See `kvpager.attention.merge_states`."""
    with stream_of(out_a):
        result = new_array(out_a, tuple(out_a.shape)) if out is None else out
        state = new_array(lse_a, tuple(lse_a.shape)) if lse is None else lse
        views = (view(array) for array in (out_a, lse_a, out_b, lse_b, result, state))
        kernels.launch(_memory_launch.merge_states_launches(*views))
    return result, state


def _check_batch(query: Any, k_cache: Any, options: Mapping[str, Any]) -> None:
    """Checks lengths that are on the host; the table entries that they need, if those are there too."""
    starts, lens = (host_ints(name, options[name]) for name in ("query_start", "context_lens"))
    if starts is None or lens is None:
        return
    given_rows, window = options.get("table_rows"), options.get("window")
    rows, tables = host_ints("table_rows", given_rows), host_ints("block_tables", options["block_tables"])
    if given_rows is not None and rows is None:
        tables = None
    blocks, block_size = k_cache.shape[:2]
    _core._check_batch(starts, lens, rows, tables, query.shape[0], blocks, block_size, window)


def _check_slots(slot_mapping: Any, num_slots: int) -> None:
    """Checks slots that are still on the host; -1 skips a token."""
    slots = host_ints("slot_mapping", slot_mapping, np.int64)
    if slots is not None and slots.size and not -1 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise InvalidArgumentError(
            f"slot_mapping must be -1 to {num_slots - 1}, has {int(slots.min())} to {int(slots.max())}"
        )


def _check_sources(block_ids: Any, num_blocks: int) -> None:
    """Checks ids that are still on the host; a block may be named twice."""
    ids = host_ints("block_ids", block_ids)
    if ids is not None:
        _core._check_block_moves("block_ids", ids, _NO_IDS, num_blocks, 0, in_place=False)


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """See `kvpager.attention.copy_blocks`."""
    with stream_of(k_cache):
        caches = [view(cache) for cache in (k_cache, v_cache) if cache is not None]
        host = host_ints("block_copies", block_copies)
        if host is not None:
            host = host.reshape(-1, 2) if host.size == 0 else host
            if host.ndim != 2 or host.shape[1] != 2:
                raise InvalidArgumentError(f"block_copies must be [num_copies, 2], is {list(host.shape)}")
            fewest = min(cache.shape[0] for cache in caches)
            _core._check_block_moves("block_copies", host[:, 0], host[:, 1], fewest, fewest, in_place=True)
        pairs = ints_on_device("block_copies", block_copies if host is None else host)
        launches = _memory_launch.copy_launches(
            caches,
            caches,
            from_ids=view(pairs[:, 0]),
            to_ids=view(pairs[:, 1]),
            num_items=int(pairs.shape[0]),
        )
        kernels.launch(launches)


def zero_blocks(cache: Any, block_ids: Any) -> None:
    """See `kvpager.attention.zero_blocks`."""
    with stream_of(cache):
        _check_sources(block_ids, cache.shape[0])
        ids = ints_on_device("block_ids", block_ids)
        kernels.launch(_memory_launch.zero_launches([view(cache)], view(ids)))


def gather_blocks(cache: Any, block_ids: Any, *, out: Any = None) -> Any:
    """See `kvpager.attention.gather_blocks`."""
    with stream_of(cache):
        _check_sources(block_ids, cache.shape[0])
        ids = ints_on_device("block_ids", block_ids)
        count = int(ids.shape[0])
        result = new_array(cache, (count, *cache.shape[1:])) if out is None else out
        _check_blocks("out", result, count, cache)
        launches = _memory_launch.copy_launches(
            [view(cache)], [view(result)], from_ids=view(ids), to_ids=None, num_items=count
        )
        kernels.launch(launches)
    return result


def scatter_blocks(cache: Any, block_ids: Any, values: Any) -> None:
    """See `kvpager.attention.scatter_blocks`."""
    with stream_of(cache):
        host = host_ints("block_ids", block_ids)
        if host is not None:
            _core._check_block_moves("block_ids", _NO_IDS, host, 0, cache.shape[0], in_place=False)
        ids = ints_on_device("block_ids", block_ids)
        count = int(ids.shape[0])
        _check_blocks("values", values, count, cache)
        launches = _memory_launch.copy_launches(
            [view(values)], [view(cache)], from_ids=None, to_ids=view(ids), num_items=count
        )
        kernels.launch(launches)


def _check_blocks(name: str, array: Any, count: int, cache: Any) -> None:
    wanted = (count, *cache.shape[1:])
    if tuple(array.shape) != wanted or array.dtype != cache.dtype:
        raise InvalidArgumentError(
            f"{name} must be {cache.dtype} {wanted}, is {array.dtype} {tuple(array.shape)}"
        )
