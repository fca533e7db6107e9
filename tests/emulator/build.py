"""Compiles kernel sources for the CPU, into shared libraries and sanitized programs, cached by content.

A unit is a kernel source with the instantiations that are wanted of it. Patches plant faults: they edit a
copy of the sources, so that the shipped ones carry no test switches.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CUDA = REPOSITORY / "cuda"
NATIVE = Path(__file__).resolve().parent / "native"
CACHE = REPOSITORY / "target" / "emulator"

PARAMETERS = {
    "append_kv": "AppendParams",
    "copy_blocks": "BlockParams",
    "zero_blocks": "BlockParams",
    "merge_states": "MergeStatesParams",
    "apply_deltas": "DeltaParams",
}
"""Parameter struct by kernel; all others take `AttentionParams`."""

_COMMON = ("-std=c++17", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fno-gnu-unique", "-fPIC")
_FLAVOURS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # flavour: (flags of instrumented code, flags of the machine)
    "plain": (("-O2", "-fvisibility=hidden"), ("-O2", "-fvisibility=hidden")),
    "address": (("-O1", "-fsanitize=address"), ("-O1", "-DEMULATOR_ASAN")),
    "undefined": (
        ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"),
        ("-O1",),
    ),
    "thread": (("-O1", "-fsanitize=thread"), ("-O1", "-DEMULATOR_TSAN")),
}


@dataclass(frozen=True)
class Patch:
    """An edit of one source, relative to `cuda/`; `old` must occur `count` times."""

    file: str
    old: str
    new: str
    count: int = 1


@dataclass(frozen=True)
class Unit:
    """Instantiations of one kernel source, with planted faults if any."""

    kernel: str
    names: tuple[str, ...]
    patches: tuple[Patch, ...] = ()


@functools.cache
def _compiler() -> tuple[str, str]:
    """The compiler and what it is, for the cache's key."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the emulator needs a C++17 compiler (g++)")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    # The objects use this machine's instructions, so the key names the machine.
    return compiler, version + platform.machine() + platform.processor() + platform.node()


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256(_compiler()[1].encode())
    files = [*CUDA.rglob("*.cu*"), *NATIVE.rglob("*.h"), *NATIVE.rglob("*.cpp"), Path(__file__)]
    for path in sorted(path for path in files if path.is_file()):
        digest.update(str(path.relative_to(REPOSITORY)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _architecture() -> tuple[str, ...]:
    return ("-march=native",) if platform.machine() in ("x86_64", "aarch64") else ()


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")


def _publish(made: Path, wanted: Path) -> Path:
    """Puts a finished file in place in one step, so that parallel runs see all of it or nothing."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    made.replace(wanted)
    return wanted


def _object(source: str, flavour: str, *, instrumented: bool) -> Path:
    """The object file of one native source."""
    flags = _FLAVOURS[flavour][0 if instrumented else 1]
    wanted = CACHE / _sources_digest()[:16] / f"{Path(source).stem}-{flavour}.o"
    if wanted.exists():
        return wanted
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder) / "made.o"
        command = [_compiler()[0], *_COMMON, *flags, *_architecture(), "-c", str(NATIVE / source)]
        _run([*command, "-o", str(made)])
        return _publish(made, wanted)


def _unit_source(unit: Unit) -> str:
    struct = PARAMETERS.get(unit.kernel, "AttentionParams")
    entries = "\n".join(
        f"  [](const void* p) {{ {name}(*static_cast<const kvpager::{struct}*>(p)); }},"
        for name in unit.names
    )
    return (
        f'#include "cuda_words.h"\n#include "{unit.kernel}.cu"\n'
        f"static void (*const kEntries[])(const void*) = {{\n{entries}\n}};\n"
        '#include "entry.h"\n'
    )


def _patched_sources(unit: Unit, folder: Path) -> Path:
    """The folder to compile from: `cuda/` itself, or a copy with the patches applied."""
    if not unit.patches:
        return CUDA
    copy = folder / "cuda"
    shutil.copytree(CUDA, copy)
    for patch in unit.patches:
        path = copy / patch.file
        text = path.read_text(encoding="utf-8")
        if text.count(patch.old) != patch.count:
            raise RuntimeError(
                f"{patch.file} has {text.count(patch.old)} times {patch.old!r}, not {patch.count}"
            )
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
    return copy


def _build(unit: Unit, flavour: str, *, program: bool) -> Path:
    key = hashlib.sha256(repr((unit, flavour, program)).encode()).hexdigest()[:16]
    wanted = CACHE / _sources_digest()[:16] / f"{unit.kernel}-{flavour}-{key}{'' if program else '.so'}"
    if wanted.exists():
        return wanted
    parts = [
        _object("machine.cpp", flavour, instrumented=False),
        _object("accesses.cpp", flavour, instrumented=True),
    ]
    if program:
        parts.append(_object("replay.cpp", flavour, instrumented=True))
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        sources = _patched_sources(unit, folder)
        (folder / "unit.cpp").write_text(_unit_source(unit), encoding="utf-8")
        made = folder / "made"
        includes = [f"-I{NATIVE}", f"-I{sources / 'include'}", f"-I{sources}"]
        flags = [*_COMMON, *_FLAVOURS[flavour][0], *_architecture(), *([] if program else ["-shared"])]
        _run(
            [
                _compiler()[0],
                *flags,
                *includes,
                str(folder / "unit.cpp"),
                *map(str, parts),
                "-pthread",
                "-o",
                str(made),
            ]
        )
        return _publish(made, wanted)


def library(unit: Unit) -> Path:
    """The shared library of a unit, for calls from this process."""
    return _build(unit, "plain", program=False)


def program(unit: Unit, flavour: str) -> Path:
    """The replay program of a unit: flavour `address`, `undefined`, `thread` or `plain`."""
    return _build(unit, flavour, program=True)
