"""What a steady decode step costs in instructions, which do not depend on what else the machine does."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MOST_PER_SEQUENCE = 430
"""Of `step` and `commit`, in the profile that the tests are built in: 403 with 64 sequences, 367 with 256."""


def instructions(program: Path, running: int, steps: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    result = subprocess.run(
        [*command, str(program), str(running), str(steps), "off"], capture_output=True, text=True, check=True
    )
    found = re.search(r"Collected : (\d+)", result.stderr)
    assert found is not None, result.stderr
    return int(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("running", [64, 256])
def test_a_steady_step_stays_within_its_instructions(repository: Path, running: int) -> None:
    for tool in ("valgrind", "cargo"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    build = ["cargo", "build", "--quiet", "--profile", "checked", "-p", "kvpager-core", "--example", "steady"]
    subprocess.run(build, cwd=repository, check=True)
    program = repository / "target" / "checked" / "examples" / "steady"
    # Whole blocks, so that what happens at a block's edge is in the count as often as it happens.
    few, many = (instructions(program, running, steps) for steps in (64, 192))
    assert (many - few) / 128 / running <= MOST_PER_SEQUENCE
