"""What every reader gives: the requests as columns, and what must be known of the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpager.replay.columns import BadLines, Columns

__all__ = ["Trace"]


@dataclass
class Trace:
    """A workload that streams.

    Attributes:
        name: what the report calls it.
        format: the reader's name.
        requests: blocks of columns, in order of arrival.
        bad: lines that were skipped.
        has_times: whether the arrival times are of the trace.
        hash_block: prompt tokens that one hash id stands for; 0 if it has none.
        max_output_tokens: most tokens that its requests asked for, as far as is known.
        max_model_tokens: longest request that it is expected to have.
        count: number of requests if it is known beforehand, for the progress display.
        tenants: names of the tenants, by index.
        notes: what the reader had to invent, in sentences.
    """

    name: str
    format: str
    requests: Iterator[Columns]
    bad: BadLines
    has_times: bool = True
    hash_block: int = 0
    max_output_tokens: int = 4096
    max_model_tokens: int = 131072
    count: int | None = None
    tenants: list[str] = field(default_factory=lambda: ["all"])
    notes: list[str] = field(default_factory=list)
