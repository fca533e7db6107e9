"""Wrong usage is one clear line on stderr and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
        (["replay", "generate:chat", "--seed", "9" * 30, "--requests", "2"], "seed is 999"),
        (["replay", __file__], "line 1: neither JSON nor CSV; name the format with --format"),
        (["generate", "--prompt", "\udcff", "--max-tokens", "2"], "not valid UTF-8"),
        (["generate", "--prompt", "hi", "--block-size", "17"], "block_size is 17, must be a power of two"),
        (
            ["generate", "--demo", "--block-size", "512"],
            "block_size is 512, must be a power of two from 1 to 256",
        ),
        (["serve", "--port", "0", "--block-size", "24"], "block_size is 24, must be a power of two"),
        (["plan", "/nowhere.json", "--device-memory", "80GiB"], "/nowhere.json"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], text: str) -> None:
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1, run.stderr
    assert run.stderr.startswith("kvpager: ")
    assert text in run.stderr


LARGE = ["generate:chat", "--requests", "200", "--policy", "reserve,watermark,forecast"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", *LARGE],
        ["replay", *LARGE, "--json"],
        ["plan", "CONFIG", "--device-memory", "80GiB"],
        ["plan", "CONFIG", "--device-memory", "80GiB", "--json"],
        ["stress", "--seconds", "0.2", "--threads", "1"],
        ["profile", "--running", "8", "--steps", "10"],
        ["replay", "--help"],
    ],
    ids=lambda arguments: " ".join((arguments[0], *arguments[-1:])),
)
def test_closed_pipe_is_no_error(tmp_path: Path, arguments: list[str]) -> None:
    """As `| head -0` closes it: nothing on stderr, and exit code 0."""
    config = tmp_path / "config.json"
    config.write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 1000}'
    )
    arguments = [str(config) if argument == "CONFIG" else argument for argument in arguments]
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


def test_module_runs_as_the_command_does() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvpager", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"kvpager {kvpager.__version__}\n"


def test_no_command_shows_the_help() -> None:
    run = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "generate" in run.stdout + run.stderr


def test_version_is_the_package_s() -> None:
    run = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"kvpager {kvpager.__version__}\n"
