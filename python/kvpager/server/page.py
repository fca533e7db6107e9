"""The live page: one static file, no build step, nothing fetched from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["page_html"]


@cache
def page_html() -> bytes:
    """The page's bytes."""
    return files("kvpager.server").joinpath("page.html").read_bytes()
