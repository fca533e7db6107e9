"""Tables of wall time and memory: of this machine, at this moment, beside a peer in the same run."""

from __future__ import annotations

import gzip
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replay_policies import MOONCAKE
from sections import head, row

__all__ = ["speed"]

POOL_TOKENS = 1 << 20
ROUNDS = 5
STREAMED = 10_000_000

MOCKER = """
import sys
from dynamo._core import run_mocker_trace_replay
size, blocks = int(sys.argv[2]), int(sys.argv[3])
engine = {"engine": {"block_size": size, "num_gpu_blocks": blocks}}
done = run_mocker_trace_replay([sys.argv[1]], extra_engine_args=engine, trace_block_size=512)
assert done.summary["completed_requests"] == 12031, done.summary
"""


LAUNCHER = """
import os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True)
class Cost:
    """What a command took: seconds on the wall and of the processor, largest resident bytes."""

    wall: float
    cpu: float
    resident: int


def cost(command: list[str]) -> Cost:
    """Runs a command to its end, which must be a good one.

    A small process starts it: what a child has resident at first is what its parent had.
    """
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, *command]
    done = subprocess.run(launcher, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}")
    wall, cpu, resident = done.stdout.split()
    return Cost(float(wall), float(cpu), int(resident))


def replay_command(*arguments: str | Path) -> list[str]:
    """`kvpager replay` of this environment."""
    code = "from kvpager.cli import main; main()"
    return [sys.executable, "-c", code, "replay", *map(str, arguments), "--no-oracle", "--json"]


def _row(name: str, size: int, costs: list[Cost]) -> str:
    walls = [cost.wall for cost in costs]
    return row(
        name,
        size,
        *(f"{seconds:.2f}" for seconds in (statistics.median(walls), min(walls), max(walls))),
        f"{statistics.median(cost.cpu for cost in costs):.2f}",
        max(cost.resident for cost in costs) >> 20,
    )


def speed(traces: Path, requests: int) -> Iterator[str]:
    """The Mooncake trace through us and through Dynamo's mocker, in turn; and millions of requests."""
    peer = importlib.util.find_spec("dynamo") is not None
    streamed = STREAMED if requests >= 1000 else requests
    options = ("--requests", str(streamed), "--arrivals", "saturate", "--reuse", "off")
    stream = cost(replay_command("generate:short", *options))
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    yield f"Python {platform.python_version()}, {machine}; {ROUNDS} rounds.\n"
    seconds = ("wall median, s", "best", "worst", "processor median, s")
    yield from head("what", "block size", *seconds, "resident, MiB")
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory) / "mooncake.jsonl"
        with gzip.open(traces / MOONCAKE) as packed, plain.open("wb") as file:
            shutil.copyfileobj(packed, file)
        for size in (512, 64, 16):
            blocks = str(POOL_TOKENS // size)
            ours = replay_command(plain, "--block-size", str(size), "--blocks", blocks)
            theirs = [sys.executable, "-c", MOCKER, str(plain), str(size), blocks]
            costs = [(cost(ours), cost(theirs) if peer else None) for _ in range(ROUNDS)]
            yield _row("`kvpager replay`", size, [mine for mine, _ in costs])
            if peer:
                yield _row("Dynamo's mocker", size, [other for _, other in costs if other is not None])
    yield (
        f"\n{streamed:,} generated requests (`generate:short`) streamed through in {stream.wall:.1f} s "
        f"({stream.cpu:.1f} s of the processor) with at most {stream.resident >> 20} MiB resident."
    )
    if not peer:
        yield "\nDynamo's offline mocker was not installed (`pip install --group peers`)."
