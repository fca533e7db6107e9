"""The block tables on the device: a resident copy, kept current by one small kernel a step.

The scheduler's arena on the host logs which entries a step changed (`batch.table_changes`). The log goes
through pinned memory that the device reads, together with its length, so one launch serves every step and can
be captured. The copy is made once and never moves.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvpager.attention import _cupy, _memory_launch, kernels
from kvpager.attention._arguments import integer
from kvpager.attention._streams import stream_context
from kvpager.attention._views import ArrayView
from kvpager.errors import InvalidArgumentError

__all__ = ["DeviceBlockTables", "last_changes"]

Ints = npt.NDArray[np.int32]


def last_changes(changes: Ints, max_blocks: int) -> Ints:
    """The log with only the last change of each entry, since the device applies all of it at once.

    Args:
        changes: int32 [num_changes, 3] of (row, column, block id), in the order they were made.
        max_blocks: columns of the tables.

    Returns:
        The same with one line an entry.

    Example:
        >>> last_changes(np.array([[0, 1, 5], [2, 0, 7], [0, 1, -1]], np.int32), 4).tolist()
        [[0, 1, -1], [2, 0, 7]]
    """
    cells = changes[:, 0].astype(np.int64) * max_blocks + changes[:, 1]
    _, last = np.unique(cells[::-1], return_index=True)
    return changes[::-1][last]


class DeviceBlockTables:
    """A copy of a host arena of block tables that the kernels read.

    Attributes:
        tables: what to pass as `block_tables`: the device copy, or in mapped mode the arena itself.
    """

    def __init__(
        self,
        arena: Ints,
        *,
        mode: Literal["resident", "mapped"] = "resident",
        max_changes: int = 65536,
        num_slots: int = 3,
    ) -> None:
        """Copies the arena to the current device, or maps it.

        Args:
            arena: int32 [rows, max_blocks], contiguous, as the scheduler's batches export it. It must not
                move while this object lives; the scheduler's arena never does.
            mode: `resident` keeps a copy; `mapped` registers the arena's own memory with the device, which
                then reads it over the bus: for tests and tiny batches.
            max_changes: changed entries that one launch takes; a longer log takes several.
            num_slots: logs that may be on their way at once; a further step waits for the oldest.

        Raises:
            InvalidArgumentError: The arena is not a contiguous int32 array of two dimensions, the mode is
                another word, or a number is not positive.
        """
        if mode not in ("resident", "mapped"):
            raise InvalidArgumentError(f"mode is {mode!r}, expected 'resident' or 'mapped'")
        if arena.dtype != np.int32 or arena.ndim != 2 or not arena.flags.c_contiguous:
            raise InvalidArgumentError(
                f"arena must be a contiguous int32 [rows, max_blocks], is {arena.dtype} {arena.shape}"
            )
        max_changes = integer("max_changes", max_changes, 1)
        num_slots = integer("num_slots", num_slots, 1)
        self._cupy = kernels.load_cupy()
        self._arena = arena
        self._mapped = mode == "mapped"
        self._next = 0
        if self._mapped:
            self.tables = _map_host(self._cupy, arena)
            return
        self.tables = self._cupy.asarray(arena)
        # `apply` may go to another stream than the copy did.
        self._cupy.cuda.get_current_stream().synchronize()
        self._slots = [_Slot(self._cupy, max_changes) for _ in range(num_slots)]

    def apply(self, changes: Ints, *, stream: Any = None) -> None:
        """Brings the copy up to date on a stream; nothing to do in mapped mode.

        Args:
            changes: int32 [num_changes, 3] of (row, column, block id), the step's `table_changes`.
            stream: of CuPy or torch, the one whose attention reads the tables. None: CuPy's current stream,
                which is not torch's: with torch tensors pass `torch.cuda.current_stream()`.

        Raises:
            InvalidArgumentError: An entry outside the tables, a wrong shape, or no stream. Nothing is changed
                then.
        """
        with stream_context(stream):
            self._apply(changes)

    def _apply(self, changes: Ints) -> None:
        if changes.ndim != 2 or changes.shape[1] != 3:
            raise InvalidArgumentError(f"changes must have shape [num_changes, 3], have {changes.shape}")
        if self._mapped or len(changes) == 0:
            return
        rows, columns = self._arena.shape
        if np.any(changes[:, :2] < 0) or np.any(changes[:, :2] >= (rows, columns)):
            raise InvalidArgumentError(f"a change lies outside the {rows} x {columns} tables")
        log = last_changes(changes, columns)
        room = self._slots[0].capacity
        for start in range(0, len(log), room):
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            slot.fill(log[start : start + room])
            kernels.launch(_memory_launch.delta_launches(_cupy.view(self.tables), slot.log, slot.count))
            slot.launched()


def _map_host(cupy: Any, array: Ints) -> Any:
    """A device array over registered host memory. The registration ends with the array."""
    import weakref

    runtime = cupy.cuda.runtime
    runtime.hostRegister(array.ctypes.data, array.nbytes, 2)  # cudaHostRegisterMapped
    device = int(cupy.cuda.Device().id)
    # With unified addressing the host address is the device address.
    memory = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, device)
    mapped = cupy.ndarray(array.shape, np.int32, cupy.cuda.MemoryPointer(memory, 0))
    weakref.finalize(mapped, runtime.hostUnregister, array.ctypes.data)
    return mapped


class _Slot:
    """One log in pinned memory, reused only when the launch that reads it is done."""

    def __init__(self, cupy: Any, capacity: int) -> None:
        self._cupy = cupy
        self.capacity = capacity
        # A header of 16 bytes, the count in its first word, then (row, column, value, unused) lines.
        self._pinned = cupy.cuda.alloc_pinned_memory(16 + capacity * 16)
        words = np.frombuffer(self._pinned, np.int32, 4 + capacity * 4)
        self._header, self._lines = words[:4], words[4:].reshape(capacity, 4)
        self.count = int(self._header.ctypes.data)
        address = int(self._lines.ctypes.data)
        self.log = ArrayView(address, (capacity, 4), (4, 1), "int32", 4)
        self._done: Any = None

    def fill(self, log: Ints) -> None:
        if self._done is not None:
            self._done.synchronize()
        self._lines[: len(log), :3] = log
        self._header[0] = len(log)

    def launched(self) -> None:
        if self._done is None:
            self._done = self._cupy.cuda.Event(disable_timing=True)
        self._done.record()
