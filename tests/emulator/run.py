"""Runs launches on the emulator in this process: the backend's own launches, on NumPy memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvpager.attention import _launch
from kvpager.attention._launch import AttentionCall, Launch
from kvpager.attention._manifest import Instantiation, KernelClass
from kvpager.attention._plan import plan_class, plan_room, view_of
from kvpager.attention._views import ArrayView

from .build import Patch, Unit, library

ORDERS = ("forward", "reverse", "random")
_ALIASES = {"float8_e4m3fn": "float8_e4m3"}


class EmulatorError(Exception):
    """The emulated launch went wrong: a deadlock, a lane outside its mask, a failed check."""


@functools.cache
def _load(unit: Unit) -> Any:
    run = ctypes.CDLL(str(library(unit))).emulator_run
    run.restype = ctypes.c_char_p
    run.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
    ]
    return run


def unit_of(instantiation: Instantiation, patches: tuple[Patch, ...] = ()) -> Unit:
    """The unit that holds one instantiation alone, with the patches that touch its source or the headers."""
    own = f"{instantiation.kernel}.cu"
    relevant = tuple(p for p in patches if p.file == own or p.file.startswith("include/"))
    return Unit(instantiation.kernel, (instantiation.name,), relevant)


def run(
    launches: Iterable[Launch], *, order: str = "forward", seed: int = 1, patches: tuple[Patch, ...] = ()
) -> None:
    """Runs launches in order. Raises `EmulatorError` with the emulator's report."""
    for launch in launches:
        function = _load(unit_of(launch.instantiation, patches))
        grid = (ctypes.c_uint * 3)(*launch.grid)
        fault = function(
            0,
            ctypes.addressof(grid),
            launch.threads,
            launch.shared_bytes,
            launch.arguments.ctypes.data,
            ORDERS.index(order),
            seed,
        )
        if fault:
            raise EmulatorError(f"{launch.instantiation.name}: {fault.decode()}")


def view(array: Any) -> ArrayView:
    """A NumPy array as the backend sees a device array."""
    name = str(array.dtype)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return ArrayView(array.ctypes.data, array.shape, strides, _ALIASES.get(name, name), array.itemsize)


def optional_view(array: Any) -> Any:
    """The same for arguments that may be None or a number."""
    return view(array) if isinstance(array, np.ndarray) else array


class Attention:
    """One attention call on the emulator: the launches, and the arrays that they point to."""

    def __init__(
        self,
        query: Any,
        k_cache: Any,
        v_cache: Any,
        *,
        block_tables: Any,
        query_start: Any,
        context_lens: Any,
        table_rows: Any = None,
        out: Any = None,
        target_blocks: int = 8,
        min_chunk: int = 64,
        classes: tuple[KernelClass, ...] | None = None,
        **options: Any,
    ) -> None:
        self.out = np.full((*query.shape[:2], v_cache.shape[3]), np.nan, query.dtype) if out is None else out
        self.lse = np.full(query.shape[:2], np.nan, np.float32)
        arrays = ("alibi_slopes", "sinks", "k_scale", "v_scale")
        for name in arrays:
            if isinstance(options.get(name), (list, tuple)):
                options[name] = np.asarray(options[name], np.float32)
        self.kept = [query, k_cache, v_cache, block_tables, query_start, context_lens, table_rows, options]
        self.call = AttentionCall(
            query=view(query),
            k_cache=view(k_cache),
            v_cache=view(v_cache),
            out=view(self.out),
            block_tables=view(block_tables),
            query_start=view(query_start),
            context_lens=view(context_lens),
            table_rows=optional_view(table_rows),
            lse=view(self.lse),
            **{name: optional_view(value) if name in arrays else value for name, value in options.items()},
        )
        self.launches: list[Launch] = []
        self.num_merges = 0
        for item in classes or self.call.kernels():
            self._plan(item, query_start, context_lens, target_blocks, min_chunk)
        self.launches += _launch.tail_launches(self.call)

    def _plan(self, item: KernelClass, starts: Any, lens: Any, target_blocks: int, min_chunk: int) -> None:
        heads = self.call.k_cache.shape[2]
        shape = {"group": self.call.group, "num_kv_heads": heads, "target_blocks": target_blocks}
        room = plan_room(
            item.kernel,
            max_sequences=len(lens),
            max_tokens=self.call.query.shape[0],
            min_chunk=min_chunk,
            **shape,
        )
        host = plan_class(
            starts,
            lens,
            item,
            window=self.call.window,
            causal=self.call.causal,
            room=room,
            min_chunk=min_chunk,
            **shape,
        )
        rows = (room.partials, heads, item.kernel.tile_rows)
        partial_out = np.full((*rows, self.call.out.shape[2]), np.nan, np.float32)
        partial_state = np.full((*rows, 2), np.nan, np.float32)
        self.kept += [host, partial_out, partial_state]
        self.num_merges += int(host.counts[1])
        addresses = [a.ctypes.data for a in (host.counts, host.work, host.merges)]
        plan = view_of(*addresses, room, partial_out.ctypes.data, partial_state.ctypes.data)
        self.launches += _launch.attention_launches(self.call, item.kernel, plan)

    def run(self, **how: Any) -> tuple[Any, Any]:
        """Runs the launches; returns output and log-sum-exp."""
        run(self.launches, **how)
        return self.out, self.lse


def attend(
    *arguments: Any, order: str = "forward", seed: int = 1, patches: tuple[Patch, ...] = (), **options: Any
) -> Any:
    """`paged_attention` on the emulator; returns (output, log-sum-exp)."""
    return Attention(*arguments, **options).run(order=order, seed=seed, patches=patches)
