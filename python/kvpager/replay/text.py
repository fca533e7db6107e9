"""Lines of plain and gzip-compressed text, with damage reported by line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import BadLines

__all__ = ["first_line", "numbered_lines", "open_bytes"]

MAX_LINE_BYTES = 64 << 20
"""A longer line is damage, not a request."""


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file, through gzip if its first bytes say so.

    Raises:
        InvalidArgumentError: with the path and the reason.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(2)
        # A GzipFile that opened the file itself also closes it.
        return cast("IO[bytes]", gzip.open(path, "rb")) if magic == b"\x1f\x8b" else path.open("rb")
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}") from error


def first_line(path: Path) -> bytes:
    """The first line that is not blank; empty if there is none or the file is damaged before its end."""
    with open_bytes(path) as file:
        try:
            while line := file.readline(MAX_LINE_BYTES):
                if line.strip():
                    return line.strip()
        except (EOFError, OSError, zlib.error):
            pass
    return b""


def numbered_lines(path: Path, bad: BadLines) -> Iterator[tuple[int, bytes]]:
    """Yields `(number, line)` of every line that is not blank; damage ends the file after a report."""
    number = 0
    with open_bytes(path) as file:
        while True:
            number += 1
            try:
                line = file.readline(MAX_LINE_BYTES)
            except (EOFError, OSError, zlib.error) as error:
                bad.report(number, f"the compressed file is damaged: {error}")
                return
            if not line:
                return
            if len(line) >= MAX_LINE_BYTES:
                bad.report(number, f"longer than {MAX_LINE_BYTES} bytes")
                return
            line = line.strip()
            if line:
                yield number, line
