"""Text becomes the ids of the model's own tokenizer, and ids become text again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_items import GoldenItem

from kvpager.engine import TextStream
from kvpager.errors import InvalidArgumentError
from kvpager.runner import LoadedModel, Tokenizer
from kvpager.runner.gguf_file import GgufFile

pytestmark = pytest.mark.model

SYSTEM = "You are a helpful assistant that answers in one short sentence."
TEXTS = ["", "héllo wörld", "日本語 🎉🎉", "1234 + 5.6 = ?", "  two  spaces\n\n\ttab", "don't I'll"]


def test_ids_of_every_golden_text_equal_the_models_own(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    for item in golden:
        assert demo.tokenizer.encode(item.text) == item.prompt_ids


def test_chat_template_of_the_model_gives_the_golden_chat_prompts(
    demo: LoadedModel, golden: list[GoldenItem]
) -> None:
    (item,) = [item for item in golden if "Why is the sky blue?" in item.text]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why is the sky blue?"}]
    assert demo.tokenizer.encode_chat(messages) == item.prompt_ids


def test_end_token_is_the_models(demo: LoadedModel) -> None:
    assert demo.tokenizer.stop_token_ids == (2,)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_are_the_texts_where_characters_are_split(demo: LoadedModel, text: str) -> None:
    ids = demo.tokenizer.encode(text)
    assert b"".join(map(demo.tokenizer.token_bytes, ids)) == text.encode()


def test_tokens_that_fall_back_to_bytes_are_those_bytes() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<0xF0>": 0, "<0x9F>": 1, "é": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = tokenizers.decoders.ByteFallback()
    tokenizer = Tokenizer(backend, chat_template=None, stop_token_ids=())
    assert [tokenizer.token_bytes(token_id) for token_id in range(3)] == [b"\xf0", b"\x9f", "é".encode()]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(demo: LoadedModel, text: str) -> None:
    assert demo.tokenizer.decode(demo.tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_never_split_a_character_and_sum_to_the_text(demo: LoadedModel, text: str) -> None:
    stream = TextStream(demo.tokenizer)
    pieces = [stream.push(token_id) for token_id in demo.tokenizer.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_stream_that_ends_inside_a_character_says_so_at_its_end(demo: LoadedModel) -> None:
    ids = demo.tokenizer.encode("🎉")
    assert len(ids) > 1
    stream = TextStream(demo.tokenizer)
    assert "".join(stream.push(token_id) for token_id in ids[:-1]) == ""
    assert "\ufffd" in stream.finish()


def test_hugging_face_files_give_the_same_tokenizer(
    demo: LoadedModel, golden: list[GoldenItem], tmp_path: Path
) -> None:
    metadata = GgufFile(demo.path).metadata
    demo.tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "chat_template": metadata["tokenizer.chat_template"],
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer = Tokenizer.from_hugging_face(tmp_path)
    assert [tokenizer.encode(item.text) for item in golden] == [item.prompt_ids for item in golden]
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.encode_chat(messages) == demo.tokenizer.encode_chat(messages)
    assert tokenizer.stop_token_ids == (2, 0)


def test_template_that_refuses_messages_is_a_clear_error(demo: LoadedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="refuses these messages"):
        demo.tokenizer.encode_chat([{"role": "user"}])


def test_unknown_kinds_of_tokenizer_are_named_in_the_error(demo: LoadedModel) -> None:
    metadata = dict(GgufFile(demo.path).metadata)
    with pytest.raises(InvalidArgumentError, match="'llama' is not supported"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.model": "llama"})
    with pytest.raises(InvalidArgumentError, match="'qwen2' is not supported"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    with pytest.raises(InvalidArgumentError, match=r"no tokenizer\.ggml\.merges"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": []})
