"""How a cascade is cut: a pass over shared prefixes for all their readers, and one over what is left.

The prefix pass sees each group as one sequence whose query rows are those of all members; every row stands
behind the whole prefix, so no mask is needed. The second pass is the ordinary one with the prefix left out.
Both are joined by their log-sum-exp. Everything here is on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError

__all__ = ["Cascade", "cut_cascade"]

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cascade:
    """The two passes of a cascade.

    Attributes:
        rows: query rows of all groups, group after group: [num_rows] int32.
        query_start: ranges of `rows` by group: [num_groups + 1] int32.
        context_lens: prefix length of each group: [num_groups] int32.
        table_rows: a table row that begins with the prefix: [num_groups] int32.
        kv_starts: positions that the second pass leaves out, by sequence: [num_sequences] int32.
    """

    rows: Ints
    query_start: Ints
    context_lens: Ints
    table_rows: Ints
    kv_starts: Ints

    def rows_of_tokens(self, num_tokens: int) -> Ints:
        """Which of `rows` a query token is, -1 for none: [num_tokens] int32."""
        places = np.full(num_tokens, -1, np.int32)
        places[self.rows] = np.arange(len(self.rows), dtype=np.int32)
        return places


def cut_cascade(
    group_start: Ints,
    group_sequences: Ints,
    prefix_lens: Ints,
    *,
    query_start: Ints,
    context_lens: Ints,
    table_rows: Ints | None,
    block_size: int,
    block_tables: Ints | None = None,
) -> Cascade:
    """Cuts a batch whose groups share prefixes.

    Args:
        group_start: [num_groups + 1], ranges of `group_sequences`.
        group_sequences: member sequences, each at most once.
        prefix_lens: [num_groups], multiples of the block size, not past any member's first query row.
        query_start: [num_sequences + 1].
        context_lens: [num_sequences].
        table_rows: [num_sequences], or None: the sequence's index.
        block_size: positions of a block.
        block_tables: [rows, max_blocks], if they are on the host: members must have the prefix's blocks in
            common.

    Returns:
        The passes. Groups without members or prefix are left out.

    Raises:
        InvalidArgumentError: The groups do not fit the batch.
    """
    _check(group_start, group_sequences, prefix_lens, query_start, context_lens, block_size)
    tables = np.arange(len(context_lens), dtype=np.int32) if table_rows is None else table_rows
    kv_starts = np.zeros(len(context_lens), np.int32)
    rows: list[Ints] = []
    starts, lens, heads = [0], [], []
    for group, prefix in enumerate(prefix_lens):
        members = group_sequences[group_start[group] : group_start[group + 1]]
        if prefix == 0 or len(members) == 0:
            continue
        kv_starts[members] = prefix
        if block_tables is not None:
            _check_shared(block_tables, tables, members, int(prefix), block_size)
        ranges = [np.arange(query_start[m], query_start[m + 1], dtype=np.int32) for m in members]
        rows += ranges
        starts.append(starts[-1] + sum(len(r) for r in ranges))
        lens.append(prefix)
        heads.append(tables[members[0]])
    return Cascade(
        np.concatenate(rows) if rows else np.zeros(0, np.int32),
        np.array(starts, np.int32),
        np.array(lens, np.int32),
        np.array(heads, np.int32),
        kv_starts,
    )


def _check_shared(tables: Ints, rows: Ints, members: Ints, prefix: int, block_size: int) -> None:
    """Refuses members whose tables do not begin with the same blocks."""
    columns = prefix // block_size
    if columns > tables.shape[1] or rows[members].min() < 0 or rows[members].max() >= tables.shape[0]:
        raise InvalidArgumentError(
            f"a prefix of {prefix} tokens of table rows {rows[members].tolist()} lies outside tables of "
            f"{list(tables.shape)} in blocks of {block_size}"
        )
    blocks = tables[rows[members], :columns]
    different = np.argwhere(blocks != blocks[0])
    if len(different):
        member, column = (int(place) for place in different[0])
        raise InvalidArgumentError(
            f"sequences {members[0]} and {members[member]} do not share their first {prefix} tokens: entry "
            f"{column} is block {blocks[0, column]} and {blocks[member, column]}"
        )


def _check(
    group_start: Ints,
    group_sequences: Ints,
    prefix_lens: Ints,
    query_start: Ints,
    context_lens: Ints,
    block_size: int,
) -> None:
    if len(group_start) != len(prefix_lens) + 1 or group_start[0] != 0 or np.any(np.diff(group_start) < 0):
        raise InvalidArgumentError(f"group_start must be {len(prefix_lens) + 1} rising offsets from 0")
    if group_start[-1] != len(group_sequences):
        raise InvalidArgumentError(
            f"group_start ends at {group_start[-1]}, group_sequences has {len(group_sequences)} entries"
        )
    if len(group_sequences) and not 0 <= group_sequences.min() <= group_sequences.max() < len(context_lens):
        raise InvalidArgumentError(f"group_sequences must name sequences 0 to {len(context_lens) - 1}")
    if len(np.unique(group_sequences)) != len(group_sequences):
        raise InvalidArgumentError("a sequence is in two groups")
    if np.any(prefix_lens < 0) or np.any(prefix_lens % block_size):
        raise InvalidArgumentError(f"prefix_lens must be multiples of the block size {block_size}")
    prefix = np.repeat(prefix_lens, np.diff(group_start))
    first = (context_lens - np.diff(query_start))[group_sequences]
    if np.any(prefix > first):
        worst = int(np.argmax(prefix - first))
        raise InvalidArgumentError(
            f"prefix of {prefix[worst]} tokens goes past the first query row of sequence "
            f"{group_sequences[worst]} at position {first[worst]}"
        )
