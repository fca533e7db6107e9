"""Launch shapes by architecture: how many thread blocks fill a device, and the shortest chunk worth one.

The default is reasoned, not measured: no GPU was at hand when it was written. `python -m
kvpager.attention.tune` measures on the GPU that it runs on and puts what it found into `launch_shapes.json`
beside this file.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kvpager.attention import kernels
from kvpager.errors import InvalidArgumentError

__all__ = [
    "DEFAULT",
    "TABLE",
    "LaunchShape",
    "Tuning",
    "check_writable",
    "current_tuning",
    "read_table",
    "record",
]


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

TABLE = Path(__file__).with_name("launch_shapes.json")
"""Measured shapes by compute capability, such as "90". Empty until measured."""


def read_table(path: Path = TABLE) -> dict[str, LaunchShape]:
    """The measured shapes."""
    return {name: LaunchShape(**shape) for name, shape in json.loads(path.read_text("utf-8")).items()}


@functools.cache
def _measured() -> dict[str, LaunchShape]:
    """The table as this process found it."""
    return read_table()


def record(capability: str, shape: LaunchShape, path: Path = TABLE) -> None:
    """Puts a measured shape into the table; those of other architectures stay."""
    table = read_table(path) | {capability: shape}
    lines = {name: asdict(table[name]) for name in sorted(table)}
    path.write_text(json.dumps(lines, indent=2) + "\n", "utf-8")


def check_writable(path: Path = TABLE) -> None:
    """Refuses a table that cannot be written, before anything is measured.

    Raises:
        InvalidArgumentError: with the reason.
    """
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"the table of launch shapes cannot be written: {error}. Install kvpager where you may write, "
            "such as in a virtual environment of your own"
        ) from error


@dataclass(frozen=True, slots=True)
class Tuning:
    """A launch shape on one device."""

    target_blocks: int
    min_chunk: int


def current_tuning() -> Tuning:
    """The shape for CuPy's current device."""
    device = kernels.load_cupy().cuda.Device()
    shape = _measured().get(str(device.compute_capability), DEFAULT)
    multiprocessors = int(device.attributes["MultiProcessorCount"])
    return Tuning(shape.blocks_per_multiprocessor * multiprocessors, shape.min_chunk)
