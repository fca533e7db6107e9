"""From token ids to text as it comes: whole characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["StopFinder", "TextStream", "TextTokenizer"]


class TextTokenizer(Protocol):
    """What an engine needs of a tokenizer; `kvpager.runner.Tokenizer` is one.

    Attributes:
        stop_token_ids: tokens that end an answer.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a plain prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the ids, without special tokens."""

    def new_decode_stream(self) -> Callable[[int], str]:
        """Returns a function that takes one id after the other and returns the text completed by each."""


class TextStream:
    """Turns the ids of one growing answer into pieces of text that never split a character."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Starts with no ids."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.new_decode_stream()
        self._token_ids: list[int] = []
        self._num_sent = 0

    @property
    def num_chars(self) -> int:
        """Characters that are complete so far."""
        return self._num_sent

    def push(self, token_id: int) -> str:
        """Adds one id; returns the text that is complete now, often empty inside a multi-byte character."""
        self._token_ids.append(token_id)
        piece = self._stream(token_id)
        self._num_sent += len(piece)
        return piece

    def finish(self) -> str:
        """Returns what is left, with U+FFFD for an unfinished character."""
        return self._tokenizer.decode(self._token_ids)[self._num_sent :]


class StopFinder:
    """Holds back text that may become a stop text, across any split into pieces.

    Example:
        >>> finder = StopFinder(("END",))
        >>> [finder.push(piece) for piece in ("one E", "N", "X E", "ND two")]
        ['one ', '', 'ENX ', '']
        >>> finder.found
        'END'
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Looks for any of the texts."""
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None
        """The text that was found first; nothing is given out after it."""

    def push(self, piece: str) -> str:
        """Adds text; returns what is certainly before any stop text."""
        if not self._stop or self.found is not None:
            return "" if self.found is not None else piece
        held = self._held + piece
        places = [(place, text) for text in self._stop if (place := held.find(text)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return held[:place]
        keep = max(_overlap(held, text) for text in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Returns what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`, the whole of it excepted."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
