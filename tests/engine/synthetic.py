"""Engines over synthetic tokens, and a tokenizer of single characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpager.engine import Engine, NullRunner


class LetterTokenizer:
    """Token id = code point; 0 ends an answer and has no text."""

    stop_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id)

    def new_decode_stream(self) -> Callable[[int], str]:
        return lambda token_id: self.decode([token_id])


class ScriptRunner(NullRunner):
    """Answers every request with the letters of one text, then with the end token."""

    def __init__(self, text: str, *, step_time: float = 0.0) -> None:
        super().__init__(vocab_size=256, max_model_tokens=4096, step_time=step_time)
        self.text = text

    def token(self, request_id: int, place: int) -> int:
        return ord(self.text[place]) if place < len(self.text) else 0


def idle(engine: Engine) -> bool:
    """Whether nothing is held, reserved or quarantined, every block is accounted for, nothing is live."""
    stats = engine.pool.stats()
    engine.pool.check_invariants()
    if engine.index is not None:
        engine.index.check_invariants()
    return (
        (stats.held, stats.reserved, stats.quarantined) == (0, 0, 0)
        and stats.cached + stats.free == stats.capacity
        and engine.num_live == 0
        and not engine.has_work()
    )
