"""What the scheduler costs, and what recording it adds: writes benches/results/profile.md.

    python benches/python/scheduler_profile.py [--steps 2000] [--peer-python PATH]

Times are those of `kvpager profile`. The cost of recording is counted in instructions, which no other load on
the machine changes: `rust/kvpager-core/examples/steady.rs` runs under valgrind, built without the recording
(`--cfg unrecorded`), with it off, and with it on. Needs cargo and valgrind. With --peer-python, an
environment with vLLM, its scheduler runs the same load beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sections

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "benches/results/profile.md"
RUNNING = (64, 256, 1024)
STEPS = 400


def instructions(program: Path, running: int, recording: str) -> float:
    """Instructions of one step: the difference of two runs, so that the start cancels out."""
    counts = []
    for steps in (STEPS, 2 * STEPS):
        with TemporaryDirectory() as folder:
            command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
            command += [str(program), str(running), str(steps), recording]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"Collected\s*:\s*(\d+)", run.stderr)
        assert found is not None, run.stderr
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / STEPS


def build(flags: str, target: str) -> Path:
    folder = REPOSITORY / "target" / target
    command = ["cargo", "build", "--quiet", "-p", "kvpager-core", "--release", "--example", "steady"]
    subprocess.run(
        [*command, "--target-dir", str(folder)],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "RUSTFLAGS": flags},
    )
    return folder / "release/examples/steady"


def recording() -> Iterator[str]:
    """The table of what recording costs, in instructions."""
    without, there = build("--cfg unrecorded", "unrecorded"), build("", "recorded")
    yield from sections.head("running", "built without", "off", "", "on", "")
    for running in RUNNING:
        none = instructions(without, running, "off")
        off = instructions(there, running, "off")
        on = instructions(there, running, "on")
        shares = [f"{count / none - 1:+.2%}" for count in (off, on)]
        yield sections.row(running, f"{none:,.0f}", f"{off:,.0f}", shares[0], f"{on:,.0f}", shares[1])


def profile(python: str, steps: int, *options: str) -> list[dict[str, Any]]:
    """The cases of `kvpager profile --json`."""
    command = [
        python,
        "-c",
        "from kvpager.cli import main; main()",
        "profile",
        "--json",
        "--steps",
        str(steps),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
    run = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    cases: list[dict[str, Any]] = json.loads(run.stdout)["cases"]
    return cases


def percentiles(times: dict[str, float]) -> list[str]:
    return [f"{times[name]:,.1f}" for name in ("p50", "p99", "p999", "max")]


def steps_table(cases: list[dict[str, Any]]) -> Iterator[str]:
    yield from sections.head(
        "running", "p50 us", "p99", "p99.9", "max", "ns a sequence", "allocations", "bytes", "recording, p50"
    )
    for case in cases:
        yield sections.row(
            case["running"],
            *percentiles(case["step_us"]),
            f"{case['ns_per_sequence']:.1f}",
            f"{case['allocations_per_step']:.1f}",
            f"{case['bytes_per_step']:,.0f}",
            f"{case['recording_overhead']:+.1%}",
        )


def phases_table(cases: list[dict[str, Any]]) -> Iterator[str]:
    yield from sections.head("running", "phase", "p50 us", "p99", "p99.9", "max")
    for case in cases:
        for name, times in case["phases"].items():
            yield sections.row(case["running"], name, *percentiles(times))


def python_table(cases: list[dict[str, Any]]) -> Iterator[str]:
    yield from sections.head("running", "busy threads", "p50 us", "p99", "p99.9", "max", "boundary us")
    for case in cases:
        interpreter = case["interpreter"]
        for busy, times in interpreter["step_us_beside_busy_threads"].items():
            boundary = f"{interpreter['boundary_us']:.2f}" if busy == "0" else ""
            yield sections.row(case["running"], busy, *percentiles(times), boundary)


def peer_table(cases: list[dict[str, Any]]) -> Iterator[str]:
    yield from sections.head("running", "vLLM, p50 us", "p99", "ours, p50 us", "ratio")
    for case in cases:
        peer = case["peers"].get("vllm")
        if peer is None:
            sys.exit("vLLM is not in that environment, or its parts do not fit")
        theirs = peer["step_us"]
        yield sections.row(
            case["running"],
            f"{theirs['p50']:,.0f}",
            f"{theirs['p99']:,.0f}",
            f"{case['step_us']['p50']:,.1f}",
            f"{peer['ratio']:,.0f}",
        )


def main() -> None:
    """Measures, and rewrites the sections of the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="to time of each case")
    parser.add_argument("--peer-python", help="interpreter of an environment with vLLM")
    arguments = parser.parse_args()
    found = {"machine": sections.machine()}
    if shutil.which("valgrind") is not None:
        found["recording"] = "\n".join(recording())
    cases = profile(sys.executable, arguments.steps, "--python")
    found["steps"] = "\n".join(steps_table(cases))
    found["phases"] = "\n".join(phases_table(cases))
    found["python"] = "\n".join(python_table(cases))
    if arguments.peer_python is not None:
        found["peer"] = "\n".join(peer_table(profile(arguments.peer_python, arguments.steps)))
    PAGE.write_text(sections.rewrite(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    print("\n\n".join(found.values()))


if __name__ == "__main__":
    main()
