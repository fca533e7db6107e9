"""The kernel loader on a machine without a device: imports nothing, says what is missing."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path

import pytest

from kvpager.attention import kernels, tuning
from kvpager.errors import MissingDependencyError


def test_importing_the_loader_imports_no_cupy_and_touches_no_device() -> None:
    code = (
        "import sys; import kvpager.attention.kernels, kvpager.attention._cupy; "
        "print(sorted(m for m in ('cupy', 'torch', 'cuda.bindings') if m in sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


def test_the_package_carries_the_kernel_sources_as_they_are_in_the_repository(repository: Path) -> None:
    packaged = {
        path.relative_to(kernels.source_dir()): path.read_bytes()
        for path in kernels.source_dir().rglob("*.cu*")
        if path.is_file()
    }
    sources = {
        path.relative_to(repository / "cuda"): path.read_bytes()
        for path in (repository / "cuda").rglob("*.cu*")
        if path.is_file()
    }
    # The editable copy is never cleaned and may hold more; what the repository has must be there.
    assert {name: packaged.get(name) for name in sources} == sources


def _without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    original = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "cupy":
            raise ImportError("No module named 'cupy'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("importlib.import_module", lambda name: refuse(name))


def test_without_cupy_a_call_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_cupy(monkeypatch)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvpager\[cuda13\]'"):
        kernels.compile_all()


def test_without_cupy_the_status_names_what_is_missing_and_does_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without_cupy(monkeypatch)
    status = kernels.cuda_status()
    assert status["usable"] is False
    assert status["kernels"] == len(kernels.all_instantiations())
    missing = status["missing"]
    assert isinstance(missing, list)
    assert [(item["what"], item["install"]) for item in missing] == [("CuPy", kernels.INSTALL_HINT)]


def test_every_source_file_has_kernels_and_every_kernel_a_source(repository: Path) -> None:
    sources = {path.stem for path in (repository / "cuda").glob("*.cu")}
    assert sources == {instantiation.kernel for instantiation in kernels.all_instantiations()}


def test_measured_launch_shapes_are_kept_by_architecture(tmp_path: Path) -> None:
    table = tmp_path / "launch_shapes.json"
    table.write_text(tuning.TABLE.read_text("utf-8"), "utf-8")
    before = tuning.read_table(table)
    tuning.record("90", tuning.LaunchShape(3, 128), table)
    tuning.record("80", tuning.LaunchShape(1, 512), table)
    tuning.record("90", tuning.LaunchShape(4, 256), table)
    expected = {"80": tuning.LaunchShape(1, 512), "90": tuning.LaunchShape(4, 256)}
    assert tuning.read_table(table) == before | expected


def test_tuning_without_a_gpu_says_what_is_missing_in_one_line() -> None:
    if kernels.cuda_status()["usable"]:
        pytest.skip("there is a GPU: tuning would run")
    program = [sys.executable, "-m", "kvpager.attention.tune"]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("kvpager: ")
    assert len(ran.stderr.splitlines()) == 1
