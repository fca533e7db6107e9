"""Every model of kv_geometry.json, read from its own family's key names, costs exactly what the facts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpager._core import KvGeometry

from .released_configs import CONFIGS


@pytest.fixture(scope="module")
def facts(shared_dir: Path) -> dict[str, dict[str, Any]]:
    models = json.loads((shared_dir / "models" / "kv_geometry.json").read_text())["models"]
    return {model["model"]: model for model in models}


def geometry(config: dict[str, Any], **options: Any) -> KvGeometry:
    return KvGeometry.from_config_json(json.dumps(config), **options)


def test_every_entry_has_a_config(facts: dict[str, dict[str, Any]]) -> None:
    assert set(facts) == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_released_model_costs_exactly_what_the_facts_say(facts: dict[str, dict[str, Any]], name: str) -> None:
    fact = facts[name]
    read = geometry(CONFIGS[name](fact))
    assert read.bytes_per_token == fact["kv_bytes_per_token_bf16"]
    assert read.bytes_per_token_beyond_window == fact["kv_bytes_per_token_bf16_beyond_window"]
    assert read.bytes_per_token == read.num_layers * fact["kv_bytes_per_token_per_layer_bf16"]
    assert read.attention == fact["attention"]
    assert read.num_layers == fact["num_hidden_layers"]
    assert read.num_attention_heads == fact["num_attention_heads"]
    assert read.hidden_size == fact["hidden_size"]
    assert read.head_dim == fact["head_dim"]
    assert (read.full_attention_layers, read.windowed_layers) == (
        fact["full_attention_layers"],
        fact["windowed_layers"],
    )
    assert read.window == fact["window"]
    if fact["mla"] is None:
        assert read.num_kv_heads == fact["num_key_value_heads"]
    if name != "Falcon-7B":  # its released file has no maximum
        assert read.max_positions == fact["max_position_embeddings"]


def test_class_defaults_are_named_in_the_notes(facts: dict[str, dict[str, Any]]) -> None:
    notes = " ".join(geometry(CONFIGS["Gemma-3-12B-it"](facts["Gemma-3-12B-it"])).notes)
    assert "head_dim 256" in notes
    assert "one full layer in 6" in notes
    assert geometry(CONFIGS["Llama-3-8B"](facts["Llama-3-8B"])).notes == []


def test_half_the_bytes_in_fp8_and_int8_with_scales(facts: dict[str, dict[str, Any]]) -> None:
    config = CONFIGS["Llama-3-8B"](facts["Llama-3-8B"])
    assert geometry(config, kv_dtype="fp8").bytes_per_token == 65536
    assert geometry(config, kv_dtype="int8").bytes_per_token == 65536 + 32 * 8 * 2 * 4
    assert geometry(config, kv_dtype="int8", kv_scales="per_tensor").bytes_per_token == 65536
    mla = CONFIGS["DeepSeek-V3"](facts["DeepSeek-V3"])
    assert geometry(mla, tensor_parallel=8).bytes_per_token == 70272, "a latent is on every rank"
