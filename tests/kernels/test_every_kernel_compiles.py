"""Every kernel that ships compiles for every supported architecture, without spills, within its registers.

NVIDIA's run-time compiler needs no device. `registers.json` holds the recorded registers of each one;
`record_registers.py` writes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpager.attention._manifest import all_instantiations

from .nvrtc import ARCHITECTURES, compile_kernels

BOUNDS: dict[str, dict[str, int]] = json.loads(
    (Path(__file__).parent / "registers.json").read_text(encoding="utf-8")
)
SLACK = 8
"""Registers that another release of the compiler may use more than the recorded one."""


def test_the_manifest_lists_exactly_what_ships_and_stays_small() -> None:
    names = [instantiation.name for instantiation in all_instantiations()]
    assert len(names) == len(set(names)) <= 150
    assert set(names) == set(BOUNDS), "run tests/kernels/record_registers.py"


def _faults(sources: Path, kernel: str, names: list[str], architecture: str) -> list[str]:
    found = []
    for name, used in compile_kernels(sources / f"{kernel}.cu", names, architecture).items():
        bound = min(255, BOUNDS[name][architecture] + SLACK)
        if used.spill_bytes or used.registers > bound:
            found.append(f"{name} on {architecture}: {used}, recorded bound {bound}")
    return found


def _check(sources: Path, architecture: str, *, every: int, offset: int) -> None:
    """Compiles every `every`-th instantiation; a few at a time, so that two processors share the work."""
    by_kernel: dict[str, list[str]] = defaultdict(list)
    for number, instantiation in enumerate(all_instantiations()):
        if number % every == offset:
            by_kernel[instantiation.kernel].append(instantiation.name)
    jobs = [
        (kernel, names[i : i + 4]) for kernel, names in by_kernel.items() for i in range(0, len(names), 4)
    ]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda job: _faults(sources, *job, architecture), jobs)
        assert [fault for faults in results for fault in faults] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_quarter_of_the_kernels_compiles_without_spills(repository: Path, architecture: str) -> None:
    # The four quarters together are every kernel, each on one architecture.
    _check(repository / "cuda", architecture, every=4, offset=ARCHITECTURES.index(architecture))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_without_spills_within_its_registers(
    repository: Path, architecture: str
) -> None:
    _check(repository / "cuda", architecture, every=1, offset=0)
