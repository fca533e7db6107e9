"""Configs of the models in kv_geometry.json, in each family's own key names.

The numbers come from the facts file; what is written here is how the family's released file says them, and
the fields in it that mislead a careless reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
Config = dict[str, Any]


def llama(facts: Facts, model_type: str = "llama", **more: Any) -> Config:
    config = {
        "model_type": model_type,
        "num_hidden_layers": facts["num_hidden_layers"],
        "num_attention_heads": facts["num_attention_heads"],
        "num_key_value_heads": facts["num_key_value_heads"],
        "hidden_size": facts["hidden_size"],
        "max_position_embeddings": facts["max_position_embeddings"],
        "torch_dtype": "bfloat16",
    }
    if facts["head_dim_from"] == "explicit":
        config["head_dim"] = facts["head_dim"]
    return config | more


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def alternating(facts: Facts, kinds: str) -> list[str]:
    """One layer type a layer: `sf` repeats sliding, full."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return [names[kinds[layer % len(kinds)]] for layer in range(facts["num_hidden_layers"])]


def gemma3(facts: Facts) -> Config:
    text = without(llama(facts, "gemma3_text", sliding_window=facts["window"]), "torch_dtype")
    return {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"num_hidden_layers": 27},
    }


def deepseek(facts: Facts) -> Config:
    return llama(facts, "deepseek_v3", num_nextn_predict_layers=1, **facts["mla"])


def falcon(facts: Facts) -> Config:
    return {
        "model_type": "falcon",
        "num_hidden_layers": facts["num_hidden_layers"],
        "num_attention_heads": facts["num_attention_heads"],
        "num_kv_heads": facts["num_attention_heads"],
        "hidden_size": facts["hidden_size"],
        "multi_query": True,
        "new_decoder_architecture": False,
    }


def gpt2(facts: Facts) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": facts["num_hidden_layers"],
        "n_head": facts["num_attention_heads"],
        "n_embd": facts["hidden_size"],
        "n_positions": facts["max_position_embeddings"],
        "n_ctx": facts["max_position_embeddings"],
        "n_inner": None,
    }


CONFIGS: dict[str, Callable[[Facts], Config]] = {
    "Llama-2-7B": llama,
    "Llama-2-70B": llama,
    "Llama-3-8B": llama,
    "Llama-3.1-8B-Instruct": llama,
    "Llama-3.2-1B-Instruct": llama,
    "Mistral-7B-Instruct-v0.3": lambda facts: llama(facts, "mistral", sliding_window=None),
    "Mixtral-8x7B-v0.1": lambda facts: llama(facts, "mixtral", sliding_window=None, num_local_experts=8),
    "Qwen2.5-7B-Instruct": lambda facts: llama(
        facts, "qwen2", sliding_window=131072, use_sliding_window=False, max_window_layers=28
    ),
    "Qwen3-8B": lambda facts: llama(facts, "qwen3"),
    "Gemma-2-9B": lambda facts: llama(facts, "gemma2", sliding_window=facts["window"]),
    "Gemma-3-12B-it": gemma3,
    "Phi-3-mini-4k-instruct": lambda facts: llama(facts, "phi3", sliding_window=facts["window"]),
    "DeepSeek-V3": deepseek,
    "Falcon-7B": falcon,
    "GPT-NeoX-20B": lambda facts: without(llama(facts, "gpt_neox"), "num_key_value_heads"),
    "GPT-2 (124M)": gpt2,
    "gpt-oss-120b": lambda facts: llama(
        facts, "gpt_oss", sliding_window=facts["window"], layer_types=alternating(facts, "sf")
    ),
    "SmolLM2-135M-Instruct": llama,
}
