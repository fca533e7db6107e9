"""How texts for people say things."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    Example:
        >>> counted(1, "block"), counted(2048, "block")
        ('1 block', '2,048 blocks')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
