"""Members of a directory or a tar archive, by name."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import BadLines

__all__ = ["members", "read_members"]

DAMAGE = (EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)
"""How Python reports an archive that is cut off or wrong."""


def is_archive(path: Path) -> bool:
    """Whether the name is that of a tar archive."""
    return any(path.name.endswith(end) for end in (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2"))


def members(path: Path, bad: BadLines) -> list[str]:
    """Names of the files in a directory or archive, sorted.

    Args:
        path: the directory or archive.
        bad: what to do with an archive that is damaged from some place on.

    Raises:
        InvalidArgumentError: with the path and the reason.
    """
    return [name for name, _ in read_members(path, lambda _: True, bad, content=False)]


def read_members(
    path: Path, wanted: Callable[[str], bool], bad: BadLines, *, content: bool = True
) -> Iterator[tuple[str, bytes]]:
    """Yields `(name, bytes)` of the wanted files of a directory or archive, sorted by name.

    Args:
        path: the directory or archive.
        wanted: says which names.
        bad: what to do with an archive that is damaged from some place on.
        content: whether the bytes are read; else they are empty.

    Raises:
        InvalidArgumentError: with the path and the reason.
    """
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file() and wanted(file.name):
                    yield str(file.relative_to(path)), file.read_bytes() if content else b""
            return
        with tarfile.open(path) as archive:
            for entry in _entries(archive, bad):
                if entry.isfile() and wanted(entry.name):
                    data = _content(archive, entry, bad) if content else b""
                    if data is not None:
                        yield entry.name, data
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}") from error
    except DAMAGE as error:
        raise InvalidArgumentError(
            f"{path}: not an archive, or cut off before its first file ends"
        ) from error


def _entries(archive: tarfile.TarFile, bad: BadLines) -> list[tarfile.TarInfo]:
    """What the archive has, by name, as far as it can be read."""
    entries = []
    try:
        for entry in archive:
            entries.append(entry)
    except DAMAGE as error:
        last = entries[-1].name if entries else "the start"
        bad.report(f"after {last}", _reason(error))
    return sorted(entries, key=lambda entry: entry.name)


def _content(archive: tarfile.TarFile, entry: tarfile.TarInfo, bad: BadLines) -> bytes | None:
    try:
        member = archive.extractfile(entry)
        return b"" if member is None else member.read()
    except DAMAGE as error:
        bad.report(entry.name, _reason(error))
        return None


def _reason(error: Exception) -> str:
    # Python's words for an early end are those of the compression, one for each.
    return "the archive is cut off" if isinstance(error, EOFError) else f"the archive is damaged: {error}"
