"""Tiny Llama models with random weights: files of both formats, and their dense float64 forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 24,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}
LAYER_SHAPES = {
    "input_layernorm": (24,),
    "self_attn.q_proj": (32, 24),
    "self_attn.k_proj": (16, 24),
    "self_attn.v_proj": (16, 24),
    "self_attn.o_proj": (24, 32),
    "post_attention_layernorm": (24,),
    "mlp.gate_proj": (40, 24),
    "mlp.up_proj": (40, 24),
    "mlp.down_proj": (24, 40),
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Tensors = dict[str, np.ndarray]


def random_tensors(*, tied: bool = False, num_layers: int = CONFIG["num_hidden_layers"]) -> Tensors:
    """Weights by their Hugging Face names. Every value is exact in bfloat16, so that no format rounds it."""
    generator = np.random.default_rng(7)
    shapes = {"model.embed_tokens.weight": (50, 24), "model.norm.weight": (24,)}
    if not tied:
        shapes["lm_head.weight"] = (50, 24)
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER_SHAPES.items()}
    return {
        name: generator.integers(-64, 65, shape).astype(np.float32) / 128 for name, shape in shapes.items()
    }


def write_hugging_face(
    directory: Path, tensors: Tensors, *, dtype: str = "F32", shards: int = 1, **changes: Any
) -> Path:
    """Writes config.json and the weights; a changed key of the config is removed if its value is None."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        _write_shard(directory / "model.safetensors", tensors, dtype)
        return directory
    weight_map = {}
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        _write_shard(directory / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def _write_shard(path: Path, tensors: Tensors, dtype: str) -> None:
    def encode(values: np.ndarray) -> np.ndarray:
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype({"F32": np.float32, "F16": np.float16, "I32": np.int32}[dtype])

    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32"}
    arrays = {name: np.ascontiguousarray(encode(values)) for name, values in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=names[dtype], shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    safetensors.serialize_file(specs, path)


def write_gguf(path: Path, tensors: Tensors, **changes: Any) -> Path:
    """Writes the same model as GGUF: query and key rows interleaved, as its llama architecture has them."""
    import gguf

    architecture = changes.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    integers = {
        "block_count": CONFIG["num_hidden_layers"],
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "attention.key_length": CONFIG["head_dim"],
        "vocab_size": CONFIG["vocab_size"],
    } | changes
    for key, value in integers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", CONFIG["rope_theta"])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", CONFIG["rms_norm_eps"])
    for name, values in tensors.items():
        writer.add_tensor(*_gguf_tensor(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensor(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    outside = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        "lm_head.weight": "output",
    }
    if name in outside:
        return f"{outside[name]}.weight", values
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    if part in ("self_attn.q_proj", "self_attn.k_proj"):
        rows = np.arange(len(values)).reshape(-1, 2, CONFIG["head_dim"] // 2)
        values = np.ascontiguousarray(values[rows.transpose(0, 2, 1).ravel()])
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight", values


def dense_logits(
    tensors: Tensors,
    token_ids: list[int],
    frequencies: np.ndarray,
    windows: tuple[int | None, ...] = (),
) -> np.ndarray:
    """The logits after every token of one sequence: [T, vocab], float64, nothing paged, nothing fused."""
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][token_ids]
    num_layers = sum(name.endswith("input_layernorm.weight") for name in tensors)
    for layer in range(num_layers):
        window = windows[layer] if windows else None
        part = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER_SHAPES}
        hidden = hidden + _attention(_norm(hidden, part["input_layernorm"]), part, frequencies, window)
        normed = _norm(hidden, part["post_attention_layernorm"])
        gate = normed @ part["mlp.gate_proj"].T
        up = normed @ part["mlp.up_proj"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ part["mlp.down_proj"].T
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(hidden, weights["model.norm.weight"]) @ output.T


def _norm(hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def _attention(normed: np.ndarray, part: Tensors, frequencies: np.ndarray, window: int | None) -> np.ndarray:
    size, groups = CONFIG["head_dim"], CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    length = len(normed)
    angles = np.arange(length)[:, None] * frequencies

    def heads(name: str) -> np.ndarray:
        return (normed @ part[name].T).reshape(length, -1, size).transpose(1, 0, 2)

    def rotate(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    query, key, value = (
        rotate(heads("self_attn.q_proj")),
        rotate(heads("self_attn.k_proj")),
        heads("self_attn.v_proj"),
    )
    key, value = np.repeat(key, groups, axis=0), np.repeat(value, groups, axis=0)
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(size)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ value).transpose(1, 0, 2).reshape(length, -1) @ part["self_attn.o_proj"].T
