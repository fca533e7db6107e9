"""What a step costs while other Python threads want the interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvpager.profile.load import Load, LoadDriver
from kvpager.profile.measure import quiet_collector

__all__ = ["BUSY_THREADS", "steps_beside"]

BUSY_THREADS = (0, 1, 3)
"""Numbers of busy threads that `kvpager profile --python` tries."""


def steps_beside(load: Load, steps: int, busy: int) -> NDArray[np.int64]:
    """[steps] nanoseconds of `step` + `commit`, waiting for the interpreter between them included.

    Args:
        load: the steady state.
        steps: steps to time.
        busy: threads that run Python code all the while.
    """
    driver = LoadDriver(load)
    driver.warm()
    times = np.empty(steps, np.int64)
    with quiet_collector(), _busy_threads(busy):
        for i in range(steps):
            start = time.perf_counter_ns()
            batch = driver.plan()
            starts, tokens = driver.prepare(batch)
            outcome = driver.scheduler.commit(batch.step_id, starts, tokens)
            times[i] = time.perf_counter_ns() - start
            driver.refill(outcome)
    return times


@contextmanager
def _busy_threads(count: int) -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        total = 0
        while not stop.is_set():
            total += 1

    threads = [threading.Thread(target=spin, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
