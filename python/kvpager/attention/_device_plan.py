"""The split plan in device memory, at addresses that do not change while lengths do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.attention import _launch, kernels, tuning
from kvpager.attention._launch import AttentionCall
from kvpager.attention._manifest import KernelClass
from kvpager.attention._plan import HostPlan, PlanRoom, plan_class, plan_room, view_of

__all__ = ["AttentionPlan"]

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _DeviceClass:
    """One kernel class of a plan in device memory."""

    kernel_class: KernelClass
    room: PlanRoom
    counts: Any
    work: Any
    merges: Any
    partial_out: Any
    partial_state: Any


class AttentionPlan:
    """The split plan of batches up to given bounds.

    One plan serves all layers of a step that share head counts, dtypes, window and mask. `update` refills it
    from the lengths of the next step without moving it, so captured launches stay valid.
    """

    def __init__(
        self,
        call: AttentionCall,
        *,
        max_sequences: int,
        max_tokens: int,
        max_query_len: int | None = None,
        target_blocks: int | None = None,
        min_chunk: int | None = None,
    ) -> None:
        """Makes room on the current device.

        Args:
            call: head counts, dtypes, window and mask; its arrays are not kept.
            max_sequences: most sequences of a batch.
            max_tokens: most query tokens of a batch.
            max_query_len: most query tokens of one sequence; kernels for more rows are left out. None: any.
            target_blocks: thread blocks that fill the device; None: as tuned for it.
            min_chunk: positions below which a chunk is not cut; None: as tuned.
        """
        tuned = tuning.current_tuning()
        self._target_blocks = tuned.target_blocks if target_blocks is None else target_blocks
        self._min_chunk = tuned.min_chunk if min_chunk is None else min_chunk
        self._call = call
        classes = call.kernels()
        if max_query_len is not None:
            classes = tuple(c for c in classes if c.rows_above < max_query_len * call.group)
        self._classes = [
            self._allocate(item, self._room(item, max_sequences, max_tokens)) for item in classes
        ]

    @classmethod
    def for_lengths(
        cls, call: AttentionCall, query_start: Ints, context_lens: Ints, kv_starts: Ints | None = None
    ) -> AttentionPlan:
        """A plan for one batch alone, as large as it needs.

        Args:
            call: as for the constructor.
            query_start: int32 [num_sequences + 1], on the host.
            context_lens: int32 [num_sequences], on the host.
            kv_starts: positions to leave out at the front of each sequence.

        Returns:
            The filled plan.
        """
        plan = cls(call, max_sequences=0, max_tokens=0)
        wanted = call.kernels()
        plan._classes = []
        for item in wanted:
            room = plan._room(item, len(context_lens), call.query.shape[0])
            host = plan._host(item, room, query_start, context_lens, kv_starts)
            num_work, num_merges = (int(count) for count in host.counts)
            if num_work:
                exact = PlanRoom(num_work, num_merges, host.num_partials)
                plan._classes.append(plan._allocate(item, exact))
                plan._fill(plan._classes[-1], host)
        return plan

    def _room(self, item: KernelClass, max_sequences: int, max_tokens: int) -> PlanRoom:
        return plan_room(
            item.kernel,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            group=self._call.group,
            num_kv_heads=self._call.k_cache.shape[2],
            target_blocks=self._target_blocks,
            min_chunk=self._min_chunk,
        )

    def _allocate(self, item: KernelClass, room: PlanRoom) -> _DeviceClass:
        cupy = kernels.load_cupy()
        rows = (room.partials, self._call.k_cache.shape[2], item.kernel.tile_rows)
        return _DeviceClass(
            item,
            room,
            cupy.zeros(2, dtype=np.int32),
            cupy.empty((room.work, 8), dtype=np.int32),
            cupy.empty((room.merges, 4), dtype=np.int32),
            cupy.empty((*rows, self._call.v_cache.shape[3]), dtype=np.float32),
            cupy.empty((*rows, 2), dtype=np.float32),
        )

    def _host(
        self, item: KernelClass, room: PlanRoom, query_start: Ints, context_lens: Ints, kv_starts: Ints | None
    ) -> HostPlan:
        return plan_class(
            query_start,
            context_lens,
            item,
            group=self._call.group,
            num_kv_heads=self._call.k_cache.shape[2],
            window=self._call.window,
            causal=self._call.causal,
            target_blocks=self._target_blocks,
            room=room,
            kv_starts=kv_starts,
            min_chunk=self._min_chunk,
        )

    def _fill(self, item: _DeviceClass, host: HostPlan) -> None:
        num_work, num_merges = (int(count) for count in host.counts)
        item.counts.set(host.counts)
        if num_work:
            item.work[:num_work].set(host.work[:num_work])
        if num_merges:
            item.merges[:num_merges].set(host.merges[:num_merges])

    def update(self, query_start: Ints, context_lens: Ints, kv_starts: Ints | None = None) -> None:
        """Refills the plan for the next step, on the current stream.

        Args:
            query_start: int32 [num_sequences + 1], on the host.
            context_lens: int32 [num_sequences], on the host.
            kv_starts: positions to leave out at the front of each sequence.

        Raises:
            InvalidArgumentError: The batch is larger than the plan was made for.
        """
        hosts = [
            self._host(item.kernel_class, item.room, query_start, context_lens, kv_starts)
            for item in self._classes
        ]
        for item, host in zip(self._classes, hosts, strict=True):
            self._fill(item, host)

    def launches(self, call: AttentionCall) -> list[_launch.Launch]:
        """The launches of a call over this plan's work; the grids depend on the plan's room only."""
        call.check()
        found: list[_launch.Launch] = []
        for item in self._classes:
            addresses = view_of(
                int(item.counts.data.ptr),
                int(item.work.data.ptr),
                int(item.merges.data.ptr),
                item.room,
                int(item.partial_out.data.ptr),
                int(item.partial_state.data.ptr),
            )
            found += _launch.attention_launches(call, item.kernel_class.kernel, addresses)
        return found + _launch.tail_launches(call)
