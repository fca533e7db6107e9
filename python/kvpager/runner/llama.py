"""The Llama forward pass over paged KV, written once for NumPy and CuPy.

One call computes a whole scheduler batch: prefill chunks and decodes of many sequences lie in one `[T,
hidden]` array, and only attention knows where one sequence ends and the next begins. Every layer appends its
new K and V to the slots that the scheduler chose, then attends through the block tables. Logits are computed
for `sample_rows` only.

All arithmetic is fp32; the order of sums inside the BLAS library depends on the batch's shape, so logits of
one sequence differ by rounding (about 1e-5) between batchings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpager import attention
from kvpager.errors import InvalidArgumentError
from kvpager.runner.config import LlamaConfig
from kvpager.runner.kv_cache import KvCache
from kvpager.runner.layer_groups import RunnerGroups
from kvpager.runner.products import product
from kvpager.runner.weights import Array, LayerWeights, LlamaWeights

__all__ = ["BatchArrays", "LlamaModel"]


class GroupArrays(Protocol):
    """The arrays of a batch that each layer group has of its own."""

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[T] slot of each token's K and V; -1 writes nothing."""

    @property
    def table_rows(self) -> npt.NDArray[np.int32]:
        """[S] row of `block_tables`."""

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """[rows, max_blocks] block ids; -1 where the group sees nothing any more."""


class BatchArrays(Protocol):
    """The arrays of a scheduler's batch that the forward pass reads."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """[T] flattened tokens of this step."""

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """[T] position of each token in its sequence."""

    @property
    def query_start(self) -> npt.NDArray[np.int32]:
        """[S+1] token range of each sequence."""

    @property
    def sample_rows(self) -> npt.NDArray[np.int32]:
        """[R] rows whose logits are needed."""

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[T] slot of each token's K and V; -1 writes nothing."""

    @property
    def context_lens(self) -> npt.NDArray[np.int32]:
        """[S] tokens visible to each sequence's last query."""

    @property
    def table_rows(self) -> npt.NDArray[np.int32]:
        """[S] row of `block_tables`."""

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """[rows, max_blocks] block ids."""

    @property
    def groups(self) -> Sequence[GroupArrays]:
        """The last three by layer group; read only if the model has more than one."""


@dataclass(frozen=True)
class _Step:
    """A batch's arrays where the model computes, and what every layer shares.

    Attributes:
        cosine, sine: [T, 1, head_dim / 2] of the rotary angles.
        groups: of each layer group the slot mapping, i64 [T], and the keyword arguments of `paged_attention`.
    """

    cosine: Array
    sine: Array
    groups: list[tuple[Array, dict[str, Any]]]


class LlamaModel:
    """A Llama-family model whose weights are on one device. It keeps no state between calls."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, *, array_module: Any = np) -> None:
        """Keeps the weights, moved to the device of `array_module` if they are not there yet.

        Args:
            config: the model's shape.
            weights: as NumPy arrays, or already of `array_module`.
            array_module: `numpy` or `cupy`.
        """
        self.config = config
        self.groups = RunnerGroups.of(config)
        self.array_module = array_module
        self._weights = weights if array_module is np else weights.to(array_module)

    def new_cache(self, *, num_blocks: int, block_size: int, host_blocks: int = 0) -> KvCache:
        """Returns KV arrays for this model, on its device, and those of a host tier."""
        return KvCache(
            self.config,
            num_blocks=num_blocks,
            block_size=block_size,
            host_blocks=host_blocks,
            array_module=self.array_module,
        )

    def to_host(self, array: Array) -> npt.NDArray[np.float32]:
        """Returns an array of the model's device as a NumPy array."""
        host: npt.NDArray[np.float32] = array if self.array_module is np else self.array_module.asnumpy(array)
        return host

    def forward(self, batch: BatchArrays, cache: KvCache) -> Array:
        """Computes one batch: writes its K and V into `cache`, returns the logits that are needed.

        Args:
            batch: the step's arrays, host memory.
            cache: the KV arrays that the batch's block ids index; written at `slot_mapping`.

        Returns:
            [R, vocab] fp32 on the model's device, in the order of `sample_rows`.

        Raises:
            InvalidArgumentError: a token id outside the vocabulary.
        """
        xp, weights = self.array_module, self._weights
        self._check_tokens(batch.token_ids)
        step = self._step(batch)
        hidden = weights.embedding[xp.asarray(batch.token_ids)]
        with np.errstate(
            over="ignore"
        ):  # exp(-gate) of a strongly negative gate; its quotient is a correct 0
            for number, layer in enumerate(weights.layers):
                normed = self._normed(hidden, layer.attention_norm)
                hidden += self._attend(layer, normed, number, cache, step)
                hidden += self._feed_forward(layer, self._normed(hidden, layer.ffn_norm))
        sampled = hidden[xp.asarray(batch.sample_rows)]
        return self._product(self._normed(sampled, weights.output_norm), weights.output)

    def _check_tokens(self, token_ids: npt.NDArray[np.int32]) -> None:
        if not len(token_ids):
            return
        lowest, highest, size = int(token_ids.min()), int(token_ids.max()), self.config.vocab_size
        if lowest < 0 or highest >= size:
            raise InvalidArgumentError(f"token ids from {lowest} to {highest}: the vocabulary has {size}")

    def _step(self, batch: BatchArrays) -> _Step:
        xp = self.array_module
        positions = xp.asarray(batch.positions).astype(xp.float32)
        angles = (positions[:, None] * self._weights.inverse_frequencies)[:, None, :]
        shared = {name: xp.asarray(getattr(batch, name)) for name in ("query_start", "context_lens")}
        arrays: Sequence[GroupArrays] = (batch,) if len(self.groups.spans) == 1 else batch.groups
        groups = []
        for (_, window), group in zip(self.groups.spans, arrays, strict=True):
            tables = {name: xp.asarray(getattr(group, name)) for name in ("block_tables", "table_rows")}
            groups.append((xp.asarray(group.slot_mapping), {**shared, **tables, "window": window}))
        return _Step(xp.cos(angles), xp.sin(angles), groups)

    def _attend(self, layer: LayerWeights, normed: Array, number: int, cache: KvCache, step: _Step) -> Array:
        """Projects, rotates, appends and attends. `normed`: [T, hidden]; returns [T, hidden]."""
        config = self.config
        num_tokens = normed.shape[0]
        qkv = self._product(normed, layer.qkv).reshape(num_tokens, config.num_qkv_heads, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        query = self._rotated(qkv[:, : config.num_heads], step)
        key = self._rotated(qkv[:, config.num_heads : num_rotated], step)
        value = self.array_module.ascontiguousarray(qkv[:, num_rotated:])
        keys, values = cache.of_layer(number)
        slot_mapping, tables = step.groups[self.groups.group_of[number]]
        attention.append_kv(key, value, keys, values, slot_mapping)
        mixed = attention.paged_attention(query, keys, values, **tables)
        return self._product(mixed.reshape(num_tokens, -1), layer.attention_out)

    def _rotated(self, heads: Array, step: _Step) -> Array:
        """Returns [T, H, head_dim] rotated by position: pairs are (i, i + head_dim / 2)."""
        xp, half = self.array_module, self.config.head_dim // 2
        first, second = heads[..., :half], heads[..., half:]
        rotated = xp.empty(heads.shape, heads.dtype)
        rotated_first, rotated_second = rotated[..., :half], rotated[..., half:]
        xp.multiply(first, step.cosine, out=rotated_first)
        rotated_first -= second * step.sine
        xp.multiply(second, step.cosine, out=rotated_second)
        rotated_second += first * step.sine
        return rotated

    def _feed_forward(self, layer: LayerWeights, normed: Array) -> Array:
        """SwiGLU: `(silu(gate) * up) @ down`. `normed`: [T, hidden]; returns [T, hidden]."""
        xp, size = self.array_module, self.config.intermediate_size
        gate_up = self._product(normed, layer.gate_up)
        gate, up = gate_up[:, :size], gate_up[:, size:]
        activated = xp.exp(-gate)
        activated += 1.0
        xp.divide(gate, activated, out=activated)
        activated *= up
        return self._product(activated, layer.down)

    def _product(self, rows: Array, weight: Array) -> Array:
        """Returns `rows @ weight`: [T, out]."""
        return product(rows, weight) if self.array_module is np else rows @ weight

    def _normed(self, hidden: Array, weight: Array) -> Array:
        """RMSNorm over the last axis."""
        xp = self.array_module
        mean_square = xp.einsum("th,th->t", hidden, hidden) / hidden.shape[1]
        scale = 1.0 / xp.sqrt(mean_square + self.config.rms_norm_eps)
        normed = hidden * scale[:, None]
        normed *= weight
        return normed
