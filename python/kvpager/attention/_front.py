"""The public functions: choose the backend by the arrays' type, and say what each call means.

A backend is a module with the functions of this one and the same arguments. `_numpy` runs on the CPU, `_cupy`
on a GPU; `_torch` lends tensors to either.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from kvpager import _core

__all__ = [
    "append_kv",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "get_num_threads",
    "instruction_sets",
    "merge_states",
    "mla_decode",
    "paged_attention",
    "prefix_groups",
    "scatter_blocks",
    "set_num_threads",
    "zero_blocks",
]

Array = Any
"""A NumPy array, a CuPy array or a torch tensor; what shapes and dtypes each argument takes is in its
text."""

_BACKENDS = {"cupy": "_cupy", "torch": "_torch"}


def _backend(array: Array) -> ModuleType:
    """The module that handles arrays of this type; imported when the first such array arrives."""
    package = type(array).__module__.partition(".")[0]
    return importlib.import_module(f"kvpager.attention.{_BACKENDS.get(package, '_numpy')}")


def append_kv(
    key: Array,
    value: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    slot_mapping: Array,
    *,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Writes new keys and values to their slots, converting and quantising on the way.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, float32, float16 or bfloat16.
        value: the same for values, or None with `v_cache` None (a latent cache has one array).
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, written.
        v_cache: the same for values, written.
        slot_mapping: `[num_tokens]`, int64: `block_id * block_size + offset`; -1 skips the token.
        k_scale: for float8 caches the divisor, a number or `[num_kv_heads]` float32 (default 1); values
            beyond the format's range saturate. For int8 caches a float32 array `[num_blocks, block_size,
            num_kv_heads]` that is written: the largest magnitude of each token and head over 127.
        v_scale: the same for values.
        kv_dtype: what the bytes of uint8 caches are: "float8_e4m3fn" or "float8_e5m2".

    Raises:
        InvalidArgumentError: shapes, dtypes, slots or scales that do not fit. Nothing is written then.
    """
    _backend(k_cache).append_kv(
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
    )


def paged_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_tables: Array,
    table_rows: Array | None = None,
    query_start: Array,
    context_lens: Array,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_dtype: str | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    causal: bool = True,
) -> Any:
    """Attention of a ragged batch over paged keys and values: decodes, prefill chunks, verification.

    Query row `j` of a sequence with `q_len` rows stands at position `context_len - q_len + j` and sees the
    positions up to its own (`causal`), of those the last `window`. Slots that no query sees are not read.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, float32, float16 or bfloat16. Head `h` uses KV head
            `h // (num_query_heads // num_kv_heads)`. `head_dim` 1 to 1024.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; block sizes are powers of two up to 256.
        v_cache: `[num_blocks, block_size, num_kv_heads, value_dim]`, the dtype of `k_cache`.
        block_tables: `[rows, max_blocks]`, int32. Entries outside a sequence's visible range may hold
            anything.
        table_rows: `[num_sequences]`, int32: each sequence's row; its own index if None.
        query_start: `[num_sequences + 1]`, int32: ranges of query rows. Rows past the last range give zeros.
        context_lens: `[num_sequences]`, int32: tokens in the cache, the query's included. With 0 the
            sequence's rows give zeros and its table row is not read.
        scale: factor of the products; `head_dim ** -0.5` if None.
        window: positions that a query sees at most, its own included.
        softcap: `softcap * tanh(score / softcap)`.
        alibi_slopes: `[num_query_heads]`, float32: adds `slope * (key position - query position)`.
        sinks: `[num_query_heads]`, float32: the logit of one more key without a value.
        k_scale: scale of a quantised cache, as for `append_kv`.
        v_scale: the same for values.
        kv_dtype: as for `append_kv`.
        out: `[num_tokens, num_query_heads, value_dim]`, written and returned; a new array of the query's
            dtype if None.
        return_lse: also return `[num_tokens, num_query_heads]` float32, the natural logarithm of the sum of
            exponentials (sinks included), -inf where nothing was seen.
        causal: whether a query sees nothing past its own position.

    Returns:
        The output, or (output, log-sum-exp).

    Raises:
        InvalidArgumentError: anything that does not fit, with the numbers. Nothing is written then.
    """
    return _backend(query).paged_attention(
        query,
        k_cache,
        v_cache,
        block_tables=block_tables,
        table_rows=table_rows,
        query_start=query_start,
        context_lens=context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        out=out,
        return_lse=return_lse,
        causal=causal,
    )


def cascade_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    group_start: Array,
    group_sequences: Array,
    prefix_lens: Array,
    block_tables: Array,
    table_rows: Array | None = None,
    query_start: Array,
    context_lens: Array,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_dtype: str | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    causal: bool = True,
) -> Any:
    """`paged_attention` that reads a prefix shared by several sequences once for all of them.

    Args:
        query: as for `paged_attention`, like the arguments not listed here.
        k_cache: as there.
        v_cache: as there.
        group_start: `[num_groups + 1]`, int32: ranges of `group_sequences`.
        group_sequences: int32: indices of the member sequences, each in at most one group. Sequences in none
            are computed as usual.
        prefix_lens: `[num_groups]`, int32: tokens that the members share: a multiple of the block size, not
            past any member's first query row. The tables of all members must begin with the same blocks.
        block_tables: as there.
        table_rows: as there.
        query_start: as there.
        context_lens: as there.
        scale: as there.
        window: as there.
        softcap: as there.
        alibi_slopes: as there.
        sinks: as there.
        k_scale: as there.
        v_scale: as there.
        kv_dtype: as there.
        out: as there.
        return_lse: as there.
        causal: as there.

    Returns:
        As `paged_attention`: the same values up to rounding.

    Raises:
        InvalidArgumentError: as `paged_attention`, or groups that do not fit.
    """
    return _backend(query).cascade_attention(
        query,
        k_cache,
        v_cache,
        group_start=group_start,
        group_sequences=group_sequences,
        prefix_lens=prefix_lens,
        block_tables=block_tables,
        table_rows=table_rows,
        query_start=query_start,
        context_lens=context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        out=out,
        return_lse=return_lse,
        causal=causal,
    )


def prefix_groups(
    block_tables: Array,
    *,
    table_rows: Array | None = None,
    query_start: Array,
    context_lens: Array,
    block_size: int,
    min_tokens: int = 64,
) -> dict[str, Any]:
    """Finds the sequences of a batch whose tables begin with the same blocks, as prefixes from the index do.

    Args:
        block_tables: `[rows, max_blocks]`, int32, NumPy.
        table_rows: as for `paged_attention`, NumPy or None.
        query_start: as there.
        context_lens: as there.
        block_size: positions of a block.
        min_tokens: shared tokens from which a group is worth it.

    Returns:
        The arguments `group_start`, `group_sequences` and `prefix_lens` of `cascade_attention`, int32 arrays.

    Raises:
        InvalidArgumentError: arrays that do not fit each other.
    """
    found = _core._prefix_groups(
        block_tables, table_rows, query_start, context_lens, block_size, max(min_tokens, 0)
    )
    names = ("group_start", "group_sequences", "prefix_lens")
    return {name: np.array(values, np.int32) for name, values in zip(names, found, strict=True)}


def mla_decode(
    query: Array,
    latent_cache: Array,
    *,
    kv_lora_rank: int,
    block_tables: Array,
    table_rows: Array | None = None,
    query_start: Array,
    context_lens: Array,
    scale: float,
    out: Array | None = None,
    return_lse: bool = False,
    causal: bool = True,
) -> Any:
    """Attention over a latent cache (MLA with absorbed projections): each key's head is its value.

    Args:
        query: `[num_tokens, num_query_heads, kv_lora_rank + rope_dim]`, already multiplied by the key
            projection.
        latent_cache: `[num_blocks, block_size, 1, kv_lora_rank + rope_dim]`.
        kv_lora_rank: elements of a row that are also its value.
        block_tables: as for `paged_attention`.
        table_rows: as there.
        query_start: as there.
        context_lens: as there.
        scale: factor of the products (of the head size before absorption, so there is no default).
        out: `[num_tokens, num_query_heads, kv_lora_rank]`, written and returned; a new array if None.
        return_lse: as there.
        causal: as there.

    Returns:
        The output (still to be multiplied by the value projection), or (output, log-sum-exp).

    Raises:
        InvalidArgumentError: anything that does not fit, with the numbers. Nothing is written then.
    """
    return _backend(query).mla_decode(
        query,
        latent_cache,
        kv_lora_rank=kv_lora_rank,
        block_tables=block_tables,
        table_rows=table_rows,
        query_start=query_start,
        context_lens=context_lens,
        scale=scale,
        out=out,
        return_lse=return_lse,
        causal=causal,
    )


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
        out_a: `[num_tokens, num_heads, value_dim]`, float32, float16 or bfloat16.
        lse_a: `[num_tokens, num_heads]`, float32; -inf where `a` saw no key (its output is not read there).
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: written and returned; may be one of the sources; a new array of the dtype of `out_a` if None.
        lse: the same for the log-sum-exp.

    Returns:
        (output, log-sum-exp).

    Raises:
        InvalidArgumentError: shapes or dtypes that do not fit. Nothing is written then.
    """
    result: tuple[Any, Any] = _backend(out_a).merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)
    return result


def copy_blocks(k_cache: Array, v_cache: Array | None, block_copies: Array) -> None:
    """Copies whole blocks inside each cache: copy on write.

    Args:
        k_cache: `[num_blocks, ...]`, up to 4 dimensions, elements of 1, 2 or 4 bytes; written.
        v_cache: another such array, or None.
        block_copies: `[num_copies, 2]`, int32: (from, to). No block is a destination twice, or a destination
            and a source.

    Raises:
        InvalidArgumentError: ids that do not fit. Nothing is written then.
    """
    _backend(k_cache).copy_blocks(k_cache, v_cache, block_copies)


def zero_blocks(cache: Array, block_ids: Array) -> None:
    """Fills whole blocks with zeros.

    Args:
        cache: `[num_blocks, ...]`, up to 4 dimensions; written.
        block_ids: `[num_ids]`, int32.

    Raises:
        InvalidArgumentError: ids that do not fit. Nothing is written then.
    """
    _backend(cache).zero_blocks(cache, block_ids)


def gather_blocks(cache: Array, block_ids: Array, *, out: Array | None = None) -> Any:
    """Copies blocks out of a cache, to swap them out.

    Args:
        cache: `[num_blocks, ...]`, up to 4 dimensions.
        block_ids: `[num_ids]`, int32.
        out: `[num_ids, ...]`, written and returned; a new array if None.

    Returns:
        The blocks, in the order of the ids.

    Raises:
        InvalidArgumentError: ids, shapes or dtypes that do not fit. Nothing is written then.
    """
    return _backend(cache).gather_blocks(cache, block_ids, out=out)


def scatter_blocks(cache: Array, block_ids: Array, values: Array) -> None:
    """Copies blocks into a cache, to swap them in.

    Args:
        cache: `[num_blocks, ...]`, up to 4 dimensions; written.
        block_ids: `[num_ids]`, int32, each at most once.
        values: `[num_ids, ...]`, the dtype of the cache.

    Raises:
        InvalidArgumentError: ids, shapes or dtypes that do not fit. Nothing is written then.
    """
    _backend(cache).scatter_blocks(cache, block_ids, values)


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads a call on the CPU may use, the caller's included (1 to 1024).

    The first value is the number of cores that the process may use. Results do not depend on it.
    """
    _core._set_num_threads(num_threads)


def get_num_threads() -> int:
    """Threads that a call on the CPU may use, the caller's included."""
    return _core._get_num_threads()


def instruction_sets() -> list[str]:
    """Instruction sets of this processor that attention has kernels for; the first is used."""
    return _core._instruction_sets()
