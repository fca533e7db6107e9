"""Wrong usage is one clear line on stderr and exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvpager

COMMAND = [sys.executable, "-c", "from kvpager.cli import main; main()"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "nonsense"),
        (["generate", "--prompt", "hi", "--blocks", "0"], "greater than or equal to 1"),
        (["generate", "--hope"], "--hope"),
        (["replay"], "TRACE"),
        (["replay", "generate:chat", "--seed", "9" * 30, "--requests", "2"], "too big"),
        (["generate", "--prompt", "\udcff", "--max-tokens", "2"], "not valid UTF-8"),
        (["plan", "/nowhere.json", "--device-memory", "80GiB"], "/nowhere.json"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], text: str) -> None:
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1, run.stderr
    assert run.stderr.startswith("kvpager: ")
    assert text in run.stderr


def test_no_command_shows_the_help() -> None:
    run = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "generate" in run.stdout + run.stderr


def test_version_is_the_package_s() -> None:
    run = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"kvpager {kvpager.__version__}\n"
