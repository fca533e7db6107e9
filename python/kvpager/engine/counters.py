"""What an engine counts: per tenant, written by its thread, read by anybody.

A reader may see a step's counts half applied, never a torn number. Nothing here is touched per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager._core import AccountStats, FinishedRequest, PoolStats, SchedulerStats
    from kvpager.engine.generation import Generation

__all__ = ["EngineSnapshot", "Histogram", "TenantCounters"]

_WAIT = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)


class Histogram:
    """Counts of values by upper bound, and their sum.

    Attributes:
        bounds: upper bounds, ascending; what is above the last is counted beyond it.
        counts: one more than bounds.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Starts empty."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Adds the counts of a histogram with the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Upper bound of the bucket in which that share of the values is reached; None if there are none."""
        rest = share * self.count
        for bound, count in zip((*self.bounds, self.bounds[-1]), self.counts, strict=True):
            rest -= count
            if count and rest <= 0:
                return bound
        return None


@dataclass(slots=True)
class TenantCounters:
    """What became of a tenant's requests.

    Attributes:
        submitted, started: requests accepted; those that have run.
        refused: requests not accepted.
        ended: requests by reason. A stop text counts as `stop` if its consumer came to it before the request
            had run to another end.
        num_ended: all of them.
        prompt_tokens, cached_tokens: of started requests, counted once each: looked up, and found.
        generation_tokens: tokens of ended requests.
        ended_waiting: requests that ended before their first step.
        preemptions: of ended requests.
        queue_time: seconds from submission to the first step.
        time_to_first_token: seconds from submission.
        time_per_output_token: seconds, mean of each request after its first token.
        latency: seconds from submission to the end.
        prompt_length, generation_length: tokens.
    """

    submitted: int = 0
    started: int = 0
    refused: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    ended_waiting: int = 0
    queue_time: Histogram = field(default_factory=lambda: Histogram(_WAIT))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_WAIT))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN))
    latency: Histogram = field(default_factory=lambda: Histogram(_WAIT))
    prompt_length: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    generation_length: Histogram = field(default_factory=lambda: Histogram(_TOKENS))

    def note_started(self, generation: Generation) -> None:
        """Counts a request that is in its first step. Beams count each, what they share once."""
        self.started += 1
        if _follows(generation):
            return
        self.prompt_tokens += generation.prompt_tokens
        self.cached_tokens += generation.cached_tokens or 0
        self.queue_time.observe(generation.queue_wait)
        self.prompt_length.observe(generation.prompt_tokens)

    def note_ended(self, generation: Generation, account: FinishedRequest, now: float) -> None:
        """Counts a request's end."""
        self.ended[generation.finish_reason or account.reason] += 1
        self.num_ended += 1
        self.preemptions += account.preemptions
        if generation.started_at is None:
            self.ended_waiting += 1
        length = len(generation.token_ids)
        self.generation_tokens += length
        if _follows(generation):
            return
        self.latency.observe(now - generation.submitted_at)
        self.generation_length.observe(length)
        first, last = generation.first_token_at, generation.last_token_at
        if first is not None and last is not None:
            self.time_to_first_token.observe(first - generation.submitted_at)
            if length > 1:
                self.time_per_output_token.observe((last - first) / (length - 1))

    def add(self, other: TenantCounters) -> None:
        """Adds another tenant's counts."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Histogram):
                mine.add(theirs)
            elif isinstance(mine, Counter):
                mine.update(theirs.copy())  # the engine's thread may add a reason meanwhile
            else:
                setattr(self, name, mine + theirs)

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended; preempted ones are among them."""
        return max(0, self.started - (self.num_ended - self.ended_waiting))

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return max(0, self.submitted - self.started - self.ended_waiting)


def _follows(generation: Generation) -> bool:
    """Whether it is a beam besides its search's first one."""
    return generation.search is not None and generation.index > 0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine at one moment.

    Attributes:
        state: `running`, `draining`, `stopped` or `failed`.
        reason: why it failed, or None.
        pool, scheduler: their counts.
        accounts: blocks of each tenant.
        tenants: counters of each tenant; shared with the engine, read them at once.
        failed_steps: steps that the runner failed.
        is_exact: whether no turn of the scheduler came in between, see `SchedulerSnapshot`.
    """

    state: str
    reason: str | None
    pool: PoolStats
    scheduler: SchedulerStats
    accounts: dict[str, AccountStats]
    tenants: dict[str, TenantCounters]
    failed_steps: int
    is_exact: bool
