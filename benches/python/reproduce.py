"""Writes the tables of the results page from the traces: `make reproduce`.

    python benches/python/reproduce.py [--only admission,eviction] [--shared ../shared] [--requests 5000]

Each part is a section of `benches/RESULTS.md` between two comments, `speed` also one of
`benches/results/replay.md`; what is outside stays as it is. Every cell is a run of the real scheduler, index
and pool in virtual time, so all parts but `speed` come out the same on every machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import replay_caches
import replay_policies
import replay_speed
import sections

__all__ = ["PARTS", "main"]

_BENCHES = Path(__file__).resolve().parent.parent
PAGES = (_BENCHES / "RESULTS.md", _BENCHES / "results" / "replay.md")
"""The results page has every section, the page about the replay its wall times again."""

PARTS: dict[str, Callable[[Path, int], Iterator[str]]] = {
    "admission": replay_policies.admission,
    "reordered": replay_policies.reordered,
    "overflow": replay_policies.overflow,
    "tenants": replay_policies.tenants,
    "lengths": replay_policies.lengths,
    "eviction": replay_caches.eviction,
    "block-sizes": replay_caches.block_sizes,
    "speed": replay_speed.speed,
}
"""Sections of the page: each takes the folder of traces and the requests of a cell, and gives Markdown."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts and writes each as soon as it is done."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("KVPAGER_SHARED", "../shared")))
    parser.add_argument("--requests", type=int, default=5000, help="of a cell")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--page", type=Path, action="append", help="instead of the project's own pages")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    for name in names:
        lines = []
        for line in PARTS[name](options.shared / "traces", options.requests):
            print(line, flush=True)
            lines.append(line)
        _write(options.page or PAGES, name, "\n".join(lines))


def _write(pages: Sequence[Path], name: str, content: str) -> None:
    """Puts a section into the first page, which must have it, and into those of the others that do."""
    for number, path in enumerate(pages):
        text = path.read_text(encoding="utf-8")
        if number == 0 or name in sections.names(text):
            path.write_text(sections.rewrite(text, {name: content}), encoding="utf-8")


if __name__ == "__main__":
    main()
