"""Waiting for what another thread or process does, on a machine of any speed.

No test depends on who is faster: what has to have happened is waited for, what must not happen yet is held by
a gate, and only what is broken takes as long as `PATIENCE`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from kvpager.engine import NullRunner

PATIENCE = 60.0
"""Seconds: far longer than anything takes, on a machine that has better things to do."""


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Returns once the condition is true."""
    deadline = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < deadline, f"not within {PATIENCE:g} s: {what or condition}"
        time.sleep(0.002)


async def until(condition: Callable[[], object], what: str = "") -> None:
    """The same in an event loop, which goes on meanwhile."""
    deadline = time.perf_counter() + PATIENCE
    while not condition():
        assert time.perf_counter() < deadline, f"not within {PATIENCE:g} s: {what or condition}"
        await asyncio.sleep(0.002)


class Gate:
    """Lets as many steps of a model through as the test says; the engine's thread waits in the next one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = 0.0
        self._has_come = False

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits that has not been let through."""
        with self._changed:
            return self._has_come and self._allowed <= 0

    def allow(self, steps: float = 1) -> None:
        """Lets that many more through."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()

    def open(self) -> None:
        """Lets everything through from now on."""
        self.allow(math.inf)

    def pass_through(self) -> None:
        """Called by a step."""
        with self._changed:
            self._has_come = True
            # A test that fails leaves its gate shut: what then waits fails too, and so nothing hangs.
            is_let = self._changed.wait_for(lambda: self._allowed > 0, 2 * PATIENCE)
            self._has_come = False
            if not is_let:
                raise TimeoutError("the test's gate stayed shut")
            self._allowed -= 1


class GatedRunner(NullRunner):
    """Synthetic tokens, in as many steps as the gate lets through."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = Gate()

    def run(self, batch: Any, sampled: Any, /) -> Any:
        self.gate.pass_through()
        return super().run(batch, sampled)
