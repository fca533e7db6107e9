"""Tries a plan on real memory: allocates every part, runs the worst batch, and compares."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpager._core import BlockPool, Budget, KvGeometry
from kvpager.errors import InvalidArgumentError, OutOfBlocksError, OverQuotaError
from kvpager.planning.forward_pass import check_runs, run_pass
from kvpager.planning.limits import Limits
from kvpager.planning.memory import Memory, open_host
from kvpager.planning.worst_batch import group_batches

__all__ = ["MOST_OVER", "verify"]

MOST_OVER = 0.05
"""A part may be predicted larger than it is by so much, and never smaller."""

NOT_ALLOCATED = ("safety_margin", "left_over", "not_offered")


def verify(
    geometry: KvGeometry, budget: Budget, limits: Limits, *, device: Memory | None, runtime: int | None
) -> dict[str, Any]:
    """Allocates a plan and runs its worst batch.

    Every block of the pool is full, and in a sequence as far as so many sequences of the longest request
    reach; the batch has as many tokens and rows as the plan allows, padded where the blocks hold fewer.
    Attention runs over all layers; on the host, which has no fast 16-bit product, dense layers only write
    their results.

    Args:
        geometry: the model.
        budget: its plan.
        limits: the limits that the plan was made for.
        device: where to allocate it; None: the host's memory. Parts that only a device has are held there as
            plain bytes.
        runtime: measured bytes of the device's runtime, which cannot be allocated.

    Returns:
        `memory`, `batch`, `parts[]` with `part`, `predicted`, `measured`, `over` (share), `how` and
        `ok`, the `refusal` of one block more, `most_over` and `ok` of all.

    Raises:
        InvalidArgumentError: if the memory is too small for the plan, or the pass does not run such a model.
    """
    check_runs(geometry, limits.block_size)
    memory = open_host() if device is None else device
    try:
        trial = _Trial(geometry, budget, limits, memory, runtime)
        trial.check_room()
        refusal = trial.claim_blocks()
        trial.allocate()
        parts = trial.parts()
    finally:
        if device is None:
            memory.close()
    return {
        "memory": memory.name,
        "batch": trial.batch,
        "parts": parts,
        "refusal": refusal,
        "most_over": MOST_OVER,
        "ok": all(part["ok"] for part in parts) and bool(refusal),
    }


class _Trial:
    def __init__(
        self, geometry: KvGeometry, budget: Budget, limits: Limits, memory: Memory, runtime: int | None
    ) -> None:
        self.geometry = geometry
        self.budget = budget
        self.limits = limits
        self.memory = memory
        self.predicted = {name: size for name, size, _, _ in budget.parts if name not in NOT_ALLOCATED}
        self.measured: dict[str, int] = {}
        self.how: dict[str, str] = {}
        self.kept: list[Any] = []
        self.batch: dict[str, int] = {}
        if memory.on_device and runtime is not None:
            self.measured["runtime"], self.how["runtime"] = runtime, "measured in a process of its own"

    def check_room(self) -> None:
        """Refuses what this memory cannot hold, before anything is allocated."""
        # A device's runtime is there already, and not free.
        there = self.predicted["runtime"] if self.memory.on_device else 0
        needed = sum(self.predicted.values()) - there
        free = self.memory.free_bytes()
        if needed > free:
            raise InvalidArgumentError(
                f"--verify would allocate {needed} bytes of {self.memory.name}, {free} are free: "
                "plan for less --device-memory, or verify on the device itself"
            )

    def claim_blocks(self) -> str:
        """Takes every block of a pool of the plan's size; the answer to one more."""
        pool = BlockPool(self.budget.num_blocks)
        account = pool.add_account()
        handles = pool.allocate(account, self.budget.num_blocks)
        self.block_ids = (handles & np.uint64(0xFFFFFFFF)).astype(np.int64)
        try:
            pool.allocate(account, 1)
        except (OutOfBlocksError, OverQuotaError) as error:
            return str(error)
        return ""

    def hold(self, name: str, size: int, how: str) -> Any:
        """Allocates bytes, counted for a part."""
        before = self.memory.live_bytes()
        array = self.memory.empty((size,), "uint8")
        self.measured[name] = self.memory.live_bytes() - before
        self.how[name] = how
        self.kept.append(array)
        return array

    def allocate(self) -> None:
        """Allocates every part and runs the batch beside them."""
        on_device = self.memory.on_device
        weights = self.hold("weights", self.predicted["weights"], "allocated")
        on_host = "a device's only: held as bytes"
        self.hold("communication", self.predicted["communication"], "allocated")
        self.hold("graphs", self.predicted["graphs"], "held as bytes" if on_device else on_host)
        if not on_device:
            self.hold("runtime", self.predicted["runtime"], on_host)
        num_blocks, block_bytes = self.budget.num_blocks, self.budget.block_bytes
        cache = self.hold("cache", num_blocks * block_bytes, "allocated and filled")
        batches = group_batches(self.geometry, self.block_ids, self.limits)
        self.batch = {"tokens": batches[0].num_tokens, "sequences": batches[0].num_sequences}
        peaks = run_pass(
            self.memory,
            self.geometry,
            self.limits,
            cache=cache.reshape(num_blocks, block_bytes),
            weights=weights if on_device else None,
            batches=batches,
        )
        self.measured["activations"], self.how["activations"] = peaks.activations, "peak of the batch"
        self.measured["workspace"] = peaks.workspace
        plans = (
            "arrays and peak of the batch" if on_device else "arrays of the batch, and a device's split plans"
        )
        self.how["workspace"] = plans

    def parts(self) -> list[dict[str, Any]]:
        """Predicted against measured; an empty part has nothing to be over."""
        rows = []
        for name, predicted in self.predicted.items():
            measured = self.measured.get(name, 0)
            over = predicted / measured - 1 if measured else float(predicted > 0)
            row = {"part": name, "predicted": predicted, "measured": measured, "over": over}
            row |= {"how": self.how.get(name, "not allocated"), "ok": 0 <= over <= MOST_OVER}
            rows.append(row)
        return rows
