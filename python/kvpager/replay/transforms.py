"""Workloads made from others: a part, another order."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import Columns
from kvpager.replay.trace import Trace

__all__ = ["limited", "reordered"]


def limited(requests: Iterator[Columns], limit: int | None) -> Iterator[Columns]:
    """The first `limit` requests.

    Args:
        requests: blocks of columns.
        limit: how many, or None for all.
    """
    left = limit
    for columns in requests:
        if left is None or len(columns) <= left:
            yield columns
        else:
            yield _rows(columns, list(range(left)))
        if left is not None:
            left -= len(columns)
            if left <= 0:
                return


def reordered(trace: Trace, seed: int, *, limit: int | None = None) -> Trace:
    """The same requests in a drawn order; the times of arrival stay where they are.

    Args:
        trace: the workload; all of it comes into memory.
        seed: of the order.
        limit: take the first so many requests, then reorder them.

    Raises:
        InvalidArgumentError: for a workload with sessions, whose turns have an order.
    """
    trace.requests = _reordered(trace, limited(trace.requests, limit), seed)
    trace.notes.append(f"order drawn with seed {seed}")
    return trace


def _reordered(trace: Trace, requests: Iterator[Columns], seed: int) -> Iterator[Columns]:
    whole = Columns()
    for part in requests:
        _extend(whole, part)
    if any(whole.session):
        raise InvalidArgumentError(f"{trace.name} has sessions, whose turns cannot be reordered")
    order = list(range(len(whole)))
    Random(seed).shuffle(order)
    shuffled = _rows(whole, order)
    shuffled.arrival = whole.arrival
    yield shuffled


def _extend(columns: Columns, part: Columns) -> None:
    ids = len(columns.hash_ids)
    columns.arrival.extend(part.arrival)
    columns.prompt_tokens.extend(part.prompt_tokens)
    columns.output_tokens.extend(part.output_tokens)
    columns.tenant.extend(part.tenant)
    columns.session.extend(part.session)
    columns.think_time.extend(part.think_time)
    columns.hash_start.extend(ids + start for start in part.hash_start[1:])
    columns.hash_ids.extend(part.hash_ids)


def _rows(columns: Columns, rows: list[int]) -> Columns:
    """Some rows of a block, in the order given."""
    chosen = Columns(
        arrival=array("d", (columns.arrival[row] for row in rows)),
        prompt_tokens=array("I", (columns.prompt_tokens[row] for row in rows)),
        output_tokens=array("I", (columns.output_tokens[row] for row in rows)),
        tenant=array("I", (columns.tenant[row] for row in rows)),
        session=array("Q", (columns.session[row] for row in rows)),
        think_time=array("d", (columns.think_time[row] for row in rows)),
    )
    for row in rows:
        chosen.hash_ids.extend(columns.hash_ids[columns.hash_start[row] : columns.hash_start[row + 1]])
        chosen.hash_start.append(len(chosen.hash_ids))
    return chosen
