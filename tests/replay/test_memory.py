"""A replay needs little memory, and no more for a longer trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .commands import COMMAND

FULL_SIZE = os.environ.get("KVPAGER_FULL_SIZE") == "1"


LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss >> 10)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_mebibytes(*arguments: str | Path | int) -> int:
    """Largest resident size of a replay; a small process starts it, for a child begins with its parent's."""
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER]
    command = [*launcher, *COMMAND, *map(str, arguments), "--no-oracle", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("arrivals", ["recorded", "saturate"])
def test_mooncake_trace_replays_in_less_than_half_a_gibibyte(shared_dir: Path, arrivals: str) -> None:
    trace = shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"
    assert peak_mebibytes(trace, "--block-size", 512, "--arrivals", arrivals) < 512


def test_ten_million_requests_stream_through_in_the_memory_of_few() -> None:
    """A sample of them by default; all with KVPAGER_FULL_SIZE=1."""
    options = ("--arrivals", "saturate", "--reuse", "off", "--requests")
    few = peak_mebibytes("generate:short", *options, 20_000)
    many = peak_mebibytes("generate:short", *options, 10_000_000 if FULL_SIZE else 400_000)
    assert many < few + 32
    assert many < 512
