"""Mooncake traces: one JSON object a line with arrival, lengths and ids of the prompt's 512-token blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvpager.replay.columns import BadLines, Columns, ColumnsBuilder, LineError
from kvpager.replay.text import decode_json, numbered_lines
from kvpager.replay.trace import Trace

__all__ = ["read_mooncake"]

HASH_BLOCK = 512


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path, bad: BadLines) -> Trace:
    """Reads `{timestamp (ms), input_length, output_length, hash_ids}` lines, plain or gzip.

    Args:
        path: the file.
        bad: what to do with a bad line.
    """
    return Trace(path.name, "mooncake", _requests(path, bad), bad, hash_block=HASH_BLOCK)


def _requests(path: Path, bad: BadLines) -> Iterator[Columns]:
    builder = ColumnsBuilder(hash_block=HASH_BLOCK, every_block=True)
    decode = msgspec.json.Decoder(_Row).decode
    for number, line in numbered_lines(path, bad):
        try:
            row = decode_json(decode, line)
            builder.append(
                arrival=row.timestamp / 1000,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                hash_ids=row.hash_ids,
            )
        except LineError as error:
            bad.report(number, str(error))
        yield from builder.full()
    yield from builder.rest()
