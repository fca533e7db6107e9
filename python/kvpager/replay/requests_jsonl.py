"""Request lists as benchmark clients write them: vLLM bench and AIPerf JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvpager.replay.columns import BadLines, Columns, ColumnsBuilder, LineError
from kvpager.replay.tenants import FieldRule, TenantNames
from kvpager.replay.text import decode_json, numbered_lines
from kvpager.replay.trace import Trace

__all__ = ["read_requests"]

PROMPT_NAMES = ("input_length", "prompt_len", "prompt_tokens", "num_prompt_tokens", "input_tokens", "isl")
OUTPUT_NAMES = (
    "output_length",
    "output_len",
    "output_tokens",
    "max_tokens",
    "max_completion_tokens",
    "expected_output_len",
    "osl",
)
SECONDS_NAMES = ("arrival_time", "arrival", "arrived_at")
"""Arrival in seconds; AIPerf's `timestamp` and `delay` are in milliseconds."""

TENANT_NAMES = ("tenant", "user", "user_id", "customer")


def read_requests(path: Path, bad: BadLines, tenants: FieldRule | None = None) -> Trace:
    """Reads one JSON object a line: lengths, and perhaps times, ids, a session and a tenant.

    A prompt given as token ids counts them; a prompt given as text has no token count here and is refused.
    A line with `turns` is a whole session, one request a turn.

    Args:
        path: the file.
        bad: what to do with a bad line.
        tenants: the field that names the tenant; by default the first of `TENANT_NAMES` that a line has.
    """
    trace = Trace(path.name, "requests", iter(()), bad, hash_block=512, tenants=[], has_times=True)
    reader = _Reader(path, bad, trace, tenants)
    reader.peek()
    trace.requests = reader.requests()
    return trace


class _Reader:
    def __init__(self, path: Path, bad: BadLines, trace: Trace, rule: FieldRule | None) -> None:
        self._path = path
        self._bad = bad
        self._trace = trace
        self._rule = rule
        self._tenants = TenantNames(trace.tenants)
        self._sessions: dict[str, int] = {}

    def peek(self) -> None:
        """Reads the file once for what must be known beforehand: times, and the names of the tenants."""
        quiet = BadLines(self._path, skip=True)
        first = True
        for _, line in numbered_lines(self._path, quiet):
            try:
                row = decode_json(msgspec.json.decode, line)
                if isinstance(row, dict):
                    if first:
                        self._trace.has_times, first = _time(row) is not None, False
                    self._tenant(row)
            except LineError:
                continue

    def requests(self) -> Iterator[Columns]:
        builder = ColumnsBuilder(hash_block=self._trace.hash_block)
        arrival = 0.0
        for number, line in numbered_lines(self._path, self._bad):
            try:
                row = decode_json(msgspec.json.decode, line)
                if not isinstance(row, dict):
                    raise LineError("expected a JSON object")
                time = _time(row)
                arrival = arrival if time is None else time
                self._append(builder, row, arrival)
            except LineError as error:
                self._bad.report(number, str(error))
            yield from builder.full()
        yield from builder.rest()

    def _append(self, builder: ColumnsBuilder, row: dict[str, Any], arrival: float) -> None:
        turns = row.get("turns")
        session = row.get("session_id", row.get("conversation_id"))
        if turns is not None and session is None:
            session = f"line {len(self._sessions)}"
        number = 0 if session is None else self._sessions.setdefault(str(session), len(self._sessions) + 1)
        for turn in _turns(turns) if turns is not None else [row]:
            builder.append(
                arrival=arrival,
                prompt_tokens=_prompt_tokens(turn),
                output_tokens=_count(turn, OUTPUT_NAMES),
                hash_ids=_ids(turn),
                tenant=self._tenant(row),
                session=number,
                think_time=_number(turn, "delay", 0.0) / 1000,
            )

    def _tenant(self, row: dict[str, Any]) -> int:
        if self._rule is not None:
            return self._tenants.number(self._rule.tenant(row.get(self._rule.field)))
        name = next((str(row[key]) for key in TENANT_NAMES if row.get(key) is not None), "all")
        return self._tenants.number(name)


def _turns(turns: object) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise LineError("'turns' is not a list of objects")
    return turns


def _time(row: dict[str, Any]) -> float | None:
    """Arrival in seconds, if the line has one."""
    for name in SECONDS_NAMES:
        if row.get(name) is not None:
            return _number(row, name, 0.0)
    return _number(row, "timestamp", 0.0) / 1000 if row.get("timestamp") is not None else None


def _number(row: dict[str, Any], name: str, default: float) -> float:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LineError(f"'{name}' is {value!r}, expected a number")
    return float(value)


def _prompt_tokens(row: dict[str, Any]) -> int:
    if not any(row.get(name) is not None for name in PROMPT_NAMES):
        prompt = row.get("prompt_token_ids", row.get("prompt"))
        if isinstance(prompt, list):
            return len(prompt)
        if isinstance(prompt, str):
            raise LineError("the prompt is text: its length in tokens is not in the line (input_length)")
    return _count(row, PROMPT_NAMES)


def _count(row: dict[str, Any], names: Sequence[str]) -> int:
    for name in names:
        value = row.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int):
                raise LineError(f"'{name}' is {value!r}, expected a whole number")
            return value
    raise LineError(f"no '{names[0]}' (nor {', '.join(names[1:])})")


def _ids(row: dict[str, Any]) -> list[int]:
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list) or not all(
        isinstance(block, int) and not isinstance(block, bool) for block in ids
    ):
        raise LineError("'hash_ids' is not a list of whole numbers")
    return ids
