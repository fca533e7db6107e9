"""The weights of a Llama-family model, laid out for the forward pass.

Every matrix is fp32, contiguous and stored `[in, out]`, so that `activations @ weight` is one BLAS call with
no transposed operand; the query, key and value projections are one matrix, and so are gate and up. A file
format gives its matrices as `[out, in]` through a `TensorSource`; `assemble` checks every shape and writes
each into its place, so that only one tensor at a time exists twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError
from kvpager.runner.config import LlamaConfig

__all__ = ["Array", "LayerWeights", "LlamaWeights", "TensorSource", "assemble"]

Array = Any
"""A NumPy or a CuPy array: the runner is written against what both offer."""

FloatArray = npt.NDArray[np.float32]


class TensorSource(Protocol):
    """Named tensors of a model file, as fp32."""

    def __contains__(self, name: str) -> bool:
        """Whether the file has that tensor."""

    def read(self, name: str) -> FloatArray:
        """Returns one tensor, dequantised: matrices as [out, in].

        Raises:
            InvalidArgumentError: the file does not have it.
        """

    def layer_name(self, layer: int, part: str) -> str:
        """Returns the name of a layer's tensor, for a `part` of `LAYER_PARTS`."""

    def model_name(self, part: str) -> str:
        """Returns the name of a tensor outside the layers: "embedding", "output_norm", "output"."""

    def frequency_factors(self) -> FloatArray | None:
        """Returns divisors of the rope frequencies, [head_dim / 2], if the file brings them as a tensor."""


LAYER_PARTS = ("attention_norm", "query", "key", "value", "attention_out", "ffn_norm", "gate", "up", "down")


@dataclass(frozen=True)
class LayerWeights:
    """One layer, fp32, contiguous.

    Attributes:
        attention_norm: [hidden].
        qkv: [hidden, (num_heads + 2 * num_kv_heads) * head_dim], query, key, value columns in this order.
        attention_out: [num_heads * head_dim, hidden].
        ffn_norm: [hidden].
        gate_up: [hidden, 2 * intermediate], gate columns before up columns.
        down: [intermediate, hidden].
    """

    attention_norm: Array
    qkv: Array
    attention_out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True)
class LlamaWeights:
    """A whole model.

    Attributes:
        embedding: [vocab, hidden], rows are looked up.
        layers: the layers, in order.
        output_norm: [hidden].
        output: [hidden, vocab]; of a tied model a transposed copy of the embedding, which costs memory and
            halves the time of the largest matrix product of a decode step.
        inverse_frequencies: [head_dim / 2], the angle per position of each rotary pair.
    """

    embedding: Array
    layers: tuple[LayerWeights, ...]
    output_norm: Array
    output: Array
    inverse_frequencies: Array

    def to(self, array_module: Any) -> LlamaWeights:
        """Returns the same weights as arrays of that module (`cupy`: on its current device)."""
        convert = array_module.asarray
        layers = tuple(
            LayerWeights(**{name: convert(value) for name, value in vars(layer).items()})
            for layer in self.layers
        )
        return LlamaWeights(
            embedding=convert(self.embedding),
            layers=layers,
            output_norm=convert(self.output_norm),
            output=convert(self.output),
            inverse_frequencies=convert(self.inverse_frequencies),
        )


def assemble(config: LlamaConfig, source: TensorSource) -> LlamaWeights:
    """Reads every tensor of the model into the layout of the forward pass.

    Args:
        config: the shapes to expect.
        source: the tensors, by name.

    Raises:
        InvalidArgumentError: a tensor is missing or has another shape.
    """
    embedding = _read(source, source.model_name("embedding"), (config.vocab_size, config.hidden_size))
    if config.tied_embeddings:
        output = _transposed(embedding)
    else:
        output = _transposed(_read(source, source.model_name("output"), embedding.shape))
    frequencies = np.array(config.rope.inverse_frequencies(config.head_dim), dtype=np.float64)
    if (factors := source.frequency_factors()) is not None:
        frequencies /= factors
    return LlamaWeights(
        embedding=np.ascontiguousarray(embedding),
        layers=tuple(_assemble_layer(config, source, layer) for layer in range(config.num_layers)),
        output_norm=_read(source, source.model_name("output_norm"), (config.hidden_size,)),
        output=output,
        inverse_frequencies=frequencies.astype(np.float32),
    )


def _assemble_layer(config: LlamaConfig, source: TensorSource, layer: int) -> LayerWeights:
    hidden, ffn = config.hidden_size, config.intermediate_size
    rows = {
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
        "value": config.num_kv_heads * config.head_dim,
        "gate": ffn,
        "up": ffn,
    }

    def read(part: str, shape: tuple[int, ...]) -> FloatArray:
        return _read(source, source.layer_name(layer, part), shape)

    def fuse(*parts: str) -> FloatArray:
        fused = np.empty((hidden, sum(rows[part] for part in parts)), dtype=np.float32)
        start = 0
        for part in parts:
            fused[:, start : start + rows[part]] = read(part, (rows[part], hidden)).T
            start += rows[part]
        return fused

    return LayerWeights(
        attention_norm=read("attention_norm", (hidden,)),
        qkv=fuse("query", "key", "value"),
        attention_out=_transposed(read("attention_out", (hidden, rows["query"]))),
        ffn_norm=read("ffn_norm", (hidden,)),
        gate_up=fuse("gate", "up"),
        down=_transposed(read("down", (hidden, ffn))),
    )


def _read(source: TensorSource, name: str, shape: tuple[int, ...]) -> FloatArray:
    tensor = source.read(name)
    if tensor.shape != shape:
        raise InvalidArgumentError(f"tensor {name!r} has shape {tensor.shape}, {shape} is needed")
    return tensor


def _transposed(matrix: FloatArray) -> FloatArray:
    return np.ascontiguousarray(matrix.T)
