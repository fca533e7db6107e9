"""What a step costs in instructions, which do not depend on what else the machine does."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CASES = [("steady", 64, 340), ("steady", 256, 300), ("turnover", 256, 450), ("turnover", 1024, 450)]
"""Program, sequences, most instructions of `step` and `commit` for each of them, in a release.
`steady` only decodes: 329 and 271. In `turnover` some end and others begin in each step: 415 and 386."""


def instructions(program: Path, running: int, steps: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += [str(program), str(running), str(steps)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", result.stderr)
    assert found is not None, result.stderr
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "running", "most"), CASES)
def test_a_step_stays_within_its_instructions(repository: Path, name: str, running: int, most: int) -> None:
    for tool in ("valgrind", "cargo"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    build = ["cargo", "build", "--quiet", "--release", "-p", "kvpager-core", "--example", name]
    subprocess.run(build, cwd=repository, check=True)
    program = repository / "target" / "release" / "examples" / name
    # Whole blocks, so that what happens at a block's edge is in the count as often as it happens.
    few, many = (instructions(program, running, steps) for steps in (64, 192))
    assert (many - few) / 128 / running <= most
