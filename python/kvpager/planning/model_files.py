"""What `plan` reads of a model: its config, and the bytes of its weights if a file says them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpager.errors import InvalidArgumentError, MissingDependencyError

__all__ = ["ModelFiles", "read_model_files"]


@dataclass(frozen=True)
class ModelFiles:
    """A model's config and weights, as far as files say them.

    Attributes:
        path: the file that the config came from.
        config: the text of a `config.json`.
        weight_bytes: bytes of the weights, or None if no file says.
        weight_source: where the bytes come from.
    """

    path: Path
    config: str
    weight_bytes: int | None = None
    weight_source: str = ""


def read_model_files(path: Path) -> ModelFiles:
    """Reads a `config.json`, a directory that holds one, or a GGUF file.

    Args:
        path: the file or directory.

    Raises:
        InvalidArgumentError: with the path and the reason, if it cannot be read.
        MissingDependencyError: for a GGUF file without the `gguf` package.
    """
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".gguf":
        return _read_gguf(config)
    try:
        text = config.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidArgumentError(f"{config}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{config}: not UTF-8 text (byte {error.start})") from error
    _refuse_twice(config, text)
    # A file of another name says nothing about what lies beside it.
    size, source = _weight_bytes(config.parent) if config.name == "config.json" else (None, "")
    return ModelFiles(config, text, size, source)


def _refuse_twice(path: Path, text: str) -> None:
    """Refuses a field that is there twice: readers would disagree about which one counts."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgumentError(f"{path}: config field '{twice}': is there twice")
        return fields

    # Text that is not JSON is refused by the reader of the config, which says where.
    try:
        json.loads(text, object_pairs_hook=once)
    except InvalidArgumentError:
        raise
    except (ValueError, RecursionError):
        return


def _weight_bytes(directory: Path) -> tuple[int | None, str]:
    """Bytes of the safetensors beside a config: the index's total, or the files' sizes."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            size = int(json.loads(index.read_text())["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(f"{index}: no metadata.total_size: {error}") from error
        if not 0 < size < 1 << 62:
            raise InvalidArgumentError(f"{index}: metadata.total_size is {size}, expected bytes above 0")
        return size, index.name
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None, ""
    return sum(file.stat().st_size for file in files), f"{len(files)} safetensors files"


_GGUF_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "vocab_size": "vocab_size",
}
"""GGUF metadata, below the architecture's name, and the config field that means the same."""

_GGUF_PATTERNS = frozenset(
    {"gemma2", "gemma3", "gemma3n", "cohere2", "gpt_oss", "phi3", "mistral", "llama", "qwen2"}
)
"""Architectures whose window pattern is known; other windowed ones are refused."""


def _read_gguf(path: Path) -> ModelFiles:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError("reading GGUF needs gguf: pip install 'kvpager[model]'") from error
    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError, IndexError) as error:
        raise InvalidArgumentError(f"{path}: not a readable GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _gguf_config(path, metadata)
    size = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    return ModelFiles(path, json.dumps(config), size, f"{len(reader.tensors)} tensors of the file")


def _gguf_config(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidArgumentError(f"{path}: no general.architecture")
    state = next((name for name in metadata if name.startswith(f"{architecture}.ssm.")), None)
    if state is not None:
        raise InvalidArgumentError(f"{path}: field '{state}': layers with recurrent state are not sized")
    config: dict[str, Any] = {"model_type": architecture.replace("-", "_")}
    for name, field in _GGUF_KEYS.items():
        if f"{architecture}.{name}" in metadata:
            config[field] = metadata[f"{architecture}.{name}"]
    if "kv_lora_rank" not in config:
        config.pop("qk_rope_head_dim", None)
    windowed = config.get("sliding_window") and "sliding_window_pattern" not in config
    if windowed and config["model_type"] not in _GGUF_PATTERNS:
        raise InvalidArgumentError(
            f"{path}: field '{architecture}.attention.sliding_window': the file does not say which layers"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    return config
