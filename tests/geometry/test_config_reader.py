"""Layer patterns and key names beyond the facts file, and configs that are refused with field and reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpager._core import KvGeometry
from kvpager.errors import InvalidArgumentError

BASE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
}
LAYER = 2 * 2 * 64 * 2
"""Bytes a token of one of its layers."""


def geometry(**fields: Any) -> KvGeometry:
    return KvGeometry.from_config_json(json.dumps(BASE | fields))


def full_and_windowed(read: KvGeometry) -> tuple[int, int]:
    return read.full_attention_layers, read.windowed_layers


def test_llama4_is_chunked_with_one_full_layer_in_four() -> None:
    read = geometry(model_type="llama4_text", attention_chunk_size=8192)
    assert full_and_windowed(read) == (2, 6)
    assert {group[0] for group in read.layer_groups} == {"full", "chunked"}
    listed = geometry(model_type="llama4_text", attention_chunk_size=8192, no_rope_layers=[1, 0] * 4)
    assert full_and_windowed(listed) == (4, 4)


def test_qwen2_window_starts_at_max_window_layers() -> None:
    read = geometry(model_type="qwen2", sliding_window=1024, use_sliding_window=True, max_window_layers=6)
    assert full_and_windowed(read) == (6, 2)


def test_pattern_fields_of_each_family() -> None:
    assert full_and_windowed(geometry(model_type="cohere2", sliding_window=64, sliding_window_pattern=4)) == (
        2,
        6,
    )
    assert full_and_windowed(
        geometry(model_type="exaone4", sliding_window=64, sliding_window_pattern="LLLG")
    ) == (2, 6)
    assert full_and_windowed(geometry(model_type="starcoder2", sliding_window=4096)) == (0, 8)
    neo = geometry(model_type="gpt_neo", window_size=256, attention_types=[[["global", "local"], 4]])
    assert full_and_windowed(neo) == (4, 4)


def test_layers_that_share_kv_keep_none() -> None:
    assert geometry(num_kv_shared_layers=3).bytes_per_token == 5 * LAYER
    assert geometry(use_cla=True, cla_share_factor=2).bytes_per_token == 4 * LAYER
    blocks = [{"attention": {"no_op": True}}] * 2 + [{"attention": {"n_heads_in_group": 4}}] * 6
    assert geometry(block_configs=blocks).bytes_per_token == 6 * LAYER


def test_full_layers_may_have_heads_of_their_own() -> None:
    types = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    read = geometry(
        model_type="gemma4_text",
        layer_types=types,
        sliding_window=512,
        global_head_dim=128,
        num_global_key_value_heads=1,
    )
    assert read.bytes_per_token == 6 * LAYER + 2 * (1 * 2 * 128 * 2)
    blocks = {group[3] + group[4] for group in read.layer_groups}
    assert len(blocks) == 1, "blocks are of equal bytes whatever the layers"


def test_mpt_chatglm_and_bigcode_key_names() -> None:
    mpt = {"model_type": "mpt", "n_layers": 4, "n_heads": 8, "d_model": 512, "max_seq_len": 2048}
    read = KvGeometry.from_config_json(
        json.dumps(mpt | {"attn_config": {"attn_type": "multihead_attention"}})
    )
    assert (read.num_kv_heads, read.max_positions) == (8, 2048)
    grouped = mpt | {"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}}
    assert KvGeometry.from_config_json(json.dumps(grouped)).num_kv_heads == 2
    glm = {
        "model_type": "chatglm",
        "num_layers": 4,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "kv_channels": 128,
    }
    glm |= {"multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 65024}
    assert KvGeometry.from_config_json(json.dumps(glm)).num_kv_heads == 2
    code = {"model_type": "gpt_bigcode", "n_layer": 4, "n_head": 48, "n_embd": 6144, "multi_query": True}
    assert KvGeometry.from_config_json(json.dumps(code)).attention == "MQA"


BROKEN = [
    ({"num_hidden_layers": None}, "num_hidden_layers", "is missing"),
    ({"num_hidden_layers": 0}, "num_hidden_layers", "is 0, expected a whole number"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers", "more than 4096"),
    ({"num_attention_heads": "8"}, "num_attention_heads", "expected a whole number"),
    ({"num_key_value_heads": -2}, "num_key_value_heads", "is -2"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "does not divide the 8 query heads"),
    ({"head_dim": 64.5}, "head_dim", "is 64.5"),
    ({"head_dim": None, "hidden_size": 510}, "head_dim", "510 / 8 heads is not a whole number"),
    ({"head_dim": None, "hidden_size": None}, "hidden_size", "is missing"),
    ({"hidden_size": 2**40}, "hidden_size", "expected a whole number"),
    ({"kv_lora_rank": 512}, "qk_rope_head_dim", "is missing"),
    ({"layer_types": ["full_attention"] * 7}, "layer_types", "lists 7 layers, the model has 8"),
    ({"layer_types": ["sliding_attention"] * 8}, "layer_types", "there is no sliding_window"),
    ({"use_sliding_window": "no", "sliding_window": 8}, "use_sliding_window", "expected true or false"),
    ({"num_kv_shared_layers": 8}, "num_kv_shared_layers", "no layer would keep K and V"),
]


@pytest.mark.parametrize(("fields", "field", "reason"), BROKEN)
def test_broken_config_names_the_field_and_the_reason(
    fields: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        geometry(**fields)
    assert f"'{field}'" in str(caught.value)
    assert reason in str(caught.value)


UNSIZED = [
    ({"model_type": "mamba2"}, "model_type"),
    ({"model_type": "jamba", "attn_layer_period": 8}, "model_type"),
    ({"attn_layer_period": 8}, "attn_layer_period"),
    ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2},
        "layer_types",
    ),
    ({"layers_block_type": ["recurrent", "attention"] * 4}, "layers_block_type"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"model_type": "bert"}, "model_type"),
    ({"cross_attention_layers": [3, 7]}, "cross_attention_layers"),
    ({"index_topk": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "index_topk"),
]


@pytest.mark.parametrize(("fields", "field"), UNSIZED)
def test_what_cannot_be_sized_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{field}'"):
        geometry(**fields)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', "null"])
def test_a_file_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="config is not"):
        KvGeometry.from_config_json(text)
