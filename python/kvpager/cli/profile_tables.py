"""The tables of `kvpager profile`."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

__all__ = ["print_cases"]

_PERCENTILES = ("p50", "p99", "p999", "max")
_HEADINGS = ("p50", "p99", "p99.9", "max")


def print_cases(cases: list[dict[str, Any]], *, file: TextIO) -> None:
    """Prints steps, then phases, then what else was asked for."""
    console = Console(file=file, width=None if file.isatty() else 110, highlight=False)
    console.print(_steps(cases))
    console.print(_phases(cases))
    if any("interpreter" in case for case in cases):
        console.print(_interpreter(cases))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _cells(times_us: dict[str, float]) -> list[str]:
    return [f"{times_us[key]:,.1f}" for key in _PERCENTILES]


def _steps(cases: list[dict[str, Any]]) -> Table:
    instructions = any("instructions" in case for case in cases)
    extra = ["instr."] if instructions else []
    table = _table(
        "step + commit through Python, µs",
        "running",
        *_HEADINGS,
        "ns/seq.",
        "alloc.",
        "bytes",
        "record",
        "vLLM p50",
        *extra,
    )
    for case in cases:
        peer = case["peers"].get("vllm")
        row = [
            f"{case['running']:,}",
            *_cells(case["step_us"]),
            f"{case['ns_per_sequence']:.1f}",
            f"{case['allocations_per_step']:.1f}",
            f"{case['bytes_per_step']:,.0f}",
            f"{case['recording_overhead']:+.1%}",
            f"{peer['step_us']['p50']:,.0f} ({peer['ratio']:,.0f}x)" if peer else "none",
        ]
        if instructions:
            count = case.get("instructions", {})
            row.append(f"{count['per_step']:,} ({count['tool']})" if count.get("per_step") else "no tool")
        table.add_row(*row)
    return table


def _phases(cases: list[dict[str, Any]]) -> Table:
    table = _table("phases of a step, µs", "running", "phase", *_HEADINGS)
    for case in cases:
        for name, times_us in case["phases"].items():
            table.add_row(f"{case['running']:,}", name, *_cells(times_us))
        table.add_section()
    return table


def _interpreter(cases: list[dict[str, Any]]) -> Table:
    table = _table("step + commit beside busy Python threads, µs", "running", "busy", *_HEADINGS, "boundary")
    for case in cases:
        interpreter = case.get("interpreter")
        if interpreter is None:
            continue
        for busy, times_us in interpreter["step_us_beside_busy_threads"].items():
            boundary = f"{interpreter['boundary_us']:.1f}" if busy == "0" else ""
            table.add_row(f"{case['running']:,}", busy, *_cells(times_us), boundary)
    return table
