"""Instructions of a step, counted in child processes by `perf` or, without hardware counters, by valgrind.

A child runs N steps, another 2 N; the difference is N steps and nothing else: start-up, imports and the first
prompts cancel out but for about a million instructions of chance. Python's own around the calls are in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvpager.profile.load import Load, LoadDriver, Request
from kvpager.profile.measure import quiet_collector

__all__ = ["count_instructions"]

_ENVIRONMENT = {**os.environ, "PYTHONHASHSEED": "0"}
"""The same dictionaries in both children, or their layouts would be in the difference."""

Counter = Callable[[Sequence[str]], int | None]


def count_instructions(load: Load, steps: int) -> tuple[float, str] | None:
    """Instructions of one step and the tool that counted them; None if there is no tool that can.

    Args:
        load: the steady state.
        steps: N, steps of the shorter child; the longer one runs twice as many.
    """
    for name, counter in (("perf", _perf), ("valgrind", _valgrind)):
        if shutil.which(name) is None:
            continue
        short = counter(_child(load, steps))
        long = counter(_child(load, 2 * steps)) if short is not None else None
        if short is not None and long is not None:
            return (long - short) / steps, name
    return None


def _child(load: Load, steps: int) -> list[str]:
    return [sys.executable, "-m", __name__, json.dumps(asdict(load)), str(steps)]


def _perf(command: Sequence[str]) -> int | None:
    """User-mode instructions; None where the processor's counters are not available."""
    run = subprocess.run(
        ["perf", "stat", "-x", ",", "-e", "instructions:u", *command],
        capture_output=True,
        text=True,
        check=False,
        env=_ENVIRONMENT,
    )
    found = re.search(r"^(\d+),[^,]*,instructions", run.stderr, re.MULTILINE)
    return int(found[1]) if run.returncode == 0 and found else None


def _valgrind(command: Sequence[str]) -> int | None:
    with TemporaryDirectory() as directory:
        run = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={Path(directory, 'out')}", *command],
            capture_output=True,
            text=True,
            check=False,
            env=_ENVIRONMENT,
        )
    found = re.search(r"Collected\s*:\s*(\d+)", run.stderr)
    return int(found[1]) if run.returncode == 0 and found else None


def _run(load: dict[str, Any], steps: int) -> None:
    """What a child does."""
    load["requests"] = tuple(Request(**request) for request in load["requests"])
    driver = LoadDriver(Load(**load))
    driver.warm()
    with quiet_collector():
        for _ in range(steps):
            batch = driver.plan()
            starts, tokens = driver.prepare(batch)
            driver.refill(driver.scheduler.commit(batch.step_id, starts, tokens))


if __name__ == "__main__":
    _run(json.loads(sys.argv[1]), int(sys.argv[2]))
