"""The batch that needs the most memory: every limit reached, and what the blocks do not hold is padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager._core import KvGeometry
from kvpager.planning.limits import Limits
from kvpager.planning.memory import Memory

__all__ = ["Batch", "copy_arrays", "group_batches", "worst_batch"]

_DTYPES = {4: "int32", 8: "int64"}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A ragged batch: decodes, then prefill chunks, then padding; every block of every sequence is full.

    Attributes:
        num_tokens: query tokens that are not padding.
        num_sequences: sequences that are not padding.
        query_start: int32 [max_running + 1].
        context_lens: int32 [max_running]; 0 for padding.
        block_tables: int32 [max_running, table_width].
        slot_mapping: int64 [max_batch_tokens]; -1 for padding.
    """

    num_tokens: int
    num_sequences: int
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array of the batch by its name; those that no attention reads are zeros."""
        found: npt.NDArray[Any] | None = getattr(self, name, None)
        if found is not None:
            return found
        if name == "table_rows":
            return np.arange(len(self.context_lens), dtype=np.int32)
        return np.zeros(1, np.int32)


def worst_batch(block_ids: npt.NDArray[np.int64], limits: Limits) -> Batch:
    """The largest batch over the given blocks.

    Every sequence has as many blocks as any other, give or take one, and no more than the longest request;
    blocks beyond that are in no sequence, as cached ones are.

    Args:
        block_ids: int64 [n], at least one.
        limits: of the batch.
    """
    size, rows = limits.block_size, limits.max_running
    num_sequences = min(len(block_ids), limits.sampled_rows)
    parts = np.array_split(block_ids[: num_sequences * limits.table_width], num_sequences)
    tables = np.full((rows, limits.table_width), -1, np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part)] = part
    lengths = np.array([len(part) * size for part in parts])
    queries = _queries(lengths, limits.max_batch_tokens)
    slots = np.full(limits.max_batch_tokens, -1, np.int64)
    start = np.concatenate([[0], np.cumsum(queries)])
    for part, length, count, first in zip(parts, lengths, queries, start[:-1], strict=True):
        positions = np.arange(length - count, length)
        slots[first : first + count] = part[positions // size] * size + positions % size
    padding = rows - num_sequences
    return Batch(
        num_tokens=int(start[-1]),
        num_sequences=num_sequences,
        query_start=np.pad(start, (0, padding), mode="edge").astype(np.int32),
        context_lens=np.pad(lengths, (0, padding)).astype(np.int32),
        block_tables=tables,
        slot_mapping=slots,
    )


def _queries(lengths: npt.NDArray[np.int64], max_batch_tokens: int) -> npt.NDArray[np.int64]:
    """Query tokens of each sequence: one, and from the last on as many more as are left and it holds."""
    more = lengths[::-1] - 1
    left = max_batch_tokens - len(lengths) - (np.cumsum(more) - more)
    queries: npt.NDArray[np.int64] = 1 + np.clip(left, 0, more)[::-1]
    return queries


def group_batches(geometry: KvGeometry, block_ids: npt.NDArray[np.int64], limits: Limits) -> list[Batch]:
    """The worst batch of each layer group; the groups share the blocks evenly, and have the same lengths."""
    num_groups = len(geometry.layer_groups)
    share = len(block_ids) // num_groups
    parts = block_ids[: share * num_groups].reshape(num_groups, share)
    return [worst_batch(part, limits) for part in parts]


def copy_arrays(
    memory: Memory, geometry: KvGeometry, limits: Limits, batches: list[Batch]
) -> list[dict[str, Any]]:
    """Allocates the arrays that a plan counts, and fills those that attention reads.

    Args:
        memory: where to.
        geometry: the model.
        limits: that the batches were made for.
        batches: one a layer group.

    Returns:
        The arrays of each group by name; those that exist once are in all of them.
    """
    shared: dict[str, Any] = {}
    groups: list[dict[str, Any]] = [{} for _ in batches]
    for name, group, item_bytes, (rows, columns) in geometry.batch_arrays(**limits.arguments()):
        shape = (rows, columns) if name == "block_tables" else (columns,)
        array = memory.empty(shape, _DTYPES[item_bytes])
        values = batches[group or 0].array(name)
        memory.fill(array, values)
        (shared if group is None else groups[group])[name] = array
    return [shared | group for group in groups]
