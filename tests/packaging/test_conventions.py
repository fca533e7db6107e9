"""Rules of the code base that no linter knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvpager
from kvpager import errors


def rust_sources(repository: Path) -> list[Path]:
    return sorted((repository / "rust").rglob("src/**/*.rs"))


def test_only_the_sync_module_names_atomics(repository: Path) -> None:
    offenders = [
        str(path.relative_to(repository))
        for path in rust_sources(repository)
        if "kvpager-core" in path.parts
        and path.name != "sync.rs"
        and re.search(r"std::sync::atomic|core::sync::atomic", path.read_text())
    ]
    assert not offenders


def test_every_python_class_of_the_core_is_frozen(repository: Path) -> None:
    attributes = [
        (path.name, attribute)
        for path in rust_sources(repository)
        for attribute in re.findall(r"#\[pyclass\(([^)]*)\)\]", path.read_text(), re.DOTALL)
    ]
    assert len(attributes) > 5
    assert not [found for found in attributes if "frozen" not in found[1]]


def test_every_unsafe_block_says_why_it_is_sound(repository: Path) -> None:
    offenders = []
    for path in rust_sources(repository):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bunsafe (\{|impl|fn \w)", line):
                around = "\n".join(lines[max(0, number - 8) : number + 1])
                if not re.search(r"SAFETY|# Safety|Safety:", around):
                    offenders.append(f"{path.relative_to(repository)}:{number + 1}")
    assert not offenders


def test_the_core_crate_knows_no_python_and_no_device(repository: Path) -> None:
    manifest = (repository / "rust/kvpager-core/Cargo.toml").read_text()
    assert not re.search(r"pyo3|numpy|cuda", manifest)


@pytest.mark.parametrize("name", kvpager.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    if name != "__version__":
        assert getattr(kvpager, name).__doc__


def test_every_exception_has_the_one_base() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.KvPagerError)
