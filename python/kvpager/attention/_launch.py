"""What to launch for a call: kernel, grid, shared memory and parameters, from shapes and addresses alone.

Nothing here touches a device, so the tests run it as it is against the emulator. Arrays appear as
`ArrayView`: address, shape, strides in elements, dtype by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpager.attention import _manifest as manifest
from kvpager.attention import _params as params
from kvpager.attention._manifest import Instantiation
from kvpager.errors import InvalidArgumentError

__all__ = [
    "ArrayView",
    "AttentionCall",
    "Launch",
    "PlanView",
    "append_launches",
    "attention_launches",
    "copy_launches",
    "delta_launches",
    "merge_states_launches",
    "tail_launches",
    "zero_launches",
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


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    Attributes:
        instantiation: source file and name expression.
        grid: blocks in x, y, z.
        threads: threads of a block, in x.
        shared_bytes: dynamic shared memory.
        arguments: the parameter struct, a one-element array.
    """

    instantiation: Instantiation
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class PlanView:
    """The work of one kernel class as the device sees it. All addresses are fixed for the plan's life.

    Attributes:
        counts: address of two i32: work items, merge items.
        work: address of `WorkItem`s.
        merges: address of `MergeItem`s.
        work_capacity: blocks to launch in x; those past the count leave at once.
        merge_capacity: the same for the merge; 0 when nothing can be split.
        partial_out: address of f32 [partials, num_kv_heads, tile_rows, head_dim].
        partial_lse: address of f32 [partials, num_kv_heads, tile_rows].
    """

    counts: int
    work: int
    merges: int
    work_capacity: int
    merge_capacity: int
    partial_out: int
    partial_lse: int


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `paged_attention`, as addresses. Optional arrays are None."""

    query: ArrayView
    k_cache: ArrayView
    v_cache: ArrayView
    out: ArrayView
    block_tables: ArrayView
    query_start: ArrayView
    context_lens: ArrayView
    table_rows: ArrayView | None = None
    lse: ArrayView | None = None
    k_scale: ArrayView | float | None = None
    v_scale: ArrayView | float | None = None
    alibi_slopes: ArrayView | None = None
    sinks: ArrayView | None = None
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    causal: bool = True

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.query.shape[1] // self.k_cache.shape[2]

    def check(self) -> None:
        """Refuses shapes, dtypes and options that do not fit each other."""
        _check_attention(self)

    def kernels(self) -> tuple[manifest.KernelClass, ...]:
        """The kernels that serve this call, by rows a sequence; refuses what none serves."""
        self.check()
        return manifest.choose_attention(
            kv_dtype=self.k_cache.dtype,
            query_dtype=self.query.dtype,
            head_dim=self.query.shape[2],
            value_dim=self.v_cache.shape[3],
            group=self.group,
        )


def _fail(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(text)


def _check_rows(name: str, view: ArrayView, axes: int) -> None:
    """The last axis must be dense and every row start at a multiple of 8 elements, at most 16 bytes."""
    if len(view.shape) != axes:
        raise _fail(f"{name} must have {axes} dimensions, has {len(view.shape)}")
    if 0 in view.shape:
        return
    align = min(16, 8 * view.itemsize)
    if view.shape[-1] > 1 and view.strides[-1] != 1:
        raise _fail(f"{name} must be contiguous in its last dimension, has stride {view.strides[-1]}")
    if view.pointer % align:
        raise _fail(f"{name} must start at a multiple of {align} bytes")
    for axis, (length, stride) in enumerate(zip(view.shape[:-1], view.strides[:-1], strict=True)):
        if length > 1 and stride * view.itemsize % align:
            raise _fail(
                f"{name} has stride {stride} in dimension {axis}: must be a multiple of {align} bytes"
            )


def _check_cache(k_cache: ArrayView, v_cache: ArrayView) -> int:
    """Checks a pair of caches; returns log2 of the block size."""
    _check_rows("k_cache", k_cache, 4)
    _check_rows("v_cache", v_cache, 4)
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.dtype != v_cache.dtype:
        raise _fail(
            f"k_cache {k_cache.shape} {k_cache.dtype} and v_cache {v_cache.shape} {v_cache.dtype} "
            "must be alike"
        )
    block_size = k_cache.shape[1]
    if block_size < 1 or block_size > 256 or block_size & (block_size - 1):
        raise _fail(f"block_size must be a power of two from 1 to 256, is {block_size}")
    return block_size.bit_length() - 1


def _check_ints(name: str, view: ArrayView, dtype: str, axes: int, length: int | None = None) -> None:
    if view.dtype != dtype or len(view.shape) != axes:
        raise _fail(f"{name} must be {dtype} with {axes} dimensions, is {view.dtype} {view.shape}")
    if 0 not in view.shape and view.shape[-1] > 1 and view.strides[-1] != 1:
        raise _fail(f"{name} must be contiguous in its last dimension")
    if length is not None and view.shape[0] != length:
        raise _fail(f"{name} must have length {length}, has {view.shape[0]}")


def _check_head_values(name: str, view: ArrayView | None, num_heads: int) -> None:
    if view is None:
        return
    if view.dtype != "float32" or view.shape != (num_heads,) or (num_heads > 1 and view.strides[0] != 1):
        raise _fail(f"{name} must be float32 [{num_heads}], is {view.dtype} {view.shape}")


def _check_attention(call: AttentionCall) -> None:
    _check_rows("query", call.query, 3)
    _check_rows("out", call.out, 3)
    _check_cache(call.k_cache, call.v_cache)
    tokens, q_heads, head_dim = call.query.shape
    kv_heads = call.k_cache.shape[2]
    if kv_heads < 1 or q_heads % kv_heads or q_heads < kv_heads:
        raise _fail(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
    if call.k_cache.shape[3] != head_dim:
        raise _fail(f"query has head_dim {head_dim}, k_cache has {call.k_cache.shape[3]}")
    wanted = (tokens, q_heads, call.v_cache.shape[3])
    if call.out.shape != wanted or call.out.dtype != call.query.dtype:
        raise _fail(f"out must be {call.query.dtype} {wanted}, is {call.out.dtype} {call.out.shape}")
    if call.lse is not None and (call.lse.dtype != "float32" or call.lse.shape != (tokens, q_heads)):
        raise _fail(f"lse must be float32 {(tokens, q_heads)}, is {call.lse.dtype} {call.lse.shape}")
    _check_ints("query_start", call.query_start, "int32", 1)
    if call.query_start.shape[0] < 1:
        raise _fail("query_start must have one entry more than there are sequences, is empty")
    sequences = call.query_start.shape[0] - 1
    _check_ints("context_lens", call.context_lens, "int32", 1, sequences)
    _check_ints("block_tables", call.block_tables, "int32", 2)
    if call.table_rows is not None:
        _check_ints("table_rows", call.table_rows, "int32", 1, sequences)
    elif call.block_tables.shape[0] < sequences:
        raise _fail(f"block_tables has {call.block_tables.shape[0]} rows for {sequences} sequences")
    if call.v_cache.shape[3] != head_dim:
        _check_latent(call)
    _check_head_values("alibi_slopes", call.alibi_slopes, q_heads)
    _check_head_values("sinks", call.sinks, q_heads)
    _check_features(call)


def _check_latent(call: AttentionCall) -> None:
    """Values that are shorter than keys are the front of the same rows, with none of the extra features."""
    same = (call.k_cache.pointer, call.k_cache.strides) == (call.v_cache.pointer, call.v_cache.strides)
    if not same or call.k_cache.shape[2] != 1:
        raise _fail(
            f"keys of {call.k_cache.shape[3]} with value heads of {call.v_cache.shape[3]} elements: "
            "only a latent cache has a kernel, where values are the front of the keys of one head"
        )
    if call.alibi_slopes is not None:
        raise _fail("ALiBi has no kernel for latent caches")


def _check_features(call: AttentionCall) -> None:
    if call.window is not None and call.window < 1:
        raise _fail(f"window must be at least 1 position, is {call.window}")
    if call.softcap is not None and not (0 < call.softcap < math.inf):
        raise _fail(f"softcap must be a positive number, is {call.softcap}")
    if call.scale is not None and not math.isfinite(call.scale):
        raise _fail(f"scale must be a finite number, is {call.scale}")


@dataclass(frozen=True, slots=True)
class _Scale:
    """A quantisation scale as the kernels take it: a factor, and an array or null."""

    value: float
    pointer: int
    strides: tuple[int, int, int]


def _resolve_scale(name: str, scale: ArrayView | float | None, cache: ArrayView) -> _Scale:
    """Checks a scale: one number, one a KV head (8-bit floats), or one a slot and head (int8)."""
    blocks, block_size, heads, _ = cache.shape
    if cache.dtype == "int8":
        if not isinstance(scale, ArrayView):
            raise _fail(
                f"{name} of an int8 cache must be a float32 array [num_blocks, block_size, num_kv_heads]"
            )
        if scale.dtype != "float32" or scale.shape != (blocks, block_size, heads):
            raise _fail(
                f"{name} must be float32 {(blocks, block_size, heads)}, is {scale.dtype} {scale.shape}"
            )
        return _Scale(1.0, scale.pointer, (scale.strides[0], scale.strides[1], scale.strides[2]))
    if scale is None:
        return _Scale(1.0, 0, (0, 0, 0))
    if not cache.dtype.startswith("float8"):
        raise _fail(f"{name} is given, but the cache is {cache.dtype}: only 8-bit caches have scales")
    if isinstance(scale, ArrayView):
        if scale.dtype != "float32" or scale.shape != (heads,):
            raise _fail(f"{name} must be a number or float32 [{heads}], is {scale.dtype} {scale.shape}")
        return _Scale(1.0, scale.pointer, (0, 0, scale.strides[0]))
    if isinstance(scale, bool) or not (0 < scale < math.inf):
        raise _fail(f"{name} must be a positive number, is {scale}")
    return _Scale(float(scale), 0, (0, 0, 0))


def _attention_fields(call: AttentionCall, tile_rows: int, plan: PlanView) -> dict[str, object]:
    k_scale = _resolve_scale("k_scale", call.k_scale, call.k_cache)
    v_scale = _resolve_scale("v_scale", call.v_scale, call.v_cache)
    head_dim = call.query.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if call.scale is None else call.scale
    fields: dict[str, object] = {
        "counts": plan.counts,
        "work": plan.work,
        "merges": plan.merges,
        "partial_out": plan.partial_out,
        "partial_lse": plan.partial_lse,
        "query_token_stride": call.query.strides[0],
        "query_head_stride": call.query.strides[1],
        "out_token_stride": call.out.strides[0],
        "out_head_stride": call.out.strides[1],
        "lse_token_stride": call.lse.strides[0] if call.lse else 0,
        "lse_head_stride": call.lse.strides[1] if call.lse else 0,
        "table_stride": call.block_tables.strides[0],
        "scale": scale * k_scale.value,
        "out_scale": v_scale.value,
        "softcap": call.softcap or 0.0,
        "window": call.window or 0,
        "causal": int(call.causal),
        "num_kv_heads": call.k_cache.shape[2],
        "group": call.group,
        "block_shift": call.k_cache.shape[1].bit_length() - 1,
        "num_blocks": call.k_cache.shape[0],
        "query_dtype": manifest.DTYPE_CODES[call.query.dtype],
        "tile_rows": tile_rows,
        "head_dim": call.v_cache.shape[3],
        "num_sequences": call.context_lens.shape[0],
        "num_tokens": call.query.shape[0],
        "k_scale": k_scale.pointer,
        "v_scale": v_scale.pointer,
    }
    for name in ("query", "k_cache", "v_cache", "block_tables", "query_start", "context_lens", "out"):
        fields[name] = getattr(call, name).pointer
    for name in ("table_rows", "alibi_slopes", "sinks", "lse"):
        view = getattr(call, name)
        fields[name] = 0 if view is None else view.pointer
    fields |= _cache_strides(call.k_cache, call.v_cache) | _scale_strides(k_scale, v_scale)
    return fields


def _cache_strides(k_cache: ArrayView, v_cache: ArrayView) -> dict[str, object]:
    names = ("block_stride", "slot_stride", "head_stride")
    found: dict[str, object] = {f"k_{n}": s for n, s in zip(names, k_cache.strides[:3], strict=True)}
    return found | {f"v_{n}": s for n, s in zip(names, v_cache.strides[:3], strict=True)}


def _scale_strides(k_scale: _Scale, v_scale: _Scale) -> dict[str, object]:
    names = ("block_stride", "slot_stride", "head_stride")
    found: dict[str, object] = {f"k_scale_{n}": s for n, s in zip(names, k_scale.strides, strict=True)}
    return found | {f"v_scale_{n}": s for n, s in zip(names, v_scale.strides, strict=True)}


def attention_launches(call: AttentionCall, kernel: manifest.AttentionKernel, plan: PlanView) -> list[Launch]:
    """The launches of one kernel class: attention over the plan's work, then the merge of what was split.

    Args:
        call: the checked call.
        kernel: which of `call.kernels()`.
        plan: the work made for that kernel's `tile_rows`.

    Returns:
        No launch when the plan has no room for work; one, or two when work may be split.
    """
    if plan.work_capacity == 0:
        return []
    arguments = params.pack(params.ATTENTION, **_attention_fields(call, kernel.tile_rows, plan))
    heads = call.k_cache.shape[2]
    launches = [
        Launch(
            kernel.instantiation,
            (plan.work_capacity, heads, 1),
            kernel.threads,
            kernel.shared_bytes,
            arguments,
        )
    ]
    if plan.merge_capacity:
        merge = manifest.merge_splits_kernel(call.k_cache.dtype)
        launches.append(Launch(merge, (plan.merge_capacity, heads, 1), 128, 0, arguments))
    return launches


def tail_launches(call: AttentionCall) -> list[Launch]:
    """The launch that zeroes output rows past the last sequence's; none for a call without rows."""
    tokens, heads = call.query.shape[:2]
    if tokens == 0 or heads == 0:
        return []
    nothing = PlanView(0, 0, 0, 0, 0, 0, 0)
    arguments = params.pack(params.ATTENTION, **_attention_fields(call, 1, nothing))
    grid = (-(-heads // 4), min(tokens, 64), 1)
    return [Launch(Instantiation("zero_tail", "kvpager::zero_tail"), grid, 128, 0, arguments)]


def _check_append(key: ArrayView, value: ArrayView, k_cache: ArrayView, v_cache: ArrayView) -> None:
    for name, new, cache in (("key", key, k_cache), ("value", value, v_cache)):
        _check_rows(name, new, 3)
        if new.shape[1:] != cache.shape[2:]:
            raise _fail(f"{name} is {new.shape}, the cache has heads of {cache.shape[2:]}")
    if key.shape != value.shape or key.dtype != value.dtype or key.dtype not in manifest.DTYPE_CODES:
        raise _fail(
            f"key {key.shape} {key.dtype} and value {value.shape} {value.dtype} must be alike, "
            "fp32, fp16 or bf16"
        )
    if k_cache.dtype not in manifest.KV_TYPES:
        raise _fail(f"no kernel for a cache of {k_cache.dtype}; there are {', '.join(manifest.KV_TYPES)}")
    if key.shape[2] % 8 or key.shape[2] > 1024:
        raise _fail(f"head_dim must be a multiple of 8 up to 1024, is {key.shape[2]}")


def append_launches(
    key: ArrayView,
    value: ArrayView | None,
    k_cache: ArrayView,
    v_cache: ArrayView | None,
    slot_mapping: ArrayView,
    *,
    k_scale: ArrayView | float | None = None,
    v_scale: ArrayView | float | None = None,
) -> list[Launch]:
    """The launch of `append_kv`; none for an empty batch.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], fp32, fp16 or bf16.
        value: the same; None with `v_cache` None for a latent cache.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: the same.
        slot_mapping: int64 [num_tokens]; -1 skips the token.
        k_scale: of an 8-bit cache; for int8 an array that is written.
        v_scale: the same for values.

    Returns:
        At most one launch.

    Raises:
        InvalidArgumentError: Shapes, dtypes, strides or scales do not fit.
    """
    if (value is None) != (v_cache is None):
        raise _fail("value and v_cache must both be given or both be None")
    sides = 1 if value is None else 2
    if value is None or v_cache is None:
        value, v_cache, v_scale = key, k_cache, k_scale
    shift = _check_cache(k_cache, v_cache)
    _check_append(key, value, k_cache, v_cache)
    tokens, heads, head_dim = key.shape
    _check_ints("slot_mapping", slot_mapping, "int64", 1, tokens)
    k_resolved = _resolve_scale("k_scale", k_scale, k_cache)
    v_resolved = _resolve_scale("v_scale", v_scale, v_cache)
    if tokens == 0:
        return []
    arguments = params.pack(
        params.APPEND,
        key=key.pointer,
        value=value.pointer,
        k_cache=k_cache.pointer,
        v_cache=v_cache.pointer,
        slot_mapping=slot_mapping.pointer,
        k_scale=k_resolved.pointer,
        v_scale=v_resolved.pointer,
        key_token_stride=key.strides[0],
        key_head_stride=key.strides[1],
        value_token_stride=value.strides[0],
        value_head_stride=value.strides[1],
        num_slots=k_cache.shape[0] * k_cache.shape[1],
        k_scale_value=k_resolved.value,
        v_scale_value=v_resolved.value,
        num_tokens=tokens,
        num_kv_heads=heads,
        head_dim=head_dim,
        block_shift=shift,
        dtype=manifest.DTYPE_CODES[key.dtype],
        **_cache_strides(k_cache, v_cache),
        **_scale_strides(k_resolved, v_resolved),
    )
    grid = (-(-tokens * heads // 4), sides, 1)
    return [Launch(manifest.append_kernel(k_cache.dtype), grid, 128, 0, arguments)]


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array of blocks as rows of bytes: [num_blocks, num_slots, num_heads] rows."""

    pointer: int
    blocks: int
    slots: int
    heads: int
    row_bytes: int
    block_bytes: int
    slot_bytes: int
    head_bytes: int


def _as_rows(name: str, view: ArrayView) -> _Rows:
    """Reads an array of blocks, [num_blocks, ...] with up to 4 dimensions, as rows of bytes."""
    if not 1 <= len(view.shape) <= 4:
        raise _fail(f"{name} must have 1 to 4 dimensions, has {len(view.shape)}")
    shape, strides = list(view.shape), list(view.strides)
    dense = len(shape) > 1 and (shape[-1] <= 1 or strides[-1] == 1)
    row = shape.pop() if dense else 1
    if dense:
        strides.pop()
    if len(shape) > 3:
        raise _fail(f"{name} must be contiguous in its last dimension, has stride {strides[-1]}")
    while len(shape) < 3:  # missing axes have one entry
        shape.insert(1, 1)
        strides.insert(1, 0)
    size = view.itemsize
    block_bytes, slot_bytes, head_bytes = (stride * size for stride in strides)
    return _Rows(view.pointer, shape[0], shape[1], shape[2], row * size, block_bytes, slot_bytes, head_bytes)


def _block_launches(
    kernel: str,
    sources: list[_Rows],
    targets: list[_Rows],
    from_ids: tuple[int, int],
    to_ids: tuple[int, int],
    num_items: int,
) -> list[Launch]:
    """One launch over up to two arrays; sources and targets are the same arrays for zeroing."""
    if num_items == 0 or 0 in (targets[0].blocks, targets[0].slots, targets[0].heads):
        return []
    pairs = list(zip(sources, targets, strict=True))
    for source, target in pairs:
        if (source.slots, source.heads, source.row_bytes) != (target.slots, target.heads, target.row_bytes):
            raise _fail(f"blocks differ: {source.slots, source.heads} and {target.slots, target.heads} rows")
    numbers = [
        n
        for rows in sources + targets
        for n in (rows.pointer, rows.row_bytes, rows.block_bytes, rows.slot_bytes, rows.head_bytes)
    ]
    word_bytes, word = manifest.word_type(*numbers)

    def both(name: str, rows: list[_Rows]) -> tuple[int, int]:
        values = [getattr(r, name) for r in rows]
        return (values[0], values[1] if len(values) > 1 else 0)

    arguments = params.pack(
        params.BLOCK,
        to=both("pointer", targets),
        from_ids=from_ids[0],
        to_ids=to_ids[0],
        from_block_bytes=both("block_bytes", sources),
        from_slot_bytes=both("slot_bytes", sources),
        from_head_bytes=both("head_bytes", sources),
        to_block_bytes=both("block_bytes", targets),
        to_slot_bytes=both("slot_bytes", targets),
        to_head_bytes=both("head_bytes", targets),
        from_ids_stride=from_ids[1],
        to_ids_stride=to_ids[1],
        num_items=num_items,
        num_slots=targets[0].slots,
        num_heads=targets[0].heads,
        row_bytes=both("row_bytes", targets),
        word_bytes=word_bytes,
        from_blocks=sources[0].blocks,
        to_blocks=targets[0].blocks,
        **{"from": both("pointer", sources)},
    )
    words = targets[0].slots * targets[0].heads * max(r.row_bytes for r in targets) // word_bytes
    parts = max(1, min(64, words // 512))
    instantiation = Instantiation(kernel, f"kvpager::{kernel}<{word}>")
    return [Launch(instantiation, (num_items, parts, len(targets)), 128, 0, arguments)]


def _pair_up(arrays: list[_Rows]) -> list[list[_Rows]]:
    """Arrays two at a time, as many as one launch moves, alike in slots and heads."""
    return [arrays[i : i + 2] for i in range(0, len(arrays), 2)]


def copy_launches(
    sources: list[ArrayView],
    targets: list[ArrayView],
    *,
    from_ids: ArrayView | None,
    to_ids: ArrayView | None,
    num_items: int,
) -> list[Launch]:
    """Copies `num_items` blocks from each source array to the target array at the same place in the lists.

    Args:
        sources: arrays of blocks [num_blocks, block_size, num_kv_heads(, head_dim)].
        targets: the same arrays (copy on write) or others of the same block shape.
        from_ids: int32, any stride; None: item i is block i of the source.
        to_ids: the same for the target.
        num_items: blocks to copy.

    Returns:
        One launch for every two arrays.

    Raises:
        InvalidArgumentError: The blocks of a pair differ, or ids have a wrong dtype.
    """
    views = [("source", a) for a in sources] + [("target", a) for a in targets]
    rows = [_as_rows(name, a) for name, a in views]
    ids = [_ids(from_ids), _ids(to_ids)]
    half = len(sources)
    found: list[Launch] = []
    for source, target in zip(_pair_up(rows[:half]), _pair_up(rows[half:]), strict=True):
        found += _block_launches("copy_blocks", source, target, ids[0], ids[1], num_items)
    return found


def zero_launches(arrays: list[ArrayView], block_ids: ArrayView) -> list[Launch]:
    """Zeroes the named blocks of each array; one launch for every two arrays."""
    rows = [_as_rows("cache", a) for a in arrays]
    ids = _ids(block_ids)
    found: list[Launch] = []
    for pair in _pair_up(rows):
        found += _block_launches("zero_blocks", pair, pair, ids, ids, block_ids.shape[0])
    return found


def _ids(view: ArrayView | None) -> tuple[int, int]:
    """Address and stride of a list of block ids; (0, 0) for none."""
    if view is None:
        return (0, 0)
    if view.dtype != "int32" or len(view.shape) != 1:
        raise _fail(f"block ids must be int32 with 1 dimension, are {view.dtype} {view.shape}")
    return (view.pointer, view.strides[0])


def merge_states_launches(
    out_a: ArrayView,
    lse_a: ArrayView,
    out_b: ArrayView,
    lse_b: ArrayView,
    out: ArrayView,
    lse: ArrayView | None,
) -> list[Launch]:
    """Joins two attention results over disjoint positions; `out` may be one of the inputs.

    Args:
        out_a: [num_tokens, num_heads, head_dim], fp32, fp16 or bf16.
        lse_a: float32 [num_tokens, num_heads].
        out_b: as out_a.
        lse_b: as lse_a.
        out: as out_a.
        lse: as lse_a, or None.

    Returns:
        At most one launch.

    Raises:
        InvalidArgumentError: Shapes or dtypes differ.
    """
    for name, view in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        if view.shape != out_a.shape or view.dtype != out_a.dtype or len(view.shape) != 3:
            raise _fail(f"{name} is {view.dtype} {view.shape}, out_a is {out_a.dtype} {out_a.shape}")
        if view.shape[-1] > 1 and view.strides[-1] != 1:
            raise _fail(f"{name} must be contiguous in its last dimension")
    if out_a.dtype not in manifest.DTYPE_CODES:
        raise _fail(f"no kernel for {out_a.dtype}; there are {', '.join(manifest.DTYPE_CODES)}")
    for name, state in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if state is not None and (state.dtype != "float32" or state.shape != out_a.shape[:2]):
            raise _fail(f"{name} must be float32 {out_a.shape[:2]}, is {state.dtype} {state.shape}")
    tokens, heads, head_dim = out_a.shape
    if 0 in out_a.shape:
        return []
    arguments = params.pack(
        params.MERGE_STATES,
        out_a=out_a.pointer,
        out_b=out_b.pointer,
        lse_a=lse_a.pointer,
        lse_b=lse_b.pointer,
        out=out.pointer,
        lse=lse.pointer if lse else 0,
        a_token_stride=out_a.strides[0],
        a_head_stride=out_a.strides[1],
        b_token_stride=out_b.strides[0],
        b_head_stride=out_b.strides[1],
        out_token_stride=out.strides[0],
        out_head_stride=out.strides[1],
        lse_a_token_stride=lse_a.strides[0],
        lse_a_head_stride=lse_a.strides[1],
        lse_b_token_stride=lse_b.strides[0],
        lse_b_head_stride=lse_b.strides[1],
        lse_token_stride=lse.strides[0] if lse else 0,
        lse_head_stride=lse.strides[1] if lse else 0,
        num_tokens=tokens,
        num_heads=heads,
        head_dim=head_dim,
        dtype=manifest.DTYPE_CODES[out_a.dtype],
    )
    instantiation = Instantiation("merge_states", "kvpager::merge_states")
    return [Launch(instantiation, (-(-tokens * heads // 4), 1, 1), 128, 0, arguments)]


def delta_launches(block_tables: ArrayView, deltas: ArrayView, count: int) -> list[Launch]:
    """Applies a step's log of changed table entries.

    Args:
        block_tables: int32 [rows, max_blocks], on the device.
        deltas: int32 [capacity, 4] of (row, column, value, unused), readable by the device.
        count: address of an int32: entries of the log that are valid.

    Returns:
        One launch, of a size that depends on the capacity only.

    Raises:
        InvalidArgumentError: A wrong dtype or shape.
    """
    _check_ints("block_tables", block_tables, "int32", 2)
    if deltas.dtype != "int32" or len(deltas.shape) != 2 or deltas.shape[1] != 4 or deltas.strides != (4, 1):
        raise _fail(f"deltas must be a contiguous int32 [capacity, 4], is {deltas.dtype} {deltas.shape}")
    arguments = params.pack(
        params.DELTA,
        block_tables=block_tables.pointer,
        deltas=deltas.pointer,
        count=count,
        table_stride=block_tables.strides[0],
        capacity=deltas.shape[0],
        num_rows=block_tables.shape[0],
        max_blocks=block_tables.shape[1],
    )
    blocks = max(1, min(64, -(-deltas.shape[0] // 128)))
    return [Launch(Instantiation("apply_deltas", "kvpager::apply_deltas"), (blocks, 1, 1), 128, 0, arguments)]
