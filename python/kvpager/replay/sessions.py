"""kv-cache-tester sessions: one JSON file a session, ids of 64-token blocks that are local to it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvpager.errors import InvalidArgumentError
from kvpager.replay.archive import read_members
from kvpager.replay.columns import BadLines, Columns, ColumnsBuilder, LineError
from kvpager.replay.trace import Trace

__all__ = ["read_sessions"]

START_SPAN_HOURS = 8
"""Sessions have no real start times; they are drawn over this span."""


class _Request(msgspec.Struct):
    t: float = 0.0
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = msgspec.field(default_factory=list)
    think_time: float = 0.0
    requests: list[_Request] | None = None


class _Session(msgspec.Struct):
    block_size: int
    requests: list[_Request]
    id: str = ""


_Entry = tuple[float, int, int, _Request]
"""Arrival, session number, number in the session, request."""


def read_sessions(path: Path, bad: BadLines, *, seed: int = 0) -> Trace:
    """Reads a directory or archive of session files, or one of them.

    Sub-agents (entries with requests of their own) are sessions of their own. The start times of the sessions
    are drawn uniformly over 8 hours.

    Args:
        path: the file, directory or archive.
        bad: what to do with a bad entry.
        seed: of the start times.
    """
    sessions = list(_load(path, bad))
    blocks = {session.block_size for session in sessions}
    if len(blocks) > 1:
        raise InvalidArgumentError(f"{path}: sessions with blocks of {sorted(blocks)} tokens in one trace")
    starts = np.random.default_rng(seed).uniform(0, START_SPAN_HOURS * 3600, len(sessions))
    chains: list[list[_Entry]] = []
    for session, start in zip(sessions, starts.tolist(), strict=True):
        _chains(session.requests, start, chains)
    hash_block = next(iter(blocks), 64)
    requests = _requests(chains, hash_block, bad)
    return Trace(
        path.name,
        "sessions",
        requests,
        bad,
        hash_block=hash_block,
        max_output_tokens=16384,
        max_model_tokens=1 << 20,
        count=sum(map(len, chains)),
        notes=[f"session start times are invented: uniform over {START_SPAN_HOURS} h, seed {seed}"],
    )


def _load(path: Path, bad: BadLines) -> Iterator[_Session]:
    decode = msgspec.json.Decoder(_Session).decode
    if path.suffix == ".json":
        files: Iterator[tuple[str, bytes]] = iter([(path.name, path.read_bytes())])
    else:
        files = read_members(path, lambda name: name.endswith(".json"))
    for name, content in files:
        try:
            session = decode(content)
            if not 1 <= session.block_size <= 1 << 20:
                raise LineError(f"block_size is {session.block_size}, expected 1 to {1 << 20}")
            yield session
        except (msgspec.DecodeError, LineError) as error:
            bad.report(name, str(error))


def _chains(requests: list[_Request], start: float, chains: list[list[_Entry]]) -> None:
    """One chain for the requests, one for each sub-agent among them."""
    number = len(chains)
    chain: list[_Entry] = []
    chains.append(chain)
    for request in requests:
        if request.requests is not None:
            _chains(request.requests, start + request.t, chains)
        else:
            chain.append((start + request.t, number, len(chain), request))


def _requests(chains: list[list[_Entry]], hash_block: int, bad: BadLines) -> Iterator[Columns]:
    builder = ColumnsBuilder(hash_block=hash_block)
    for arrival, number, place, request in heapq.merge(*chains):
        # Full blocks only: the number of ids is not always that of the blocks.
        ids = request.hash_ids[: request.input_tokens // hash_block]
        try:
            if not all(0 <= block < 1 << 32 for block in ids):
                raise LineError("a hash id is negative or above 2^32")
            builder.append(
                arrival=arrival,
                prompt_tokens=request.input_tokens,
                output_tokens=max(1, request.output_tokens)
                if request.output_tokens == 0
                else request.output_tokens,
                hash_ids=[(number + 1) << 32 | block for block in ids],
                session=number + 1,
                think_time=request.think_time if place else 0.0,
            )
        except LineError as error:
            bad.report(f"session {number + 1}, request {place + 1}", str(error))
        yield from builder.full()
    yield from builder.rest()
