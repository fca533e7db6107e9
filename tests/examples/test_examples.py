"""Every example runs, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROMISES = {
    "asyncio_server": ["8 clients got 320 characters, [2-8] answers differ", "blocks held at the end: 0"],
    "own_model_runner": [r"12 of 12 answers are right, [1-9]\d* prompt tokens came from the cache", "end: 0"],
    "threads": ["8 threads got 1600 tokens of 200 requests", "tried again: True", "held at the end: 0"],
    "tenants": [
        "alice's second request finds 64 of 80 tokens",
        "bob's first request, the same prompt, finds 0",
        "bob, over his limit: .*need 24 blocks.*may have 12",
        r"blocks of bob at most: (\d|1[012]) \(limit 12\)",
    ],
    "policies": [r"reserve +\d+ +\d+ +0 +0", r"watermark +\d+ +\d+ +[1-9]", r"forecast +\d+ +\d+ +\d+ +\d+"],
    "retention": [
        "a request that ended: 4 blocks kept, 0 preemptions",
        "between its turns: 8 blocks kept",
        "its next turn finds 64 tokens",
        "after a large request: 4 blocks kept, 0 preemptions",
        "0 blocks held at the end",
    ],
    "branches": [
        r"one request holds (\d+) blocks, with its three branches \1\n",
        "4 of 4 branches are right, 4 differ",
        r"copied before a write: [1-3]; held at the end: 0",
    ],
    "beams": [
        r"greedy: \[5, 5, 5, 5, 5, 5\], log-probability -6.50",
        r"beam 0: \[4, 0, 4, 0, 4, 2\], log-probability -5.72",
        "best of all 46656 answers: found True",
        "6 beams hold 35 blocks at most, 6 requests would hold 192",
        "blocks held at the end: 0",
    ],
    "host_swap": [
        r"recompute: 12 of 12 answers are right; 0 blocks out, 0 in, [1-9]\d* tokens computed again",
        r"swap: 12 of 12 answers are right; [1-9]\d* blocks out, [1-9]\d* in, 0 tokens computed again",
    ],
}


def test_every_example_is_tested(repository: Path) -> None:
    assert {path.stem for path in (repository / "examples").glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_example_prints_what_it_promises(repository: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(repository / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for promise in PROMISES[name]:
        assert re.search(promise, done.stdout), done.stdout


def test_embedding_in_an_asyncio_server_takes_fewer_than_80_lines(repository: Path) -> None:
    assert len((repository / "examples/asyncio_server.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("name", ["embedding.md", "notes/engine.md", "notes/server.md", "notes/runner.md"])
def test_files_that_the_pages_name_exist(repository: Path, name: str) -> None:
    page = repository / "docs" / name
    text = page.read_text()
    links = [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    named = [repository / path for path in re.findall(r"`((?:python|examples|docs)/[\w/.-]+)`", text)]
    assert links or named
    assert not [str(path) for path in (*links, *named) if not path.exists()]
