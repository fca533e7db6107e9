"""A replay needs little memory, and no more for a longer trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .commands import peak_mebibytes

FULL_SIZE = os.environ.get("KVPAGER_FULL_SIZE") == "1"


def peak_of(*arguments: str | Path | int) -> int:
    """Largest resident size of a replay that comes to its end."""
    code, peak, err = peak_mebibytes(*arguments, "--no-oracle", "--json")
    assert code == 0, err
    return peak


@pytest.mark.parametrize("arrivals", ["recorded", "saturate"])
def test_mooncake_trace_replays_in_less_than_half_a_gibibyte(shared_dir: Path, arrivals: str) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"
    assert peak_of(trace, "--block-size", 512, "--arrivals", arrivals) < 512


def test_ten_million_requests_stream_through_in_the_memory_of_few() -> None:
    """A sample of them by default; all with KVPAGER_FULL_SIZE=1."""
    options = ("--arrivals", "saturate", "--reuse", "off", "--requests")
    few = peak_of("generate:short", *options, 20_000)
    many = peak_of("generate:short", *options, 10_000_000 if FULL_SIZE else 400_000)
    assert many < few + 32
    assert many < 512
