"""What attention kernels keep besides a batch's arrays, from the code that makes room for them.

A device keeps the split plan of each kind of layer: lists of work and partial results. The room is that of
`kvpager.attention`, for the largest device there is; the host's kernels keep none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager._core import KvGeometry
from kvpager.attention._manifest import KernelClass, choose_attention
from kvpager.attention._plan import PlanArrays, PlanRoom, bytes_of, plan_class, plan_room
from kvpager.attention.tuning import DEFAULT, read_table
from kvpager.errors import InvalidArgumentError
from kvpager.planning.limits import Limits

__all__ = ["LayerKind", "SplitPlan", "layer_kinds", "split_plan_bytes", "split_plans"]

MULTIPROCESSORS = 160
"""Of the largest device; a split plan cuts no more than fills it."""

_KERNEL_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3",
    "int8": "int8",
}


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers whose attention is alike on one device, so that one split plan serves them.

    Attributes:
        window: positions that a token sees; None: all.
        query_heads: query heads.
        kv_heads: heads that are kept.
        key_dim: elements of a key.
        value_dim: elements of a value.
        latent: whether values are the front of the keys (MLA).
    """

    window: int | None
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool


def layer_kinds(geometry: KvGeometry) -> list[list[LayerKind]]:
    """The kind of each layer of each group."""
    rows = {row[0]: row for row in geometry.cached_layers}

    def kind(layer: int, window: int | None) -> LayerKind:
        _, query_heads, kv_heads, key_dim, value_dim, latent = rows[layer]
        return LayerKind(
            window=window,
            query_heads=query_heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            latent=latent,
        )

    return [[kind(layer, window) for layer in layers] for _, window, layers, _, _ in geometry.layer_groups]


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """One kernel's share of the split plan of one kind of layer.

    Attributes:
        kind: the layers.
        group: the first layer group with such layers, whose batch it plans.
        kernel_class: the kernel.
        room: what it can hold.
        target_blocks: thread blocks that it aims at.
    """

    kind: LayerKind
    group: int
    kernel_class: KernelClass
    room: PlanRoom
    target_blocks: int

    def arrays(self) -> PlanArrays:
        """Its arrays."""
        return self.room.arrays(self.kernel_class.kernel, self.kind.kv_heads, self.kind.value_dim)

    def check(self, query_start: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32]) -> None:
        """Plans a batch in this room.

        Raises:
            InvalidArgumentError: if it needs more.
        """
        plan_class(
            query_start,
            context_lens,
            self.kernel_class,
            group=self.kind.query_heads // self.kind.kv_heads,
            num_kv_heads=self.kind.kv_heads,
            window=self.kind.window,
            causal=True,
            target_blocks=self.target_blocks,
            room=self.room,
        )


def split_plans(geometry: KvGeometry, limits: Limits) -> Iterator[SplitPlan]:
    """The split plans of the largest batch on the largest device; none for layers that no kernel serves."""
    shapes = [DEFAULT, *read_table().values()]
    target_blocks = MULTIPROCESSORS * max(shape.blocks_per_multiprocessor for shape in shapes)
    seen: set[LayerKind] = set()
    for group, kinds in enumerate(layer_kinds(geometry)):
        for kind in dict.fromkeys(kinds):
            if kind in seen:
                continue
            seen.add(kind)
            for kernel_class in _classes(geometry.kv_dtype, kind):
                room = plan_room(
                    kernel_class.kernel,
                    max_sequences=limits.max_running,
                    max_tokens=limits.max_batch_tokens,
                    group=kind.query_heads // kind.kv_heads,
                    num_kv_heads=kind.kv_heads,
                    target_blocks=target_blocks,
                )
                yield SplitPlan(
                    kind=kind,
                    group=group,
                    kernel_class=kernel_class,
                    room=room,
                    target_blocks=target_blocks,
                )


def _classes(kv_dtype: str, kind: LayerKind) -> tuple[KernelClass, ...]:
    dtype = _KERNEL_DTYPES[kv_dtype]
    try:
        return choose_attention(
            kv_dtype=dtype,
            query_dtype="float16" if dtype == "float16" else "bfloat16",
            head_dim=kind.key_dim,
            value_dim=kind.value_dim,
            group=max(1, kind.query_heads // kind.kv_heads),
        )
    except InvalidArgumentError:
        return ()  # Such layers run on the host, whose kernels keep no plans.


def split_plan_bytes(geometry: KvGeometry, limits: Limits) -> int:
    """Bytes of all split plans."""
    return sum(bytes_of(array) for plan in split_plans(geometry, limits) for array in plan.arrays())
