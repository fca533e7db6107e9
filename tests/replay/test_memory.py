"""A replay needs little memory, and no more for a longer trace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .commands import COMMAND

FULL_SIZE = os.environ.get("KVPAGER_FULL_SIZE") == "1"


def peak_mebibytes(*arguments: str | Path | int) -> int:
    """Largest resident size of `kvpager replay`."""
    command = [*COMMAND, *map(str, arguments), "--no-oracle", "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss >> 10


@pytest.mark.parametrize("arrivals", ["recorded", "saturate"])
def test_mooncake_trace_replays_in_less_than_a_gibibyte(shared_dir: Path, arrivals: str) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"
    assert peak_mebibytes(trace, "--block-size", 512, "--arrivals", arrivals) < 1024


def test_ten_million_requests_stream_through_in_the_memory_of_few() -> None:
    """A sample of them by default; all with KVPAGER_FULL_SIZE=1."""
    options = ("--arrivals", "saturate", "--reuse", "off", "--requests")
    few = peak_mebibytes("generate:short", *options, 20_000)
    many = peak_mebibytes("generate:short", *options, 10_000_000 if FULL_SIZE else 400_000)
    assert many < few + 64
    assert many < 1024
