"""Tables of eviction and block sizes: counts, so the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from replay_policies import MOONCAKE, WORKLOADS
from sections import head, row

from kvpager._core import KvGeometry
from kvpager.planning.block_sizes import compare_block_sizes
from kvpager.replay.run import RunSettings
from kvpager.replay.study import Study

__all__ = ["block_sizes", "eviction"]

FOOTPRINT_BLOCKS = {1: 1708, 2: 3417, 5: 8544, 10: 17089, 20: 34179, 50: 85449}
"""Percent of the trace's distinct blocks, and how many that is."""

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""An 8-billion-parameter model: 128 KiB a token."""


def eviction(traces: Path, _requests: int) -> Iterator[str]:
    """Hit rate by cache size; always the whole trace, whose figures are known."""
    yield from head("eviction", *(f"{share} %" for share in FOOTPRINT_BLOCKS))
    for name in ("lru", "learned", "clock"):
        cells = []
        for blocks in FOOTPRINT_BLOCKS.values():
            study = Study(
                source=str(traces / MOONCAKE),
                settings=RunSettings(blocks=blocks, block_size=512),
                evictions=(name,),
                sequential=True,
            )
            (run,) = study.run()
            cells.append(f"{run['hit_blocks'] / run['lookup_blocks']:.2%}")
        yield row(name, *cells)


def block_sizes(traces: Path, _requests: int) -> Iterator[str]:
    """Unused slots against table entries, for the lengths of real workloads."""
    yield from head("workload", "block size", "blocks", "unused", "entries a request", "tables, MiB")
    geometry = KvGeometry.from_config_json(json.dumps(MODEL))
    for name in ("Azure conv", "Mooncake conv", "R1 (ServeGen)"):
        source = str(traces / WORKLOADS[name][0])
        for size in compare_block_sizes(geometry, source, cache_bytes=40 << 30, max_running=256):
            yield row(
                name,
                size["block_size"],
                f"{size['num_blocks']:,}",
                f"{size['internal_waste']:.2%}",
                f"{size['table_entries']:,.0f}",
                f"{size['table_bytes'] / (1 << 20):.1f}",
            )
