"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_embedding_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scheduling, _ = python_blocks()
    exec(compile(scheduling, str(README), "exec"), {})
    assert capsys.readouterr().out == "1 length 0\n"


def test_the_attention_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    _, attention = python_blocks()
    exec(compile(attention, str(README), "exec"), {})
    assert capsys.readouterr().out == "(3, 32, 128) 2.0\n"


def test_every_command_of_the_readme_exists() -> None:
    commands = set(re.findall(r"bin/kvpager (\w+)", README.read_text()))
    assert {"generate", "replay", "plan"} <= commands
    for command in sorted(commands):
        run = subprocess.run(
            [sys.executable, "-c", "from kvpager.cli import main; main()", command, "--help"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{command}: {run.stderr}"


def test_every_link_of_the_docs_leads_somewhere(repository: Path) -> None:
    pages = [README, repository / "CONTRIBUTING.md", *sorted((repository / "docs").rglob("*.md"))]
    missing = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing
