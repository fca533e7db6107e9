"""Text for synthetic tokens: a tokenizer of bytes, to load-test a server without a model."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence

__all__ = ["ByteTokenizer"]

_FIRST = 3


class ByteTokenizer:
    """Token ids 3 to 258 are the bytes; larger ones repeat printable ASCII, ids below 3 have no text.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.decode(tokenizer.encode("naïve"))
        'naïve'
    """

    stop_token_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Returns one id for each byte."""
        return [_FIRST + byte for byte in text.encode("utf-8", "replace")]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the messages' texts, one after the other."""
        return self.encode("\n".join(f"{message['role']}: {message['content']}" for message in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(_byte, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the token's one byte, or none."""
        return _byte(token_id)

    def new_decode_stream(self) -> Callable[[int], str]:
        """Returns a function from one id to the text that it completes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token_id: decoder.decode(_byte(token_id))


def _byte(token_id: int) -> bytes:
    if token_id < _FIRST:
        return b""
    code = token_id - _FIRST
    return bytes((code,)) if code < 256 else bytes((32 + code % 95,))
