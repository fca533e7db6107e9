"""Measures launch shapes on the GPU at hand: `python -m kvpager.attention.tune`.

Prints the time of typical decode batches for each candidate and puts the best into the table that plans are
made from (`kvpager.attention.tuning`). Needs CuPy and a device.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvpager.attention import kernels, paged_attention, tuning
from kvpager.attention.device_plan import AttentionPlan
from kvpager.errors import KvPagerError

__all__ = ["candidates", "main"]

_BATCHES = ([4096] * 32, [131072], [200] * 64, [32768, *[500] * 31])


def candidates() -> list[tuning.LaunchShape]:
    """Shapes worth trying."""
    return [tuning.LaunchShape(blocks, chunk) for blocks in (1, 2, 3, 4, 6) for chunk in (128, 256, 512)]


def _time(cupy: Any, lens: list[int], shape: tuning.LaunchShape) -> float:
    """Median milliseconds of one decode layer, 32 query and 8 KV heads of 128, blocks of 16."""
    lengths = np.array(lens, np.int32)
    blocks = -(-lengths // 16)
    tables = np.zeros((len(lens), int(blocks.max())), np.int32)
    order = np.random.default_rng(0).permutation(int(blocks.sum())).astype(np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(blocks), blocks, strict=True)):
        tables[row, :count] = order[end - count : end]
    caches = [cupy.full((int(blocks.sum()), 16, 8, 128), 0.1, np.float16) for _ in range(2)]
    query = cupy.full((len(lens), 32, 128), 0.1, np.float16)
    starts = np.arange(len(lens) + 1, dtype=np.int32)
    options = {
        "block_tables": cupy.asarray(tables),
        "query_start": cupy.asarray(starts),
        "context_lens": cupy.asarray(lengths),
        "out": cupy.empty_like(query),
    }
    multiprocessors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    plan = AttentionPlan(
        query,
        *caches,
        max_sequences=len(lens),
        max_tokens=len(lens),
        max_query_len=1,
        target_blocks=shape.blocks_per_multiprocessor * multiprocessors,
        min_chunk=shape.min_chunk,
    )
    plan.update(starts, lengths)
    times = []
    for _ in range(25):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        paged_attention(query, *caches, plan=plan, **options)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(times[5:]))


def main() -> int:
    """Measures all candidates; returns the exit code."""
    try:
        cupy = kernels.load_cupy()
        kernels.require_device()
        tuning.check_writable()
        capability = str(cupy.cuda.Device().compute_capability)
        results = [(shape, [_time(cupy, lens, shape) for lens in _BATCHES]) for shape in candidates()]
    except KvPagerError as error:
        print(f"kvpager: {error}", file=sys.stderr)
        return 2
    best = [min(times[i] for _, times in results) for i in range(len(_BATCHES))]
    for shape, times in results:
        print(shape, " ".join(f"{time * 1e3:.1f} us" for time in times))
    # The shape whose worst loss against the best of each batch is smallest.
    shape, _ = min(results, key=lambda item: max(t / b for t, b in zip(item[1], best, strict=True)))
    tuning.record(capability, shape)
    print(f"compute capability {capability}: {shape}, written to {tuning.TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
