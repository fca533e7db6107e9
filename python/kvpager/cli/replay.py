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

from kvpager.cli.paths import given_path
from kvpager.cli.replay_checks import check_outputs, check_usage, names_in
from kvpager.errors import InvalidArgumentError
from kvpager.wording import counted

if TYPE_CHECKING:
    from kvpager.replay.study import Study
    from kvpager.replay.trace import Trace
    from kvpager.replay.watch import Report, Watch

__all__ = ["register", "replay"]

DEFAULT_POOL_TOKENS = 1_000_000

_Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A file, directory or archive, or generate:NAME, drawn from published lengths: chat, long-chat, "
        "reasoning, summarisation, short, essays, shift, shock, burst.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("replay", short_help="Run a real workload in virtual time.")(replay)


def replay(
    context: typer.Context,
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
    speed: Annotated[
        float, typer.Option(help="Of recorded arrivals, 1e-9 to 1e9; 2 halves every gap.")
    ] = 1.0,
    rate: Annotated[
        float, typer.Option(help="Requests a second, for --arrivals rate; where --find rate begins.")
    ] = 1.0,
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
    hardware: Annotated[
        str, typer.Option(help="Preset of the step time: 8b-hbm3, 8b-a100, 70b-hbm3x4.")
    ] = "8b-hbm3",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="STEPS.csv",
            parser=given_path,
            help="Fit the step time to measured tokens, context_tokens, seconds.",
        ),
    ] = None,
    oracle: Annotated[bool, typer.Option(help="Compare with the clairvoyant schedule.")] = True,
    shuffle: Annotated[int | None, typer.Option(min=0, help="Seed of another order of the requests.")] = None,
    tenants: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Who gets which request: a=3,b=1 by share; prompt:short<=1024,long by length, or output:; "
            "session:8; round-robin:4; field:NAME or field:NAME~REGEX.",
        ),
    ] = None,
    short_by: Annotated[
        str,
        typer.Option(
            metavar="PERCENTS",
            help="Like 0,1,5: run again on devices that lack so many percent of the blocks.",
        ),
    ] = "0",
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="BOUNDS",
            help="For --find, like ttft_p99=2s,tpot_p99=50ms: ttft, tpot, gap or queue, at p50, p90, p99, "
            "p999 or max.",
        ),
    ] = None,
    find: Annotated[
        str | None, typer.Option(help="blocks or rate: the fewest blocks or highest rate that meets --slo.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", parser=given_path, help="Write a page with plots.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=given_path, help="Write the plots as pictures.")
    ] = None,
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

    check_usage(_given(context))
    check_outputs(report, png)
    if tenants is not None:
        parse_tenants(tenants)
    if hardware not in CLOCKS:
        raise InvalidArgumentError(f"--hardware is {hardware!r}, expected {', '.join(CLOCKS)}")
    if reuse not in ("on", "off"):
        raise InvalidArgumentError(f"--reuse is {reuse!r}, expected on or off")
    overflows = names_in(overflow, "--overflow")
    pool_blocks = blocks or max(1, DEFAULT_POOL_TOKENS // block_size)
    if host_blocks is None:
        host_blocks = 4 * pool_blocks if "swap" in overflows else 0
    try:
        first = open_trace(trace, format_name=format_name, skip_bad=skip_bad, seed=seed, requests=requests)
    except InvalidArgumentError as error:
        if error.param == "format_name":
            raise InvalidArgumentError(f"{error}; name the format with --format") from error
        raise
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
        policies=names_in(policy, "--policy"),
        evictions=names_in(eviction, "--eviction"),
        overflows=overflows,
        format_name=format_name,
        skip_bad=skip_bad,
        sequential=sequential,
        oracle=oracle,
        shuffle=shuffle,
        tenants=tenants,
        short_by=_percents(short_by),
    )
    study.check()
    if "speed" in _given(context) and settings.arrivals != "recorded":
        raise InvalidArgumentError(f"--speed is of recorded arrivals, and {trace} has no times")
    if slo is not None and find is not None:
        _search(study, slo, find, as_json=as_json)
    else:
        _compare(study, first, report, png, timings=timings, as_json=as_json)


def _given(context: typer.Context) -> dict[str, object]:
    """The options that were written on the command line."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {
        name: context.params[name]
        for name, source in sources
        if source is not None and source.name == "COMMANDLINE"
    }


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
    from kvpager.replay.watch import Watch, asked_to_stop

    with asked_to_stop() as stop:
        with _progress(trace, study, shown=not as_json) as report:
            watch = Watch(report, stop)
            runs = study.run(watch)
        if not timings:
            runs = [without_timings(run) for run in runs]
        whole = True
        if runs and (page is not None or png is not None):
            whole = _write_report(study, trace, runs, page, png, Watch(stop=stop))
    omitted = study.planned()[len(runs) :]
    interrupted = bool(omitted) or not whole or any(run["interrupted"] for run in runs)
    if as_json:
        typer.echo(json.dumps({"runs": runs, "interrupted": interrupted, "omitted": omitted}))
    else:
        from kvpager.cli.replay_tables import print_omitted, print_runs

        if runs:
            print_runs(runs, trace, study.settings)
        if interrupted:
            print_omitted(omitted)
    _say_skipped(runs)
    if interrupted:
        raise typer.Exit(130)
    _check_ran(runs)


def _say_skipped(runs: list[dict[str, Any]]) -> None:
    """Bad lines that were skipped, on stderr: the figures are not of the whole trace."""
    worst = max(runs, key=lambda run: int(run["skipped_lines"]), default=None)
    if worst is not None and worst["skipped_lines"]:
        count = worst["skipped_lines"]
        typer.echo(
            f"kvpager: {counted(count, 'bad line')} skipped, the first: {worst['first_skipped_line']}",
            err=True,
        )


def _check_ran(runs: list[dict[str, Any]]) -> None:
    """Exits with 1 if a run finished nothing, with what became of its requests."""
    idle = next((run for run in runs if not run["finished"]), None)
    if idle is None:
        return
    ends = idle["refused"] | idle.get("ended_otherwise", {})
    counts = ", ".join(f"{count:,} {reason}" for reason, count in ends.items())
    first = f"; the first: {idle['first_refusal']}" if idle["first_refusal"] else ""
    typer.echo(
        f"kvpager: {idle['policy']}: none of {counted(idle['requests'], 'request')} ran in "
        f"{counted(idle['blocks'], 'block')} of {counted(idle['block_size'], 'token')} ({counts}){first}",
        err=True,
    )
    raise typer.Exit(1)


def _write_report(
    study: Study,
    trace: Trace,
    runs: list[dict[str, Any]],
    page: Path | None,
    png: Path | None,
    watch: Watch,
) -> bool:
    """Writes the page and the pictures; False if it was stopped before all was there."""
    from kvpager.replay.report import eviction_curves, plots_of, write_plots, write_report

    with TemporaryDirectory() as directory:
        target = page or Path(directory) / "report.html"
        curves = eviction_curves(study, watch)
        try:
            write_report(target, runs, trace, study, curves or [])
        except OSError as error:
            raise InvalidArgumentError(f"{target}: {error.strerror or error}") from error
        if png is not None and not watch.stop():
            write_plots(target, png, plots=plots_of(runs, curves or []))
            return curves is not None
    return curves is not None and png is None


def _search(study: Study, slo: str, what: str, *, as_json: bool) -> None:
    from kvpager.replay.search import find, parse_objectives
    from kvpager.replay.watch import Watch, asked_to_stop

    objectives = parse_objectives(slo)
    with asked_to_stop() as stop, _progress(study.open(), study, shown=not as_json) as report:
        result = find(study, objectives, what=what, watch=Watch(report, stop))
    run = result.pop("run")
    runs = [run] if run else []
    if as_json:
        typer.echo(json.dumps({"search": result, "runs": runs}))
    else:
        from kvpager.cli.replay_tables import print_search

        print_search(result)
    _say_skipped(runs)
    if result["interrupted"]:
        raise typer.Exit(130)
    if run is None:
        raise typer.Exit(1)


@contextmanager
def _progress(trace: Trace, study: Study, *, shown: bool) -> Iterator[Report]:
    """A progress line on stderr: requests, rate, time left. Silent when stderr is no terminal."""
    from kvpager.replay.watch import UNWATCHED

    if not shown or not sys.stderr.isatty():
        yield UNWATCHED.report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    requests = study.settings.requests
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
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
