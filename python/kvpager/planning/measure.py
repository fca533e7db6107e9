"""Measures on a device what a plan would otherwise estimate."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from kvpager._core import KvGeometry
from kvpager.errors import KvPagerError, MissingDependencyError
from kvpager.planning.forward_pass import Widths, check_runs, run_pass
from kvpager.planning.limits import Limits
from kvpager.planning.memory import Memory, open_device
from kvpager.planning.split_plans import layer_kinds
from kvpager.planning.worst_batch import group_batches

__all__ = ["Measured", "measure", "require_device"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a device said.

    Attributes:
        free: bytes free before an engine starts: what others do not use.
        runtime: bytes of a process with a context, the matrix product and the attention kernels loaded.
        activations: peak of the largest batch.
        workspace: what attention allocates besides, and the batch's arrays.
    """

    free: int
    runtime: int
    activations: int
    workspace: int


def require_device() -> Memory:
    """The device.

    Raises:
        MissingDependencyError: with the reason, if there is none.
    """
    memory, reason = open_device()
    if memory is None:
        raise MissingDependencyError(f"--measure needs a CUDA device with CuPy or torch: {reason}")
    return memory


def measure(memory: Memory, geometry: KvGeometry, limits: Limits) -> Measured:
    """Runs the largest batch over a cache that just holds it, and a process that loads what an engine loads.

    Args:
        memory: the device.
        geometry: the model.
        limits: of the batches.

    Raises:
        InvalidArgumentError: if the pass does not run such a model.
    """
    check_runs(geometry, limits.block_size)
    block_size = limits.block_size
    blocks = -(-limits.max_batch_tokens // block_size) + limits.max_running
    num_blocks = blocks * len(geometry.layer_groups)
    cache = memory.empty((num_blocks, geometry.block_bytes_per_token * block_size), "uint8")
    weights = memory.empty((2 * geometry.hidden_size * _widest(geometry),), "uint8")
    batches = group_batches(geometry, np.arange(num_blocks), limits)
    peaks = run_pass(memory, geometry, limits, cache=cache, weights=weights, batches=batches)
    del cache, weights
    memory.trim()
    runtime = _runtime_bytes(memory)
    return Measured(
        # What this process takes of the device is gone when an engine starts.
        free=min(memory.total, memory.free_bytes() + runtime),
        runtime=runtime,
        activations=peaks.activations,
        workspace=peaks.workspace,
    )


def _widest(geometry: KvGeometry) -> int:
    """Elements of the widest row that a dense layer gives."""
    kinds = [kind for kinds in layer_kinds(geometry) for kind in kinds]
    heads = max(max(kind.query_heads, kind.kv_heads) * kind.key_dim for kind in kinds)
    return max(2 * Widths.of(geometry).intermediate, heads)


def _runtime_bytes(memory: Memory) -> int:
    """How much less is free while another process holds a context with everything loaded."""
    before = memory.free_bytes()
    command = [sys.executable, "-c", "from kvpager.planning.measure import hold_runtime; hold_runtime()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        ready = child.stdout.readline() if child.stdout is not None else ""
        after = memory.free_bytes()
        child.communicate()
    if ready.strip() != "ready":
        raise KvPagerError(f"the process that measures the runtime ended with {child.returncode}")
    return max(0, before - after)


def hold_runtime() -> None:
    """Loads a context, the matrix product and attention, says so, and waits for its input to end."""
    from kvpager.attention import paged_attention

    memory = require_device()
    square = memory.empty((64, 64), "float16")
    memory.product(square, square, memory.empty((64, 64), "float16"))
    cache = memory.empty((1, 16, 1, 64), "float16")
    query_start = memory.empty((2,), "int32")
    memory.fill(query_start, np.array([0, 1], np.int32))
    context_lens = memory.empty((1,), "int32")
    memory.fill(context_lens, np.array([1], np.int32))
    paged_attention(
        memory.empty((1, 1, 64), "float16"),
        cache,
        cache,
        block_tables=memory.empty((1, 1), "int32"),
        query_start=query_start,
        context_lens=context_lens,
    )
    memory.close()
    print("ready", flush=True)
    sys.stdin.read()
