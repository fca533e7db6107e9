"""Times of `step` and `commit` under a load, with and without the recording of phases."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpager import Batch, PhaseTimes
from kvpager._core import num_allocations
from kvpager.profile.load import Load, LoadDriver

__all__ = ["CaseTimes", "measure", "percentiles_us", "quiet_collector"]

SPANS_PER_STEP = 16
"""Room for recorded spans: six phases and some look-ups a step."""


@dataclass(frozen=True)
class CaseTimes:
    """What one load costs.

    Attributes:
        load: what ran.
        steps_ns: [N] `step` + `commit` as Python sees them, nanoseconds, nothing recorded meanwhile.
        recorded_ns: [N] the same of a second scheduler under the same load whose phases were recorded.
        phases: what was recorded of that one.
        is_complete: whether all steps that were asked for are in it; False after an interrupt.
        allocations: [N] allocations of the extension in each step of the first.
        bytes_written: [N] bytes of batch arrays in each step.
    """

    load: Load
    steps_ns: NDArray[np.int64]
    recorded_ns: NDArray[np.int64]
    phases: PhaseTimes
    allocations: NDArray[np.int64]
    bytes_written: NDArray[np.int64]
    is_complete: bool = True

    @property
    def recording_overhead(self) -> float:
        """Median cost of recording, as a part of the median step."""
        return float(np.median(self.recorded_ns) / np.median(self.steps_ns)) - 1.0

    @property
    def boundary_ns(self) -> float:
        """Median nanoseconds of a step that are spent outside the core: calls, arguments, results."""
        return float(np.median(self.recorded_ns)) - self.phases.percentile_ns(50)


def measure(
    load: Load, steps: int, *, max_spans: int = 0, report: Callable[[int], None] | None = None
) -> CaseTimes:
    """Runs two schedulers under the same load, step by step in turns, one of them recorded.

    Args:
        load: the steady state.
        steps: steps to time.
        max_spans: spans to keep one by one.
        report: called with the number of steps done, now and then.

    Raises:
        KeyboardInterrupt: before anything was timed. Later, what was timed is returned.
    """
    plain, recorded = LoadDriver(load), LoadDriver(load)
    plain.warm()
    recorded.warm()
    steps_ns, recorded_ns = np.empty(steps, np.int64), np.empty(steps, np.int64)
    allocations, written = np.empty(steps, np.int64), np.empty(steps, np.int64)
    recorded.scheduler.begin_phases(max_spans=max_spans)
    done = 0
    try:
        with quiet_collector():
            while done < steps:
                steps_ns[done], allocations[done], written[done] = _timed_step(plain)
                recorded_ns[done], _, _ = _timed_step(recorded)
                done += 1
                if report is not None and done % 64 == 0:
                    report(done)
    except KeyboardInterrupt:
        if done == 0:
            raise
    phases = recorded.scheduler.end_phases()
    assert phases is not None, "recording was begun above"
    return CaseTimes(
        load,
        steps_ns[:done],
        recorded_ns[:done],
        phases,
        allocations[:done],
        written[:done],
        is_complete=done == steps,
    )


def _timed_step(driver: LoadDriver) -> tuple[int, int, int]:
    """One step: nanoseconds, allocations and bytes written by `step` and `commit` together."""
    before = num_allocations()
    start = time.perf_counter_ns()
    batch = driver.plan()
    planned = time.perf_counter_ns()
    allocations = num_allocations() - before
    starts, tokens = driver.prepare(batch)
    written = _bytes_written(batch)
    step_id = batch.step_id
    before = num_allocations()
    resumed = time.perf_counter_ns()
    outcome = driver.scheduler.commit(step_id, starts, tokens)
    ended = time.perf_counter_ns()
    allocations += num_allocations() - before
    driver.refill(outcome)
    return planned - start + ended - resumed, allocations, written


def _bytes_written(batch: Batch) -> int:
    """Bytes of the arrays that the step wrote; of the tables, the entries that changed."""
    arrays = (
        batch.sequence_ids,
        batch.query_start,
        batch.token_ids,
        batch.positions,
        batch.token_source,
        batch.sample_rows,
        batch.slot_mapping,
        batch.context_lens,
        batch.table_rows,
        batch.block_copies,
        batch.swap_out,
        batch.swap_in,
        batch.block_zeros,
    )
    changes = batch.table_changes
    return sum(array.nbytes for array in arrays) + changes.nbytes + 4 * len(changes)


def percentiles_us(times_ns: NDArray[np.int64]) -> dict[str, float]:
    """p50, p99, p99.9 and the maximum, in microseconds."""
    p50, p99, p999 = np.percentile(times_ns, [50, 99, 99.9]) / 1e3
    return {"p50": float(p50), "p99": float(p99), "p999": float(p999), "max": float(times_ns.max()) / 1e3}


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keeps Python's garbage collector out of the timed steps."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
