"""Sections of a Markdown page that a program writes, between two comments that carry their name.

    <!-- reproduce: eviction -->
    ...
    <!-- /reproduce: eviction -->

What is outside is a person's and stays as it is, byte for byte.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["head", "machine", "names", "rewrite", "row"]

_OPEN = re.compile(r"^<!-- reproduce: ([\w-]+) -->$", re.MULTILINE)


def head(*columns: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*columns)
    yield "|" + "---|" * len(columns)


def row(*cells: object) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def machine() -> str:
    """A line about where numbers are from, and how busy it was."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name, version = models[0] if models else platform.machine(), platform.python_version()
    load = os.getloadavg()[0]
    return f"{name}, {os.cpu_count()} cores, Python {version}, load average {load:.1f} at the start."


def names(text: str) -> list[str]:
    """Names of the sections, in their order.

    Raises:
        ValueError: for a section without its end, inside another one, or twice.
    """
    found: list[str] = []
    end = 0
    for opening in _OPEN.finditer(text):
        name = opening[1]
        closing = text.find(_closing(name), opening.end())
        if name in found:
            raise ValueError(f"section {name!r} is there twice")
        if opening.start() < end:
            raise ValueError(f"section {name!r} begins inside {found[-1]!r}")
        if closing < 0:
            raise ValueError(f"section {name!r} has no end: {_closing(name)}")
        end = closing
        found.append(name)
    return found


def rewrite(text: str, contents: Mapping[str, str]) -> str:
    """The page with new contents in the named sections; writing the same twice changes nothing.

    Args:
        text: the page.
        contents: Markdown by section; the page must have each of them.

    Raises:
        ValueError: for a section that the page does not have, or has wrongly.
    """
    there = names(text)
    for name, content in contents.items():
        if name not in there:
            raise ValueError(f"no section {name!r}: there are {', '.join(there) or 'none'}")
        opening = f"<!-- reproduce: {name} -->\n"
        start = text.index(opening) + len(opening)
        end = text.index(_closing(name), start)
        text = f"{text[:start]}{content.strip()}\n{text[end:]}"
    return text


def _closing(name: str) -> str:
    return f"<!-- /reproduce: {name} -->"
