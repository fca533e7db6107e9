"""A comparison: one workload, several policies, and the schedule of somebody who knows every length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.replay.formats import open_trace
from kvpager.replay.run import Report, RunSettings, run_oracle, run_replay, run_sequential
from kvpager.replay.tenants import FieldRule, parse_tenants
from kvpager.replay.trace import Trace
from kvpager.replay.transforms import reordered

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

    def run(self, report: Report | None = None) -> list[dict[str, Any]]:
        """Runs everything; Ctrl-C ends it with the runs so far, the last one marked `interrupted`.

        Args:
            report: called now and then with the progress.
        """
        runs: list[dict[str, Any]] = []
        for share in self.short_by:
            part = self.shorter(share)
            fresh = part.run_policies(report)
            runs += fresh
            if any(run["interrupted"] for run in fresh):
                break
            if self.oracle and not self.sequential:
                part.add_oracle(fresh)
        return runs

    def shorter(self, percent: float) -> Study:
        """The same study on a device that lacks some of its blocks."""
        if not 0 <= percent < 100:
            raise InvalidArgumentError(f"--short-by is {percent:g}, expected percents from 0 to below 100")
        blocks = max(1, round(self.settings.blocks * (1 - percent / 100)))
        return replace(self, settings=replace(self.settings, blocks=blocks), short_by=(0.0,))

    def run_policies(self, report: Report | None) -> list[dict[str, Any]]:
        """Runs every policy on this study's device."""
        runs = []
        for policy, eviction, overflow in self._combinations():
            if self.sequential:
                run = run_sequential(self.open(), self.settings, eviction=eviction, report=report)
            else:
                settings = replace(
                    self.settings,
                    overflow=overflow,
                    host_blocks=self.settings.host_blocks if overflow in ("auto", "swap") else 0,
                )
                run = run_replay(self.open(), settings, policy=policy, eviction=eviction, report=report)
            runs.append(run)
            if run["interrupted"]:
                return runs
        return runs

    def _combinations(self) -> Iterator[tuple[str, str, str]]:
        if self.sequential:
            return product(("sequential",), self.evictions, ("auto",))
        return product(self.policies, self.evictions, self.overflows)

    def add_oracle(self, runs: list[dict[str, Any]]) -> None:
        """Runs the clairvoyant schedule and adds it to each run."""
        outcome = run_oracle(self.open(), self.settings)
        if outcome.pop("interrupted"):
            runs[-1]["interrupted"] = True
            return
        for run in runs:
            run["oracle_time"] = outcome["time"]
            run["oracle"] = outcome
