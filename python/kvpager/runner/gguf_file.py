"""A GGUF file: metadata and tensors, through the `gguf` package's reader and dequantisers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.errors import InvalidArgumentError
from kvpager.runner.optional import import_optional
from kvpager.runner.weights import FloatArray

__all__ = ["GgufFile"]

_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_out": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_MODEL_NAMES = {"embedding": "token_embd", "output_norm": "output_norm", "output": "output"}
_DAMAGED = (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError)
"""What the reader raises for a file that ends early or is no GGUF file.

It has no exception of its own, and nothing tells beforehand what it will trip over.
"""


class GgufFile:
    """An open GGUF file of the `llama` architecture; a `TensorSource`.

    The rows of query and key matrices of this architecture are stored in the order of interleaved rotary
    pairs; `read` puts them back into the order of the original weights (first halves, then second halves of
    each head).
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and reads its metadata.

        Raises:
            InvalidArgumentError: the file is missing, truncated or damaged, or is no GGUF file.
            MissingDependencyError: the `gguf` package is not installed.
        """
        self._gguf = import_optional("gguf", needed_for="reading a GGUF file")
        self._path = path
        try:
            reader = _plain_reader(self._gguf, path)
            self._metadata = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise InvalidArgumentError(f"cannot read {path}: {error.strerror or error}") from error
        except _DAMAGED as error:
            raise InvalidArgumentError(f"{path} is truncated, damaged or no GGUF file ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Key to value, as in the file."""
        return self._metadata

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str) -> FloatArray:
        """Returns one tensor as fp32, [out, in] for matrices, rotary rows in the original order."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise InvalidArgumentError(f"{self._path} has no tensor {name!r}")
        try:
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:  # the package does not list the types that it can read
            raise InvalidArgumentError(f"tensor {name!r} of {self._path}: {error}") from error
        values = np.asarray(values, dtype=np.float32)
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            return self._original_row_order(name, values)
        return values

    def layer_name(self, layer: int, part: str) -> str:
        """Returns the name of a layer's tensor."""
        return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"

    def model_name(self, part: str) -> str:
        """Returns the name of a tensor outside the layers."""
        return f"{_MODEL_NAMES[part]}.weight"

    def frequency_factors(self) -> FloatArray | None:
        """Returns the divisors of the rope frequencies that Llama-3.1 files bring, or None."""
        return self.read("rope_freqs.weight") if "rope_freqs.weight" in self else None

    def _original_row_order(self, name: str, values: FloatArray) -> FloatArray:
        heads_key = "head_count" if name.endswith(".attn_q.weight") else "head_count_kv"
        num_heads = self._metadata.get(f"llama.attention.{heads_key}") or 0
        if not num_heads or values.shape[0] % (2 * num_heads):
            raise InvalidArgumentError(f"tensor {name!r} has {values.shape[0]} rows for {num_heads} heads")
        pairs = values.reshape(num_heads, values.shape[0] // (2 * num_heads), 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def _plain_reader(gguf: Any, path: Path) -> Any:
    """Opens the package's reader over a plain view of its file map.

    Each of the two hundred thousand small slices that the vocabulary takes would otherwise be a
    `numpy.memmap` object, which triples the time (1.7 s against 0.6 s for 49,152 tokens).
    """

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]
        data: Any

        def _get(self, *arguments: Any, **options: Any) -> Any:
            if type(self.data) is not np.ndarray:
                self.data = self.data.view(np.ndarray)
            return super()._get(*arguments, **options)

    return PlainReader(path)
