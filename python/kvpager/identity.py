"""Fingerprints from model files: everything that must be equal for KV to be reusable, read in one place.

A fingerprint names what computed the KV. These builders read the parts that a model's own files state
(position scheme, attention mask, data type, tokenizer and template); the caller states the rest (weights,
adapters, scales).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager._core import Fingerprint
from kvpager.errors import InvalidArgumentError, MissingDependencyError

__all__ = ["file_digest", "fingerprint_from_gguf", "fingerprint_from_hf_config", "text_digest"]

_CHUNK_BYTES = 1 << 20
_ROPE_KEYS = (
    "partial_rotary_factor",
    "rotary_pct",
    "head_dim",
    "qk_rope_head_dim",
    "original_max_position_embeddings",
    "rope_local_base_freq",
    "mrope_section",
    "no_rope_layers",
    "no_rope_layer_interval",
)
_MASK_KEYS = (
    "layer_types",
    "sliding_window_pattern",
    "max_window_layers",
    "is_causal",
    "attn_temperature_tuning",
)


def text_digest(text: str | bytes) -> str:
    """Digest of a text, such as a chat template: 64 hexadecimal digits."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=32).hexdigest()


def file_digest(*paths: str | Path) -> str:
    """Digest of files' contents in the given order, such as all shards of the weights.

    Each file enters with its length, so moving bytes from one file to the next changes the digest.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path in paths:
        digest.update(Path(path).stat().st_size.to_bytes(8, "little"))
        with Path(path).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def fingerprint_from_hf_config(
    config: Mapping[str, Any],
    *,
    model: str | None = None,
    model_revision: str | None = None,
    tokenizer_revision: str | None = None,
    chat_template: str | None = None,
    adapters: Sequence[tuple[str, float | None]] = (),
    kv_dtype: str | None = None,
    kv_scales: str | None = None,
    numerics: str | None = None,
    block_size: int | None = None,
) -> Fingerprint:
    """The fingerprint of a Hugging Face model.

    Args:
        config: the content of `config.json`. A multimodal model's `text_config` is read.
        model: the model's name; by default the one in the configuration.
        model_revision: digest or commit of the weights; by default the configuration's commit, if it has one.
        tokenizer_revision: digest or commit of the tokenizer.
        chat_template: the template's text; its digest is kept.
        adapters: (content digest, scale) in the order of application. None are stated as none.
        kv_dtype: data type of the stored K and V; by default the model's.
        kv_scales: digest of quantisation scales.
        numerics: whatever else changes values.
        block_size: tokens in a block.

    Returns:
        A fingerprint that differs if any of these, or the position scheme or attention mask, differs.

    Raises:
        InvalidArgumentError: the configuration is not a mapping, or a number in it is not one.

    >>> config = {"model_type": "llama", "rope_theta": 1e5, "torch_dtype": "bfloat16"}
    >>> fingerprint_from_hf_config(config) == fingerprint_from_hf_config({**config, "rope_theta": 1e4})
    False
    """
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"config must be a mapping, is {type(config).__name__}")
    text: Mapping[str, Any] = config.get("text_config") or config
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    theta = text.get("rope_theta", rope.pop("rope_theta", None))
    rope_type = rope.pop("rope_type", rope.pop("type", "default"))
    rope.update({key: text[key] for key in _ROPE_KEYS if text.get(key) is not None})
    mask, window = _mask_of(text)
    return Fingerprint(
        model=model or config.get("_name_or_path") or config.get("model_type"),
        model_revision=model_revision or config.get("_commit_hash"),
        tokenizer_revision=tokenizer_revision,
        chat_template=None if chat_template is None else text_digest(chat_template),
        adapters=list(adapters),
        rope_type=str(rope_type),
        rope_theta=_number("rope_theta", theta),
        rope_scaling=_canonical(rope),
        attention_mask=mask,
        window=window,
        kv_dtype=kv_dtype or text.get("dtype") or text.get("torch_dtype"),
        kv_scales=kv_scales,
        numerics=numerics,
        block_size=block_size,
    )


def fingerprint_from_gguf(
    source: str | Path | Mapping[str, Any],
    *,
    model_revision: str | None = None,
    adapters: Sequence[tuple[str, float | None]] = (),
    kv_dtype: str | None = None,
    kv_scales: str | None = None,
    numerics: str | None = None,
    block_size: int | None = None,
) -> Fingerprint:
    """The fingerprint of a GGUF model.

    Args:
        source: the file, or its metadata as a mapping. Of a file, the weights' revision is its digest.
        model_revision: digest or name of the weights' revision, if not the file's digest.
        adapters: (content digest, scale) in the order of application. None are stated as none.
        kv_dtype: data type of the stored K and V.
        kv_scales: digest of quantisation scales.
        numerics: whatever else changes values.
        block_size: tokens in a block.

    Returns:
        A fingerprint that differs if any of these, or the position scheme, mask, tokenizer or template,
        differs.

    Raises:
        InvalidArgumentError: the metadata does not name an architecture.
        MissingDependencyError: a file was given and the `gguf` package is not installed.
    """
    if isinstance(source, Mapping):
        metadata: Mapping[str, Any] = source
    else:
        metadata = _gguf_metadata(Path(source))
        model_revision = model_revision or file_digest(source)
    architecture = metadata.get("general.architecture")
    if not architecture:
        raise InvalidArgumentError("the GGUF metadata has no general.architecture")
    prefix = f"{architecture}."
    rope = {key: metadata[key] for key in metadata if key.startswith(f"{prefix}rope.")}
    theta = rope.pop(f"{prefix}rope.freq_base", None)
    rope_type = rope.pop(f"{prefix}rope.scaling.type", "default")
    tokenizer = {key: metadata[key] for key in metadata if key.startswith("tokenizer.ggml.")}
    template = metadata.get("tokenizer.chat_template")
    window = metadata.get(f"{prefix}attention.sliding_window")
    return Fingerprint(
        model=str(metadata.get("general.name") or architecture),
        model_revision=model_revision,
        tokenizer_revision=text_digest(_canonical(tokenizer)),
        chat_template=None if template is None else text_digest(str(template)),
        adapters=list(adapters),
        rope_type=str(rope_type),
        rope_theta=_number("rope.freq_base", theta),
        rope_scaling=_canonical(rope),
        attention_mask="causal" if window is None else "sliding",
        window=None if window is None else int(window),
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        numerics=numerics,
        block_size=block_size,
    )


def _mask_of(text: Mapping[str, Any]) -> tuple[str, int | None]:
    """Kind of mask with its layer pattern in one canonical text, and its window or chunk in tokens."""
    pattern = {key: text[key] for key in _MASK_KEYS if text.get(key) is not None}
    window, chunk = text.get("sliding_window"), text.get("attention_chunk_size")
    if text.get("use_sliding_window") is False:
        window = None
    kind = "chunked" if chunk else "sliding" if window else "causal"
    name = kind if not pattern else f"{kind} {_canonical(pattern)}"
    tokens = chunk or window
    return name, int(tokens) if tokens else None


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(f"{name} must be a number, is {value!r}")
    return float(value)


def _canonical(values: Mapping[str, Any]) -> str:
    """One text for equal mappings, whatever the order of their keys."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=repr)


def _gguf_metadata(path: Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError("reading GGUF files needs `pip install 'kvpager[model]'`") from error
    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError, IndexError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as GGUF: {error}") from error
    return {name: field.contents() for name, field in reader.fields.items()}
