"""The split plan in device memory, at addresses that do not change while lengths do.

A plan is made once for bounds. Each step `update_from(batch)` makes the step's work in Rust from the batch's
lengths and copies it over; kernels read how much there is from device memory, so a captured graph that was
launched over the plan stays right for every later step.

    plan = AttentionPlan(query, k_cache, v_cache, max_sequences=256, max_tokens=256, max_query_len=1)
    ...
    plan.update_from(batch)  # every step, outside the graph, on the stream of the graph (or stream=...)
    paged_attention(query, k_cache, v_cache, plan=plan, out=out, ...)  # captured, once a layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpager.attention import _launch, kernels, tuning
from kvpager.attention._arguments import integer
from kvpager.attention._device_arrays import new_array, view
from kvpager.attention._device_workspace import workspace_start
from kvpager.attention._launch import AttentionCall, PlanShape, plan_shape
from kvpager.attention._manifest import KernelClass
from kvpager.attention._plan import (
    HostPlan,
    PlanArrays,
    PlanBounds,
    PlanRoom,
    plan_class,
    plan_room,
    view_of,
)
from kvpager.attention._streams import stream_context
from kvpager.errors import InvalidArgumentError

__all__ = ["AttentionPlan"]

Ints = npt.NDArray[np.int32]


class _Batch(Protocol):
    """What a plan reads of a batch; `kvpager.Batch` has it."""

    @property
    def query_start(self) -> Any: ...
    @property
    def context_lens(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _DeviceClass:
    """One kernel class of a plan in device memory.

    `items` has the counts in its first row, then the work; partial results are addresses in the workspace.
    """

    kernel_class: KernelClass
    room: PlanRoom
    items: Any
    merges: Any
    partial_out: int
    partial_state: int


class AttentionPlan:
    """The split plan of batches up to given bounds, for arrays on a device.

    One plan serves all layers of a step that share head counts, dtypes, window and mask.
    """

    def __init__(
        self,
        query: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        max_sequences: int,
        max_tokens: int,
        max_query_len: int | None = None,
        window: int | None = None,
        causal: bool = True,
        kv_dtype: str | None = None,
        target_blocks: int | None = None,
        min_chunk: int | None = None,
        workspace: Any = None,
    ) -> None:
        """Makes room on the current device.

        Args:
            query: as for `paged_attention`, on the device; heads and dtypes count, no array is kept.
            k_cache: as there.
            v_cache: as there.
            max_sequences: most sequences of a batch.
            max_tokens: most query tokens of a batch.
            max_query_len: most query tokens of one sequence; kernels for more rows are left out. None: any.
            window: as there.
            causal: as there.
            kv_dtype: as there.
            target_blocks: thread blocks that fill the device; None: as tuned for it.
            min_chunk: positions below which a chunk is not cut; None: as tuned.
            workspace: device memory for partial results: contiguous, of any dtype, with at least
                `workspace_bytes` bytes, kept while the plan lives. Plans whose calls follow each other on one
                stream may share it. None: the plan makes it.

        Raises:
            InvalidArgumentError: arrays that are not on the device, or that no kernel serves; bounds that are
                not positive; a workspace that is too small.
        """
        arrays = (view(query), view(k_cache, kv_dtype), view(v_cache, kv_dtype))
        shape = plan_shape(*arrays, window=window, causal=causal)
        self._start(shape, target_blocks, min_chunk)
        # Says whose current stream updates go to; holds nothing of the query's.
        self._like: Any = new_array(query, (0,))
        bounds = PlanBounds(max_sequences, max_tokens, max_query_len).checked()
        self._place(self._rooms(bounds), workspace)

    @classmethod
    def workspace_bytes(
        cls,
        query: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        max_sequences: int,
        max_tokens: int,
        max_query_len: int | None = None,
        window: int | None = None,
        causal: bool = True,
        kv_dtype: str | None = None,
        target_blocks: int | None = None,
        min_chunk: int | None = None,
    ) -> int:
        """Bytes of `workspace` that a plan of these arguments needs.

        Raises:
            InvalidArgumentError: as the constructor.
        """
        plan = cls.__new__(cls)
        arrays = (view(query), view(k_cache, kv_dtype), view(v_cache, kv_dtype))
        plan._start(plan_shape(*arrays, window=window, causal=causal), target_blocks, min_chunk)
        rooms = plan._rooms(PlanBounds(max_sequences, max_tokens, max_query_len).checked())
        return plan._partial_bytes(rooms)

    def _start(self, shape: PlanShape, target_blocks: int | None, min_chunk: int | None) -> None:
        tuned = tuning.current_tuning()
        self._shape = shape
        self._target_blocks = tuned.target_blocks
        if target_blocks is not None:
            self._target_blocks = integer("target_blocks", target_blocks, 1)
        self._min_chunk = tuned.min_chunk if min_chunk is None else integer("min_chunk", min_chunk, 1)
        self._classes: list[_DeviceClass] = []

    def _rooms(self, bounds: PlanBounds) -> list[tuple[KernelClass, PlanRoom]]:
        """The kernel classes that batches of these bounds need, with their room."""
        return [
            (item, self._room(item, bounds.max_sequences, bounds.max_tokens))
            for item in self._shape.classes
            if bounds.max_query_len is None or item.rows_above < bounds.max_query_len * self._shape.group
        ]

    @classmethod
    def for_lengths(
        cls, call: AttentionCall, query_start: Ints, context_lens: Ints, kv_starts: Ints | None = None
    ) -> AttentionPlan:
        """A plan for one batch alone, as large as it needs.

        Args:
            call: the arguments of the attention.
            query_start: int32 [num_sequences + 1], on the host.
            context_lens: int32 [num_sequences], on the host.
            kv_starts: positions to leave out at the front of each sequence.

        Returns:
            The filled plan.
        """
        plan = cls.__new__(cls)
        plan._start(call.plan_shape(), None, None)
        plan._like = None
        rooms: list[tuple[KernelClass, PlanRoom]] = []
        hosts: list[HostPlan] = []
        for item in plan._shape.classes:
            room = plan._room(item, len(context_lens), call.query.shape[0])
            host = plan._host(item, room, query_start, context_lens, kv_starts)
            num_work, num_merges = (int(count) for count in host.counts)
            if num_work:
                rooms.append((item, PlanRoom(num_work, num_merges, host.num_partials)))
                hosts.append(host)
        plan._place(rooms, None)
        for device, host in zip(plan._classes, hosts, strict=True):
            plan._fill(device, host)
        return plan

    def _room(self, item: KernelClass, max_sequences: int, max_tokens: int) -> PlanRoom:
        return plan_room(
            item.kernel,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            group=self._shape.group,
            num_kv_heads=self._shape.num_kv_heads,
            target_blocks=self._target_blocks,
            min_chunk=self._min_chunk,
        )

    def _arrays(self, item: KernelClass, room: PlanRoom) -> PlanArrays:
        return room.arrays(item.kernel, self._shape.num_kv_heads, self._shape.value_dim)

    def _partial_bytes(self, rooms: list[tuple[KernelClass, PlanRoom]]) -> int:
        return sum(sum(self._arrays(*room).partial_bytes()) for room in rooms)

    def _place(self, rooms: list[tuple[KernelClass, PlanRoom]], workspace: Any) -> None:
        """Makes the lists of each class, and gives it a part of the workspace."""
        cupy = kernels.load_cupy()
        needed = self._partial_bytes(rooms)
        self._workspace = cupy.empty((needed,), np.uint8) if workspace is None else workspace
        at = workspace_start(self._workspace, needed)
        for item, room in rooms:
            arrays = self._arrays(item, room)
            out, state = arrays.partial_bytes()
            lists = (cupy.zeros(*arrays.items), cupy.empty(*arrays.merges))
            self._classes.append(_DeviceClass(item, room, *lists, at, at + out))
            at += out + state

    def _host(
        self, item: KernelClass, room: PlanRoom, query_start: Ints, context_lens: Ints, kv_starts: Ints | None
    ) -> HostPlan:
        return plan_class(
            query_start,
            context_lens,
            item,
            group=self._shape.group,
            num_kv_heads=self._shape.num_kv_heads,
            window=self._shape.window,
            causal=self._shape.causal,
            target_blocks=self._target_blocks,
            room=room,
            kv_starts=kv_starts,
            min_chunk=self._min_chunk,
        )

    def _fill(self, item: _DeviceClass, host: HostPlan) -> None:
        num_work, num_merges = (int(count) for count in host.counts)
        item.items[: 1 + num_work].set(host.items[: 1 + num_work])
        if num_merges:
            item.merges[:num_merges].set(host.merges[:num_merges])

    def update(
        self,
        query_start: Ints,
        context_lens: Ints,
        kv_starts: Ints | None = None,
        *,
        stream: Any = None,
    ) -> None:
        """Refills the plan for the next step.

        Args:
            query_start: int32 [num_sequences + 1], on the host.
            context_lens: int32 [num_sequences], on the host.
            kv_starts: positions to leave out at the front of each sequence.
            stream: of CuPy or torch, the one whose attention reads the plan. None: as for attention, torch's
                current stream if the plan was made from torch tensors, else CuPy's.

        Raises:
            InvalidArgumentError: The batch is larger than the plan was made for, or no stream. Nothing is
                changed then.
        """
        hosts = [
            self._host(item.kernel_class, item.room, query_start, context_lens, kv_starts)
            for item in self._classes
        ]
        self._check_covered(query_start)
        with stream_context(stream, self._like):
            for item, host in zip(self._classes, hosts, strict=True):
                self._fill(item, host)

    def update_from(self, batch: _Batch, *, stream: Any = None) -> None:
        """`update` from a scheduler's batch."""
        self.update(batch.query_start, batch.context_lens, stream=stream)

    def _check_covered(self, query_start: Ints) -> None:
        """Refuses sequences of more rows than the kernels of the plan serve."""
        most = max((item.kernel_class.rows_up_to for item in self._classes), default=0)
        longest = int(np.max(np.diff(query_start), initial=0))
        if longest * self._shape.group > most:
            raise InvalidArgumentError(
                f"a sequence has {longest} query tokens, the plan was made for {most // self._shape.group}"
            )

    def launches(self, call: AttentionCall) -> list[_launch.Launch]:
        """The launches of a call over this plan's work; the grids depend on the plan's room only.

        Raises:
            InvalidArgumentError: The plan was made for other heads, dtypes, window or mask.
        """
        shape = call.plan_shape()
        if shape != self._shape:
            names = [
                name
                for name in PlanShape.__dataclass_fields__
                if getattr(shape, name) != getattr(self._shape, name)
            ]
            raise InvalidArgumentError(f"the plan was made for other arguments: {', '.join(names)} differ")
        found: list[_launch.Launch] = []
        for item in self._classes:
            start = int(item.items.data.ptr)
            addresses = view_of(
                start,
                start + 32,
                int(item.merges.data.ptr),
                item.room,
                item.partial_out,
                item.partial_state,
            )
            found += _launch.attention_launches(call, item.kernel_class.kernel, addresses)
        return found + _launch.tail_launches(call)
