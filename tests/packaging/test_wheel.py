"""The wheel has what it must have, nothing else, and works in an empty environment."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(out)],
        cwd=repository,
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_ships_the_kernels_as_they_are_in_the_checkout(repository: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {
            name.removeprefix("kvpager/cuda/"): archive.read(name)
            for name in archive.namelist()
            if name.startswith("kvpager/cuda/")
        }
    source = repository / "cuda"
    expected = {
        str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()
    }
    assert shipped == expected
    assert any(name.endswith(".cu") for name in shipped)


def test_the_wheel_has_types_and_licence_and_no_residue(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "kvpager/py.typed" in names
    assert "kvpager/_core.pyi" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [
        name for name in names if "__pycache__" in name or name.startswith(("tests/", "cuda/", "benches/"))
    ]


def test_the_installed_wheel_imports_and_runs_doctor_in_an_empty_environment(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "empty"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True)
    run = subprocess.run(
        [environment / "bin" / "kvpager", "doctor", "--json"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    report = json.loads(run.stdout)
    code = "import kvpager; print(kvpager.__version__)"
    version = subprocess.run([python, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert version.stdout.strip() in json.dumps(report)
