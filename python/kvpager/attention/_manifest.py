"""Which kernels exist: every instantiation that is compiled, and which one serves a call.

The list is closed: what maps to none of them is refused at the call. Block size, window, soft cap, ALiBi,
sinks, strides and the query's dtype (on CUDA cores) are run-time values and cost no instantiation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.errors import InvalidArgumentError

__all__ = [
    "DTYPE_CODES",
    "HEAD_DIMS",
    "KV_TYPES",
    "AttentionKernel",
    "Instantiation",
    "KernelClass",
    "all_instantiations",
    "append_kernel",
    "choose_attention",
    "decode_kernel",
    "merge_splits_kernel",
    "mla_kernel",
    "prefill_kernel",
    "word_type",
]

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Head sizes with kernels."""

KV_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float8_e4m3": "kvpager::e4m3",
    "float8_e5m2": "kvpager::e5m2",
    "int8": "signed char",
}
"""Dtype of a cache to its C++ type."""

DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""Dtypes of queries, outputs, new keys and values, as the kernels number them."""

WORD_TYPES = {16: "uint4", 4: "unsigned", 1: "unsigned char"}
"""Bytes moved at a time by the block copies, to C++ type."""

_DECODE_ROWS = {
    "float32": (1, 4, 8),
    "float16": (1, 4),
    "bfloat16": (1, 4),
    "float8_e4m3": (1, 4),
    "float8_e5m2": (4,),
    "int8": (4,),
}
_WIDE = ("float16", "bfloat16")
_EIGHT_BIT = ("float8_e4m3", "float8_e5m2", "int8")
ANY_ROWS = 2**32 - 1
CORE_ROWS = 4
"""Up to so many rows a sequence, CUDA cores keep up with memory; beyond, tensor cores where possible."""
FEW_ROWS = 32
"""Up to so many rows, tiles of 16 rows whose warps split the positions; beyond, tiles of 64."""
MLA_LATENT_DIM = 512
MLA_ROPE_DIM = 64


@dataclass(frozen=True, slots=True)
class Instantiation:
    """One compiled kernel: the source `cuda/<kernel>.cu` and the C++ name expression in it."""

    kernel: str
    name: str


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """An attention kernel with the launch shape that its template fixes.

    Attributes:
        instantiation: what to launch.
        tile_rows: query rows, (token, head of the group) pairs, of one work item.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block; does not depend on the context length.
    """

    instantiation: Instantiation
    tile_rows: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class KernelClass:
    """A kernel and the sequences that it serves: those with `rows_above < rows <= rows_up_to` query rows."""

    kernel: AttentionKernel
    rows_above: int
    rows_up_to: int


def decode_kernel(kv_dtype: str, head_dim: int, rows: int) -> AttentionKernel:
    """The CUDA-core kernel for `rows` query rows a block."""
    name = f"kvpager::paged_decode<{KV_TYPES[kv_dtype]},{head_dim},{rows}>"
    shared = 4 * rows * (head_dim + 2) * 4
    return AttentionKernel(Instantiation("paged_decode", name), rows, 128, shared)


def prefill_kernel(kv_dtype: str, query_dtype: str, head_dim: int, row_warps: int) -> AttentionKernel:
    """The tensor-core kernel for tiles of `16 * row_warps` query rows; the other warps split KV."""
    kv_warps = 1 if row_warps > 1 else (4 if head_dim <= 128 else 2)
    tokens = (32 if row_warps > 1 and head_dim <= 128 else 16) * kv_warps
    name = (
        f"kvpager::paged_prefill<{KV_TYPES[kv_dtype]},{KV_TYPES[query_dtype]},"
        f"{head_dim},{row_warps},{kv_warps}>"
    )
    stages = 2 * 2 * tokens * (head_dim + 8) * 2
    queries = 16 * row_warps * (head_dim + 8) * 2 if head_dim > 128 else 0
    parts = 16 * row_warps * kv_warps * (head_dim + 2) * 4
    scales = 2 * 2 * tokens * 4 if kv_dtype == "int8" else 0
    threads = 32 * row_warps * kv_warps
    return AttentionKernel(
        Instantiation("paged_prefill", name), 16 * row_warps, threads, max(stages + queries + scales, parts)
    )


def mla_kernel(dtype: str) -> AttentionKernel:
    """The kernel for a latent cache of 512 + 64 elements a row."""
    row_bytes = (MLA_LATENT_DIM + MLA_ROPE_DIM + 8) * 2
    shared = 2 * 32 * row_bytes + 16 * row_bytes + 16 * 40 * 2 + 3 * 4 * 16 * 4
    return AttentionKernel(
        Instantiation("mla_decode", f"kvpager::mla_decode<{KV_TYPES[dtype]}>"), 16, 128, shared
    )


def append_kernel(kv_dtype: str) -> Instantiation:
    """The kernel that writes new keys and values into a cache of this dtype."""
    return Instantiation("append_kv", f"kvpager::append_kv<{KV_TYPES[kv_dtype]}>")


def merge_splits_kernel(kv_dtype: str) -> Instantiation:
    """The kernel that joins split work: one for caches with a scale a head, one for all others."""
    scaled = kv_dtype.startswith("float8")
    return Instantiation("merge_splits", f"kvpager::merge_splits<{'kvpager::e4m3' if scaled else 'float'}>")


def word_type(*byte_counts: int) -> tuple[int, str]:
    """The widest word that divides all of these byte counts, as (bytes, C++ type)."""
    for size, name in WORD_TYPES.items():
        if all(count % size == 0 for count in byte_counts):
            return size, name
    return 1, WORD_TYPES[1]


def all_instantiations() -> list[Instantiation]:
    """Everything that `compile_all` compiles, in a fixed order."""
    found = [append_kernel(kv) for kv in KV_TYPES]
    found += [Instantiation("copy_blocks", f"kvpager::copy_blocks<{word}>") for word in WORD_TYPES.values()]
    found += [Instantiation("zero_blocks", f"kvpager::zero_blocks<{word}>") for word in WORD_TYPES.values()]
    found += [merge_splits_kernel("float32"), merge_splits_kernel("float8_e4m3")]
    found += [
        Instantiation(kernel, f"kvpager::{kernel}")
        for kernel in ("merge_states", "zero_tail", "apply_deltas")
    ]
    for kv, rows in _DECODE_ROWS.items():
        found += [decode_kernel(kv, dim, count).instantiation for dim in HEAD_DIMS for count in rows]
    for query in _WIDE:
        found.append(mla_kernel(query).instantiation)
        found += [
            prefill_kernel(query, query, dim, warps).instantiation for dim in HEAD_DIMS for warps in (1, 4)
        ]
        found += [prefill_kernel(kv, query, dim, 1).instantiation for kv in _EIGHT_BIT for dim in HEAD_DIMS]
    return found


def _refuse(kind: str, value: object, known: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"no kernel for {kind} {value}; there are {', '.join(map(str, known))}")  # type: ignore[call-overload]


def choose_attention(
    *, kv_dtype: str, query_dtype: str, head_dim: int, group: int, value_dim: int | None = None
) -> tuple[KernelClass, ...]:
    """The kernels that together serve a ragged batch, by how many query rows a sequence has.

    Args:
        kv_dtype: dtype of the cache.
        query_dtype: dtype of queries and output.
        head_dim: size of a head.
        group: query heads of one KV head.
        value_dim: size of a value head; None: as head_dim.

    Returns:
        Classes in order of rows, covering every count once.

    Raises:
        InvalidArgumentError: No kernel serves this combination.
    """
    if kv_dtype not in KV_TYPES:
        raise _refuse("a cache of", kv_dtype, KV_TYPES)
    if query_dtype not in DTYPE_CODES:
        raise _refuse("queries of", query_dtype, DTYPE_CODES)
    if (head_dim, value_dim) == (MLA_LATENT_DIM + MLA_ROPE_DIM, MLA_LATENT_DIM):
        if kv_dtype not in _WIDE or query_dtype != kv_dtype:
            raise _refuse("a latent cache of", f"{kv_dtype} with queries of {query_dtype}", _WIDE)
        return (KernelClass(mla_kernel(kv_dtype), 0, ANY_ROWS),)
    if head_dim not in HEAD_DIMS:
        raise _refuse("head_dim", head_dim, HEAD_DIMS)
    if value_dim not in (None, head_dim):
        raise _refuse("value heads of", value_dim, (head_dim,))
    if query_dtype in _WIDE and (kv_dtype == query_dtype or kv_dtype in _EIGHT_BIT):
        classes = _core_classes(kv_dtype, head_dim, group, CORE_ROWS)
        few = prefill_kernel(kv_dtype, query_dtype, head_dim, 1)
        if kv_dtype in _WIDE:
            many = prefill_kernel(kv_dtype, query_dtype, head_dim, 4)
            classes += [KernelClass(few, CORE_ROWS, FEW_ROWS), KernelClass(many, FEW_ROWS, ANY_ROWS)]
        else:
            classes.append(KernelClass(few, CORE_ROWS, ANY_ROWS))
    else:
        classes = _core_classes(kv_dtype, head_dim, group, ANY_ROWS)
    # A sequence with any rows has at least a group of them.
    return tuple(c for c in classes if c.rows_up_to >= group)


def _core_classes(kv_dtype: str, head_dim: int, group: int, up_to: int) -> list[KernelClass]:
    """CUDA-core kernels by rows, the smallest that holds them; the last takes the rest in several tiles."""
    rows = [count for count in _DECODE_ROWS[kv_dtype] if count >= group] or [_DECODE_ROWS[kv_dtype][-1]]
    bounds = [0, *rows[:-1], up_to]
    return [
        KernelClass(decode_kernel(kv_dtype, head_dim, count), bounds[i], bounds[i + 1])
        for i, count in enumerate(rows)
    ]
