"""The table of promises of the prefix index names tests that there are."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NOTE = REPOSITORY / "docs/notes/prefix-index.md"


def promises() -> list[tuple[str, str, str]]:
    """Number, property and proof of each row."""
    section = NOTE.read_text().split("## Promises and their tests")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*?)\| (.*) \| (.*) \|$", section, re.MULTILINE)
    return [(number.strip(), promised, proof) for number, promised, proof in rows if promised != "property"]


@cache
def known_names() -> frozenset[str]:
    """Functions and classes of all tests; of loom's models too, which a macro makes tests of."""
    rust = REPOSITORY / "rust/kvpager-core"
    sources = [
        *rust.glob("tests/*.rs"),
        *rust.glob("src/prefix_index/*.rs"),
        *(REPOSITORY / "tests").rglob("*.py"),
    ]
    names = r"^ *(?:fn|def) (\w+)|^(Test\w+) ="
    found = (re.findall(names, source.read_text(), re.MULTILINE) for source in sources)
    return frozenset(function or name for pairs in found for function, name in pairs)


def test_every_property_of_the_list_has_its_row() -> None:
    assert [number for number, *_ in promises() if number] == [str(number) for number in range(1, 17)]


@pytest.mark.parametrize(("promised", "proof"), [row[1:] for row in promises()])
def test_a_row_names_tests_that_there_are(promised: str, proof: str) -> None:
    named = re.findall(r"`([^`]+)`", proof)
    tests = [name for name in named if re.fullmatch(r"\w+", name)]
    assert tests or any((REPOSITORY / name).is_file() for name in named), promised
    assert [name for name in tests if name not in known_names()] == []
