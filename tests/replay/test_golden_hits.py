"""Leaf LRU on a real trace, block for block against figures that an independent implementation found."""

from __future__ import annotations

from pathlib import Path

import pytest

from .commands import runs


@pytest.mark.parametrize(("blocks", "hits"), [(34179, 99115), (8544, 55906), (1708, 15037)])
def test_sequential_replay_hits_exactly_the_known_blocks(shared_dir: Path, blocks: int, hits: int) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"
    (run,) = runs(trace, "--sequential", "--block-size", 512, "--blocks", blocks)
    assert (run["lookup_blocks"], run["hit_blocks"]) == (276491, hits)
    assert (run["requests"], run["finished"], run["refused"]) == (12031, 12031, {})
    assert run["peak_held"] <= 247


def test_with_room_for_all_smaller_blocks_find_no_less(shared_dir: Path) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"
    hits = []
    for size in (512, 128):
        options = ("--sequential", "--block-size", size, "--blocks", (20 << 20) // size, "--requests", 1000)
        hits.append(runs(trace, *options)[0]["hit_tokens"])
    assert hits[0] <= hits[1] <= hits[0] * 1.05
