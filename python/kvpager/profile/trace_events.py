"""Recorded phases in the Trace Event format, which Perfetto and Chrome's tracing page open.

Format: "Trace Event Format", Google, 2016: complete events (`ph` "X"), times in microseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvpager import PhaseTimes
from kvpager.errors import InvalidArgumentError

__all__ = ["write_trace_events"]


def write_trace_events(path: Path, cases: list[tuple[str, PhaseTimes]]) -> int:
    """Writes one process of the trace for each case.

    Args:
        path: the file to write.
        cases: name and recording of each case.

    Returns:
        The number of spans written.

    Raises:
        InvalidArgumentError: if the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    for process, (name, times) in enumerate(cases, 1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 1, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": 1, "args": {"name": "engine"}}
        )
        spans = zip(
            times.span_phases.tolist(),
            times.span_starts_ns.tolist(),
            times.span_durations_ns.tolist(),
            times.span_step_ids.tolist(),
            strict=True,
        )
        events += (
            {
                "ph": "X",
                "name": times.PHASES[phase],
                "cat": "scheduler",
                "pid": process,
                "tid": 1,
                "ts": start / 1e3,
                "dur": duration / 1e3,
                "args": {"step": step},
            }
            for phase, start, duration, step in spans
        )
    document = {"traceEvents": events, "displayTimeUnit": "ns"}
    try:
        path.write_bytes(msgspec.json.encode(document))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}") from error
    return sum(len(times.span_phases) for _, times in cases)
