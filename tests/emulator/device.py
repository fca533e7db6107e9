"""A device whose memory is NumPy's and whose kernels are emulated, behind the few names of CuPy in use.

The backend itself is not replaced: its views, plans, launches and checks run as they do on a GPU.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpager.attention import kernels

from .run import run

MULTIPROCESSORS = 4


class DeviceArray(np.ndarray):
    """An array on the emulated device: what the backend asks of a `cupy.ndarray`."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        """CuPy's memory pointer."""
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        """CuPy's device, which a `with` makes current."""
        return contextlib.nullcontext()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.__array_interface__)

    def get(self) -> Any:
        """A copy on the host."""
        return np.array(self)

    def set(self, host: Any) -> None:
        """Overwrites the array from the host; like CuPy's, refuses another shape or dtype."""
        if host.shape != self.shape or host.dtype != self.dtype:
            raise ValueError(f"{host.dtype} {host.shape} for {self.dtype} {self.shape}")
        np.copyto(self, host)


DeviceArray.__module__ = "cupy"  # the front chooses the backend by the type's package


def to_device(array: Any) -> DeviceArray:
    """A copy of a host array on the emulated device, strides kept."""
    if array.base is None or array.flags.c_contiguous:
        return np.array(array, order="K").view(DeviceArray)
    return array.view(DeviceArray)


def _empty(shape: Any, dtype: Any) -> DeviceArray:
    """Device memory comes with whatever was in it."""
    array = np.empty(shape, dtype).view(DeviceArray)
    np.copyto(array.reshape(-1).view(np.uint8), 0xFF)
    return array


def emulated_cupy() -> Any:
    """The names of CuPy that the backend uses."""
    device = SimpleNamespace(compute_capability="90", attributes={"MultiProcessorCount": MULTIPROCESSORS})
    return SimpleNamespace(
        empty=_empty,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(DeviceArray),
        asarray=to_device,
        cuda=SimpleNamespace(
            Device=lambda: device,
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
            # Emulated threads read host memory, so any memory is pinned; launches end in the call.
            alloc_pinned_memory=bytearray,
            Event=lambda disable_timing: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
        ),
    )


def install(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Makes the emulated device the one that the backend finds."""
    cupy = emulated_cupy()
    monkeypatch.setattr(kernels, "load_cupy", lambda: cupy)
    monkeypatch.setattr(kernels, "launch", lambda launches, stream=None: run(launches, **how))
