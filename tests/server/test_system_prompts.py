"""What a tenants file publishes is the beginning of the chats that will use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from http_server import ALICE, running_server

from kvpager.engine import ByteTokenizer, NullRunner
from kvpager.errors import InvalidArgumentError
from kvpager.runner import find_demo_model
from kvpager.runner.gguf_file import GgufFile
from kvpager.runner.tokenizer import Tokenizer
from kvpager.server.tenants import SharedScope, TenantSpec, TenantTable, _head_of_chats, hash_key

SYSTEM = "You are the assistant of a small public library, and you know every shelf of it by heart."
USERS = ("Where are the maps?", "\n\nTwo empty lines first", " a space", "é", "1 2 3", "🙂", "<tag>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = find_demo_model()
    assert path is not None, "make setup installs the demo model"
    return Tokenizer.from_gguf(GgufFile(path).metadata)


def chat(user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def test_a_published_system_prompt_is_what_every_chat_with_it_begins_with(tokenizer: Tokenizer) -> None:
    head = _head_of_chats(tokenizer, SYSTEM)
    text = tokenizer._backend.decode(head, skip_special_tokens=False)
    assert SYSTEM in text
    assert "assistant\n" not in text, "the header of an answer belongs to no chat's beginning"
    for user in USERS:
        assert tokenizer.encode_chat(chat(user))[: len(head)] == head


@pytest.mark.parametrize("scope", ["public", "group"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_chat_hits_all_of_a_published_system_prompt(
    tokenizer: Tokenizer, scope: str, block_size: int
) -> None:
    shared: dict[str, Any] = {f"{scope}s": {"house": SharedScope(system_prompts=(SYSTEM,))}}
    tenants: dict[str, Any] = {
        f"tenant-{i}": TenantSpec(key_hashes=(hash_key(f"{ALICE}-{i}"),), **{scope: "house"})
        for i in range(len(USERS))
    }
    head = len(_head_of_chats(tokenizer, SYSTEM))
    runner = NullRunner(vocab_size=49_152)
    with running_server(
        runner=runner, tokenizer=tokenizer, table=TenantTable(tenants, **shared), block_size=block_size
    ) as server:
        server.wait_until_published()
        for i, user in enumerate(USERS):
            client = server.client(f"{ALICE}-{i}")
            done = client.chat.completions.create(model="null", messages=chat(user), max_tokens=1)  # type: ignore[arg-type]
            assert done.usage is not None
            assert done.usage.prompt_tokens_details is not None
            cached = done.usage.prompt_tokens_details.cached_tokens
            assert cached == head // block_size * block_size, user


class Numbered(ByteTokenizer):
    """Begins every chat with another token."""

    count = 0

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        self.count += 1
        return [self.count, *super().encode_chat(messages)]


def test_a_template_whose_chats_do_not_begin_alike_is_told() -> None:
    with pytest.raises(InvalidArgumentError, match="do not begin alike"):
        _head_of_chats(Numbered(), SYSTEM)
