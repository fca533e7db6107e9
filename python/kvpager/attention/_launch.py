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
from kvpager.attention._views import (
    ArrayView,
    cache_strides,
    check_cache,
    check_head_values,
    check_ints,
    check_rows,
    fail,
    resolve_scale,
    scale_strides,
)

__all__ = [
    "ArrayView",
    "AttentionCall",
    "Launch",
    "PlanShape",
    "PlanView",
    "attention_launches",
    "plan_shape",
    "tail_launches",
]


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
        partial_state: address of f32 [partials, num_kv_heads, tile_rows, 2].
    """

    counts: int
    work: int
    merges: int
    work_capacity: int
    merge_capacity: int
    partial_out: int
    partial_state: int


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What a split plan depends on besides lengths.

    Attributes:
        classes: the kernels that serve the call, by rows a sequence.
        group: query heads of one KV head.
        num_kv_heads: KV heads.
        value_dim: elements of a value head.
        window: positions that a row sees, its own included; None: all.
        causal: whether a row sees only positions up to its own.
    """

    classes: tuple[manifest.KernelClass, ...]
    group: int
    num_kv_heads: int
    value_dim: int
    window: int | None
    causal: bool


def plan_shape(
    query: ArrayView,
    k_cache: ArrayView,
    v_cache: ArrayView,
    *,
    window: int | None = None,
    causal: bool = True,
) -> PlanShape:
    """The plan's shape for arrays like these; refuses what no kernel serves."""
    if len(query.shape) != 3 or len(k_cache.shape) != 4 or len(v_cache.shape) != 4:
        raise fail(f"query {query.shape} must have 3 dimensions, caches {k_cache.shape} 4")
    heads, kv_heads = query.shape[1], k_cache.shape[2]
    if kv_heads < 1 or heads < kv_heads or heads % kv_heads:
        raise fail(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    classes = manifest.choose_attention(
        kv_dtype=k_cache.dtype,
        query_dtype=query.dtype,
        head_dim=query.shape[2],
        value_dim=v_cache.shape[3],
        group=heads // kv_heads,
    )
    return PlanShape(classes, heads // kv_heads, kv_heads, v_cache.shape[3], window, causal)


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
        return plan_shape(self.query, self.k_cache, self.v_cache).classes

    def plan_shape(self) -> PlanShape:
        """What a split plan for this call depends on."""
        self.check()
        return plan_shape(self.query, self.k_cache, self.v_cache, window=self.window, causal=self.causal)


def _check_attention(call: AttentionCall) -> None:
    check_rows("query", call.query, 3)
    check_rows("out", call.out, 3)
    check_cache(call.k_cache, call.v_cache)
    tokens, q_heads, head_dim = call.query.shape
    kv_heads = call.k_cache.shape[2]
    if kv_heads < 1 or q_heads % kv_heads or q_heads < kv_heads:
        raise fail(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
    if call.k_cache.shape[3] != head_dim:
        raise fail(f"query has head_dim {head_dim}, k_cache has {call.k_cache.shape[3]}")
    wanted = (tokens, q_heads, call.v_cache.shape[3])
    if call.out.shape != wanted or call.out.dtype not in manifest.DTYPE_CODES:
        kinds = ", ".join(manifest.DTYPE_CODES)
        raise fail(f"out must be {wanted} of {kinds}, is {call.out.dtype} {call.out.shape}")
    if call.lse is not None and (call.lse.dtype != "float32" or call.lse.shape != (tokens, q_heads)):
        raise fail(f"lse must be float32 {(tokens, q_heads)}, is {call.lse.dtype} {call.lse.shape}")
    check_ints("query_start", call.query_start, "int32", 1)
    if call.query_start.shape[0] < 1:
        raise fail("query_start must have one entry more than there are sequences, is empty")
    sequences = call.query_start.shape[0] - 1
    check_ints("context_lens", call.context_lens, "int32", 1, sequences)
    check_ints("block_tables", call.block_tables, "int32", 2)
    if call.table_rows is not None:
        check_ints("table_rows", call.table_rows, "int32", 1, sequences)
    elif call.block_tables.shape[0] < sequences:
        raise fail(f"block_tables has {call.block_tables.shape[0]} rows for {sequences} sequences")
    if call.v_cache.shape[3] != head_dim:
        _check_latent(call)
    check_head_values("alibi_slopes", call.alibi_slopes, q_heads)
    check_head_values("sinks", call.sinks, q_heads)
    _check_features(call)


def _check_latent(call: AttentionCall) -> None:
    """Values that are shorter than keys are the front of the same rows, with none of the extra features."""
    same = (call.k_cache.pointer, call.k_cache.strides) == (call.v_cache.pointer, call.v_cache.strides)
    if not same or call.k_cache.shape[2] != 1:
        raise fail(
            f"keys of {call.k_cache.shape[3]} with value heads of {call.v_cache.shape[3]} elements: "
            "only a latent cache has a kernel, where values are the front of the keys of one head"
        )
    if call.alibi_slopes is not None:
        raise fail("ALiBi has no kernel for latent caches")


def _check_features(call: AttentionCall) -> None:
    if call.window is not None and call.window < 1:
        raise fail(f"window must be at least 1 position, is {call.window}")
    if call.softcap is not None and not (0 < call.softcap < math.inf):
        raise fail(f"softcap must be a positive number, is {call.softcap}")
    if call.scale is not None and not math.isfinite(call.scale):
        raise fail(f"scale must be a finite number, is {call.scale}")


def _attention_fields(call: AttentionCall, tile_rows: int, plan: PlanView) -> dict[str, object]:
    k_scale = resolve_scale("k_scale", call.k_scale, call.k_cache)
    v_scale = resolve_scale("v_scale", call.v_scale, call.v_cache)
    head_dim = call.query.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if call.scale is None else call.scale
    fields: dict[str, object] = {
        "counts": plan.counts,
        "work": plan.work,
        "merges": plan.merges,
        "partial_out": plan.partial_out,
        "partial_state": plan.partial_state,
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
        "out_dtype": manifest.DTYPE_CODES[call.out.dtype],
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
    fields |= cache_strides(call.k_cache, call.v_cache) | scale_strides(k_scale, v_scale)
    return fields


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
