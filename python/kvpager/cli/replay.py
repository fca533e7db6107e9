"""`kvpager replay`: a real workload through the real scheduler, index and pool, in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.replay.run import Report, RunSettings
    from kvpager.replay.trace import Trace

__all__ = ["register", "replay"]

DEFAULT_POOL_TOKENS = 1_000_000

_Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="A file, directory or archive, or generate:chat|long-chat|reasoning|…"
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay")(replay)


def replay(
    trace: _Trace,
    *,
    policy: Annotated[
        str, typer.Option(help="reserve, watermark, forecast; several with commas.")
    ] = "reserve",
    eviction: Annotated[str, typer.Option(help="lru, learned; several with commas.")] = "lru",
    block_size: Annotated[int, typer.Option(min=1, max=65536, help="Tokens of a block.")] = 16,
    blocks: Annotated[
        int | None, typer.Option(min=1, max=1 << 30, help="Blocks of the pool; default: a million tokens.")
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(help="recorded, rate or saturate; default: recorded, if the trace has times."),
    ] = None,
    speed: Annotated[float, typer.Option(help="Of recorded arrivals; 2 halves every gap.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Requests a second, for --arrivals rate.")] = 1.0,
    reuse: Annotated[str, typer.Option(help="on or off: look prefixes up and keep them.")] = "on",
    requests: Annotated[int | None, typer.Option(min=1, help="Take the first N, or draw N.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Index and pool alone, one request at a time in file order.")
    ] = False,
    format_name: Annotated[
        str, typer.Option("--format", help="auto, mooncake, azure, lengths, sessions, servegen, requests.")
    ] = "auto",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")] = False,
    max_output_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 24, help="Most tokens a request asks for; default: by workload."),
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of a step.")] = 8192,
    max_running: Annotated[int, typer.Option(min=1, max=1 << 16, help="Sequences of a step.")] = 1024,
    max_model_tokens: Annotated[int | None, typer.Option(min=1, max=1 << 24, help="Longest request.")] = None,
    max_prefill_chunk: Annotated[int, typer.Option(min=0, help="Longest prefill chunk; 0: the budget.")] = 0,
    hardware: Annotated[str, typer.Option(help="Preset of the step time.")] = "8b-hbm3",
    oracle: Annotated[bool, typer.Option(help="Compare with the clairvoyant schedule.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a workload: hit rate, memory, preemptions, latencies in the tail, and the scheduler's own cost.

    No model runs: a step takes as long as the printed formula says, and output tokens are counted.
    """
    from kvpager.replay.formats import open_trace
    from kvpager.replay.run import STEP_TIMES, RunSettings

    if hardware not in STEP_TIMES:
        raise InvalidArgumentError(f"--hardware is {hardware!r}, expected {', '.join(STEP_TIMES)}")
    if reuse not in ("on", "off"):
        raise InvalidArgumentError(f"--reuse is {reuse!r}, expected on or off")

    def opened() -> Trace:
        return open_trace(trace, format_name=format_name, skip_bad=skip_bad, seed=seed, requests=requests)

    first = opened()
    arrivals = arrivals or ("recorded" if first.has_times else "saturate")
    if arrivals == "recorded" and not first.has_times:
        raise InvalidArgumentError(f"{trace} has no arrival times: use --arrivals rate or saturate")
    settings = RunSettings(
        blocks=blocks or max(1, DEFAULT_POOL_TOKENS // block_size),
        block_size=block_size,
        reuse=reuse == "on",
        arrivals=arrivals,
        speed=speed,
        rate=rate,
        seed=seed,
        requests=requests,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_tokens=max_model_tokens or first.max_model_tokens,
        max_prefill_chunk=max_prefill_chunk,
        max_output_tokens=max_output_tokens or first.max_output_tokens,
        step_time=STEP_TIMES[hardware],
    )
    with _progress(first, settings, shown=not as_json) as progress:
        if sequential:
            runs = _sequential(opened, settings, eviction.split(","), progress)
        else:
            runs = _policies(opened, settings, policy.split(","), eviction.split(","), progress)
            if oracle and not any(run["interrupted"] for run in runs):
                _add_oracle(opened(), settings, runs)
    if as_json:
        typer.echo(json.dumps({"runs": runs}))
    else:
        _print(runs, first, settings)
    if any(run["interrupted"] for run in runs):
        raise typer.Exit(130)


def _sequential(
    opened: Any, settings: RunSettings, evictions: list[str], progress: Report
) -> list[dict[str, Any]]:
    from kvpager.replay.run import run_sequential

    return [run_sequential(opened(), settings, eviction=name, report=progress) for name in evictions]


def _policies(
    opened: Any, settings: RunSettings, policies: list[str], evictions: list[str], progress: Report
) -> list[dict[str, Any]]:
    from kvpager.replay.run import run_replay

    runs = []
    for policy in policies:
        for eviction in evictions:
            runs.append(run_replay(opened(), settings, policy=policy, eviction=eviction, report=progress))
            if runs[-1]["interrupted"]:
                return runs
    return runs


def _add_oracle(trace: Trace, settings: RunSettings, runs: list[dict[str, Any]]) -> None:
    from kvpager.replay.run import run_oracle

    outcome = run_oracle(trace, settings)
    if not outcome["interrupted"]:
        for run in runs:
            run["oracle_time"] = outcome["time"]
            run["oracle"] = {name: value for name, value in outcome.items() if name != "interrupted"}


def _silent(_ended: int, _steps: int, _now: float) -> None:
    """Shows nothing."""


@contextmanager
def _progress(trace: Trace, settings: RunSettings, *, shown: bool) -> Iterator[Report]:
    """A progress line on stderr: requests, rate, time left. Silent when stderr is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = settings.requests if settings.requests is not None else trace.count
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} requests/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(trace.name, total=total, rate=0.0)

        def report(ended: int, steps: int, now: float) -> None:
            elapsed = bar.tasks[0].elapsed or 1e-9
            description = f"{trace.name}: {steps:,} steps, {now:,.0f} s"
            bar.update(task, completed=ended, rate=ended / elapsed, description=description)

        yield report


def _print(runs: list[dict[str, Any]], trace: Trace, settings: RunSettings) -> None:
    from kvpager.cli.replay_tables import print_runs

    print_runs(runs, trace, settings)
