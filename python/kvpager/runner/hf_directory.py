"""A Hugging Face model directory: `config.json`, `model.safetensors` (or shards), side files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.errors import InvalidArgumentError
from kvpager.runner.optional import import_optional
from kvpager.runner.weights import FloatArray

__all__ = ["HuggingFaceDirectory", "read_json"]

_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_MODEL_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
_FLOATS = ("F16", "F32", "F64", "BF16")


class HuggingFaceDirectory:
    """The tensors of a model directory; a `TensorSource`. Shards are mapped, tensors read one at a time."""

    def __init__(self, path: Path) -> None:
        """Opens every shard.

        Raises:
            InvalidArgumentError: a file is missing, truncated or damaged.
            MissingDependencyError: the `safetensors` package is not installed.
        """
        self._safetensors = import_optional("safetensors", needed_for="reading a safetensors file")
        self._path = path
        self._file_of: dict[str, Path] = {}
        self._shards: dict[Path, Any] = {}
        self._bfloat16: tuple[Path, dict[str, Mapping[str, Any]]] | None = None
        for file in self._files():
            shard = self._open(file)
            self._shards[file] = shard
            self._file_of.update(dict.fromkeys(shard.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> FloatArray:
        """Returns one tensor as fp32, [out, in] for matrices."""
        file = self._file_of.get(name)
        if file is None:
            raise InvalidArgumentError(f"{self._path} has no tensor {name!r}")
        shard = self._shards[file]
        dtype = shard.get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise InvalidArgumentError(
                f"tensor {name!r} of {file} is {dtype}; only {', '.join(_FLOATS)} are read"
            )
        if dtype == "BF16":
            return _widen(self._raw_tensors(file)[name])
        return np.asarray(shard.get_tensor(name), dtype=np.float32)

    def layer_name(self, layer: int, part: str) -> str:
        """Returns the name of a layer's tensor."""
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"

    def model_name(self, part: str) -> str:
        """Returns the name of a tensor outside the layers."""
        return _MODEL_NAMES[part]

    def frequency_factors(self) -> None:
        """Returns None: these directories describe rope scaling in `config.json`."""
        return

    def _files(self) -> list[Path]:
        index = self._path / "model.safetensors.index.json"
        if not index.exists():
            return [self._path / "model.safetensors"]
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise InvalidArgumentError(f"{index} has no weight_map")
        return [self._path / str(name) for name in sorted(set(shards.values()))]

    def _open(self, file: Path) -> Any:
        try:
            return self._safetensors.safe_open(file, framework="np")
        except OSError as error:
            raise InvalidArgumentError(f"cannot read {file}: {error.strerror or error}") from error
        except self._safetensors.SafetensorError as error:
            raise InvalidArgumentError(
                f"{file} is truncated, damaged or no safetensors file ({error})"
            ) from error

    def _raw_tensors(self, file: Path) -> dict[str, Mapping[str, Any]]:
        """Reads a whole shard as bytes: the package's arrays are NumPy's, which has no bfloat16.

        The last shard is kept, since tensors of one shard are asked for one after the other.
        """
        if self._bfloat16 is None or self._bfloat16[0] != file:
            self._bfloat16 = (file, dict(self._safetensors.deserialize(file.read_bytes())))
        return self._bfloat16[1]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InvalidArgumentError: the file is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON file ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{path} holds no JSON object")
    return value


def _widen(info: Mapping[str, Any]) -> FloatArray:
    """Returns a bfloat16 tensor as fp32: its bits are the upper half."""
    bits = np.frombuffer(info["data"], dtype=np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(info["shape"])
