"""What a block size costs on a workload's lengths: unused slots against table entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager._core import KvGeometry
from kvpager.errors import InvalidArgumentError
from kvpager.replay.formats import open_trace
from kvpager.replay.transforms import limited

__all__ = ["BLOCK_SIZES", "compare_block_sizes"]

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)

MAX_REQUESTS = 100_000
"""Requests of a trace that are looked at."""


def compare_block_sizes(
    geometry: KvGeometry, source: str, *, cache_bytes: int, max_running: int
) -> list[dict[str, Any]]:
    """Compares block sizes on the lengths of a trace.

    Waste is averaged over a request's life: it holds its prompt, then grows by one token a step, and only the
    last block of each layer group is partly empty.

    Args:
        geometry: the model.
        source: a trace, as `kvpager replay` takes it.
        cache_bytes: bytes of the cache.
        max_running: rows of the block tables.

    Returns:
        One object a block size: `block_size`, `num_blocks`, `internal_waste` (share of held slots),
        `table_entries` (of the mean request), `table_bytes` (of all rows at the longest request).

    Raises:
        InvalidArgumentError: if the trace cannot be read, or is empty.
    """
    prompts, outputs = _lengths(source)
    num_groups = len(geometry.layer_groups)
    longest = int((prompts + outputs).max())
    rows = []
    for block_size in BLOCK_SIZES:
        held, used = _held_and_used(prompts, outputs, block_size)
        entries = -(-(prompts + outputs) // block_size)
        rows.append(
            {
                "block_size": block_size,
                "num_blocks": cache_bytes // (geometry.block_bytes_per_token * block_size),
                "internal_waste": 1 - used / held,
                "table_entries": float(entries.mean()) * num_groups,
                "table_bytes": max_running * -(-longest // block_size) * num_groups * 4,
            }
        )
    return rows


def _lengths(source: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    prompts: list[int] = []
    outputs: list[int] = []
    for columns in limited(open_trace(source).requests, MAX_REQUESTS):
        prompts.extend(columns.prompt_tokens)
        outputs.extend(columns.output_tokens)
    if not prompts:
        raise InvalidArgumentError(f"{source}: no requests in it")
    return np.array(prompts, dtype=np.int64), np.array(outputs, dtype=np.int64)


def _held_and_used(
    prompts: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], block_size: int
) -> tuple[float, float]:
    """Slots held and slots used, summed over every step of every request.

    A request has `prompt + i` tokens with KV in its i-th step, i from 0 to output - 1.
    """
    last = prompts + outputs - 1
    used = (prompts + last) * outputs / 2
    held = _sum_of_ceilings(last, block_size) - _sum_of_ceilings(prompts - 1, block_size)
    return float(held.sum() * block_size), float(used.sum())


def _sum_of_ceilings(most: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.float64]:
    """Sum of ceil(n / block_size) for n from 1 to `most`."""
    whole, rest = np.divmod(most, block_size)
    return np.asarray(block_size * whole * (whole + 1) / 2 + rest * (whole + 1), dtype=np.float64)
