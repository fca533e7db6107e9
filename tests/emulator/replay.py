"""Records launches with their memory and replays them in a sanitized program, where every buffer is exact."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.attention import _params as params
from kvpager.attention._launch import Launch

from .build import PARAMETERS, Patch, program
from .run import ORDERS, unit_of


@dataclass(frozen=True)
class Outcome:
    """How a replay ended: exit status, and what the sanitizer or the emulator said."""

    status: int
    report: str


def _bounds(array: Any) -> tuple[int, int]:
    """First and last address of an array's memory, whatever its strides."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def _pointers(launch: Launch, buffers: list[Any]) -> list[tuple[int, int, int]]:
    """(offset in the struct, buffer, bytes into it) of each pointer that is not null."""
    struct_name = PARAMETERS.get(launch.instantiation.kernel, "AttentionParams")
    raw = launch.arguments.tobytes()
    found = []
    for _, offset in params.pointer_fields(params.STRUCTS[struct_name]):
        (address,) = struct.unpack_from("<Q", raw, offset)
        if address == 0:
            continue
        for number, array in enumerate(buffers):
            low, high = _bounds(array)
            if low <= address < high or (address == low == high):
                found.append((offset, number, address - low))
                break
    return found


def _memory(array: Any) -> bytes:
    """The bytes that an array's strides span."""
    low, high = _bounds(array)
    if low == high:
        return b""
    return bytes(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * (high - low)).from_address(low)))


def replay(
    launches: list[Launch],
    buffers: list[Any],
    flavour: str,
    *,
    order: str = "forward",
    seed: int = 1,
    patches: tuple[Patch, ...] = (),
) -> Outcome:
    """Runs launches one by one in the program of their unit; stops at the first that fails.

    Args:
        launches: of any kernels.
        buffers: every array that the launches point to, outputs included; written back between launches.
        flavour: `address`, `undefined`, `thread` or `plain`.
        order: of threads.
        seed: of the random order.
        patches: planted faults.

    Returns:
        The first failure, or status 0.
    """
    for launch in launches:
        executable = program(unit_of(launch.instantiation, patches), flavour)
        with tempfile.TemporaryDirectory() as folder:
            case, result = Path(folder) / "case", Path(folder) / "result"
            case.write_bytes(_record(launch, buffers))
            command = [str(executable), str(case), str(result), str(ORDERS.index(order)), str(seed)]
            if flavour == "thread":  # shadow memory needs the address space in its usual order
                command = ["setarch", "-R", *command]
            ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            if ran.returncode:
                return Outcome(ran.returncode, ran.stderr)
            _restore(result.read_bytes(), buffers)
    return Outcome(0, "")


def _record(launch: Launch, buffers: list[Any]) -> bytes:
    parts = [struct.pack("<I", len(buffers))]
    for array in buffers:
        memory = _memory(array)
        parts += [struct.pack("<Q", len(memory)), memory]
    arguments = launch.arguments.tobytes()
    arguments += bytes(-len(arguments) % 8)
    parts.append(struct.pack("<I", 1))
    parts.append(
        struct.pack("<7I", 0, *launch.grid, launch.threads, launch.shared_bytes, len(arguments)) + arguments
    )
    pointers = _pointers(launch, buffers)
    parts.append(struct.pack("<I", len(pointers)))
    parts += [struct.pack("<IIQ", *pointer) for pointer in pointers]
    return b"".join(parts)


def _restore(memory: bytes, buffers: list[Any]) -> None:
    at = 0
    for array in buffers:
        low, high = _bounds(array)
        np.ctypeslib.ctypes.memmove(low, memory[at : at + high - low], high - low)
        at += high - low
