"""Members of a directory or a tar archive, by name."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kvpager.errors import InvalidArgumentError

__all__ = ["members", "read_members"]


def is_archive(path: Path) -> bool:
    """Whether the name is that of a tar archive."""
    return any(path.name.endswith(end) for end in (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2"))


def members(path: Path) -> list[str]:
    """Names of the files in a directory or archive, sorted.

    Raises:
        InvalidArgumentError: with the path and the reason.
    """
    return [name for name, _ in read_members(path, lambda _: True, content=False)]


def read_members(
    path: Path, wanted: Callable[[str], bool], *, content: bool = True
) -> Iterator[tuple[str, bytes]]:
    """Yields `(name, bytes)` of the wanted files of a directory or archive, sorted by name.

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
            for entry in sorted(archive.getmembers(), key=lambda entry: entry.name):
                if entry.isfile() and wanted(entry.name):
                    member = archive.extractfile(entry) if content else None
                    yield entry.name, b"" if member is None else member.read()
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}") from error
    except (EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise InvalidArgumentError(f"{path}: {error}") from error
