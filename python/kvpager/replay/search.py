"""The smallest pool, or the highest rate, that meets what is promised to users."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.replay.study import Study
from kvpager.replay.watch import UNWATCHED, Watch

__all__ = ["Objective", "find", "parse_objectives"]

_METRICS = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "gap": "worst_gap",
    "queue": "queue_wait",
}
_QUANTILES = ("p50", "p90", "p99", "p999", "max")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_OBJECTIVE = re.compile(r"(\w+)_(p50|p90|p99|p999|max)=([0-9.]+)(us|ms|s)?")

RATE_TOLERANCE = 0.01
"""A rate is found to one percent."""


MOST_TIMES = 1 << 16
"""Rates are looked for up to so many times the first one, or so many times below it."""


@dataclass(frozen=True)
class Objective:
    """A bound on one quantile of one latency.

    Attributes:
        name: as it was written, like `ttft_p99`.
        metric: the latency's name in a run's object.
        quantile: `p50` to `max`.
        seconds: the bound.
    """

    name: str
    metric: str
    quantile: str
    seconds: float

    def value(self, run: dict[str, Any]) -> float:
        """What a run came to."""
        return float(run["latency"][self.metric][self.quantile])


def parse_objectives(text: str) -> list[Objective]:
    """Reads `ttft_p99=2s,tpot_p99=50ms`.

    Raises:
        InvalidArgumentError: if it is not that.
    """
    objectives = []
    for part in text.split(","):
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None or match[1] not in _METRICS:
            raise InvalidArgumentError(
                f"--slo has {part!r}, expected one of {'|'.join(_METRICS)}, one of {'|'.join(_QUANTILES)} "
                "and a bound, like ttft_p99=2s"
            )
        seconds = _number(match[3]) * _UNITS[match[4] or ""]
        if not 0 < seconds < math.inf:
            raise InvalidArgumentError(f"--slo has {part!r}, expected a bound above 0, like ttft_p99=2s")
        objectives.append(Objective(f"{match[1]}_{match[2]}", _METRICS[match[1]], match[2], seconds))
    return objectives


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def find(study: Study, objectives: list[Objective], *, what: str, watch: Watch = UNWATCHED) -> dict[str, Any]:
    """Finds the smallest number of blocks, or the highest rate of requests, that meets every objective.

    It doubles or halves until the answer is between two tries, then halves the distance. A pool that refuses
    a request does not meet anything. More blocks are taken to never hurt, a higher rate to never help.

    Args:
        study: the workload, with one policy and one eviction policy.
        objectives: the bounds.
        what: `blocks` or `rate`.
        watch: looks at the runs now and then.

    Returns:
        `found` (None if nothing meets them), `what`, `tries` with what each came to, and the `run` found.
        `interrupted`: it was stopped, and `found` is the best so far. `at_limit`: nothing beyond `found` was
        tried, though it may meet them too.

    Raises:
        InvalidArgumentError: for a study of several policies or an unknown `what`.
    """
    if what not in ("blocks", "rate"):
        raise InvalidArgumentError(f"--find is {what!r}, expected blocks or rate")
    choices = (study.policies, study.evictions, study.overflows, study.short_by)
    if any(len(choice) != 1 for choice in choices) or study.sequential:
        raise InvalidArgumentError(
            "--find needs one policy, one eviction policy, one overflow and one device"
        )
    search = _Search(study, objectives, what, watch)
    try:
        if what == "blocks":
            found = search.smallest(float(study.settings.blocks))
        else:
            found = search.highest(study.settings.rate)
        interrupted = False
    except _StoppedError:
        found, interrupted = search.best(), True
    run = None if found is None else search.runs[found]
    return {
        "what": what,
        "interrupted": interrupted,
        "at_limit": search.at_limit,
        "found": None if found is None else int(found) if what == "blocks" else found,
        "objectives": {objective.name: objective.seconds for objective in objectives},
        "tries": search.tries,
        "run": run,
    }


class _StoppedError(Exception):
    """The search was asked to stop."""


class _Search:
    def __init__(self, study: Study, objectives: list[Objective], what: str, watch: Watch) -> None:
        self._study = study
        self._objectives = objectives
        self._what = what
        self._watch = watch
        self.at_limit = False
        self.runs: dict[float, dict[str, Any]] = {}
        self.tries: list[dict[str, Any]] = []

    def _meets(self, value: float) -> bool:
        settings = self._study.settings
        if self._what == "blocks":
            settings = replace(settings, blocks=int(value))
        else:
            settings = replace(settings, rate=value, arrivals="rate")
        runs = replace(self._study, settings=settings).run_policies(self._watch)
        if not runs or runs[0]["interrupted"]:
            raise _StoppedError
        run = runs[0]
        measured = {objective.name: objective.value(run) for objective in self._objectives}
        met = not run["refused"] and all(
            objective.value(run) <= objective.seconds for objective in self._objectives
        )
        self.runs[value] = run
        self.tries.append({self._what: value, "met": met, "refused": run["refused"], **measured})
        return met

    def best(self) -> float | None:
        """The best value so far that meets the objectives."""
        met = [float(row[self._what]) for row in self.tries if row["met"]]
        if not met:
            return None
        return min(met) if self._what == "blocks" else max(met)

    def smallest(self, start: float) -> float | None:
        high = start
        while not self._meets(high):
            high *= 2
            if high > 1 << 26:
                return None
        low = high // 2
        while low >= 1 and low not in self.runs and self._meets(low):
            high, low = low, low // 2
        while high - low > max(1, high // 200):
            middle = (low + high) // 2
            if self._meets(middle):
                high = middle
            else:
                low = middle
        return high

    def highest(self, start: float) -> float | None:
        low = start
        while not self._meets(low):
            low /= 2
            if low < start / MOST_TIMES:
                return None
        high = low * 2
        while high not in self.runs and self._meets(high):
            low, high = high, high * 2
            if high > start * MOST_TIMES:
                self.at_limit = True
                return low
        while high - low > low * RATE_TOLERANCE:
            middle = math.sqrt(low * high)
            if self._meets(middle):
                low = middle
            else:
                high = middle
        return low
