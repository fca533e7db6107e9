"""Imports of the optional packages, in one place, so that a missing one says how to get it."""

from __future__ import annotations

import importlib
from typing import Any

from kvpager.errors import MissingDependencyError

__all__ = ["import_optional"]


def import_optional(name: str, *, needed_for: str) -> Any:
    """Imports an optional package.

    Args:
        name: module to import.
        needed_for: what cannot be done without it, for the message.

    Raises:
        MissingDependencyError: the package is not installed; the text has the install command.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"{needed_for} needs the package {name.split('.')[0]!r} ({error}): pip install 'kvpager[model]'"
        ) from error
