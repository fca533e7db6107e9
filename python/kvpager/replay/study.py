"""A comparison: one workload, several policies, and the schedule of somebody who knows every length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kvpager._core import Replay
from kvpager.errors import InvalidArgumentError
from kvpager.replay.formats import open_trace
from kvpager.replay.run import RunSettings, run_oracle, run_replay, run_sequential
from kvpager.replay.tenants import FieldRule, parse_tenants
from kvpager.replay.trace import Trace
from kvpager.replay.transforms import reordered
from kvpager.replay.watch import UNWATCHED, Watch

__all__ = ["Study"]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What `kvpager replay` runs.

    Attributes:
        source: a file, directory or archive, or `generate:NAME`.
        settings: what all runs have in common.
        policies: admission policies, each run with every eviction policy.
        evictions: eviction policies.
        overflows: answers to overflow, each run with every pair of policies; a host tier serves `auto` and
            `swap`.
        format_name: the trace's format, or `auto`.
        skip_bad: count bad lines and go on.
        sequential: index and pool alone.
        oracle: whether the clairvoyant schedule is run too.
        shuffle: seed of another order, or None for the order of the trace.
        tenants: who gets which requests, see `kvpager.replay.tenants`; None for the trace's own.
        short_by: percent of the blocks that a device lacks; each makes one more run a policy.
    """

    source: str
    settings: RunSettings
    policies: tuple[str, ...] = ("reserve",)
    evictions: tuple[str, ...] = ("lru",)
    overflows: tuple[str, ...] = ("auto",)
    format_name: str = "auto"
    skip_bad: bool = False
    sequential: bool = False
    oracle: bool = True
    shuffle: int | None = None
    tenants: str | None = None
    short_by: tuple[float, ...] = (0.0,)

    def open(self) -> Trace:
        """Opens the workload afresh.

        Raises:
            InvalidArgumentError: with file, line and reason.
        """
        settings = self.settings
        rule = None if self.tenants is None else parse_tenants(self.tenants, settings.seed)
        by_field = rule if isinstance(rule, FieldRule) else None
        trace = open_trace(
            self.source,
            format_name=self.format_name,
            skip_bad=self.skip_bad,
            seed=settings.seed,
            requests=settings.requests,
            tenants=by_field,
        )
        if settings.arrivals == "recorded" and not trace.has_times:
            raise InvalidArgumentError(f"{self.source} has no arrival times: use --arrivals rate or saturate")
        if rule is not None and not isinstance(rule, FieldRule):
            trace = rule.apply(trace)
        if self.shuffle is not None:
            trace = reordered(trace, self.shuffle, limit=settings.requests)
        return trace

    def run(self, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """Runs everything; stopped, it ends with the runs so far, `interrupted` where they lack something.

        Args:
            watch: looks at the runs now and then.
        """
        runs: list[dict[str, Any]] = []
        for share in self.short_by:
            part = self.shorter(share)
            fresh = part.run_policies(watch)
            runs += fresh
            if self.oracle and not self.sequential:
                part.add_oracle(fresh, watch)
        return runs

    def check(self) -> None:
        """Refuses a name or a share that a later run would refuse, before the first one.

        Raises:
            InvalidArgumentError: with the name or the share.
        """
        for policy, eviction, overflow in product(self.policies, self.evictions, self.overflows):
            host_blocks = min(64, self._host_blocks(overflow))
            sample = RunSettings(blocks=64, overflow=overflow, host_blocks=host_blocks)
            Replay(sample, policy=policy, eviction=eviction, hash_block=1, tenants=["all"])
        self.planned()

    def planned(self) -> list[dict[str, Any]]:
        """What `run` runs, in its order: `policy`, `eviction`, `overflow` and `blocks` of each."""
        names = ("policy", "eviction", "overflow")
        return [
            dict(zip(names, choice, strict=True)) | {"blocks": self.shorter(share).settings.blocks}
            for share in self.short_by
            for choice in self._combinations()
        ]

    def shorter(self, percent: float) -> Study:
        """The same study on a device that lacks some of its blocks."""
        if not 0 <= percent < 100:
            raise InvalidArgumentError(f"--short-by is {percent:g}, expected percents from 0 to below 100")
        blocks = max(1, round(self.settings.blocks * (1 - percent / 100)))
        return replace(self, settings=replace(self.settings, blocks=blocks), short_by=(0.0,))

    def run_policies(self, watch: Watch = UNWATCHED) -> list[dict[str, Any]]:
        """Runs every policy on this study's device, until it is asked to stop."""
        runs = []
        for policy, eviction, overflow in self._combinations():
            if watch.stop():
                break
            if self.sequential:
                run = run_sequential(self.open(), self.settings, eviction=eviction, watch=watch)
            else:
                settings = replace(
                    self.settings,
                    overflow=overflow,
                    host_blocks=self._host_blocks(overflow),
                )
                run = run_replay(self.open(), settings, policy=policy, eviction=eviction, watch=watch)
            runs.append(run)
        return runs

    def _host_blocks(self, overflow: str) -> int:
        """Blocks of the host tier, for an answer that uses it."""
        return self.settings.host_blocks if overflow in ("auto", "swap") else 0

    def _combinations(self) -> Iterator[tuple[str, str, str]]:
        if self.sequential:
            return product(("sequential",), self.evictions, ("auto",))
        return product(self.policies, self.evictions, self.overflows)

    def add_oracle(self, runs: list[dict[str, Any]], watch: Watch = UNWATCHED) -> None:
        """Runs the clairvoyant schedule and adds it to each run; stopped, they are `interrupted`."""
        outcome = None if watch.stop() else run_oracle(self.open(), self.settings, watch)
        if outcome is None or outcome.pop("interrupted"):
            for run in runs:
                run["interrupted"] = True
            return
        for run in runs:
            run["oracle_time"] = outcome["time"]
            run["oracle"] = outcome
