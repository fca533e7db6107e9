"""What a server is told at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpager.engine import TextTokenizer
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
    """

    model_name: str
    tokenizer: ChatTokenizer
    tenants: TenantTable
    max_body_bytes: int = 1 << 20
    default_max_tokens: int = 512
    request_timeout: float | None = None
    max_metric_tenants: int = 100
