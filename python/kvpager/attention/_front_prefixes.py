"""The public functions about prefixes that sequences share: who shares, and attention over them."""

from __future__ import annotations

from typing import Any, Protocol, Unpack

import numpy as np

from kvpager import _core
from kvpager.attention._arguments import integer
from kvpager.attention._dispatch import Array
from kvpager.attention._front_attention import AttentionOptions, prepared
from kvpager.attention._host_arrays import ints

__all__ = ["cascade_attention", "prefix_groups", "prefix_groups_of"]


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
    groups = {"group_start": group_start, "group_sequences": group_sequences, "prefix_lens": prefix_lens}
    others: Any = dict(options)
    workspace = others.pop("workspace", None)
    unknown = set(others) - set(AttentionOptions.__annotations__)
    if unknown:
        raise TypeError(f"cascade_attention() got an unexpected keyword argument {min(unknown)!r}")
    backend, checked = prepared(query, k_cache, v_cache, others, workspace)
    return backend.cascade_attention(query, k_cache, v_cache, **groups, **checked)


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
        block_tables: `[rows, max_blocks]` on the host: NumPy, torch or lists; int32 is read in place.
        table_rows: as for `paged_attention`, on the host.
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
        ints("block_tables", block_tables, np.int32, 2),
        None if table_rows is None else ints("table_rows", table_rows, np.int32),
        ints("query_start", query_start, np.int32),
        ints("context_lens", context_lens, np.int32),
        integer("block_size", block_size, 1),
        max(integer("min_tokens", min_tokens, -(2**31)), 0),
    )
    names = ("group_start", "group_sequences", "prefix_lens")
    return {name: np.array(values, np.int32) for name, values in zip(names, found, strict=True)}
