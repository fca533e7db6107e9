"""The split plan of a batch on the host: made in Rust from lengths, copied to where kernels read it.

One `HostPlan` is the work of one kernel class. Room and launch grids follow from the bounds that a plan was
made for, not from the lengths of a step, so a captured launch stays valid while the contents change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager.attention._arguments import integer
from kvpager.attention._launch import PlanView
from kvpager.attention._manifest import AttentionKernel, KernelClass

__all__ = [
    "ALIGNMENT",
    "HostPlan",
    "PlanArrays",
    "PlanBounds",
    "PlanRoom",
    "bytes_of",
    "plan_class",
    "plan_room",
]

MIN_CHUNK = 256
"""Positions below which a chunk is not worth a thread block of its own."""


ALIGNMENT = 16
"""Bytes at whose multiples an array of partial results begins in a workspace."""


class PlanArrays(NamedTuple):
    """Shape and dtype of each array of one kernel class of a plan."""

    items: tuple[tuple[int, ...], np.dtype[Any]]
    merges: tuple[tuple[int, ...], np.dtype[Any]]
    partial_out: tuple[tuple[int, ...], np.dtype[Any]]
    partial_state: tuple[tuple[int, ...], np.dtype[Any]]

    def partial_bytes(self) -> tuple[int, int]:
        """Bytes that `partial_out` and `partial_state` take in a workspace, each made whole lines of it."""
        out, state = (-(-bytes_of(array) // ALIGNMENT) * ALIGNMENT for array in self[2:])
        return out, state


def bytes_of(array: tuple[tuple[int, ...], np.dtype[Any]]) -> int:
    """Bytes of an array of a plan."""
    shape, dtype = array
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlanRoom:
    """How much one kernel class of a plan can hold."""

    work: int
    merges: int
    partials: int

    def arrays(self, kernel: AttentionKernel, num_kv_heads: int, value_dim: int) -> PlanArrays:
        """The arrays that this room takes."""
        rows = (self.partials, num_kv_heads, kernel.tile_rows)
        return PlanArrays(
            items=((1 + self.work, 8), np.dtype(np.int32)),
            merges=((self.merges, 4), np.dtype(np.int32)),
            partial_out=((*rows, value_dim), np.dtype(np.float32)),
            partial_state=((*rows, 2), np.dtype(np.float32)),
        )


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One kernel class of a plan on the host, int32.

    Attributes:
        items: [1 + work, 8]: the counts of work and merges, then the work; one copy brings both to a device.
        merges: [merges, 4].
        num_partials: partial results that the work leaves.
    """

    items: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    num_partials: int

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[2]: work items, merge items."""
        return self.items[0, :2]

    @property
    def work(self) -> npt.NDArray[np.int32]:
        """[work, 8]."""
        return self.items[1:]


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """The largest batch of a plan, as `AttentionPlan` has it."""

    max_sequences: int
    max_tokens: int
    max_query_len: int | None

    def checked(self) -> PlanBounds:
        """The same as plain integers; what is not positive is refused."""
        longest = self.max_query_len
        return PlanBounds(
            integer("max_sequences", self.max_sequences, 1),
            integer("max_tokens", self.max_tokens, 1),
            None if longest is None else integer("max_query_len", longest, 1),
        )


def plan_room(
    kernel: AttentionKernel,
    *,
    max_sequences: int,
    max_tokens: int,
    group: int,
    num_kv_heads: int,
    target_blocks: int,
    max_positions: int | None = None,
    min_chunk: int = MIN_CHUNK,
) -> PlanRoom:
    """Room for any batch of these bounds.

    Args:
        kernel: the class's kernel.
        max_sequences: most sequences of a batch.
        max_tokens: most query tokens of a batch.
        group: query heads of one KV head.
        num_kv_heads: KV heads.
        target_blocks: thread blocks that fill the device.
        max_positions: longest context; when no chunk can be cut from it, no room for merges is kept.
        min_chunk: shortest chunk.

    Returns:
        Numbers of items.
    """
    rows = max_tokens * group
    tiles = rows // kernel.tile_rows + min(max_sequences, rows)
    cuts = max(1, target_blocks // num_kv_heads)
    if max_positions is not None and max_positions <= min_chunk:
        cuts = 0
    # A cut tile has at least two parts, so both lists are bounded by the cuts.
    return PlanRoom(work=tiles + cuts, merges=min(tiles, cuts), partials=2 * cuts if cuts else 0)


def plan_class(
    query_start: npt.NDArray[np.int32],
    context_lens: npt.NDArray[np.int32],
    kernel_class: KernelClass,
    *,
    group: int,
    num_kv_heads: int,
    window: int | None,
    causal: bool,
    target_blocks: int,
    room: PlanRoom,
    kv_starts: npt.NDArray[np.int32] | None = None,
    min_chunk: int = MIN_CHUNK,
) -> HostPlan:
    """Plans the sequences of one kernel class.

    Args:
        query_start: int32 [num_sequences + 1], on the host.
        context_lens: int32 [num_sequences], on the host.
        kernel_class: the kernel, and the row counts that it serves.
        group: query heads of one KV head.
        num_kv_heads: KV heads.
        window: positions a row sees, its own included; None: all.
        causal: whether a row sees only positions up to its own.
        target_blocks: thread blocks that fill the device.
        room: what the arrays hold.
        kv_starts: int32 [num_sequences], positions to leave out at the front of each; None: none.
        min_chunk: shortest chunk.

    Returns:
        The plan.

    Raises:
        InvalidArgumentError: The arrays do not fit each other, or the plan needs more room.
    """
    items = np.zeros((1 + room.work, 8), np.int32)
    merges = np.zeros((room.merges, 4), np.int32)
    num_work, num_merges, num_partials = _core._split_plan(
        query_start,
        context_lens,
        kv_starts,
        items[1:].reshape(-1),
        merges.reshape(-1),
        group=group,
        tile_rows=kernel_class.kernel.tile_rows,
        num_kv_heads=num_kv_heads,
        window=window or 0,
        causal=causal,
        rows_above=kernel_class.rows_above,
        rows_up_to=kernel_class.rows_up_to,
        target_blocks=target_blocks,
        min_chunk=min_chunk,
    )
    items[0, :2] = (num_work, num_merges)
    return HostPlan(items, merges, num_partials)


def view_of(
    counts: int, work: int, merges: int, room: PlanRoom, partial_out: int, partial_state: int
) -> PlanView:
    """A plan's addresses with its room."""
    return PlanView(counts, work, merges, room.work, room.merges, partial_out, partial_state)
