"""Who a request belongs to: by share, by rule, or by a field of the trace."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import Columns, LineError
from kvpager.replay.trace import Trace

__all__ = ["MAX_TENANTS", "FieldRule", "TenantNames", "TenantRule", "parse_tenants"]

MAX_TENANTS = 60
"""Tenants of one run."""

EXPECTED = (
    "chat=3,batch=1 (shares), prompt:short<=1024,long (by prompt tokens; or output:…), session:8 or "
    "round-robin:4 (so many tenants), or field:NAME or field:NAME~REGEX (by a field of the trace)"
)


class TenantRule(ABC):
    """Gives each request of a workload to a tenant."""

    names: list[str]

    def apply(self, trace: Trace) -> Trace:
        """The same requests, given to this rule's tenants."""
        trace.tenants = list(self.names)
        trace.requests = self._assigned(trace.requests)
        return trace

    def _assigned(self, requests: Iterator[Columns]) -> Iterator[Columns]:
        for columns in requests:
            columns.tenant = array("I", self.assign(columns))
            yield columns

    @abstractmethod
    def assign(self, columns: Columns) -> Iterator[int]:
        """Index of the tenant of each request, in order."""


class ByShare(TenantRule):
    """Each request goes to a tenant with the probability of its share."""

    def __init__(self, shares: dict[str, float], seed: int) -> None:
        self.names = list(shares)
        self._bounds = list(accumulate(shares.values()))
        self._draw = Random(seed)

    def assign(self, columns: Columns) -> Iterator[int]:
        bounds = self._bounds
        last = len(bounds) - 1
        return (min(bisect(bounds, self._draw.random() * bounds[-1]), last) for _ in range(len(columns)))


class ByLength(TenantRule):
    """A request goes to the first tenant whose limit its length does not exceed."""

    def __init__(self, column: str, limits: dict[str, float]) -> None:
        self.names = list(limits)
        self._column = column
        self._limits = list(limits.values())

    def assign(self, columns: Columns) -> Iterator[int]:
        lengths: array[int] = getattr(columns, self._column)
        return (next(i for i, most in enumerate(self._limits) if length <= most) for length in lengths)


class BySession(TenantRule):
    """Sessions take turns over so many tenants; requests without one do so on their own."""

    def __init__(self, count: int) -> None:
        self.names = [f"tenant-{number}" for number in range(1, count + 1)]
        self._sessions: dict[int, int] = {}
        self._next = 0

    def assign(self, columns: Columns) -> Iterator[int]:
        for session in columns.session:
            tenant = self._sessions.get(session)
            if tenant is None:
                tenant = self._next
                self._next = (self._next + 1) % len(self.names)
                if session:
                    self._sessions[session] = tenant
            yield tenant


class RoundRobin(TenantRule):
    """Requests take turns over so many tenants."""

    def __init__(self, count: int) -> None:
        self.names = [f"tenant-{number}" for number in range(1, count + 1)]
        self._next = 0

    def assign(self, columns: Columns) -> Iterator[int]:
        for _ in range(len(columns)):
            yield self._next
            self._next = (self._next + 1) % len(self.names)


@dataclass(frozen=True)
class FieldRule:
    """The tenant is what a field of the trace says; readers of formats with named fields apply it.

    Attributes:
        field: its name.
        pattern: the tenant is its first group, or what it matches; a value without a match is `other`.
    """

    field: str
    pattern: re.Pattern[str] | None = None

    def tenant(self, value: object) -> str:
        """The tenant that a value names; `other` for a missing one."""
        if value is None:
            return "other"
        if self.pattern is None:
            return str(value)
        match = self.pattern.search(str(value))
        if match is None:
            return "other"
        return (match[1] if self.pattern.groups else match[0]) or "other"


class TenantNames:
    """Numbers the tenants of a trace as they appear.

    Args:
        names: the list that grows; a `Trace`'s.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}

    def number(self, name: str) -> int:
        """The tenant's index.

        Raises:
            LineError: for one too many.
        """
        number = self._numbers.get(name)
        if number is None:
            if len(self._names) >= MAX_TENANTS:
                raise LineError(f"tenant {name!r} is one more than the {MAX_TENANTS} that a run may have")
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number


def parse_tenants(text: str, seed: int = 0) -> TenantRule | FieldRule:
    """Reads who gets what.

    Args:
        text: shares like `chat=3,batch=1`; `prompt:short<=1024,mid<=8192,long`, or `output:` likewise;
            `session:8`; `round-robin:4`; `field:NAME` or `field:NAME~REGEX`.
        seed: of the draws by share.

    Raises:
        InvalidArgumentError: if it is none of these.

    Example:
        >>> parse_tenants("prompt:short<=1024,long").names
        ['short', 'long']
    """
    kind, colon, rest = text.partition(":")
    match kind if colon else "":
        case "prompt" | "output":
            return ByLength(f"{kind}_tokens", _limits(text, rest))
        case "session":
            return BySession(_count(text, rest))
        case "round-robin":
            return RoundRobin(_count(text, rest))
        case "field":
            return _field(text, rest)
    return ByShare(_shares(text), seed)


def _refuse(text: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"--tenants is {text!r}: {reason}; expected {EXPECTED}")


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, given, share = part.partition("=")
        try:
            value = float(share) if given else 1.0
        except ValueError:
            value = -1.0
        if not name or name in shares or not 0 < value < float("inf"):
            raise _refuse(text, f"{part!r} is not a new name with a share above 0")
        shares[name] = value
    if len(shares) > MAX_TENANTS:
        raise _refuse(text, f"{len(shares)} tenants, {MAX_TENANTS} are the most")
    return shares


def _limits(text: str, rest: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for part in rest.split(","):
        name, given, most = part.partition("<=")
        limit = (int(most) if most.isdecimal() else -1) if given else float("inf")
        if not name or name in limits or limit <= max(limits.values(), default=0):
            raise _refuse(text, f"{part!r} is not a new name with a higher limit than the one before")
        limits[name] = limit
    if max(limits.values()) != float("inf"):
        raise _refuse(text, "the last name has a limit: who gets the longer requests?")
    if len(limits) > MAX_TENANTS:
        raise _refuse(text, f"{len(limits)} tenants, {MAX_TENANTS} are the most")
    return limits


def _count(text: str, rest: str) -> int:
    if not (rest.isdecimal() and 1 <= int(rest) <= MAX_TENANTS):
        raise _refuse(text, f"{rest!r} is not a number from 1 to {MAX_TENANTS}")
    return int(rest)


def _field(text: str, rest: str) -> FieldRule:
    name, given, pattern = rest.partition("~")
    if not name:
        raise _refuse(text, "no field is named")
    try:
        return FieldRule(name, re.compile(pattern) if given else None)
    except re.error as error:
        raise _refuse(text, f"{pattern!r} is no regular expression ({error})") from None
