"""CSV files: Azure LLM inference traces, and bare lists of lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import BadLines, Columns, ColumnsBuilder, LineError
from kvpager.replay.tenants import FieldRule, TenantNames
from kvpager.replay.text import cells_of, first_line, numbered_lines
from kvpager.replay.trace import Trace

__all__ = ["AZURE_COLUMNS", "LENGTH_COLUMNS", "header", "read_azure", "read_lengths"]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTH_COLUMNS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("input_length", "output_length"),
    ("input_tokens", "output_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("prompt_tokens", "completion_tokens"),
    ("prompt_len", "output_len"),
)
"""Column names of prompt and output length that a length table may have."""

TIME_COLUMNS = ("timestamp", "arrival", "arrival_time", "arrived_at")
"""Column names of an arrival time in seconds."""


def header(path: Path) -> list[str]:
    """The names in the first line of a CSV file."""
    try:
        return [name.strip() for name in cells_of(first_line(path))]
    except LineError as error:
        raise InvalidArgumentError(f"{path}: line 1: {error}") from error


class _TenantColumn:
    """The tenant of a row by the column that a rule names; without a rule everybody is one tenant.

    Args:
        path: the file, which is read once for the tenants' names.
        names: its column names.
        rule: the rule.

    Raises:
        InvalidArgumentError: without such a column.
    """

    def __init__(self, path: Path, names: list[str], rule: FieldRule | None) -> None:
        self.tenants: list[str] = ["all"] if rule is None else []
        self._numbers = TenantNames(self.tenants)
        self._rule = rule
        self._place = 0
        if rule is None:
            return
        if rule.field not in names:
            raise InvalidArgumentError(f"{path}: line 1: no column {rule.field} for --tenants")
        self._place = names.index(rule.field)
        for _, cells in _rows(path, BadLines(path, skip=True)):
            with suppress(LineError):
                self.number(cells)

    def number(self, cells: list[str]) -> int:
        """Index of the row's tenant."""
        if self._rule is None:
            return 0
        return self._numbers.number(self._rule.tenant(_cell(cells, self._place) or None))


def read_azure(path: Path, bad: BadLines, tenants: FieldRule | None = None) -> Trace:
    """Reads `TIMESTAMP, ContextTokens, GeneratedTokens`; times count from the first row's."""
    names = header(path)
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise InvalidArgumentError(f"{path}: line 1: no column {missing[0]}")
    places = tuple(names.index(name) for name in AZURE_COLUMNS)
    column = _TenantColumn(path, names, tenants)
    return Trace(path.name, "azure", _azure_requests(path, bad, places, column), bad, tenants=column.tenants)


def _azure_requests(
    path: Path, bad: BadLines, places: tuple[int, ...], column: _TenantColumn
) -> Iterator[Columns]:
    builder = ColumnsBuilder()
    start: datetime | None = None
    for number, cells in _rows(path, bad):
        try:
            time, prompt, output = (_cell(cells, place) for place in places)
            moment = _moment(time)
            builder.append(
                arrival=0.0 if start is None else (moment - start).total_seconds(),
                prompt_tokens=_count(prompt),
                output_tokens=_count(output),
                tenant=column.number(cells),
            )
            start = start or moment
        except LineError as error:
            bad.report(number, str(error))
        yield from builder.full()
    yield from builder.rest()


def read_lengths(path: Path, bad: BadLines, tenants: FieldRule | None = None) -> Trace:
    """Reads a table with a column of prompt and one of output lengths, and perhaps one of arrival seconds."""
    names = header(path)
    pair = next((pair for pair in LENGTH_COLUMNS if set(pair) <= set(names)), None)
    if pair is None:
        known = ", ".join("/".join(pair) for pair in LENGTH_COLUMNS)
        raise InvalidArgumentError(f"{path}: line 1: no columns of lengths; known pairs: {known}")
    time = next((names.index(name) for name in TIME_COLUMNS if name in names), None)
    places = (names.index(pair[0]), names.index(pair[1]))
    column = _TenantColumn(path, names, tenants)
    return Trace(
        path.name,
        "lengths",
        _length_requests(path, bad, places, time, column),
        bad,
        has_times=time is not None,
        tenants=column.tenants,
    )


def _length_requests(
    path: Path, bad: BadLines, places: tuple[int, int], time: int | None, column: _TenantColumn
) -> Iterator[Columns]:
    builder = ColumnsBuilder()
    for number, cells in _rows(path, bad):
        try:
            prompt, output = (_count(_cell(cells, place)) for place in places)
            builder.append(
                arrival=0.0 if time is None else _seconds(_cell(cells, time)),
                prompt_tokens=prompt,
                output_tokens=output,
                tenant=column.number(cells),
            )
        except LineError as error:
            bad.report(number, str(error))
        yield from builder.full()
    yield from builder.rest()


def _rows(path: Path, bad: BadLines) -> Iterator[tuple[int, list[str]]]:
    """Cells of every line after the header."""
    lines = numbered_lines(path, bad)
    next(lines, None)
    for number, line in lines:
        try:
            cells = cells_of(line)
        except LineError as error:
            bad.report(number, str(error))
            continue
        yield number, cells


def _cell(cells: list[str], place: int) -> str:
    if place >= len(cells):
        raise LineError(f"{len(cells)} columns, column {place + 1} is missing")
    return cells[place].strip()


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LineError(f"length is {text!r}, expected a whole number") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise LineError(f"time is {text!r}, expected seconds") from None


def _moment(text: str) -> datetime:
    """A wall-clock time; digits beyond microseconds are dropped."""
    whole, point, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(f"{whole}{point}{fraction[:6]}" if point else whole)
    except ValueError:
        raise LineError(f"TIMESTAMP is {text!r}, expected a date and time") from None
