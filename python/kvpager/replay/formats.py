"""Which reader a trace needs: by the format's name, or by what the file looks like."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvpager.errors import InvalidArgumentError
from kvpager.replay.archive import is_archive, members
from kvpager.replay.columns import BadLines, LineError
from kvpager.replay.generate import generate
from kvpager.replay.mooncake import read_mooncake
from kvpager.replay.requests_jsonl import read_requests
from kvpager.replay.servegen import read_servegen
from kvpager.replay.sessions import read_sessions
from kvpager.replay.tables import AZURE_COLUMNS, header, read_azure, read_lengths
from kvpager.replay.tenants import FieldRule
from kvpager.replay.text import decode_json, first_line
from kvpager.replay.trace import Trace

__all__ = ["FORMATS", "detect_format", "open_trace"]

FORMATS = ("mooncake", "azure", "lengths", "sessions", "servegen", "requests")


def open_trace(
    source: str,
    *,
    format_name: str = "auto",
    skip_bad: bool = False,
    seed: int = 0,
    requests: int | None = None,
    tenants: FieldRule | None = None,
) -> Trace:
    """Opens a workload; its requests stream as they are asked for.

    Args:
        source: a file, directory or archive, or `generate:NAME`.
        format_name: one of `FORMATS`, or `auto`.
        skip_bad: count bad lines and go on.
        seed: of everything that is drawn.
        requests: how many to draw, for workloads that are distributions.
        tenants: the field that names the tenant, for formats with named fields.

    Raises:
        InvalidArgumentError: with file, line and reason.
    """
    if not source:
        raise InvalidArgumentError("the name of the trace is empty")
    if source.startswith("generate:"):
        _refuse_field(tenants, "generated")
        if format_name != "auto":
            raise InvalidArgumentError(f"--format is {format_name}, but {source} is no file: it is drawn")
        return generate(
            source.removeprefix("generate:"), requests=10000 if requests is None else requests, seed=seed
        )
    path = Path(source)
    bad = BadLines(path, skip=skip_bad)
    if not path.exists():
        raise InvalidArgumentError(f"{path}: no such file or directory")
    if not (path.is_file() or path.is_dir()):
        raise InvalidArgumentError(f"{path}: neither a file nor a directory; a pipe cannot be read twice")
    name = detect_format(path, bad) if format_name == "auto" else format_name
    if name in ("mooncake", "sessions"):
        _refuse_field(tenants, name)
    match name:
        case "mooncake":
            return read_mooncake(path, bad)
        case "azure":
            return read_azure(path, bad, tenants)
        case "lengths":
            return read_lengths(path, bad, tenants)
        case "sessions":
            return read_sessions(path, bad, seed=seed)
        case "servegen":
            return read_servegen(path, bad, seed=seed, requests=requests, tenants=tenants)
        case "requests":
            return read_requests(path, bad, tenants)
    raise InvalidArgumentError(f"trace format {name!r} is unknown: use auto, {', '.join(FORMATS)}")


def _refuse_field(tenants: FieldRule | None, name: str) -> None:
    if tenants is not None:
        raise InvalidArgumentError(
            f"--tenants is field:{tenants.field}: {name} traces have no named fields; requests, lengths, "
            "azure and servegen traces do"
        )


def detect_format(path: Path, bad: BadLines) -> str:
    """The format of a file by its name and its first line.

    Args:
        path: the file, directory or archive.
        bad: what to do with a damaged archive.

    Raises:
        InvalidArgumentError: if it looks like none of them.
    """
    if path.is_dir() or is_archive(path):
        return _detect_members(path, bad)
    if path.suffix == ".json":
        return "sessions"
    line = first_line(path)
    if not line:
        raise InvalidArgumentError(f"{path}: line 1: empty, or damaged before its first line ends")
    if line.startswith(b"{"):
        return _detect_json(line)
    names = header(path)
    if set(AZURE_COLUMNS) <= set(names):
        return "azure"
    if b"," in line:
        return "lengths"
    raise InvalidArgumentError(f"{path}: line 1: neither JSON nor CSV", param="format_name")


def _detect_members(path: Path, bad: BadLines) -> str:
    quiet = BadLines(path, skip=bad.skip)
    names = members(path, quiet)
    if any(name.endswith("-dataset.json") for name in names):
        return "servegen"
    if any(name.endswith(".json") for name in names):
        return "sessions"
    raise InvalidArgumentError(f"{path}: neither session files nor client sets in it{quiet.skipped()}")


def _detect_json(line: bytes) -> str:
    try:
        row = decode_json(msgspec.json.decode, line)
    except LineError:
        return "mooncake"
    plain = {"timestamp", "input_length", "output_length", "hash_ids"}
    return "mooncake" if isinstance(row, dict) and set(row) == plain else "requests"
