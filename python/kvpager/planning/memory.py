"""Memory that a plan is tried on: a device's through CuPy or torch, or the host's through NumPy.

Each kind counts the bytes that are live and the most that were at once, as its allocator sees them: arrays
and every temporary that a call makes on the way.
"""

from __future__ import annotations

import importlib.util
import tracemalloc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.attention._dispatch import backend_of

__all__ = ["Memory", "open_device", "open_host"]


class Memory(ABC):
    """An allocator with counters.

    Attributes:
        name: what the reports call it.
        on_device: whether device runtime, graphs and kernel workspaces exist there.
        total: bytes of the memory.
    """

    name: str
    on_device: bool
    total: int

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that nobody uses now."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """An array `[shape]` whose pages are there."""

    @abstractmethod
    def fill(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Copies values from the host into an array of this memory, spread over it where it is larger."""

    @abstractmethod
    def view(self, array: Any, dtype: str) -> Any:
        """The same bytes as another dtype, along the last axis."""

    @abstractmethod
    def product(self, a: Any, b: Any, out: Any) -> None:
        """Matrix product into `out`."""

    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes that are allocated."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes that were allocated at once since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Starts a new peak at what is allocated."""

    @abstractmethod
    def trim(self) -> None:
        """Gives back what the allocator keeps of freed arrays."""

    @abstractmethod
    def close(self) -> None:
        """Stops counting, and gives everything back."""


INTERPRETER = 256 << 10
"""Bytes of Python's own objects that may come and go in a pass; what is beyond was a hidden array."""


class _HostMemory(Memory):
    """The host's memory: arrays are counted one by one, and `tracemalloc` shows what NumPy makes besides."""

    def __init__(self) -> None:
        self.name = "host memory, through NumPy"
        self.on_device = False
        self.total, _ = _host_bytes()
        # Loaded now: the code of a module that the pass loads would look like a hidden array.
        backend_of({"array": np.empty(0)})
        self._live = 0
        self._peak = 0
        self._started = not tracemalloc.is_tracing()
        if self._started:
            tracemalloc.start(1)
        self._others = 0
        self.reset_peak()

    def free_bytes(self) -> int:
        return _host_bytes()[1]

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        array = np.empty(shape, dtype)
        array.fill(0)
        size = int(array.nbytes)
        self._live += size
        self._peak = max(self._peak, self._live)
        # Views keep their owner, so this comes when the last of them is gone.
        weakref.finalize(array, self._forget, size)
        return array

    def _forget(self, size: int) -> None:
        self._live -= size

    def fill(self, array: Any, values: npt.NDArray[Any]) -> None:
        array[...] = values

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(dtype)

    def product(self, a: Any, b: Any, out: Any) -> None:
        # NumPy has no fast 16-bit product, and this one allocates nothing: writing the result is what counts.
        del a, b
        out.fill(0)

    def live_bytes(self) -> int:
        return self._live

    def peak_bytes(self) -> int:
        hidden = tracemalloc.get_traced_memory()[1] - self._peak - self._others
        return self._peak + (hidden if hidden > INTERPRETER else 0)

    def reset_peak(self) -> None:
        tracemalloc.reset_peak()
        self._peak = self._live
        self._others = tracemalloc.get_traced_memory()[0] - self._live

    def trim(self) -> None:
        """Nothing: NumPy keeps no large arrays."""

    def close(self) -> None:
        if self._started:
            tracemalloc.stop()


class _CupyMemory(Memory):
    """A CUDA device through CuPy, with a memory pool of its own."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        device = cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
        self.name = f"{properties['name'].decode()}, through CuPy"
        self.on_device = True
        self._device = device
        self.total = int(device.mem_info[1])
        self._hook = _cupy_counter(cupy)
        self._hook.__enter__()

    def free_bytes(self) -> int:
        return int(self._device.mem_info[0])

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self._cupy.zeros(shape, dtype)

    def fill(self, array: Any, values: npt.NDArray[Any]) -> None:
        array.set(np.ascontiguousarray(np.broadcast_to(values, array.shape)))

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(dtype)

    def product(self, a: Any, b: Any, out: Any) -> None:
        self._cupy.matmul(a, b, out=out)

    def live_bytes(self) -> int:
        return int(self._hook.live)

    def peak_bytes(self) -> int:
        return int(self._hook.peak)

    def reset_peak(self) -> None:
        self._hook.peak = self._hook.live

    def trim(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()

    def close(self) -> None:
        self._hook.__exit__()
        self.trim()


def _cupy_counter(cupy: Any) -> Any:
    """A hook that counts what CuPy's pool hands out; its base class exists only where CuPy does."""

    class Counter(cupy.cuda.memory_hook.MemoryHook):  # type: ignore[misc]
        name = "kvpager plan"
        live = 0
        peak = 0

        def malloc_postprocess(self, **event: Any) -> None:
            self.live += event["mem_size"]
            self.peak = max(self.peak, self.live)

        def free_preprocess(self, **event: Any) -> None:
            self.live -= event["mem_size"]

    return Counter()


class _TorchMemory(Memory):
    """A CUDA device through torch's caching allocator."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.name = f"{torch.cuda.get_device_name()}, through torch"
        self.on_device = True
        self.total = int(torch.cuda.mem_get_info()[1])

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self._torch.zeros(tuple(shape), dtype=getattr(self._torch, dtype), device="cuda")

    def fill(self, array: Any, values: npt.NDArray[Any]) -> None:
        whole = np.ascontiguousarray(np.broadcast_to(values, tuple(array.shape)))
        array.copy_(self._torch.from_numpy(whole))

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(getattr(self._torch, dtype))

    def product(self, a: Any, b: Any, out: Any) -> None:
        self._torch.matmul(a, b, out=out)

    def live_bytes(self) -> int:
        return int(self._torch.cuda.memory_allocated())

    def peak_bytes(self) -> int:
        return int(self._torch.cuda.max_memory_allocated())

    def reset_peak(self) -> None:
        self._torch.cuda.reset_peak_memory_stats()

    def trim(self) -> None:
        self._torch.cuda.empty_cache()

    def close(self) -> None:
        self.trim()


def open_host() -> Memory:
    """The host's memory."""
    return _HostMemory()


def open_device() -> tuple[Memory | None, str]:
    """The first CUDA device, through CuPy or torch.

    Returns:
        The memory, or None and why there is none.
    """
    reasons = []
    for name, kind in (("cupy", _CupyMemory), ("torch", _TorchMemory)):
        if importlib.util.find_spec(name) is None:
            reasons.append(f"{name} is not installed")
            continue
        try:
            return kind(), ""
        except Exception as error:  # Each library has its own errors for "no driver" and "no device".
            reasons.append(f"{name}: {' '.join(str(error).split())}")
    return None, "; ".join(reasons)


def _host_bytes() -> tuple[int, int]:
    """Bytes of the host's memory, and of those that are available."""
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = (line.split() for line in file)
        sizes = {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if len(line) == 3}
    return sizes["MemTotal"], sizes["MemAvailable"]
