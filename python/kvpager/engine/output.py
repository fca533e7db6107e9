"""What a consumer gets of a generation, and the reader that turns its tokens into that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from kvpager.engine.text import StopFinder, TextStream
from kvpager.errors import GenerationError
from kvpager.wording import counted

if TYPE_CHECKING:
    from kvpager.engine.engine import Engine
    from kvpager.engine.generation import Generation, TokenLogprobs

__all__ = ["FinishReason", "GenerationOutput", "OutputReader"]

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(slots=True)
class GenerationOutput:
    """What is new of one sample since its last output.

    Attributes:
        index: the sample.
        text: whole characters that are certainly no part of a stop text; empty without a tokenizer.
        token_ids: the new tokens.
        logprobs: one for each new token, if they were asked for.
        text_offsets: with logprobs and a tokenizer: where each new token's text begins in the sample's. Parts
            of one character begin where it does.
        finish_reason: `stop`, `length` or `aborted` in the last output of a sample, else None.
        stop_text: the stop text that ended it, if one did.
        score: of a beam search's answer: its log-probability over (number of tokens) ** length_penalty.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    score: float | None = None
    text_offsets: list[int] | None = None


_CONSUMED: dict[str, FinishReason] = {"stop": "stop", "length": "length", "aborted": "aborted"}
"""Ends that are no failure."""

_FAILURES = {
    "deadline": "its deadline has passed",
    "capacity": "its quota was lowered below what it needs",
    "drained": "the engine was drained",
}
"""Ends that are one, in words."""


class OutputReader:
    """Reads one generation in its consumer's thread: new tokens, their text, stop texts, the end.

    Attributes:
        has_ended: whether the last output was taken.
        num_tokens: tokens taken.
    """

    __slots__ = ("_engine", "_finder", "_stream", "generation", "has_ended", "num_tokens")

    def __init__(self, engine: Engine, generation: Generation) -> None:
        """Starts before the first token."""
        self._engine = engine
        self._stream = None if engine.tokenizer is None else TextStream(engine.tokenizer)
        self._finder = StopFinder(generation.params.stop) if generation.params.stop else None
        self.generation = generation
        self.has_ended = False
        self.num_tokens = 0

    def take(self) -> GenerationOutput | None:
        """Returns what is new, or None.

        Raises:
            GenerationError: it failed; what came before was returned by earlier calls.
        """
        generation = self.generation
        if self.has_ended:
            return None
        is_last = generation.has_ended  # read before the tokens: after it, none come
        token_ids = generation.token_ids[self.num_tokens :]
        if not is_last and not token_ids:
            return None
        reason = self._end_reason() if is_last else None
        if not token_ids and reason == "error":
            self._raise_failure()
        output = self._output(token_ids)
        if output.finish_reason is None and reason is not None and reason != "error":
            self._finish(output, reason)
        return output

    def close(self) -> None:
        """Ends the request if it has not ended."""
        self.has_ended = True
        if not self.generation.has_ended:
            self._engine.abort(self.generation)

    def _output(self, token_ids: list[int]) -> GenerationOutput:
        generation, start = self.generation, self.num_tokens
        text, offsets = "", None
        if self._stream is not None:
            text, token_ids, offsets = self._read_text(self._stream, token_ids)
        self.num_tokens += len(token_ids)
        self._engine.note_taken(generation, self.num_tokens)
        logprobs = (
            None if generation.params.logprobs is None else generation.logprobs[start : self.num_tokens]
        )
        output = GenerationOutput(generation.index, text, token_ids, logprobs, score=generation.score)
        if logprobs is not None:
            output.text_offsets = offsets
        if self._finder is not None and self._finder.found is not None:
            output.finish_reason, output.stop_text = "stop", self._finder.found
            # So that it counts as what it is: to the scheduler it is an abort.
            if generation.finish_reason is None:
                generation.finish_reason = "stop"
            self.close()
        return output

    def _read_text(self, stream: TextStream, token_ids: list[int]) -> tuple[str, list[int], list[int]]:
        """Returns the text, the tokens up to the one that completed a stop text, and where each begins."""
        finder = self._finder
        pieces, offsets = [], []
        for place, token_id in enumerate(token_ids, 1):
            offsets.append(stream.num_chars)
            piece = stream.push(token_id)
            pieces.append(piece if finder is None else finder.push(piece))
            if finder is not None and finder.found is not None:
                token_ids = token_ids[:place]
                break
        return "".join(pieces), token_ids, offsets

    def _finish(self, output: GenerationOutput, reason: FinishReason) -> None:
        if self._stream is not None:
            rest = self._stream.finish()
            if self._finder is not None:
                rest = self._finder.push(rest)
                if self._finder.found is None:
                    rest += self._finder.finish()
                else:
                    reason, output.stop_text = "stop", self._finder.found
            output.text += rest
        output.finish_reason = reason
        self.has_ended = True

    def _end_reason(self) -> FinishReason | Literal["error"]:
        generation = self.generation
        reason = generation.finish_reason
        if generation.error is not None or reason is None:
            return "error"
        return _CONSUMED.get(reason, "error")

    def _raise_failure(self) -> NoReturn:
        generation = self.generation
        self.has_ended = True
        reason = generation.finish_reason or "error"
        detail = generation.error or _FAILURES.get(reason, f"it ended by {reason}")
        count = counted(len(generation.token_ids), "token")
        raise GenerationError(
            f"request {generation.request_id} ended after {count}: {detail}", reason, detail
        )
