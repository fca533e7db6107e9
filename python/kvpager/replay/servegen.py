"""ServeGen client sets: per-client rates and length distributions, sampled with a seed."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError
from kvpager.replay.archive import read_members
from kvpager.replay.columns import MAX_TOKENS, BadLines, Columns, ColumnsBuilder, LineError
from kvpager.replay.tenants import FieldRule, TenantNames
from kvpager.replay.text import decode_json
from kvpager.replay.trace import Trace

__all__ = ["DEFAULT_REQUESTS", "read_servegen"]

DEFAULT_REQUESTS = 6000
WINDOW_SECONDS = 600

_NAME = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")


@dataclass
class _Lengths:
    """A probability mass function of a length."""

    values: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float64]


@dataclass
class _Client:
    """One client: its number, windows with their rates, and lengths by the start of their period."""

    number: int
    starts: npt.NDArray[np.float64]
    rates: npt.NDArray[np.float64]
    lengths: dict[float, tuple[_Lengths, _Lengths]]


def read_servegen(
    path: Path,
    bad: BadLines,
    *,
    seed: int = 0,
    requests: int | None = None,
    tenants: FieldRule | None = None,
) -> Trace:
    """Samples requests from a directory or archive of `chunk-N-trace.csv` and `chunk-N-dataset.json`.

    A client is drawn by its number of requests, a window of its day by its rate, lengths independently from
    the period's distributions.

    Args:
        path: the directory or archive.
        bad: what to do with a bad file.
        seed: of the draws.
        requests: how many to draw, by default 6,000.
        tenants: by the one field that there is, `client`.
    """
    if tenants is not None and tenants.field != "client":
        raise InvalidArgumentError(
            f"--tenants is field:{tenants.field}: the only field of servegen traces is client"
        )
    clients = _clients(path, bad)
    if not clients:
        raise InvalidArgumentError(f"{path}: no client with a rate and lengths{bad.skipped()}")
    count = DEFAULT_REQUESTS if requests is None else requests
    names = ["all"] if tenants is None else []
    numbers = [0] * len(clients)
    if tenants is not None:
        known = TenantNames(names)
        numbers = [known.number(tenants.tenant(client.number)) for client in clients]
    columns = _sample(clients, numbers, count, np.random.default_rng(seed))
    return Trace(
        path.name,
        "servegen",
        columns,
        bad,
        tenants=names,
        max_output_tokens=16384,
        count=count,
        notes=[f"{count} requests drawn from {len(clients)} clients, seed {seed}; times are thinned to them"],
    )


def _clients(path: Path, bad: BadLines) -> list[_Client]:
    files: dict[int, dict[str, bytes]] = {}
    for name, content in read_members(path, lambda name: _NAME.search(name) is not None, bad):
        match = _NAME.search(name)
        if match is not None:
            files.setdefault(int(match[1]), {})[match[2]] = content
    clients = []
    for number, parts in sorted(files.items()):
        try:
            client = _client(number, parts)
        except (LineError, ValueError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
            bad.report(f"client {number}", str(error))
            continue
        if client.rates.sum() > 0:
            clients.append(client)
    return clients


def _client(number: int, parts: dict[str, bytes]) -> _Client:
    if len(parts) != 2:
        raise LineError(f"only {next(iter(parts))}: a client has a trace.csv and a dataset.json")
    starts, rates = [], []
    for place, line in enumerate(parts["trace.csv"].decode().splitlines(), start=1):
        try:
            start, rate = (float(cell) for cell in line.split(",")[:2])
        except ValueError:
            raise LineError(f"trace.csv: line {place}: {line!r}, expected a start and a rate") from None
        if not (np.isfinite(start) and np.isfinite(rate) and rate >= 0):
            raise LineError(f"trace.csv: line {place}: window {start} with rate {rate}")
        starts.append(start)
        rates.append(rate)
    decode = msgspec.json.Decoder(dict[str, dict[str, Any]]).decode
    periods = decode_json(decode, parts["dataset.json"])
    lengths = {}
    for start_text, period in periods.items():
        inputs, outputs = _lengths(period, "input_tokens"), _lengths(period, "output_tokens")
        if inputs is not None and outputs is not None:
            lengths[float(start_text)] = (inputs, outputs)
    client = _Client(number, np.array(starts), np.array(rates), lengths)
    # Windows of a period without lengths cannot be sampled.
    client.rates = np.where([_period(client, start) is not None for start in starts], client.rates, 0.0)
    return client


def _lengths(period: dict[str, Any], name: str) -> _Lengths | None:
    table = literal_eval(str(period.get(name, "{}")))
    if not table:
        return None
    values = np.array(list(table), dtype=np.int64)
    mass = np.array(list(table.values()), dtype=np.float64)
    if values.min() < 0 or values.max() > MAX_TOKENS:
        raise LineError(
            f"dataset.json: {name} from {values.min()} to {values.max()}, expected 0 to {MAX_TOKENS} tokens"
        )
    if mass.min() < 0 or not np.isfinite(mass).all() or mass.sum() <= 0:
        raise LineError(f"dataset.json: {name}: shares from {mass.min()} to {mass.max()} are no distribution")
    return _Lengths(values, mass / mass.sum())


def _period(client: _Client, start: float) -> float | None:
    """Start of the six-hour period that a window is in, if it has lengths."""
    earlier = [key for key in client.lengths if key <= start < key + 21600]
    return max(earlier, default=None)


def _sample(
    clients: list[_Client], tenants: list[int], count: int, draw: np.random.Generator
) -> Iterator[Columns]:
    weight = np.array([client.rates.sum() for client in clients])
    chosen = draw.choice(len(clients), size=count, p=weight / weight.sum())
    rows = []
    for index, client in enumerate(clients):
        number = int((chosen == index).sum())
        windows = draw.choice(len(client.starts), size=number, p=client.rates / client.rates.sum())
        for window in windows.tolist():
            start = float(client.starts[window])
            period = _period(client, start)
            if period is None:
                continue
            inputs, outputs = client.lengths[period]
            row = (
                start + draw.uniform(0, WINDOW_SECONDS),
                int(draw.choice(inputs.values, p=inputs.mass)),
                int(draw.choice(outputs.values, p=outputs.mass)),
                tenants[index],
            )
            rows.append(row)
    builder = ColumnsBuilder()
    rows.sort()
    for arrival, prompt, output, tenant in rows:
        builder.append(
            arrival=arrival - rows[0][0],
            prompt_tokens=max(1, prompt),
            output_tokens=max(1, output),
            tenant=tenant,
        )
        yield from builder.full()
    yield from builder.rest()
