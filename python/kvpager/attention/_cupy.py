"""The CUDA backend: views of CuPy (or torch) arrays, plans in device memory, launches on the caller's stream.

Functions have the arguments of the front `kvpager.attention`. Nothing is copied but the plan's kilobytes and
small arguments that come from the host (lengths, ids, slots). CuPy arrays use CuPy's current stream, torch
tensors torch's. Whatever is on the host is validated here; ids and slots that are on the device already are
trusted, since looking at them would wait for it (compile with `-DKV_DEBUG` to trap on wrong ones).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.attention import _memory_launch, kernels
from kvpager.attention._cascade import cut_cascade
from kvpager.attention._device_plan import AttentionPlan
from kvpager.attention._launch import ArrayView, AttentionCall
from kvpager.errors import InvalidArgumentError

__all__ = [
    "AttentionPlan",
    "append_kv",
    "attention_call",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "mla_decode",
    "paged_attention",
    "scatter_blocks",
    "view",
    "zero_blocks",
]

_DTYPE_NAMES = {"float8_e4m3fn": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}


def _is_torch(array: Any) -> bool:
    return hasattr(array, "data_ptr")


def _is_device_array(array: Any) -> bool:
    """Whether an array lies on a CUDA device (CuPy, or torch on `cuda`)."""
    return bool(array.is_cuda) if _is_torch(array) else hasattr(array, "__cuda_array_interface__")


def view(array: Any, dtype: str | None = None) -> ArrayView:
    """Address, shape and strides of a CuPy or torch array on the device.

    Args:
        array: the array; not copied, must outlive the launch.
        dtype: what its bytes are, when the array's own dtype cannot say it (8-bit floats in uint8).

    Returns:
        The view.

    Raises:
        InvalidArgumentError: The array is not on a device, or `dtype` is given for elements of other widths.
    """
    if not _is_device_array(array):
        raise InvalidArgumentError(
            f"all arrays of a call must be on the device, one is {type(array).__name__}"
        )
    itemsize = int(array.dtype.itemsize)
    name = str(array.dtype).removeprefix("torch.") if dtype is None else dtype
    if dtype is not None and itemsize != 1:
        raise InvalidArgumentError(f"kv_dtype {dtype} needs a cache of 1-byte elements, is {array.dtype}")
    name = _DTYPE_NAMES.get(name, name)
    if _is_torch(array):  # strides count elements
        return ArrayView(int(array.data_ptr()), tuple(array.shape), tuple(array.stride()), name, itemsize)
    strides = tuple(stride // itemsize for stride in array.strides)
    return ArrayView(int(array.data.ptr), tuple(array.shape), strides, name, itemsize)


def _optional(array: Any, dtype: str | None = None) -> ArrayView | None:
    return None if array is None else view(array, dtype)


def _scale(scale: Any) -> ArrayView | float | None:
    if scale is None or isinstance(scale, (int, float)):
        return scale
    if isinstance(scale, (np.floating, np.integer)):
        return float(scale)
    return view(_on_device(scale, np.float32))


def _on_device(array: Any, dtype: Any = np.int32) -> Any:
    """A small array on the device: itself if it is there, else a copy in the dtype that kernels read."""
    if array is None or _is_device_array(array):
        return array
    return kernels.load_cupy().asarray(np.ascontiguousarray(array, dtype=dtype))


def _on_host(array: Any) -> Any:
    """A small array on the host; waits for the device if it is there."""
    if array is None:
        return None
    if _is_torch(array):
        array = array.cpu().numpy()
    elif _is_device_array(array):
        array = array.get()
    return np.ascontiguousarray(array, dtype=np.int32)


def _new(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """A new array of the same library and device, of the same dtype or a named one."""
    if _is_torch(like):
        torch = importlib.import_module("torch")
        return like.new_empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype))
    return kernels.load_cupy().empty(shape, dtype=like.dtype if dtype is None else dtype)


def _stream(array: Any) -> Any:
    """The caller's stream as a context: torch's current one for its tensors, CuPy's own otherwise."""
    if not _is_torch(array):
        return contextlib.nullcontext()
    torch = importlib.import_module("torch")
    stream_class = kernels.load_cupy().cuda.Stream
    return stream_class.from_external(torch.cuda.current_stream(array.device))


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
    with _stream(k_cache):
        _check_ids("slot_mapping", slot_mapping, -1, k_cache.shape[0] * k_cache.shape[1])
        slots = _on_device(slot_mapping, np.int64)
        launches = _memory_launch.append_launches(
            view(key),
            _optional(value),
            view(k_cache, kv_dtype),
            _optional(v_cache, kv_dtype),
            view(slots),
            k_scale=_scale(k_scale),
            v_scale=_scale(v_scale),
        )
        kernels.launch(launches)


def attention_call(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    block_tables: Any,
    query_start: Any,
    context_lens: Any,
    table_rows: Any = None,
    out: Any,
    lse: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    **numbers: Any,
) -> AttentionCall:
    """The arguments of `paged_attention`, all on the device, as addresses; a plan is made from them."""
    return AttentionCall(
        query=view(query),
        k_cache=view(k_cache, kv_dtype),
        v_cache=view(v_cache, kv_dtype),
        out=view(out),
        block_tables=view(block_tables),
        query_start=view(query_start),
        context_lens=view(context_lens),
        table_rows=_optional(table_rows),
        lse=_optional(lse),
        k_scale=_scale(k_scale),
        v_scale=_scale(v_scale),
        alibi_slopes=_optional(alibi_slopes),
        sinks=_optional(sinks),
        **numbers,
    )


def paged_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    block_tables: Any,
    query_start: Any,
    context_lens: Any,
    table_rows: Any = None,
    out: Any = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    kv_starts: npt.NDArray[np.int32] | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    **options: Any,
) -> Any:
    """See `kvpager.attention.paged_attention`.

    Two more arguments. `plan`: an `AttentionPlan` kept up to date by the caller; then nothing here waits,
    copies or allocates except the output, so the call can be captured. Without one a plan is made for this
    call, which waits for the device if the lengths are there. `kv_starts`: positions that are left out at the
    front of each sequence, on the host.
    """
    with _stream(query):
        result = _new(query, (*query.shape[:2], v_cache.shape[3])) if out is None else out
        lse = _new(query, tuple(query.shape[:2]), "float32") if return_lse else None
        call = attention_call(
            query,
            k_cache,
            v_cache,
            block_tables=(tables := _on_device(block_tables)),
            query_start=(starts := _on_device(query_start)),
            context_lens=(lens := _on_device(context_lens)),
            table_rows=(rows := _on_device(table_rows)),
            out=result,
            lse=lse,
            alibi_slopes=(slopes := _on_device(alibi_slopes, np.float32)),
            sinks=(sink_scores := _on_device(sinks, np.float32)),
            **options,
        )
        if plan is None:
            plan = AttentionPlan.for_lengths(call, _on_host(query_start), _on_host(context_lens), kv_starts)
        kernels.launch(plan.launches(call))
        # Launches hold addresses only; freed memory is reused in stream order, so it may go now.
        del tables, starts, lens, rows, slopes, sink_scores
    return (result, lse) if return_lse else result


def cascade_attention(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    group_start: Any,
    group_sequences: Any,
    prefix_lens: Any,
    block_tables: Any,
    query_start: Any,
    context_lens: Any,
    table_rows: Any = None,
    out: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """See `kvpager.attention.cascade_attention`. Waits for the device if lengths or groups are there."""
    lengths = {"query_start": query_start, "context_lens": context_lens, "table_rows": table_rows}
    host = {name: _on_host(array) for name, array in lengths.items()}
    groups = [_on_host(array) for array in (group_start, group_sequences, prefix_lens)]
    cascade = cut_cascade(*groups, block_size=int(k_cache.shape[1]), **host)
    shared: dict[str, Any] = {"block_tables": block_tables, **lengths}
    # With a window or ALiBi a prefix looks different to every row: nothing to share.
    if options.get("window") is not None or options.get("alibi_slopes") is not None or not len(cascade.rows):
        return paged_attention(query, k_cache, v_cache, out=out, return_lse=return_lse, **shared, **options)
    result, lse = paged_attention(
        query, k_cache, v_cache, out=out, return_lse=True, kv_starts=cascade.kv_starts, **shared, **options
    )
    with _stream(query):
        rows = _index(query, cascade.rows)
        prefix_out, prefix_lse = paged_attention(
            query[rows],
            k_cache,
            v_cache,
            block_tables=block_tables,
            query_start=cascade.query_start,
            context_lens=cascade.context_lens,
            table_rows=cascade.table_rows,
            return_lse=True,
            **(options | {"causal": False, "sinks": None}),
        )
        joined, joined_lse = merge_states(prefix_out, prefix_lse, result[rows], lse[rows])
        result[rows], lse[rows] = joined, joined_lse
    return (result, lse) if return_lse else result


def _index(like: Any, rows: npt.NDArray[np.int32]) -> Any:
    """An index on the device for arrays of this library."""
    if _is_torch(like):
        torch = importlib.import_module("torch")
        return torch.as_tensor(rows.astype(np.int64), device=like.device)
    return kernels.load_cupy().asarray(rows)


def mla_decode(query: Any, latent_cache: Any, *, kv_lora_rank: int, **options: Any) -> Any:
    """See `kvpager.attention.mla_decode`."""
    return paged_attention(query, latent_cache, latent_cache[..., :kv_lora_rank], **options)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """See `kvpager.attention.merge_states`."""
    with _stream(out_a):
        result = _new(out_a, tuple(out_a.shape)) if out is None else out
        state = _new(lse_a, tuple(lse_a.shape)) if lse is None else lse
        views = (view(array) for array in (out_a, lse_a, out_b, lse_b, result, state))
        kernels.launch(_memory_launch.merge_states_launches(*views))
    return result, state


def _check_ids(name: str, ids: Any, lowest: int, end: int) -> None:
    """Checks ids that are still on the host."""
    if _is_device_array(ids):
        return
    values = np.asarray(ids)
    if values.size and not lowest <= int(values.min()) <= int(values.max()) < end:
        raise InvalidArgumentError(
            f"{name} must be {lowest} to {end - 1}, has {int(values.min())} to {int(values.max())}"
        )


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """See `kvpager.attention.copy_blocks`."""
    with _stream(k_cache):
        if len(block_copies.shape) != 2 or block_copies.shape[1] != 2:
            raise InvalidArgumentError(
                f"block_copies must have shape [num_copies, 2], has {tuple(block_copies.shape)}"
            )
        _check_ids("block_copies", block_copies, 0, k_cache.shape[0])
        pairs = _on_device(block_copies)
        caches = [view(cache) for cache in (k_cache, v_cache) if cache is not None]
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
    with _stream(cache):
        _check_ids("block_ids", block_ids, 0, cache.shape[0])
        ids = _on_device(block_ids)
        kernels.launch(_memory_launch.zero_launches([view(cache)], view(ids)))


def gather_blocks(cache: Any, block_ids: Any, *, out: Any = None) -> Any:
    """See `kvpager.attention.gather_blocks`."""
    with _stream(cache):
        _check_ids("block_ids", block_ids, 0, cache.shape[0])
        ids = _on_device(block_ids)
        count = int(ids.shape[0])
        result = _new(cache, (count, *cache.shape[1:])) if out is None else out
        _check_blocks("out", result, count, cache)
        launches = _memory_launch.copy_launches(
            [view(cache)], [view(result)], from_ids=view(ids), to_ids=None, num_items=count
        )
        kernels.launch(launches)
    return result


def scatter_blocks(cache: Any, block_ids: Any, values: Any) -> None:
    """See `kvpager.attention.scatter_blocks`."""
    with _stream(cache):
        _check_ids("block_ids", block_ids, 0, cache.shape[0])
        ids = _on_device(block_ids)
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
