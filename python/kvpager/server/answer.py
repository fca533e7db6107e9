"""Answers in OpenAI's shapes: whole, and as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpager.engine import GenerationOutput, GenerationStream, TokenLogprobs
from kvpager.server.settings import ChatTokenizer

__all__ = ["AnswerFormat", "Choice", "usage_of"]

_to_json = msgspec.json.encode


@dataclass
class Choice:
    """One sample, as it grows.

    Attributes:
        text: so far.
        logprobs: one for each token, if they were asked for.
        text_offsets: the same: where its text begins.
        token_ids: so far.
        finish_reason: None before the end.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, output: GenerationOutput) -> None:
        """Adds what is new."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.text_offsets += output.text_offsets or ()
        self.finish_reason = output.finish_reason


class AnswerFormat:
    """One answer's identity, and how its parts are written.

    The id is random: one that counts would tell a client how many requests others send.
    """

    def __init__(self, tokenizer: ChatTokenizer, model: str, *, is_chat: bool) -> None:
        """Makes an id and notes the time."""
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self.id = ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(16)
        kind = "chat.completion" if is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        chunk_head = _to_json({**self._head, "object": "chat.completion.chunk" if is_chat else kind})
        self._chunk_head = b"data: " + chunk_head[:-1] + b',"choices":['
        self._text_key = b'"delta":{"content":' if is_chat else b'"text":'
        self._text_end = b"}" if is_chat else b""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        body = {**self._head, "choices": [self._choice(i, choice) for i, choice in enumerate(choices)]}
        return _to_json({**body, "usage": usage})

    def role_chunk(self, index: int) -> bytes:
        """The first chunk of a chat's sample; nothing for a completion."""
        if not self._is_chat:
            return b""
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._chunk_head + delta % index + b"]}\n\n"

    def chunk(self, index: int, output: GenerationOutput) -> bytes:
        """A chunk with what is new of a sample."""
        logprobs = b"null"
        if output.logprobs:  # an end without a token has an empty list
            logprobs = _to_json(self._logprobs(output))
        reason = b"null" if output.finish_reason is None else b'"%s"' % output.finish_reason.encode()
        return b"".join(
            (
                self._chunk_head,
                b'{"index":%d,' % index,
                self._text_key,
                _to_json(output.text),
                self._text_end,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                reason,
                b"}]}\n\n",
            )
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that ends a stream with `include_usage`."""
        return self._chunk_head + b'],"usage":' + _to_json(usage) + b"}\n\n"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice) if choice.logprobs else None
        content: dict[str, Any] = {"text": choice.text}
        if self._is_chat:
            content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _logprobs(self, part: Choice | GenerationOutput) -> dict[str, Any]:
        token_ids, logprobs = part.token_ids, part.logprobs or []
        if self._is_chat:
            entries = [
                {
                    **self._token(token_id, each.logprob),
                    "top_logprobs": [self._token(other, logprob) for other, logprob in each.top],
                }
                for token_id, each in zip(token_ids, logprobs, strict=True)
            ]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [
                self._top(token_id, each) for token_id, each in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": part.text_offsets,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token_id))}

    def _name(self, token_id: int) -> str:
        """A token's text, or its bytes if they are a part of a character: U+FFFD would stand for many."""
        text = self._tokenizer.decode([token_id])
        if "\ufffd" not in text:
            return text
        own = self._tokenizer.token_bytes(token_id)
        return text if own == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def _top(self, sampled: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Alternatives by name, and the sampled token; of one name the most likely, which comes first."""
        top: dict[str, float] = {}
        for token_id, logprob in (*logprobs.top, (sampled, logprobs.logprob)):
            top.setdefault(self._name(token_id), logprob)
        return top


def usage_of(streams: Sequence[GenerationStream]) -> dict[str, Any]:
    """Tokens of a request: each prompt counts once, each sample's output counts.

    Cached tokens are those that the request's own tenant could have known of: a foreign prefix is no hit.
    """
    prompt = sum(stream.prompt_tokens for stream in streams)
    output = sum(stream.output_tokens for stream in streams)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(stream.cached_tokens for stream in streams)},
    }
