"""Fingerprints built from model files: one changed fact, one disjoint namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpager import BlockPool, Fingerprint, PrefixIndex, ShareScope
from kvpager.errors import InvalidArgumentError
from kvpager.identity import file_digest, fingerprint_from_gguf, fingerprint_from_hf_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "org/model",
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "torch_dtype": "bfloat16",
    "head_dim": 128,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "model",
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.chat_template": "{{ messages }}",
}


def namespaces(*fingerprints: Fingerprint) -> set[int]:
    index = PrefixIndex(BlockPool(4))
    return {index.namespace(ShareScope.private("alice"), fingerprint) for fingerprint in fingerprints}


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "org/other"},
        {"rope_theta": 10000.0},
        {"rope_scaling": None},
        {"rope_scaling": {**LLAMA["rope_scaling"], "factor": 4.0}},
        {"rope_scaling": {**LLAMA["rope_scaling"], "rope_type": "yarn"}},
        {"torch_dtype": "float16"},
        {"head_dim": 64},
        {"sliding_window": 4096},
        {"attention_chunk_size": 8192},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"partial_rotary_factor": 0.5},
        {"_commit_hash": "1"},
    ],
    ids=str,
)
def test_a_changed_configuration_is_disjoint(change: dict[str, Any]) -> None:
    before, after = fingerprint_from_hf_config(LLAMA), fingerprint_from_hf_config({**LLAMA, **change})
    assert len(namespaces(before, after)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m"},
        {"model_revision": "1"},
        {"tokenizer_revision": "1"},
        {"chat_template": "{{ x }}"},
        {"adapters": [("a", 1.0)]},
        {"adapters": [("a", 2.0)]},
        {"kv_dtype": "fp8"},
        {"kv_scales": "s"},
        {"numerics": "n"},
        {"block_size": 16},
    ],
    ids=str,
)
def test_what_the_caller_states_is_identity(change: dict[str, Any]) -> None:
    assert (
        len(namespaces(fingerprint_from_hf_config(LLAMA), fingerprint_from_hf_config(LLAMA, **change))) == 2
    )


def test_equal_configurations_share() -> None:
    shuffled = dict(reversed(LLAMA.items())) | {"rope_scaling": dict(reversed(LLAMA["rope_scaling"].items()))}
    unread = {**LLAMA, "transformers_version": "5", "sliding_window": 4096, "use_sliding_window": False}
    assert len(namespaces(*map(fingerprint_from_hf_config, (LLAMA, shuffled, unread)))) == 1
    nested = {"model_type": "llava", "_name_or_path": "org/model", "text_config": LLAMA}
    assert fingerprint_from_hf_config(nested) == fingerprint_from_hf_config(LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        {"general.name": "other"},
        {"llama.rope.freq_base": 10000.0},
        {"llama.rope.dimension_count": 32},
        {"llama.rope.scaling.type": "yarn"},
        {"llama.attention.sliding_window": 1024},
        {"tokenizer.ggml.tokens": ["a", "c"]},
        {"tokenizer.chat_template": "{{ other }}"},
    ],
    ids=str,
)
def test_changed_gguf_metadata_is_disjoint(change: dict[str, Any]) -> None:
    assert len(namespaces(fingerprint_from_gguf(GGUF), fingerprint_from_gguf({**GGUF, **change}))) == 2


def test_gguf_weights_are_identity(tmp_path: Path) -> None:
    assert fingerprint_from_gguf(GGUF, model_revision="1") != fingerprint_from_gguf(GGUF, model_revision="2")
    one, other = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"ab")
    other.write_bytes(b"c")
    assert len({file_digest(one), file_digest(other), file_digest(one, other), file_digest(other, one)}) == 4


def test_unreadable_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="architecture"):
        fingerprint_from_gguf({})
    with pytest.raises(InvalidArgumentError, match="mapping"):
        fingerprint_from_hf_config([])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="rope_theta"):
        fingerprint_from_hf_config({"rope_theta": "big"})
    pytest.importorskip("gguf")
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        fingerprint_from_gguf(damaged)


def test_the_encoding_tells_absent_from_empty_and_field_from_field() -> None:
    variants = [
        Fingerprint(),
        Fingerprint(model=""),
        Fingerprint(model="x"),
        Fingerprint(model_revision="x"),
        Fingerprint(adapters=[]),
        Fingerprint(adapters=[("", None)]),
    ]
    assert len({fingerprint.to_bytes() for fingerprint in variants}) == len(variants)
    assert len(set(variants)) == len(variants)
    assert namespaces(*variants) == set(range(len(variants)))


def test_no_scope_imitates_another() -> None:
    scopes = [
        ShareScope.private("x"),
        ShareScope.private("x", salt=b""),
        ShareScope.private("x", salt=b"y"),
        ShareScope.private("xy"),
        ShareScope.group("x"),
        ShareScope.public("x"),
    ]
    index = PrefixIndex(BlockPool(4))
    assert len({index.namespace(scope) for scope in scopes}) == len(set(scopes)) == len(scopes)
