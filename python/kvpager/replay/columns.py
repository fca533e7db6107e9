"""Requests of a workload as columns, checked as they come in.

A reader appends one request at a time; the builder checks every value, so that a driver never sees a bad one,
and hands out blocks of columns of bounded size: a trace of any length streams through.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvpager.errors import InvalidArgumentError

__all__ = ["MAX_TOKENS", "BadLines", "Columns", "ColumnsBuilder", "LineError"]

MAX_TOKENS = 1 << 24
"""Longest prompt or output that is believed (16 million tokens)."""


MAX_SECONDS = 10 * 365 * 86400
"""Longest trace that is believed (10 years): a time beyond that is damage, or in another unit."""

MAX_RECENT = 4096
"""Prompts that are remembered whole, by their first id."""


class LineError(ValueError):
    """What is wrong with one line or entry of a trace."""


@dataclass
class BadLines:
    """What to do with a bad line: stop with file, line and reason, or count it and go on.

    Attributes:
        path: the file, for messages.
        skip: count and go on.
        count: bad lines so far.
        first: the first complaint, for the report.
    """

    path: Path
    skip: bool = False
    count: int = 0
    first: str | None = None

    def skipped(self) -> str:
        """What was skipped, to end a complaint that nothing is left; empty if nothing was."""
        if not self.count:
            return ""
        lines = "1 bad line" if self.count == 1 else f"{self.count:,} bad lines"
        return f": {lines} skipped, the first: {self.first}"

    def report(self, line: int | str, reason: str) -> None:
        """Notes a bad line.

        Args:
            line: its number from 1, or the name of the entry; the file's own name is not said twice.
            reason: one clause.

        Raises:
            InvalidArgumentError: unless bad lines are skipped.
        """
        place = f"{self.path}: " if line == self.path.name else f"{self.path}: {line}: "
        text = f"{self.path}: line {line}: {reason}" if isinstance(line, int) else f"{place}{reason}"
        if not self.skip:
            raise InvalidArgumentError(text)
        self.count += 1
        if self.first is None:
            self.first = text


@dataclass
class Columns:
    """A block of requests in the order of their arrival.

    Attributes:
        arrival: seconds from the start of the trace, float64.
        prompt_tokens: uint32, at least 1.
        output_tokens: uint32, at least 1.
        tenant: uint32, index into the trace's tenants.
        session: uint64; 0 for a request on its own. A request waits for the answer to the one before it in
            its session.
        think_time: seconds between that answer and this request, float64.
        hash_start: uint64 [n + 1], where each request's ids are in `hash_ids`.
        hash_ids: uint64; equal ids mean equal prompt prefixes up to the end of that block.
    """

    arrival: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("I"))
    output_tokens: array[int] = field(default_factory=lambda: array("I"))
    tenant: array[int] = field(default_factory=lambda: array("I"))
    session: array[int] = field(default_factory=lambda: array("Q"))
    think_time: array[float] = field(default_factory=lambda: array("d"))
    hash_start: array[int] = field(default_factory=lambda: array("Q", [0]))
    hash_ids: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.arrival)


class ColumnsBuilder:
    """Collects checked requests into blocks of columns.

    Args:
        hash_block: prompt tokens that one hash id stands for; 0 if the trace has none.
        in_order: whether arrival times must not go back.
        block: requests in a block of columns.
        every_block: whether each block of a prompt must have its id.
        shown_id: an id as the file has it, for messages.
    """

    def __init__(
        self,
        *,
        hash_block: int = 0,
        in_order: bool = True,
        block: int = 4096,
        every_block: bool = False,
        shown_id: Callable[[int], int] = int,
    ) -> None:
        self._hash_block = hash_block
        self._in_order = in_order
        self._block = block
        self._every_block = every_block
        self._shown_id = shown_id
        self._columns = Columns()
        self._first_arrival: float | None = None
        self._last_arrival = 0.0
        self._parents: dict[int, int] = {}
        self._recent: dict[int, Sequence[int]] = {}

    def append(
        self,
        *,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        hash_ids: Sequence[int] = (),
        tenant: int = 0,
        session: int = 0,
        think_time: float = 0.0,
    ) -> None:
        """Adds a request.

        Raises:
            LineError: with the reason, if a value cannot be; nothing was added then.
        """
        self._check_times(arrival, think_time)
        _check_count("prompt", prompt_tokens)
        _check_count("output", output_tokens)
        if hash_ids or self._every_block:
            self._check_ids(prompt_tokens, hash_ids)
        columns = self._columns
        columns.arrival.append(arrival)
        columns.prompt_tokens.append(prompt_tokens)
        columns.output_tokens.append(output_tokens)
        columns.tenant.append(tenant)
        columns.session.append(session)
        columns.think_time.append(think_time)
        columns.hash_ids.extend(hash_ids)
        columns.hash_start.append(len(columns.hash_ids))
        self._last_arrival = arrival
        if self._first_arrival is None:
            self._first_arrival = arrival

    def _check_times(self, arrival: float, think_time: float) -> None:
        if not (math.isfinite(arrival) and arrival >= 0):
            raise LineError(f"arrival time is {arrival}, expected a finite number of at least 0")
        if not (math.isfinite(think_time) and think_time >= 0):
            raise LineError(f"think time is {think_time}, expected a finite number of at least 0")
        late = arrival - (arrival if self._first_arrival is None else self._first_arrival)
        if late > MAX_SECONDS:
            raise LineError(
                f"time is {late:.6g} s after the first: more than {MAX_SECONDS} s are not believed"
            )
        if think_time > MAX_SECONDS:
            raise LineError(f"think time is {think_time:.6g} s: more than {MAX_SECONDS} s are not believed")
        if self._in_order and arrival < self._last_arrival:
            raise LineError(f"time goes back: {arrival:.6g} s after {self._last_arrival:.6g} s")

    def _check_ids(self, prompt_tokens: int, hash_ids: Sequence[int]) -> None:
        """An id stands for a whole prefix, so it always follows the same id."""
        most = -(-prompt_tokens // self._hash_block)
        if len(hash_ids) > most or (self._every_block and len(hash_ids) < most):
            raise LineError(
                f"{len(hash_ids)} hash ids contradict a prompt of {prompt_tokens} tokens: "
                f"it has {most} blocks of {self._hash_block}"
            )
        if not 0 <= min(hash_ids) <= max(hash_ids) < 1 << 64:
            raise LineError("a hash id is negative or above 2^64")
        # Most prompts go on from an earlier one, whose ids have been checked: only what follows is new.
        earlier = self._recent.get(hash_ids[0])
        known_ids = 0 if earlier is None else _common(earlier, hash_ids)
        parents = self._parents
        new: dict[int, int] = {}
        parent = hash_ids[known_ids - 1] if known_ids else -1
        for block in hash_ids[known_ids:]:
            known = parents.get(block)
            if known is None:
                known = new.setdefault(block, parent)
            if known != parent:
                raise LineError(
                    f"hash id {self._shown_id(block)} follows {self._name(parent)} here and "
                    f"{self._name(known)} before: an id stands for one whole prefix"
                )
            parent = block
        if len(self._recent) >= MAX_RECENT:
            self._recent.clear()
        self._recent[hash_ids[0]] = hash_ids
        parents.update(new)

    def _name(self, block: int) -> str:
        return "the start" if block == -1 else f"id {self._shown_id(block)}"

    def full(self) -> Iterator[Columns]:
        """Yields a block if one is full."""
        if len(self._columns) >= self._block:
            yield from self.rest()

    def rest(self) -> Iterator[Columns]:
        """Yields what has been collected, if anything."""
        if len(self._columns):
            columns, self._columns = self._columns, Columns()
            yield columns


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix, by comparing slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise LineError(f"{name} length is {count!r}, expected a whole number")
    if not 1 <= count <= MAX_TOKENS:
        raise LineError(f"{name} length is {count}, expected 1 to {MAX_TOKENS} tokens")
