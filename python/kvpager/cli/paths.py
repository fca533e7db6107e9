"""Paths as they are written on the command line."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["given_path"]


def given_path(text: str) -> Path:
    """A path, for `typer.Option(parser=...)`; an empty one would be the working directory.

    Raises:
        BadParameter: if it is empty.
    """
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)
