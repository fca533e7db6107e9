"""What the stream of events costs an index that has it off: a table of benches/results/prefix-index.md.

    python benches/python/events_off.py [--out benches/results/prefix-index.md]

Counts instructions of rounds of match, insert and evict (`rust/kvpager-core/examples/index_steady.rs`) under
valgrind, built with the stream (off) and without any of it (`--cfg eventless`). Needs cargo and
valgrind. Counts do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import sections

REPOSITORY = Path(__file__).resolve().parents[2]
ROUNDS = (100, 600)


def instructions(program: Path) -> float:
    """Instructions of a round: what more rounds cost, divided by them."""
    counts = []
    for rounds in ROUNDS:
        command = [
            "valgrind",
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            str(program),
            str(rounds),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"Collected\s*:\s*(\d+)", run.stderr)
        assert found is not None, run.stderr
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / (ROUNDS[1] - ROUNDS[0])


def build(flags: str, target: str, profile: str = "release") -> Path:
    """Builds the program with compiler flags, in a target folder of their own."""
    folder = REPOSITORY / "target" / target
    command = [
        "cargo",
        "build",
        "--quiet",
        "-p",
        "kvpager-core",
        "--profile",
        profile,
        "--example",
        "index_steady",
    ]
    subprocess.run(
        [*command, "--target-dir", str(folder)],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "RUSTFLAGS": flags},
    )
    return folder / profile / "examples/index_steady"


def table() -> Iterator[str]:
    """The table: instructions of a round."""
    without, off = instructions(build("--cfg eventless", "eventless")), instructions(build("", "eventful"))
    yield from sections.head("a round of match, insert and evict 32", "instructions", "")
    yield sections.row("built without events", f"{without:,.0f}", "")
    yield sections.row("events off", f"{off:,.0f}", f"{off / without - 1:+.3%}")


def main() -> None:
    """Rewrites the table of a page, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="page whose table between the events-off marks is rewritten")
    options = parser.parse_args()
    lines = list(table())
    print("\n".join(lines))
    if options.out is not None:
        page = options.out.read_text(encoding="utf-8")
        options.out.write_text(sections.rewrite(page, {"events-off": "\n".join(lines)}), encoding="utf-8")


if __name__ == "__main__":
    main()
