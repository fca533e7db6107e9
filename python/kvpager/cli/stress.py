"""`kvpager stress`: many threads work on block pools at once, and everything they see is checked."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["register", "stress"]

ROUND_SECONDS = 0.25
"""Longest round: between two of them the progress moves and Ctrl-C is heard."""


class Run(Protocol):
    """A run in rounds: the core's, or that of Python threads."""

    def advance(self, seconds: float) -> None:
        """Runs a round, for at most so many seconds."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong so far."""

    @property
    def num_operations(self) -> int:
        """Operations so far."""

    def report_json(self) -> str:
        """What was found so far."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("stress", short_help="Work the block pool hard, and check it.")(stress)


def stress(
    *,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that work at once.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=1e6, help="How long.")] = 10.0,
    blocks: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Blocks of the largest pool; many rounds use a small one.")
    ] = 4096,
    tenants: Annotated[int, typer.Option(min=1, max=250, help="Tenants of a pool.")] = 4,
    mix: Annotated[
        Literal["alloc", "share", "cow", "quota", "all"], typer.Option(help="What the threads do.")
    ] = "all",
    seed: Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="Of everything that is drawn.")] = 0,
    inject: Annotated[
        str | None,
        typer.Option(metavar="FAULT", help="Plant a fault, to see that it is seen; `list` names them."),
    ] = None,
    shrink_seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Longest time to make a failing history small.")
    ] = 10.0,
    python: Annotated[
        bool, typer.Option("--python", help="Work through the bindings, from Python threads.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Stress the block pool with random legal work, and check that nothing is lost or handed out twice.

    Threads allocate, reserve, share, copy on write, open and close steps and change quotas on a fresh pool a
    round, beside an owner map that sees a block in two hands. Exits with 1, the seed and the smallest failing
    history if anything is off.
    """
    if inject == "list":
        _list_faults()
        return
    for option, value in (("--seconds", seconds), ("--shrink-seconds", shrink_seconds)):
        if math.isnan(value):
            raise InvalidArgumentError(f"{option} is {value}, must be a number of seconds")
    if python and inject is not None:
        raise InvalidArgumentError(
            "--inject plants its fault into the pool of the Rust threads: leave --python out"
        )
    settings = {"threads": threads, "blocks": blocks, "tenants": tenants, "mix": mix, "seed": seed}
    run = _make_run(settings, inject, shrink_seconds, python=python)
    interrupted = False
    with _progress(seconds, shown=not as_json) as report:
        try:
            _work(run, seconds, report)
        except KeyboardInterrupt:
            interrupted = True
    found = {**json.loads(run.report_json()), "interrupted": interrupted}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print(found, inject)
    if not found["ok"]:
        raise typer.Exit(1)
    if interrupted:
        raise typer.Exit(130)


def _list_faults() -> None:
    from kvpager._core import Stress

    for name in Stress.fault_names():
        typer.echo(name)


def _make_run(settings: dict[str, Any], fault: str | None, shrink_seconds: float, *, python: bool) -> Run:
    if python:
        from kvpager.cli.stress_python import PythonStress

        return PythonStress(**settings)
    from kvpager._core import Stress

    return Stress(**settings, fault=fault, shrink_seconds=shrink_seconds)


def _work(run: Run, seconds: float, report: Callable[[float, int], None]) -> None:
    begin = time.monotonic()
    while run.is_sound and (left := seconds - (time.monotonic() - begin)) > 0:
        run.advance(min(left, ROUND_SECONDS))
        report(time.monotonic() - begin, run.num_operations)


@contextmanager
def _progress(seconds: float, *, shown: bool) -> Iterator[Callable[[float, int], None]]:
    """A bar on stderr with operations a second. Silent when stderr is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda _elapsed, _operations: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("stress"),
        BarColumn(),
        TextColumn("{task.fields[operations]:,} operations, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("stress", total=seconds, operations=0, rate=0.0)

        def report(elapsed: float, operations: int) -> None:
            rate = operations / max(elapsed, 1e-9)
            bar.update(task, completed=elapsed, operations=operations, rate=rate)

        yield report


def _print(found: dict[str, Any], inject: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    table = Table(title="Latencies, ns", title_justify="left")
    table.add_column("operations")
    for column in ("count", "p50", "p99", "p99.9", "max"):
        table.add_column(column, justify="right")
    rows = {**found["latency_by_operation_ns"], "all": found["latency_ns"]}
    for name, row in rows.items():
        table.add_row(
            name.replace("_", " "), *(f"{row[key]:,}" for key in ("count", "p50", "p99", "p999", "max"))
        )
    console.print(table)
    console.print(
        f"{found['operations']:,} operations in {found['rounds']:,} rounds and {found['wall_time']:.1f} s, "
        f"{found['checks']:,} checks at a standstill, seed {found['seed']}",
        soft_wrap=True,
    )
    if found["ok"]:
        planted = f"; the planted fault {inject} was not seen" if inject else ""
        console.print(f"ok: nothing is off{planted}", soft_wrap=True)
    else:
        _print_violations(found, console)


_WAYS = {
    "in_order": "one thread, in this order, always",
    "at_once": "each thread repeats its operations",
    "recorded": "not seen again; the last operations of each thread, as recorded",
}


def _print_violations(found: dict[str, Any], console: Console) -> None:
    for violation in found["violations"]:
        thread = "" if violation["thread"] is None else f"thread {violation['thread']}: "
        console.print(f"violation: {thread}{violation['text']}", soft_wrap=True, markup=False)
    history = found["history"]
    if history is None:
        return
    way = _WAYS[history["way"]]
    if history["way"] == "at_once":
        way += f"; {history['failures']} of {history['runs']} runs failed"
    console.print(f"smallest failing history ({way}):", soft_wrap=True, markup=False)
    quotas = ", ".join(f"{quota['guaranteed']}..{quota['limit']}" for quota in history["tenants"])
    console.print(
        f"  {history['blocks']} blocks, at most {history['max_open_steps']} open steps, "
        f"quotas (guaranteed..limit) {quotas}",
        soft_wrap=True,
        markup=False,
    )
    for number, step in enumerate(history["operations"], 1):
        console.print(
            f"  {number}. thread {step['thread']}: {step['operation']}", soft_wrap=True, markup=False
        )
    console.print(f"  then: {history['text']}", soft_wrap=True, markup=False)
