"""What a server is told at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpager.engine import TextTokenizer
from kvpager.errors import InvalidArgumentError
from kvpager.server.tenants import TenantTable

__all__ = ["ChatTokenizer", "ServerSettings"]


class ChatTokenizer(TextTokenizer, Protocol):
    """A tokenizer that also knows how a conversation becomes a prompt."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the ids of a conversation, up to where the assistant's next answer starts."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token's text, which may be a part of a character."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server is told at its start.

    Attributes:
        model_name: the name that requests give and `/v1/models` lists.
        tokenizer: of the model.
        tenants: who may ask.
        max_body_bytes: longest request body; a longer one gets 413.
        default_max_tokens: tokens of a chat answer that names no maximum.
        request_timeout: seconds after which a request that has not ended fails; None for no limit.
        max_metric_tenants: tenants with labels of their own in `/metrics`; the others are summed as `_other`.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    model_name: str
    tokenizer: ChatTokenizer
    tenants: TenantTable
    max_body_bytes: int = 1 << 20
    default_max_tokens: int = 512
    request_timeout: float | None = None
    max_metric_tenants: int = 100

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise InvalidArgumentError(f"max_body_bytes is {self.max_body_bytes}, at least 1 is needed")
        if self.default_max_tokens < 1:
            raise InvalidArgumentError(
                f"default_max_tokens is {self.default_max_tokens}, at least 1 is needed"
            )
        timeout = self.request_timeout
        if timeout is not None and not 0.0 < timeout < float("inf"):
            raise InvalidArgumentError(f"request_timeout is {timeout}, above 0 seconds is needed")
