"""The public functions about where the CPU computes: threads and instruction sets."""

from __future__ import annotations

from kvpager import _core

__all__ = ["get_num_threads", "instruction_sets", "set_num_threads"]


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads a call on the CPU may use, the caller's included (1 to 1024).

    The first value is the number of cores that the process may use. Results do not depend on it. Threads
    beyond a smaller number end: at once, or after the call that they are in.
    """
    _core._set_num_threads(num_threads)


def get_num_threads() -> int:
    """Threads that a call on the CPU may use, the caller's included."""
    return _core._get_num_threads()


def instruction_sets() -> list[str]:
    """Instruction sets of this processor that attention has kernels for; the first is used."""
    return _core._instruction_sets()
