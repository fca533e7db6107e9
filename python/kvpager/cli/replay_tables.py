"""What `kvpager replay` prints for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpager.replay.run import RunSettings, served_tokens
from kvpager.replay.trace import Trace
from kvpager.wording import counted

__all__ = ["print_omitted", "print_runs", "print_search"]

Run = dict[str, Any]


def print_runs(runs: list[Run], trace: Trace, settings: RunSettings) -> None:
    """Prints the settings, then one column a run.

    Args:
        runs: the runs.
        trace: the workload that they ran.
        settings: what they have in common.
    """
    console = Console(highlight=False)
    # Numbers that are cut off say nothing: a narrow terminal wraps lines instead.
    overflows = len({run.get("overflow") for run in runs}) > 1
    console.width = max(console.width, 150 if overflows else 100, 40 + 30 * len(runs))
    console.print(
        f"{escape(trace.name)} ({trace.format}): {counted(settings.blocks, 'block')} of "
        f"{counted(settings.block_size, 'token')}, "
        f"arrivals {settings.arrivals}, reuse {'on' if settings.reuse else 'off'}"
    )
    for note in trace.notes:
        console.print(f"Note: {escape(note)}")
    sequential = all(run["policy"] == "sequential" for run in runs)
    if not sequential:
        floor, per_token, per_kv_token, _ = settings.step_time
        console.print(
            f"Step time: max({floor * 1e3:g} ms, {per_token * 1e3:g} ms x tokens) + "
            f"{per_kv_token * 1e3:g} ms x context tokens"
        )
    table = Table("", *(_title(run) for run in runs), box=None)
    for label, value in _SEQUENTIAL if sequential else _SEQUENTIAL + _ROWS:
        table.add_row(label, *(value(run) for run in runs))
    console.print(table)
    if not sequential:
        for run in runs:
            console.print(_latency_table(run))
            if run["burst"] is not None:
                console.print(_burst_line(run))
                console.print(_burst_table(run))
            if len(run["tenants"]) > 1:
                console.print(_tenant_table(run))
    if overflows:
        console.print(_overflow_table(runs))


def print_omitted(omitted: list[dict[str, Any]]) -> None:
    """Says that the figures are of what had run, and what had not.

    Args:
        omitted: runs that were planned and not begun.
    """
    text = "Interrupted: the figures are of what had run."
    if omitted:
        names = (f"{_title(run)} in {counted(run['blocks'], 'block')}" for run in omitted)
        text += f" Not run: {'; '.join(names)}."
    Console(highlight=False).print(escape(text))


def print_search(result: dict[str, Any]) -> None:
    """Prints what a capacity search tried and found.

    Args:
        result: what `kvpager.replay.search.find` gives.
    """
    console = Console(highlight=False)
    bounds = result["objectives"]
    table = Table(
        result["what"], *(f"{name} <= {seconds:g} s" for name, seconds in bounds.items()), "met", box=None
    )
    for row in sorted(result["tries"], key=lambda row: row[result["what"]]):
        refused = "refuses requests" if row["refused"] else "yes" if row["met"] else "no"
        table.add_row(_number(row[result["what"]]), *(_number(row[name]) for name in bounds), refused)
    console.print(table)
    console.print(_found(result))


def _found(result: dict[str, Any]) -> str:
    """The answer, and what keeps it from being one."""
    name = "Fewest blocks" if result["what"] == "blocks" else "Highest rate"
    found = "nothing meets this" if result["found"] is None else _number(result["found"])
    if result["interrupted"]:
        found = "nothing yet" if result["found"] is None else f"{found} so far"
        return f"Interrupted. {name}: {found}"
    if result["at_limit"]:
        return f"{name}: at least {found}; no higher one was tried"
    return f"{name}: {found}"


def _number(value: float) -> str:
    """A number without an exponent: whole from a thousand on, else four figures."""
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4f}".rstrip("0") if abs(value) < 0.1 else f"{value:.4g}"


def _title(run: Run) -> str:
    overflow = run.get("overflow", "auto")
    names = (run["policy"], run["eviction"], None if overflow == "auto" else overflow)
    return ", ".join(name for name in names if name is not None)


def _rate(hits: int, of: int) -> str:
    return f"{hits / of:.2%}" if of else "none"


def _refused(run: Run) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in run["refused"].items()) or "0"


def _quantiles(values: dict[str, float], *names: str) -> str:
    return " / ".join(_number(values[name]) for name in names)


def _timed(run: Run, key: str, shown: Callable[[Any], str]) -> str:
    return "" if run[key] is None else shown(run[key])


def _oracle(run: Run) -> str:
    if not run["oracle_time"]:
        return "not run"
    # A reader takes a clairvoyant schedule for a bound. This one computes every prompt whole.
    reuse = " without reuse" if run["hit_tokens"] else ""
    return f"{run['virtual_time'] / run['oracle_time']:.3f}x of {run['oracle_time']:,.1f} s{reuse}"


def _shortage(run: Run) -> str:
    return " / ".join(f"{count:,}" for count in run["out_of_memory_if_short"].values())


_Row = tuple[str, Callable[[Run], str]]

_SEQUENTIAL: list[_Row] = [
    ("requests", lambda run: f"{run['requests']:,}"),
    ("finished", lambda run: f"{run['finished']:,}"),
    ("refused", _refused),
    ("skipped lines", lambda run: f"{run['skipped_lines']:,}"),
    ("blocks", lambda run: f"{run['blocks']:,}"),
    ("hit blocks", lambda run: f"{run['hit_blocks']:,} of {run['lookup_blocks']:,}"),
    ("hit rate, tokens", lambda run: _rate(run["hit_tokens"], run["prompt_tokens"])),
    ("peak held blocks", lambda run: f"{run['peak_held']:,}"),
    ("wall time", lambda run: _timed(run, "wall_time", lambda value: f"{value:.2f} s")),
]

_ROWS: list[_Row] = [
    ("mean held blocks", lambda run: f"{run['mean_held']:,.0f}"),
    ("held p50 / p99 / max", lambda run: _quantiles(run["memory"]["held"], "p50", "p99", "max")),
    ("cached p50 / p99 / max", lambda run: _quantiles(run["memory"]["cached"], "p50", "p99", "max")),
    ("reserved p50 / p99 / max", lambda run: _quantiles(run["memory"]["reserved"], "p50", "p99", "max")),
    ("free p50 / p99 / max", lambda run: _quantiles(run["memory"]["free"], "p50", "p99", "max")),
    (
        "if nothing were shared",
        lambda run: _quantiles(run["memory"]["held_if_nothing_were_shared"], "p50", "p99", "max"),
    ),
    (
        "contiguous reservation",
        lambda run: _quantiles(run["memory"]["contiguous_reservation"], "p50", "p99", "max"),
    ),
    ("internal waste", lambda run: f"{run['memory']['internal_waste']:.2%}"),
    ("out of memory", lambda run: f"{run['out_of_memory']:,}"),
    ("out of memory without it, short by 1 / 5 / 10 %", _shortage),
    ("batch p50 / p99 / max", lambda run: _quantiles(run["batch_size"], "p50", "p99", "max")),
    (
        "preempted requests",
        lambda run: f"{run['preempted_requests']:,} ({_rate(run['preempted_requests'], run['finished'])})",
    ),
    (
        "recomputed tokens",
        lambda run: f"{run['recomputed_tokens']:,} ({_rate(run['recomputed_tokens'], run['prompt_tokens'])})",
    ),
    (
        "swapped tokens",
        lambda run: f"{run['swapped_tokens']:,} ({_rate(run['swapped_tokens'], run['prompt_tokens'])})",
    ),
    (
        "lost tokens",
        lambda run: f"{run['lost_tokens']:,} ({_rate(run['lost_tokens'], run['prompt_tokens'])})",
    ),
    ("ended early", lambda run: f"{sum(run['ended_otherwise'].values()):,}"),
    ("worst token gap", lambda run: f"{run['worst_token_gap']:.3f} s"),
    ("virtual time", lambda run: f"{run['virtual_time']:,.1f} s"),
    ("against the oracle", _oracle),
    ("steps", lambda run: f"{run['steps']:,}"),
    ("scheduler steps a second", lambda run: _timed(run, "steps_per_second", lambda value: f"{value:,.0f}")),
    (
        "scheduler µs a step p50 / p99 / max",
        lambda run: _timed(run, "step_us", lambda value: _quantiles(value, "p50", "p99", "max")),
    ),
]

_LATENCIES = (
    ("queue_wait", "queue wait"),
    ("time_to_first_token", "first token"),
    ("time_per_output_token", "per token"),
    ("worst_gap", "worst gap"),
)


def _latency_table(run: Run) -> Table:
    """Latencies in seconds, by prompt length: the long tail shows where means would hide it."""
    table = Table(
        f"{_title(run)}: seconds", "prompts of", "requests", "p50", "p90", "p99", "p99.9", "max", box=None
    )
    least = 0
    for group in run["latency_by_context"]:
        most = group["prompt_tokens_at_most"]
        label = f"over {least:,}" if most is None else f"{least + 1:,} to {most:,}"
        least = most or least
        for name, title in _LATENCIES:
            values = group["latency"][name]
            if values["count"]:
                shown = (_number(values[key]) for key in ("p50", "p90", "p99", "p999", "max"))
                table.add_row(title, label, f"{values['count']:,}", *shown)
    return table


def _overflow_table(runs: list[Run]) -> Table:
    """Answers to overflow side by side, in the busiest ten seconds (if arrivals were spread) and overall."""
    table = Table(
        *("answer to overflow", "of", "first token p50 / p99 / max, s", "worst gap p50 / p99 / max, s"),
        *("taken back", "ended early", "lost tokens", "swapped tokens"),
        box=None,
    )
    for run in runs:
        for label, part in (("the burst", run["burst"]), ("the run", run)):
            if part is None:
                continue
            early = part["ended_otherwise"]
            table.add_row(
                _title(run),
                label,
                _quantiles(part["latency"]["time_to_first_token"], "p50", "p99", "max"),
                _quantiles(part["latency"]["worst_gap"], "p50", "p99", "max"),
                f"{part['preempted_requests']:,}",
                f"{early if isinstance(early, int) else sum(early.values()):,}",
                f"{part['lost_tokens']:,}",
                f"{run['swapped_tokens']:,}" if part is run else "",
            )
    return table


def _burst_line(run: Run) -> str:
    burst = run["burst"]
    return (
        f"{_title(run)}: the busiest {burst['window']:g} s (from {burst['from']:,.0f} s) brought "
        f"{counted(burst['arrivals'], 'request')}, {burst['times_mean']:.1f} times the mean (index of "
        f"dispersion {burst['index_of_dispersion']:.1f}); {burst['refused']:,} refused, "
        f"{burst['preempted_requests']:,} preempted, "
        f"{counted(burst['peak_held'], 'block')} held at most when one ended"
    )


def _burst_table(run: Run) -> Table:
    """The busiest ten seconds of arrivals beside the whole run."""
    table = Table("seconds", "in it p50 / p99 / max", "whole run", box=None)
    burst = run["burst"]
    for name, label in _LATENCIES:
        whole = run["latency"][name]
        table.add_row(
            label, *(_quantiles(part, "p50", "p99", "max") for part in (burst["latency"][name], whole))
        )
    return table


def _tenant_table(run: Run) -> Table:
    """What each tenant got, and how evenly: Jain's index of served tokens is 1 when all got the same.

    `most behind` is the most service (tokens computed and blocks x steps held) that another tenant got more
    in any stretch in which both waited.
    """
    names = (
        *("tenant", "finished", "served tokens", "service", "most behind", "hit rate"),
        "first token p50 / p99 / max, s",
    )
    title = f"{_title(run)}: tenants, Jain's index {run['fairness']:.3f}"
    table = Table(*names, title=title, title_justify="left", box=None)
    for tenant in run["tenants"]:
        table.add_row(
            escape(tenant["tenant"]),
            f"{tenant['finished']:,}",
            f"{served_tokens(tenant):,}",
            f"{tenant['service']:,}",
            f"{tenant['worst_service_gap']:,}",
            _rate(tenant["hit_tokens"], tenant["prompt_tokens"]),
            _quantiles(tenant["latency"]["time_to_first_token"], "p50", "p99", "max"),
        )
    return table
