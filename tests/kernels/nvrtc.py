"""Compiles kernel sources with NVIDIA's run-time compiler, which needs no device; reads its report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cuda import pathfinder
from cuda.bindings import nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")

_ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '\w+'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses."""

    registers: int
    spill_bytes: int
    stack_bytes: int


class CompileError(Exception):
    """The compiler refused; the text is its log."""


def compile_kernels(
    source: Path, names: list[str], architecture: str, *, defines: tuple[str, ...] = ()
) -> dict[str, Resources]:
    """Compiles the name expressions of one source; returns resources by name."""
    log, symbols = _compile(source, names, architecture, defines)
    found: dict[str, Resources] = {}
    for entry in _ENTRY.finditer(log):
        spills = int(entry["stores"]) + int(entry["loads"])
        resources = Resources(int(entry["registers"]), spills, int(entry["stack"]))
        found[symbols[entry["symbol"]]] = resources
    missing = set(names) - set(found)
    if missing:
        raise CompileError(f"no resources reported for {sorted(missing)}:\n{log}")
    return found


def _compile(
    source: Path, names: list[str], architecture: str, defines: tuple[str, ...]
) -> tuple[str, dict[str, str]]:
    headers = pathfinder.find_nvidia_header_directory("cudart")
    options = [
        "-std=c++17",
        f"-arch={architecture}",
        f"-I{source.parent / 'include'}",
        f"-I{headers}",
        "--ptxas-options=-v",
        *defines,
    ]
    _, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    try:
        for name in names:
            nvrtc.nvrtcAddNameExpression(program, name.encode())
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = b" " * size
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.rstrip(b"\0 ").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{source.name} for {architecture}:\n{log}")
        symbols = {}
        for name in names:
            _, symbol = nvrtc.nvrtcGetLoweredName(program, name.encode())
            symbols[symbol.decode()] = name
        return log, symbols
    finally:
        nvrtc.nvrtcDestroyProgram(program)
