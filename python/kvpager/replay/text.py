"""Lines of plain and gzip-compressed text, with damage reported by line."""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import BadLines, LineError

__all__ = ["cells_of", "decode_json", "first_line", "numbered_lines", "open_bytes"]

DAMAGE = (EOFError, OSError, zlib.error)
"""How Python reports a compressed file that is cut off or wrong."""

MAX_LINE_BYTES = 64 << 20
"""A longer line is damage, not a request."""


_WIDE_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_Row = TypeVar("_Row")


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file, through gzip if its first bytes say so; a mark of UTF-8 is left out.

    Raises:
        InvalidArgumentError: with the path and the reason, also for UTF-16 and UTF-32 text.
    """
    file = _open_plain(path)
    try:
        start = file.read(4)
    except DAMAGE:
        start = b""  # Whoever reads on is told where.
    if start.startswith(_WIDE_MARKS):
        file.close()
        raise InvalidArgumentError(f"{path}: line 1: UTF-16 or UTF-32 text; convert it to UTF-8")
    with suppress(*DAMAGE):
        file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
    return file


def _open_plain(path: Path) -> IO[bytes]:
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
        except DAMAGE:
            pass
    return b""


def decode_json(decode: Callable[[bytes], _Row], text: bytes) -> _Row:
    """What JSON text says.

    Args:
        decode: of a `msgspec` decoder.
        text: the text.

    Raises:
        LineError: with the reason.
    """
    try:
        return decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError(str(error)) from error
    except RecursionError:
        raise LineError("JSON is nested too deeply") from None


def cells_of(line: bytes) -> list[str]:
    """The cells of a line of CSV. A quoted line break is not part of these formats.

    Raises:
        LineError: with the reason.
    """
    text = line.decode("utf-8", errors="replace")
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise LineError(f"not CSV: {error}") from error


def numbered_lines(path: Path, bad: BadLines) -> Iterator[tuple[int, bytes]]:
    """Yields `(number, line)` of every line that is not blank; damage ends the file after a report."""
    number = 0
    with open_bytes(path) as file:
        while True:
            number += 1
            try:
                line = file.readline(MAX_LINE_BYTES)
            except DAMAGE as error:
                bad.report(number, f"the compressed file is damaged, nothing after this is read: {error}")
                return
            if not line:
                return
            if len(line) >= MAX_LINE_BYTES:
                bad.report(number, f"longer than {MAX_LINE_BYTES} bytes")
                return
            line = line.strip()
            if line:
                yield number, line
