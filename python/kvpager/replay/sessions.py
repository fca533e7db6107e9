"""kv-cache-tester sessions: one JSON file a session, ids of 64-token blocks that are local to it."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvpager.errors import InvalidArgumentError
from kvpager.replay.archive import read_members
from kvpager.replay.columns import BadLines, Columns, ColumnsBuilder, LineError
from kvpager.replay.text import decode_json, open_bytes
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


class _Turn(NamedTuple):
    """A request of a session, its ids packed: a trace has millions of them."""

    arrival: float
    session: int
    place: int
    file: str
    prompt_tokens: int
    output_tokens: int
    think_time: float
    hash_ids: array[int]


def read_sessions(path: Path, bad: BadLines, *, seed: int = 0) -> Trace:
    """Reads a directory or archive of session files, or one of them.

    Sub-agents (entries with requests of their own) are sessions of their own. The start times of the sessions
    are drawn uniformly over 8 hours.

    Args:
        path: the file, directory or archive.
        bad: what to do with a bad entry.
        seed: of the start times.
    """
    draw = np.random.default_rng(seed)
    blocks: set[int] = set()
    chains: list[list[_Turn]] = []
    for name, session in _load(path, bad):
        blocks.add(session.block_size)
        if len(blocks) > 1:
            raise InvalidArgumentError(
                f"{path}: sessions with blocks of {sorted(blocks)} tokens in one trace"
            )
        start = float(draw.uniform(0, START_SPAN_HOURS * 3600))
        try:
            _chains(name, session, session.requests, start, chains)
        except (OverflowError, LineError) as error:
            bad.report(name, str(error))
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


def _load(path: Path, bad: BadLines) -> Iterator[tuple[str, _Session]]:
    decode = msgspec.json.Decoder(_Session).decode
    if path.suffix == ".json":
        with open_bytes(path) as file:
            files: Iterator[tuple[str, bytes]] = iter([(path.name, file.read())])
    else:
        files = read_members(path, lambda name: name.endswith(".json"), bad)
    for name, content in files:
        try:
            session = decode_json(decode, content)
            if not 1 <= session.block_size <= 1 << 20:
                raise LineError(f"block_size is {session.block_size}, expected 1 to {1 << 20}")
            yield name, session
        except LineError as error:
            bad.report(name, str(error))


def _chains(
    name: str, session: _Session, requests: list[_Request], start: float, chains: list[list[_Turn]]
) -> None:
    """One chain for the requests, one for each sub-agent among them."""
    number = len(chains)
    chain: list[_Turn] = []
    chains.append(chain)
    for request in requests:
        if request.requests is not None:
            _chains(name, session, request.requests, start + request.t, chains)
            continue
        # Full blocks only: the number of ids is not always that of the blocks.
        ids = request.hash_ids[: max(0, request.input_tokens // session.block_size)]
        if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
            raise LineError(f"request {len(chain) + 1}: a hash id is negative or above 2^32")
        high = number + 1 << 32
        chain.append(
            _Turn(
                arrival=start + request.t,
                session=number,
                place=len(chain),
                file=name,
                prompt_tokens=request.input_tokens,
                # The answer to a cut-off request is counted as one token.
                output_tokens=1 if request.output_tokens == 0 else request.output_tokens,
                think_time=request.think_time if chain else 0.0,
                hash_ids=array("Q", [high | block for block in ids]),
            )
        )


def _requests(chains: list[list[_Turn]], hash_block: int, bad: BadLines) -> Iterator[Columns]:
    builder = ColumnsBuilder(hash_block=hash_block, block=256, shown_id=lambda block: block & 0xFFFFFFFF)
    for turn in heapq.merge(*chains):
        try:
            builder.append(
                arrival=turn.arrival,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                hash_ids=turn.hash_ids,
                session=turn.session + 1,
                think_time=turn.think_time,
            )
        except LineError as error:
            bad.report(turn.file, f"request {turn.place + 1}: {error}")
        yield from builder.full()
    yield from builder.rest()
