"""`kvpager profile`: what the scheduler costs, and where."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvpager.cli.paths import given_path
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.profile.load import Load
    from kvpager.profile.measure import CaseTimes

__all__ = ["profile", "register"]

MAX_RUNNING = 16_384
INSTRUCTION_STEPS = 2000


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("profile", short_help="Time steps of the scheduler.")(profile)


def profile(
    workload: Annotated[
        str | None, typer.Argument(metavar="[TRACE]", help="Take the lengths of a trace's requests.")
    ] = None,
    *,
    running: Annotated[
        str, typer.Option(help="Sequences that run at once; several with commas.")
    ] = "64,256,1024",
    steps: Annotated[int, typer.Option(min=10, max=10_000_000, help="Steps to time of each case.")] = 2000,
    prompt: Annotated[int, typer.Option(min=1, max=1 << 20, help="Prompt tokens of a request.")] = 256,
    output: Annotated[int, typer.Option(min=1, max=1 << 20, help="Output tokens of a request.")] = 256,
    prefix_share: Annotated[
        float, typer.Option(help="Part of the prompt that a tenant's requests have in common, 0 to 1.")
    ] = 0.5,
    tenants: Annotated[int, typer.Option(min=1, max=32, help="Tenants that take turns.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, max=65536, help="Tokens of a block.")] = 16,
    policy: Annotated[
        Literal["reserve", "watermark", "forecast"], typer.Option(help="Admission policy.")
    ] = "reserve",
    seed: Annotated[int, typer.Option(min=0, help="Of the tokens that are drawn.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json", parser=given_path, help="Write the phases as trace events (Perfetto)."
        ),
    ] = None,
    python: Annotated[
        bool, typer.Option("--python", help="Add the boundary's cost, and steps beside busy Python threads.")
    ] = False,
    instructions: Annotated[
        bool, typer.Option("--instructions", help="Count instructions with perf or valgrind (slow).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time steps of the scheduler without a model: percentiles, phases, allocations, bytes.

    Sequences that end are followed by the next, so a step has decodes, some prompts and admissions. Where
    vLLM is installed, its scheduler runs the same load in the same process beside it.
    """
    from kvpager.profile.load import Load, requests_of_trace

    sizes = _parse_running(running)
    requests = () if workload is None else requests_of_trace(workload, count=4 * max(sizes), longest=1 << 17)
    loads = [
        Load(
            running=size,
            prompt=prompt,
            output=output,
            prefix_share=prefix_share,
            tenants=tenants,
            block_size=block_size,
            policy=policy,
            seed=seed,
            requests=requests,
        )
        for size in sizes
    ]
    cases: list[dict[str, Any]] = []
    recorded = []
    is_interrupted = False
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # There is something to save now: Ctrl-C while a peer's modules load is an exception like any other.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for load in loads:
            case, times = _measure(load, steps, spans=trace is not None, shown=not as_json)
            cases.append(case)
            recorded.append((f"{load.running} running", times.phases))
            if not times.is_complete:
                raise KeyboardInterrupt
            case["peers"] = _peers(case, load, steps)
            if python:
                case["interpreter"] = _interpreter(times, steps)
            if instructions:
                case["instructions"] = _instructions(load)
    except KeyboardInterrupt:
        is_interrupted = True
    if trace is not None and recorded:
        from kvpager.profile.trace_events import write_trace_events

        write_trace_events(trace, recorded)
    if cases or as_json:
        _print(cases, as_json=as_json)
    if is_interrupted:
        typer.echo(_what_was_left_out(cases, steps), err=True)
        raise typer.Exit(130)


def _what_was_left_out(cases: list[dict[str, Any]], steps: int) -> str:
    if not cases:
        return "interrupted before anything was timed"
    last = cases[-1]
    return f"interrupted: {last['steps']} of {steps} steps with {last['running']} running, no further cases"


def _parse_running(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgumentError(f"--running is {text!r}, expected whole numbers with commas") from None
    for size in sizes:
        if not 1 <= size <= MAX_RUNNING:
            raise InvalidArgumentError(f"--running has {size}, must be from 1 to {MAX_RUNNING}")
    return sizes


def _measure(load: Load, steps: int, *, spans: bool, shown: bool) -> tuple[dict[str, Any], CaseTimes]:
    """One case as the JSON has it, and its times."""
    from kvpager.profile.measure import SPANS_PER_STEP, measure, percentiles_us

    with _progress(f"{load.running} running", steps, shown=shown) as report:
        times = measure(load, steps, max_spans=SPANS_PER_STEP * steps if spans else 0, report=report)
    phases = {
        name: {
            key: times.phases.percentile_ns(percentile, name) / 1e3
            for key, percentile in (("p50", 50), ("p99", 99), ("p999", 99.9), ("max", 100))
        }
        for name in times.phases.PHASES
    }
    step_us = percentiles_us(times.steps_ns)
    case: dict[str, Any] = {
        "running": load.running,
        "steps": len(times.steps_ns),
        "step_us": step_us,
        "ns_per_sequence": step_us["p50"] * 1e3 / load.running,
        "phases": phases,
        "allocations_per_step": float(times.allocations.mean()),
        "bytes_per_step": float(times.bytes_written.mean()),
        "recording_overhead": times.recording_overhead,
        "peers": {},
    }
    return case, times


def _peers(case: dict[str, Any], load: Load, steps: int) -> dict[str, Any]:
    """The scheduler of vLLM under the same load, where that is installed."""
    from kvpager.profile.measure import percentiles_us
    from kvpager.profile.vllm_scheduler import steps_of_vllm

    peer_ns = steps_of_vllm(load, max(50, steps // 20))
    if peer_ns is None:
        return {}
    peer_us = percentiles_us(peer_ns)
    return {"vllm": {"step_us": peer_us, "ratio": peer_us["p50"] / case["step_us"]["p50"]}}


def _interpreter(times: CaseTimes, steps: int) -> dict[str, Any]:
    from kvpager.profile.interpreter import BUSY_THREADS, steps_beside
    from kvpager.profile.measure import percentiles_us

    beside = {
        str(busy): percentiles_us(steps_beside(times.load, min(steps, 2000 if busy == 0 else 500), busy))
        for busy in BUSY_THREADS
    }
    return {"boundary_us": times.boundary_ns / 1e3, "step_us_beside_busy_threads": beside}


def _instructions(load: Load) -> dict[str, Any]:
    from kvpager.profile.instructions import count_instructions

    counted = count_instructions(load, INSTRUCTION_STEPS)
    if counted is None:
        return {"per_step": None, "tool": None}
    return {"per_step": round(counted[0]), "tool": counted[1]}


def _print(cases: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"cases": cases}))
        return
    from kvpager.cli.profile_tables import print_cases

    print_cases(cases, file=sys.stdout)


@contextmanager
def _progress(name: str, steps: int, *, shown: bool) -> Iterator[Callable[[int], None] | None]:
    """A progress line on stderr; silent when stderr is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=steps)
        yield lambda done: bar.update(task, completed=done)
