"""What looks at a run from outside: who shows its progress, and who may end it early."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["UNWATCHED", "Report", "Watch", "asked_to_stop"]

Report = Callable[[int, int, float], None]
"""Called with requests ended, steps, virtual seconds."""


def _silent(_ended: int, _steps: int, _now: float) -> None:
    """Shows nothing."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Watch:
    """Looks at a run between its pieces, ten times a second or so.

    Attributes:
        report: shows the progress.
        stop: whether to end with what there is.
    """

    report: Report = _silent
    stop: Callable[[], bool] = _never


UNWATCHED = Watch()


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C a question that a run answers between two pieces; the second one ends at once.

    Where the process was started with Ctrl-C ignored, as shells start background jobs, it stays so.

    Yields:
        Says whether there was one.
    """
    asked = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield _never
        return
    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
