"""`kvpager replay`: a real workload through the real scheduler, index and pool, in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.replay.run import Report
    from kvpager.replay.study import Study
    from kvpager.replay.trace import Trace

__all__ = ["register", "replay"]

DEFAULT_POOL_TOKENS = 1_000_000

_Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="A file, directory or archive, or generate:chat|long-chat|reasoning|burst|…"
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
    eviction: Annotated[str, typer.Option(help="lru, learned, clock; several with commas.")] = "lru",
    overflow: Annotated[
        str,
        typer.Option(help="When the pool is outgrown: auto, recompute, swap, refuse; several with commas."),
    ] = "auto",
    host_blocks: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1 << 30,
            help="Blocks of the host tier; default: for swap four times the pool's, else 0.",
        ),
    ] = None,
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
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="STEPS.csv", help="Fit the step time to measured tokens, context_tokens, seconds."
        ),
    ] = None,
    oracle: Annotated[bool, typer.Option(help="Compare with the clairvoyant schedule.")] = True,
    shuffle: Annotated[int | None, typer.Option(min=0, help="Seed of another order of the requests.")] = None,
    tenants: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Who gets which request: a=3,b=1 by share; prompt:short<=1024,long by length (or output:…); "
            "session:8; round-robin:4; field:NAME or field:NAME~REGEX.",
        ),
    ] = None,
    short_by: Annotated[
        str,
        typer.Option(metavar="0,1,5", help="Run again on devices that lack so many percent of the blocks."),
    ] = "0",
    slo: Annotated[
        str | None, typer.Option(metavar="ttft_p99=2s,…", help="Bounds on ttft, tpot, gap, queue for --find.")
    ] = None,
    find: Annotated[
        str | None, typer.Option(help="blocks or rate: the fewest blocks or highest rate that meets --slo.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a page with plots.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the plots as pictures.")] = None,
    timings: Annotated[
        bool, typer.Option(help="Without, the same seed prints the same bytes: no wall times.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a workload: hit rate, memory, preemptions, latencies in the tail, and the scheduler's own cost.

    No model runs: a step takes as long as the printed formula says, and output tokens are counted.
    """
    from kvpager.replay.formats import open_trace
    from kvpager.replay.run import CLOCKS, RunSettings
    from kvpager.replay.study import Study
    from kvpager.replay.tenants import parse_tenants

    if tenants is not None:
        parse_tenants(tenants)
    if hardware not in CLOCKS:
        raise InvalidArgumentError(f"--hardware is {hardware!r}, expected {', '.join(CLOCKS)}")
    if reuse not in ("on", "off"):
        raise InvalidArgumentError(f"--reuse is {reuse!r}, expected on or off")
    if (slo is None) != (find is None):
        raise InvalidArgumentError("--slo and --find go together: what must hold, and what to look for")
    overflows = tuple(overflow.split(","))
    pool_blocks = blocks or max(1, DEFAULT_POOL_TOKENS // block_size)
    if host_blocks is None:
        host_blocks = 4 * pool_blocks if "swap" in overflows else 0
    first = open_trace(trace, format_name=format_name, skip_bad=skip_bad, seed=seed, requests=requests)
    settings = RunSettings(
        blocks=pool_blocks,
        host_blocks=host_blocks,
        block_size=block_size,
        reuse=reuse == "on",
        arrivals=arrivals or ("recorded" if first.has_times else "saturate"),
        speed=speed,
        rate=rate,
        seed=seed,
        requests=requests,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_tokens=max_model_tokens or first.max_model_tokens,
        max_prefill_chunk=max_prefill_chunk,
        max_output_tokens=max_output_tokens or first.max_output_tokens,
        clock=CLOCKS[hardware] if calibrate is None else _calibrated(calibrate),
    )
    study = Study(
        source=trace,
        settings=settings,
        policies=tuple(policy.split(",")),
        evictions=tuple(eviction.split(",")),
        overflows=overflows,
        format_name=format_name,
        skip_bad=skip_bad,
        sequential=sequential,
        oracle=oracle,
        shuffle=shuffle,
        tenants=tenants,
        short_by=_percents(short_by),
    )
    if slo is not None and find is not None:
        _search(study, slo, find, as_json=as_json)
    else:
        _compare(study, first, report, png, timings=timings, as_json=as_json)


def _calibrated(path: Path) -> tuple[float, float, float]:
    from kvpager.replay.calibrate import calibrate

    fit = calibrate(path)
    typer.echo(
        f"Step time fitted to {fit.steps} steps: {fit.median_error:.1%} off in the median, "
        f"{fit.worst_error:.1%} at worst",
        err=True,
    )
    return fit.clock


def _percents(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgumentError(f"--short-by is {text!r}, expected percents like 0,1,5,10") from None


def _compare(
    study: Study, trace: Trace, page: Path | None, png: Path | None, *, timings: bool, as_json: bool
) -> None:
    from kvpager.replay.run import without_timings

    with _progress(trace, study, shown=not as_json) as progress:
        runs = study.run(progress)
    if not timings:
        runs = [without_timings(run) for run in runs]
    if page is not None or png is not None:
        _write_report(study, trace, runs, page, png)
    if as_json:
        typer.echo(json.dumps({"runs": runs}))
    else:
        from kvpager.cli.replay_tables import print_runs

        print_runs(runs, trace, study.settings)
    if any(run["interrupted"] for run in runs):
        raise typer.Exit(130)
    idle = next((run for run in runs if not run["finished"]), None)
    if idle is not None:
        refused = ", ".join(f"{count:,} {reason}" for reason, count in idle["refused"].items())
        typer.echo(
            f"kvpager: {idle['policy']}: none of {idle['requests']:,} requests ran in {idle['blocks']:,} "
            f"blocks of {idle['block_size']} tokens ({refused}): give more --blocks or fewer "
            "--max-output-tokens",
            err=True,
        )
        raise typer.Exit(1)


def _write_report(
    study: Study, trace: Trace, runs: list[dict[str, Any]], page: Path | None, png: Path | None
) -> None:
    from kvpager.replay.report import eviction_curves, plots_of, write_plots, write_report

    with TemporaryDirectory() as directory:
        target = page or Path(directory) / "report.html"
        interrupted = any(run["interrupted"] for run in runs)
        curves = [] if interrupted else eviction_curves(study)
        try:
            write_report(target, runs, trace, study, curves)
        except OSError as error:
            raise InvalidArgumentError(f"{target}: {error.strerror or error}") from error
        if png is not None:
            write_plots(target, png, plots=plots_of(runs, curves))


def _search(study: Study, slo: str, what: str, *, as_json: bool) -> None:
    from kvpager.replay.search import find, parse_objectives

    objectives = parse_objectives(slo)
    try:
        with _progress(study.open(), study, shown=not as_json) as progress:
            result = find(study, objectives, what=what, report=progress)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    run = result.pop("run")
    if as_json:
        typer.echo(json.dumps({"search": result, "runs": [run] if run else []}))
    else:
        from kvpager.cli.replay_tables import print_search

        print_search(result)
    if run is None:
        raise typer.Exit(1)


def _silent(_ended: int, _steps: int, _now: float) -> None:
    """Shows nothing."""


@contextmanager
def _progress(trace: Trace, study: Study, *, shown: bool) -> Iterator[Report]:
    """A progress line on stderr: requests, rate, time left. Silent when stderr is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    requests = study.settings.requests
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} requests/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(trace.name, total=trace.count if requests is None else requests, rate=0.0)

        def report(ended: int, steps: int, now: float) -> None:
            elapsed = bar.tasks[0].elapsed or 1e-9
            description = f"{trace.name}: {steps:,} steps, {now:,.0f} s"
            bar.update(task, completed=ended, rate=ended / elapsed, description=description)

        yield report
