"""Runs `kvpager replay` as a person does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from kvpager.cli import main; main()", "replay"]


def run(*arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)


def runs(*arguments: str | Path | int) -> list[dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["runs"]


LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss >> 10)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_mebibytes(*arguments: str | Path | int) -> tuple[int, int, str]:
    """Exit code, largest resident size and stderr of a replay.

    A small process starts it, for a child begins with its parent's size.
    """
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER]
    command = [*launcher, *COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, int(done.stdout), done.stderr


def write_lines(path: Path, rows: list[Any]) -> Path:
    """One line a row: objects as JSON, strings as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
