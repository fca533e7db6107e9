"""Measures every instantiation and writes `registers.json`, the bounds that the tests hold kernels to.

Run it after a change of the kernels that is meant to change their registers:

    cd tests && ../.venv/bin/python -m kernels.record_registers
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpager.attention._manifest import all_instantiations

from .nvrtc import ARCHITECTURES, compile_kernels

HERE = Path(__file__).resolve().parent
BOUNDS = HERE / "registers.json"
SOURCES = HERE.parent.parent / "cuda"


def by_source() -> dict[str, list[str]]:
    """Name expressions of each source file."""
    found: dict[str, list[str]] = defaultdict(list)
    for instantiation in all_instantiations():
        found[instantiation.kernel].append(instantiation.name)
    return dict(found)


def main() -> None:
    """Compiles everything for every architecture and writes the file."""
    jobs = [
        (kernel, name, arch)
        for kernel, names in by_source().items()
        for name in names
        for arch in ARCHITECTURES
    ]

    def measure(job: tuple[str, str, str]) -> tuple[str, str, int, int]:
        kernel, name, arch = job
        resources = compile_kernels(SOURCES / f"{kernel}.cu", [name], arch)[name]
        return name, arch, resources.registers, resources.spill_bytes

    table: dict[str, dict[str, int]] = defaultdict(dict)
    with ThreadPoolExecutor(2) as pool:
        for name, arch, registers, spills in pool.map(measure, jobs):
            table[name][arch] = registers
            if spills:
                print(f"{name} {arch}: {spills} bytes spilled")
    BOUNDS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"{len(table)} instantiations")


if __name__ == "__main__":
    main()
