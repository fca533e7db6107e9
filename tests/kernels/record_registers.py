"""Measures every instantiation and writes `registers.json`, the bounds that the tests hold kernels to.

Run it after a change of the kernels that is meant to change their registers:

    cd tests && ../.venv/bin/python -m kernels.record_registers [KERNEL ...]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpager.attention._manifest import all_instantiations

from .nvrtc import ARCHITECTURES, compile_kernels

HERE = Path(__file__).resolve().parent
BOUNDS = HERE / "registers.json"
SOURCES = HERE.parent.parent / "cuda"
GROUP = 4
"""Instantiations compiled together: they share the parsing of headers."""


def by_source() -> dict[str, list[str]]:
    """Name expressions of each source file."""
    found: dict[str, list[str]] = defaultdict(list)
    for instantiation in all_instantiations():
        found[instantiation.kernel].append(instantiation.name)
    return dict(found)


def main(only: list[str]) -> None:
    """Compiles what is asked for, for every architecture, and writes the file; the other lines stay."""
    groups = [
        (kernel, names[i : i + GROUP], arch)
        for kernel, names in by_source().items()
        for i in range(0, len(names), GROUP)
        for arch in ARCHITECTURES
        if not only or kernel in only
    ]
    table: dict[str, dict[str, int]] = defaultdict(dict)
    if only:
        table |= json.loads(BOUNDS.read_text(encoding="utf-8"))
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda group: compile_kernels(SOURCES / f"{group[0]}.cu", *group[1:]), groups)
        for (_, _, arch), resources in zip(groups, results, strict=True):
            for name, used in resources.items():
                table.setdefault(name, {})[arch] = used.registers
                if used.spill_bytes:
                    print(f"{name} {arch}: {used.spill_bytes} bytes spilled")
    ordered = {item.name: table[item.name] for item in all_instantiations() if item.name in table}
    BOUNDS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    print(f"{len(ordered)} instantiations")


if __name__ == "__main__":
    main(sys.argv[1:])
