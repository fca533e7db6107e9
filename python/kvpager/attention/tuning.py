"""Launch shapes by architecture: how many thread blocks fill a device, and the shortest chunk worth one.

The defaults are reasoned, not measured: no GPU was at hand when they were written. `python -m
kvpager.attention.tune` measures on the GPU that it runs on and prints the line to put into `BY_CAPABILITY`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.attention import kernels

__all__ = ["BY_CAPABILITY", "DEFAULT", "LaunchShape", "Tuning", "current_tuning"]


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """What a plan aims at on one architecture.

    Attributes:
        blocks_per_multiprocessor: thread blocks that a plan makes for each.
        min_chunk: positions below which a chunk is not worth a block of its own.
    """

    blocks_per_multiprocessor: int
    min_chunk: int


DEFAULT = LaunchShape(blocks_per_multiprocessor=2, min_chunk=256)
"""Two resident blocks hide each other's latency; 256 positions of 16-bit KV are 30 times a partial result."""

BY_CAPABILITY: dict[str, LaunchShape] = {}
"""Measured shapes by compute capability, such as "90". Empty until measured."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """A launch shape on one device."""

    target_blocks: int
    min_chunk: int


def current_tuning() -> Tuning:
    """The shape for CuPy's current device."""
    device = kernels.load_cupy().cuda.Device()
    shape = BY_CAPABILITY.get(str(device.compute_capability), DEFAULT)
    multiprocessors = int(device.attributes["MultiProcessorCount"])
    return Tuning(shape.blocks_per_multiprocessor * multiprocessors, shape.min_chunk)
