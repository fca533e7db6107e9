"""What of `kvpager replay`'s options does not go together, found before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvpager.errors import InvalidArgumentError, MissingDependencyError

__all__ = ["check_outputs", "check_usage", "names_in"]

_NOT_SEQUENTIAL = (
    *("policy", "overflow", "host_blocks", "arrivals", "speed", "rate", "reuse", "tenants", "slo", "find"),
    *("max_output_tokens", "max_batch_tokens", "max_running", "max_model_tokens", "max_prefill_chunk"),
    *("hardware", "calibrate"),
)
"""Options of the scheduler and its clock, which `--sequential` leaves out."""


def check_usage(given: Mapping[str, object]) -> None:
    """Refuses options that would be ignored.

    Args:
        given: the options on the command line, by parameter name, with their values.

    Raises:
        InvalidArgumentError: with the option and why it has no effect.
    """
    # The trace is no option: who opens it refuses an empty name.
    empty = next((name for name, value in given.items() if value == "" and name != "trace"), None)
    if empty is not None:
        raise InvalidArgumentError(f"{_flag(empty)} is empty")
    if given.get("sequential"):
        idle = [_flag(name) for name in _NOT_SEQUENTIAL if name in given]
        if idle:
            raise InvalidArgumentError(
                f"--sequential runs index and pool alone, one request at a time: {', '.join(idle)} would be "
                "ignored"
            )
    arrivals, find = given.get("arrivals"), given.get("find")
    if "rate" in given and "rate" not in (arrivals, find):
        raise InvalidArgumentError("--rate is for --arrivals rate, or for --find rate to begin at")
    if "speed" in given and (arrivals not in (None, "recorded") or find == "rate"):
        raise InvalidArgumentError("--speed is for --arrivals recorded")
    if "hardware" in given and "calibrate" in given:
        raise InvalidArgumentError("--hardware and --calibrate both give the step time: choose one")
    if "eviction" in given and given.get("reuse") == "off":
        raise InvalidArgumentError("--eviction has nothing to evict with --reuse off")
    overflows = names_in(str(given.get("overflow", "auto")), "--overflow")
    if "host_blocks" in given and not {"auto", "swap"} & set(overflows):
        raise InvalidArgumentError("--host-blocks is for --overflow auto or swap")
    if ("slo" in given) != ("find" in given):
        raise InvalidArgumentError("--slo and --find go together: what must hold, and what to look for")
    pages = [_flag(name) for name in ("report", "png") if name in given]
    if find is not None and pages:
        raise InvalidArgumentError(f"--find prints what it tried: {', '.join(pages)} would be ignored")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def names_in(text: str, option: str) -> tuple[str, ...]:
    """The names of a list with commas; spaces around them do not count.

    Raises:
        InvalidArgumentError: if one is empty or there twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    if "" in names:
        raise InvalidArgumentError(f"{option} is {text!r}: a name is empty")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgumentError(f"{option} is {text!r}: {twice} is there twice")
    return names


def check_outputs(page: Path | None, png: Path | None) -> None:
    """Refuses files that could not be written once everything has run.

    Args:
        page: where the report goes.
        png: the directory of the pictures.

    Raises:
        InvalidArgumentError: with the option, the path and the reason.
        MissingDependencyError: for pictures without a Chromium.
    """
    if page is not None:
        if page.is_dir():
            raise InvalidArgumentError(f"--report {page}: is a directory")
        _check_directory(page.parent, f"--report {page}")
        if page.exists() and not os.access(page, os.W_OK):
            raise InvalidArgumentError(f"--report {page}: may not be written")
    if png is not None:
        from kvpager.replay.report import NO_BROWSER, find_browser

        _check_directory(png if png.exists() else png.absolute().parent, f"--png {png}")
        if find_browser() is None:
            raise MissingDependencyError(NO_BROWSER)


def _check_directory(directory: Path, what: str) -> None:
    if not directory.is_dir():
        reason = "is not a directory" if directory.exists() else "there is no such directory"
        raise InvalidArgumentError(f"{what}: {directory}: {reason}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InvalidArgumentError(f"{what}: {directory}: nothing may be written there")
