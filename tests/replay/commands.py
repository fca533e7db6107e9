"""Runs `kvpager replay` as a person does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "from kvpager.cli import main; main()", "replay"]


def run(*arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def runs(*arguments: str | Path | int) -> list[dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["runs"]


def write_lines(path: Path, rows: list[Any]) -> Path:
    """One line a row: objects as JSON, strings as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
