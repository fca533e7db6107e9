"""The CUDA backend: views of CuPy (or torch) arrays, plans in device memory, launches on the current stream.

Functions mirror the front `kvpager.attention`. Nothing is copied but the plan's few kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.attention import _launch, kernels
from kvpager.attention._launch import ArrayView, AttentionCall
from kvpager.attention._manifest import KernelClass
from kvpager.attention._plan import PlanRoom, plan_class, plan_room, view_of
from kvpager.errors import InvalidArgumentError

__all__ = [
    "AttentionPlan",
    "append_kv",
    "copy_blocks",
    "gather_blocks",
    "is_device_array",
    "merge_states",
    "paged_attention",
    "scatter_blocks",
    "view",
    "zero_blocks",
]

BLOCKS_PER_MULTIPROCESSOR = 2
"""Thread blocks a multiprocessor that a plan aims at."""

_DTYPE_NAMES = {
    "float8_e4m3fn": "float8_e4m3",
    "float8_e4m3": "float8_e4m3",
    "float8_e5m2": "float8_e5m2",
}


def is_device_array(array: object) -> bool:
    """Whether an array lies on a CUDA device (CuPy, or torch on `cuda`)."""
    return hasattr(array, "__cuda_array_interface__")


def _dtype_name(array: Any, override: str | None) -> str:
    name = str(array.dtype).removeprefix("torch.")
    if override is not None:
        if array.dtype.itemsize != 1:
            raise InvalidArgumentError(f"kv_dtype {override} needs a cache of 1-byte elements, is {name}")
        return override
    return _DTYPE_NAMES.get(name, name)


def view(array: Any, dtype: str | None = None) -> ArrayView:
    """Address, shape and strides of a CuPy or torch array on the device.

    Args:
        array: the array; not copied, must outlive the launch.
        dtype: what its bytes are, when the array's own dtype cannot say it (8-bit floats in uint8).

    Returns:
        The view.

    Raises:
        InvalidArgumentError: The array is not on a device.
    """
    name = _dtype_name(array, dtype)
    itemsize = int(array.dtype.itemsize)
    if hasattr(array, "data_ptr"):  # torch: strides count elements; bf16 has no array interface
        if not array.is_cuda:
            raise InvalidArgumentError(
                "all arrays of a call must be on the device; a torch tensor is on the CPU"
            )
        return ArrayView(int(array.data_ptr()), tuple(array.shape), tuple(array.stride()), name, itemsize)
    if not is_device_array(array):
        raise InvalidArgumentError(
            f"all arrays of a call must be on the device, one is {type(array).__name__}"
        )
    strides = tuple(stride // itemsize for stride in array.strides)
    return ArrayView(int(array.data.ptr), tuple(array.shape), strides, name, itemsize)


def _optional(array: Any) -> ArrayView | None:
    return None if array is None else view(array)


def _scale(scale: Any) -> ArrayView | float | None:
    if scale is None or isinstance(scale, (int, float)):
        return scale
    return view(scale)


def _host_ints(array: Any) -> npt.NDArray[np.int32]:
    """Lengths on the host; waits for the device if they are there."""
    if hasattr(array, "data_ptr"):
        array = array.cpu().numpy()
    elif is_device_array(array):
        array = array.get()
    return np.ascontiguousarray(array, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _DeviceClass:
    """One kernel class of a plan in device memory."""

    kernel_class: KernelClass
    room: PlanRoom
    counts: Any
    work: Any
    merges: Any
    partial_out: Any
    partial_lse: Any


class AttentionPlan:
    """The split plan of batches up to given bounds, in device memory at fixed addresses.

    One plan serves all layers of a step that share head counts, dtypes, window and mask. `update` refills it
    from the lengths of the next step without moving it, so captured launches stay valid.
    """

    def __init__(
        self, call: AttentionCall, *, max_sequences: int, max_tokens: int, target_blocks: int | None = None
    ) -> None:
        """Makes room on the current device.

        Args:
            call: head counts, dtypes, window and mask; its arrays are not kept.
            max_sequences: most sequences of a batch.
            max_tokens: most query tokens of a batch.
            target_blocks: thread blocks that fill the device; None: two a multiprocessor.
        """
        cupy = kernels.load_cupy()
        if target_blocks is None:
            attributes = cupy.cuda.Device().attributes
            target_blocks = BLOCKS_PER_MULTIPROCESSOR * int(attributes["MultiProcessorCount"])
        self._target_blocks = target_blocks
        self._group = call.group
        self._num_kv_heads = call.k_cache.shape[2]
        self._window = call.window
        self._causal = call.causal
        head_dim = call.query.shape[2]
        self._classes = [
            self._allocate(cupy, kernel_class, head_dim, max_sequences, max_tokens)
            for kernel_class in call.kernels()
        ]

    def _allocate(
        self, cupy: Any, kernel_class: KernelClass, head_dim: int, max_sequences: int, max_tokens: int
    ) -> _DeviceClass:
        kernel = kernel_class.kernel
        room = plan_room(
            kernel,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            group=self._group,
            num_kv_heads=self._num_kv_heads,
            target_blocks=self._target_blocks,
        )
        rows = (room.partials, self._num_kv_heads, kernel.tile_rows)
        return _DeviceClass(
            kernel_class,
            room,
            cupy.zeros(2, dtype=np.int32),
            cupy.empty((room.work, 8), dtype=np.int32),
            cupy.empty((room.merges, 4), dtype=np.int32),
            cupy.empty((*rows, head_dim), dtype=np.float32),
            cupy.empty(rows, dtype=np.float32),
        )

    def update(self, query_start: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32]) -> None:
        """Refills the plan for the next step, on the current stream.

        Args:
            query_start: int32 [num_sequences + 1], on the host.
            context_lens: int32 [num_sequences], on the host.

        Raises:
            InvalidArgumentError: The batch is larger than the plan was made for.
        """
        for item in self._classes:
            host = plan_class(
                query_start,
                context_lens,
                item.kernel_class,
                group=self._group,
                num_kv_heads=self._num_kv_heads,
                window=self._window,
                causal=self._causal,
                target_blocks=self._target_blocks,
                room=item.room,
            )
            num_work, num_merges = (int(count) for count in host.counts)
            item.counts.set(host.counts)
            item.work[:num_work].set(host.work[:num_work])
            item.merges[:num_merges].set(host.merges[:num_merges])

    def launches(self, call: AttentionCall) -> list[_launch.Launch]:
        """The launches of a call over this plan's work."""
        found: list[_launch.Launch] = []
        for item in self._classes:
            addresses = view_of(
                item.counts.data.ptr,
                item.work.data.ptr,
                item.merges.data.ptr,
                item.room,
                item.partial_out.data.ptr,
                item.partial_lse.data.ptr,
            )
            found += _launch.attention_launches(call, item.kernel_class.kernel, addresses)
        return found


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
    """Writes new keys and values into their slots; see `kvpager.attention.append_kv`."""
    kernels.launch(
        _launch.append_launches(
            view(key),
            view(value),
            view(k_cache, kv_dtype),
            view(v_cache, kv_dtype),
            view(slot_mapping),
            k_scale=_scale(k_scale),
            v_scale=_scale(v_scale),
        )
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
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: bool = False,
    causal: bool = True,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    plan: AttentionPlan | None = None,
) -> Any:
    """Attention of a ragged batch over paged keys and values; see `kvpager.attention.paged_attention`.

    `query_start`, `context_lens` and `table_rows` may be NumPy arrays. Without a `plan` one is made for this
    call, which waits for the device if the lengths are there; with one, they must be on the device.
    """
    cupy = kernels.load_cupy()
    on_host = [None if plan is not None else _host_ints(array) for array in (query_start, context_lens)]
    tokens, q_heads = query.shape[:2]
    result = _empty_like(cupy, query) if out is None else out
    lse = cupy.empty((tokens, q_heads), dtype=np.float32) if return_lse else None
    small = [_on_device(cupy, array) for array in (query_start, context_lens, table_rows)]
    call = AttentionCall(
        query=view(query),
        k_cache=view(k_cache, kv_dtype),
        v_cache=view(v_cache, kv_dtype),
        out=view(result),
        block_tables=view(block_tables),
        query_start=view(small[0]),
        context_lens=view(small[1]),
        table_rows=_optional(small[2]),
        lse=_optional(lse),
        k_scale=_scale(k_scale),
        v_scale=_scale(v_scale),
        alibi_slopes=_optional(alibi_slopes),
        sinks=_optional(sinks),
        scale=scale,
        softcap=softcap,
        window=window,
        causal=causal,
    )
    if plan is None:
        plan = AttentionPlan(call, max_sequences=call.context_lens.shape[0], max_tokens=tokens)
        plan.update(on_host[0], on_host[1])  # type: ignore[arg-type]
    kernels.launch(plan.launches(call))
    return (result, lse) if return_lse else result


def _empty_like(cupy: Any, array: Any) -> Any:
    """A new array of the same library, shape and dtype."""
    if hasattr(array, "new_empty"):
        return array.new_empty(array.shape)
    return cupy.empty(array.shape, dtype=array.dtype)


def _on_device(cupy: Any, array: Any) -> Any:
    """A small int32 array on the device, copied there if it is a host array."""
    if array is None or is_device_array(array):
        return array
    return cupy.asarray(np.ascontiguousarray(array, dtype=np.int32))


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """Copies blocks within both caches, int32 [num_copies, 2] of (from, to); see the front."""
    pairs = _on_device(kernels.load_cupy(), block_copies)
    if len(pairs.shape) != 2 or pairs.shape[1] != 2:
        raise InvalidArgumentError(f"block_copies must have shape [num_copies, 2], has {tuple(pairs.shape)}")
    caches = [view(k_cache), view(v_cache)]
    kernels.launch(
        _launch.copy_launches(
            caches,
            caches,
            from_ids=view(pairs[:, 0]),
            to_ids=view(pairs[:, 1]),
            num_items=int(pairs.shape[0]),
        )
    )


def zero_blocks(cache: Any, block_ids: Any) -> None:
    """Zeroes the named blocks of a cache; see the front."""
    ids = _on_device(kernels.load_cupy(), block_ids)
    kernels.launch(_launch.zero_launches([view(cache)], view(ids)))


def gather_blocks(cache: Any, block_ids: Any, out: Any = None) -> Any:
    """Copies the named blocks to `out` [num_ids, block_size, num_kv_heads, head_dim]; see the front."""
    cupy = kernels.load_cupy()
    ids = _on_device(cupy, block_ids)
    count = int(ids.shape[0])
    result = out
    if result is None:
        shape = (count, *cache.shape[1:])
        new = cache.new_empty(shape) if hasattr(cache, "new_empty") else cupy.empty(shape, dtype=cache.dtype)
        result = new
    _check_room("out", result, count)
    kernels.launch(
        _launch.copy_launches([view(cache)], [view(result)], from_ids=view(ids), to_ids=None, num_items=count)
    )
    return result


def scatter_blocks(cache: Any, block_ids: Any, blocks: Any) -> None:
    """Copies `blocks` [num_ids, ...] to the named blocks of the cache; see the front."""
    ids = _on_device(kernels.load_cupy(), block_ids)
    count = int(ids.shape[0])
    _check_room("blocks", blocks, count)
    kernels.launch(
        _launch.copy_launches([view(blocks)], [view(cache)], from_ids=None, to_ids=view(ids), num_items=count)
    )


def _check_room(name: str, array: Any, count: int) -> None:
    if array.shape[0] < count:
        raise InvalidArgumentError(f"{name} holds {array.shape[0]} blocks, {count} are named")


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, return_lse: bool = False
) -> Any:
    """Joins two attention results over disjoint positions; see the front."""
    cupy = kernels.load_cupy()
    result = _empty_like(cupy, out_a) if out is None else out
    lse = cupy.empty(out_a.shape[:2], dtype=np.float32) if return_lse else None
    kernels.launch(
        _launch.merge_states_launches(
            view(out_a), view(lse_a), view(out_b), view(lse_b), view(result), _optional(lse)
        )
    )
    return (result, lse) if return_lse else result
