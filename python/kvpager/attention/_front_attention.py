"""The public functions that compute: what each call means, for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

import numpy as np

from kvpager import _core
from kvpager.attention._dispatch import Array, backend_of, check_kv_dtype, check_window
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.attention.device_plan import AttentionPlan

__all__ = [
    "cascade_attention",
    "get_num_threads",
    "instruction_sets",
    "merge_states",
    "mla_decode",
    "paged_attention",
    "prefix_groups",
    "prefix_groups_of",
    "set_num_threads",
]


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `paged_attention`, which has what they mean; the first three are required."""

    block_tables: Array
    query_start: Array
    context_lens: Array
    table_rows: Array | None
    scale: float | None
    window: int | None
    softcap: float | None
    alibi_slopes: Array | None
    sinks: Array | None
    k_scale: Array | float | None
    v_scale: Array | float | None
    kv_dtype: str | None
    out: Array | None
    lse: Array | None
    return_lse: bool
    causal: bool


class LatentOptions(TypedDict, total=False):
    """The keyword arguments of `paged_attention` that a latent cache has; the first three are required."""

    block_tables: Array
    query_start: Array
    context_lens: Array
    table_rows: Array | None
    out: Array | None
    lse: Array | None
    return_lse: bool
    causal: bool
    plan: AttentionPlan | None


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
    lse: Array | None = None,
    return_lse: bool = False,
    causal: bool = True,
    plan: AttentionPlan | None = None,
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
        lse: `[num_tokens, num_query_heads]`, float32, written: the natural logarithm of the sum of
            exponentials (sinks included), -inf where nothing was seen.
        return_lse: also return `lse`; a new array if None was given.
        causal: whether a query sees nothing past its own position.
        plan: for arrays on a device: an `AttentionPlan` that the caller keeps up to date. Without one a plan
            is made for this call, which waits for the device if the lengths are there; with one nothing
            waits, so that the call can be captured in a graph.

    Returns:
        The output, or (output, log-sum-exp).

    Raises:
        InvalidArgumentError: anything that does not fit, with the numbers. Nothing is written then.
    """
    check_kv_dtype(kv_dtype)
    check_window(window)
    return backend_of(query).paged_attention(
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
        lse=lse,
        return_lse=return_lse,
        causal=causal,
        plan=plan,
    )


def cascade_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    group_start: Array,
    group_sequences: Array,
    prefix_lens: Array,
    **options: Unpack[AttentionOptions],
) -> Any:
    """`paged_attention` that reads a prefix shared by several sequences once for all of them.

    Args:
        query: as for `paged_attention`.
        k_cache: as there.
        v_cache: as there.
        group_start: `[num_groups + 1]`, int32: ranges of `group_sequences`.
        group_sequences: int32: indices of the member sequences, each in at most one group. Sequences in none
            are computed as usual.
        prefix_lens: `[num_groups]`, int32: tokens that the members share: a multiple of the block size, not
            past any member's first query row. The tables of all members must begin with the same blocks.
        **options: the keyword arguments of `paged_attention` but `plan`.

    Returns:
        As `paged_attention`: the same values up to rounding.

    Raises:
        InvalidArgumentError: as `paged_attention`, or groups that do not fit.
    """
    check_kv_dtype(options.get("kv_dtype"))
    check_window(options.get("window"))
    groups = {"group_start": group_start, "group_sequences": group_sequences, "prefix_lens": prefix_lens}
    return backend_of(query).cascade_attention(query, k_cache, v_cache, **groups, **options)


def mla_decode(
    query: Array,
    latent_cache: Array,
    *,
    kv_lora_rank: int,
    scale: float,
    **options: Unpack[LatentOptions],
) -> Any:
    """Attention over a latent cache (MLA with absorbed projections): each key's head is its value.

    Args:
        query: `[num_tokens, num_query_heads, kv_lora_rank + rope_dim]`, already multiplied by the key
            projection.
        latent_cache: `[num_blocks, block_size, 1, kv_lora_rank + rope_dim]`.
        kv_lora_rank: elements of a row that are also its value.
        scale: factor of the products (of the head size before absorption, so there is no default).
        **options: `block_tables`, `query_start`, `context_lens`, `table_rows`, `out` (of value heads of
            `kv_lora_rank`), `lse`, `return_lse`, `causal` and `plan` of `paged_attention`.

    Returns:
        The output (still to be multiplied by the value projection), or (output, log-sum-exp).

    Raises:
        InvalidArgumentError: anything that does not fit, with the numbers. Nothing is written then.
    """
    shape = tuple(getattr(latent_cache, "shape", ()))
    if shape and (len(shape) != 4 or shape[2] != 1 or not 1 <= kv_lora_rank <= shape[3]):
        raise InvalidArgumentError(
            f"latent_cache has shape {shape}, expected [num_blocks, block_size, 1, dim] with dim at least "
            f"kv_lora_rank = {kv_lora_rank}"
        )
    unknown = set(options) - set(LatentOptions.__annotations__)
    if unknown:
        raise TypeError(f"mla_decode() got an unexpected keyword argument {min(unknown)!r}")
    if not hasattr(latent_cache, "__getitem__"):
        latent_cache = np.from_dlpack(latent_cache)
    values = latent_cache[..., :kv_lora_rank]
    return paged_attention(query, latent_cache, values, scale=scale, **options)


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
    result: tuple[Any, Any] = backend_of(out_a).merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)
    return result


class _Batch(Protocol):
    """What `prefix_groups_of` reads of a batch; `kvpager.Batch` has it."""

    @property
    def block_tables(self) -> Any: ...
    @property
    def table_rows(self) -> Any: ...
    @property
    def query_start(self) -> Any: ...
    @property
    def context_lens(self) -> Any: ...


def prefix_groups_of(batch: _Batch, *, block_size: int, min_tokens: int = 64) -> dict[str, Any]:
    """`prefix_groups` of a scheduler's batch.

    What the prefix index handed to several sequences, and pins for them, is the same physical blocks in the
    tables of all; so the tables say who shares what, whoever filled them.

    Args:
        batch: of `Scheduler.step`.
        block_size: positions of a block.
        min_tokens: shared tokens from which a group is worth it.

    Returns:
        As `prefix_groups`.
    """
    return prefix_groups(
        batch.block_tables,
        table_rows=batch.table_rows,
        query_start=batch.query_start,
        context_lens=batch.context_lens,
        block_size=block_size,
        min_tokens=min_tokens,
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

    Groups are chosen so that the most reading is saved: `n` sequences that share `b` blocks save
    `(n - 1) * b`.

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
