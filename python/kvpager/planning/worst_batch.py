"""The batch that needs the most memory, and one forward pass of it with every buffer of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager._core import KvGeometry
from kvpager.attention import append_kv, paged_attention
from kvpager.errors import InvalidArgumentError
from kvpager.planning.memory import Memory

__all__ = ["Batch", "LayerShape", "Peaks", "cache_layers", "group_batches", "run_pass", "worst_batch"]

_CACHE_DTYPES = {"bf16": "float16", "fp16": "float16", "fp32": "float32", "fp8": "uint8"}
"""KV dtype to the array's; bf16 runs as float16, which NumPy has too and which takes the same bytes."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A decoder layer on one device.

    Attributes:
        hidden: width of the residual stream.
        query_heads: query heads.
        kv_heads: KV heads.
        head_dim: elements of a head.
        intermediate: width of the feed-forward part.
        vocab: size of the vocabulary.
        cache_dtype: dtype of the cache arrays.
        cache_bytes: bytes of a K or V element in the cache.
    """

    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    cache_dtype: str
    cache_bytes: int

    @classmethod
    def of(cls, geometry: KvGeometry) -> LayerShape:
        """The layer of a deployed model.

        Raises:
            InvalidArgumentError: for a cache that the pass does not run.
        """
        heads, head_dim = geometry.num_kv_heads, geometry.head_dim
        if heads is None or head_dim is None or geometry.kv_dtype not in _CACHE_DTYPES:
            raise InvalidArgumentError(
                f"--measure and --verify run K and V of heads in {', '.join(_CACHE_DTYPES)}; this plan keeps "
                f"{geometry.attention} in {geometry.kv_dtype}"
            )
        ranks = geometry.tensor_parallel
        dtype = _CACHE_DTYPES[geometry.kv_dtype]
        shape = cls(
            hidden=geometry.hidden_size,
            query_heads=geometry.num_attention_heads // ranks,
            kv_heads=max(1, heads // ranks),
            head_dim=head_dim,
            intermediate=(geometry.intermediate_size or 4 * geometry.hidden_size) // ranks,
            vocab=geometry.vocab_size or 0,
            cache_dtype=dtype,
            cache_bytes=np.dtype(dtype).itemsize,
        )
        layer = 2 * shape.kv_heads * head_dim * shape.cache_bytes
        for span, _, layers, group_bytes, _ in geometry.layer_groups:
            if group_bytes != layer * len(layers):
                raise InvalidArgumentError(
                    f"--measure and --verify run layers of one shape; {span} layers take "
                    f"{group_bytes // len(layers)} bytes a token, others {layer}"
                )
        return shape


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A ragged batch: decodes, then one prefill chunk; every block of every sequence is full.

    Attributes:
        query_start: int32 [num_sequences + 1].
        context_lens: int32 [num_sequences].
        block_tables: int32 [num_sequences, max_blocks].
        slot_mapping: int64 [num_tokens].
    """

    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return int(self.query_start[-1])

    @property
    def num_sequences(self) -> int:
        """Sequences."""
        return len(self.context_lens)


def worst_batch(
    block_ids: npt.NDArray[np.int64],
    *,
    block_size: int,
    max_batch_tokens: int,
    max_running: int,
    table_width: int,
) -> Batch:
    """The largest batch over the given blocks, all of them full.

    Args:
        block_ids: int64 [n], at least one; each is in one sequence.
        block_size: tokens of a block.
        max_batch_tokens: query tokens at most.
        max_running: sequences at most; rows of the tables.
        table_width: blocks of the longest request; wider if a sequence here has more.
    """
    sequences, chunk = _shape(len(block_ids), block_size, max_batch_tokens, max_running)
    chunk_blocks = -(-chunk // block_size)
    if sequences == 1:
        parts = [block_ids]
    else:
        parts = [*np.array_split(block_ids[chunk_blocks:], sequences - 1), block_ids[:chunk_blocks]]
    tables = np.full((max_running, max(table_width, *map(len, parts))), -1, np.int32)
    for row, part in enumerate(parts):
        tables[row, : len(part)] = part
    lengths = np.array([len(part) * block_size for part in parts])
    queries = np.ones(sequences, np.int64)
    queries[-1] = chunk
    slots = [
        part[positions // block_size] * block_size + positions % block_size
        for part, length, count in zip(parts, lengths, queries, strict=True)
        for positions in [np.arange(length - count, length)]
    ]
    return Batch(
        query_start=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        context_lens=lengths.astype(np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots).astype(np.int64),
    )


def _shape(num_blocks: int, block_size: int, max_batch_tokens: int, max_running: int) -> tuple[int, int]:
    """Sequences, and tokens of the prefill chunk: all tokens of the batch if the blocks hold them."""
    spare = num_blocks * block_size - max_batch_tokens
    if spare < 0:
        return 1, num_blocks * block_size
    # Every decode takes a block of its own and one token of the batch.
    decodes = spare // (block_size - 1) if block_size > 1 else num_blocks
    sequences = 1 + min(decodes, max_running - 1, max_batch_tokens - 1, num_blocks - 1)
    return sequences, max_batch_tokens - (sequences - 1)


def cache_layers(
    memory: Memory, cache: Any, shape: LayerShape, *, block_size: int, layers: int
) -> list[tuple[Any, Any]]:
    """K and V `[num_blocks, block_size, kv_heads, head_dim]` of so many layers, as views of whole blocks.

    Args:
        memory: where the cache is.
        cache: uint8 `[num_blocks, block_bytes]`.
        shape: the layer.
        block_size: tokens of a block.
        layers: layers of a group.
    """
    size = block_size * shape.kv_heads * shape.head_dim * shape.cache_bytes
    whole = (len(cache), block_size, shape.kv_heads, shape.head_dim)

    def part(number: int) -> Any:
        return memory.view(cache[:, number * size : (number + 1) * size], shape.cache_dtype).reshape(whole)

    return [(part(2 * layer), part(2 * layer + 1)) for layer in range(layers)]


@dataclass
class Peaks:
    """Most bytes at once, over a pass.

    Attributes:
        activations: what the layers and the logits allocate.
        workspace: the batch's arrays, and what attention allocates besides on a device.
    """

    activations: int = 0
    workspace: int = 0


class _Pass:
    def __init__(self, memory: Memory, shape: LayerShape, weights: Any) -> None:
        self.memory = memory
        self.shape = shape
        self.weights = weights
        self.base = memory.live_bytes()
        self.peaks = Peaks()

    def mark(self) -> None:
        """Notes the peak of the activations since the last mark."""
        self.peaks.activations = max(self.peaks.activations, self.memory.peak_bytes() - self.base)
        self.memory.reset_peak()

    def project(self, rows: Any, width: int) -> Any:
        """`[T, width]` in 16 bits, as a dense layer gives them."""
        out = self.memory.empty((len(rows), width), "float16")
        needed = rows.shape[1] * width * 2
        if self.weights is not None and len(self.weights) >= needed:
            matrix = self.memory.view(self.weights[:needed], "float16").reshape(rows.shape[1], width)
            self.memory.product(rows, matrix, out)
        return out

    def attend(self, normed: Any, cache: tuple[Any, Any], batch: dict[str, Any], window: int | None) -> None:
        """Makes Q, K and V, writes K and V, and attends.

        What that allocates besides is workspace on a device; on the host, whose kernels have none, it counts
        with the activations.
        """
        shape, memory = self.shape, self.memory
        tokens = len(normed)
        query, key, value = (
            self.project(normed, heads * shape.head_dim).reshape(tokens, heads, shape.head_dim)
            for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
        )
        out = memory.empty((tokens, shape.query_heads, shape.head_dim), "float16")
        self.mark()
        before = memory.live_bytes()
        kv_dtype = "float8_e4m3fn" if shape.cache_dtype == "uint8" else None
        append_kv(key, value, *cache, batch["slot_mapping"], kv_dtype=kv_dtype)
        paged_attention(
            query,
            *cache,
            block_tables=batch["block_tables"],
            query_start=batch["query_start"],
            context_lens=batch["context_lens"],
            window=window,
            kv_dtype=kv_dtype,
            out=out,
        )
        if memory.on_device:
            self.peaks.workspace = max(self.peaks.workspace, memory.peak_bytes() - before)
            memory.reset_peak()

    def layer(self, stream: Any, cache: tuple[Any, Any], batch: dict[str, Any], window: int | None) -> None:
        """One decoder layer: the residual stream and its normed copy live throughout."""
        shape = self.shape
        normed = self.memory.empty(stream.shape, "float16")
        self.attend(normed, cache, batch, window)
        gated = self.project(normed, 2 * shape.intermediate)
        acted = self.memory.empty((len(stream), shape.intermediate), "float16")
        self.mark()
        del gated, acted

    def logits(self, stream: Any, rows: int) -> None:
        """Logits of the sampled rows and the probabilities made of them, in float32."""
        if self.shape.vocab:
            logits = self.memory.empty((rows, self.shape.vocab), "float32")
            probabilities = self.memory.empty((rows, self.shape.vocab), "float32")
            self.mark()
            del logits, probabilities
        del stream


def group_batches(
    geometry: KvGeometry, block_ids: npt.NDArray[np.int64], *, table_width: int, **limits: int
) -> list[Batch]:
    """The worst batch of each layer group; the groups share the blocks evenly, and have the same lengths."""
    num_groups = len(geometry.layer_groups)
    share = len(block_ids) // num_groups
    parts = block_ids[: share * num_groups].reshape(num_groups, share)
    return [worst_batch(part, table_width=table_width, **limits) for part in parts]


def run_pass(
    memory: Memory,
    shape: LayerShape,
    geometry: KvGeometry,
    *,
    cache: Any,
    weights: Any,
    batches: list[Batch],
    block_size: int,
) -> Peaks:
    """Runs a batch through every layer that keeps K and V, and measures.

    Args:
        memory: where it runs.
        shape: the layers.
        geometry: their groups.
        cache: uint8 `[num_blocks, block_bytes]`.
        weights: uint8 `[n]`: what the dense products read, or None to leave them out.
        batches: one for each layer group, alike but for their blocks.
        block_size: tokens of a block.
    """
    layers = cache_layers(
        memory,
        cache,
        shape,
        block_size=block_size,
        layers=max(len(group[2]) for group in geometry.layer_groups),
    )
    before = memory.live_bytes()
    inputs = [
        {
            name: memory.copy_in(getattr(batch, name))
            for name in ("query_start", "context_lens", "block_tables", "slot_mapping")
        }
        for batch in batches
    ]
    arrays = memory.live_bytes() - before
    run = _Pass(memory, shape, weights)
    memory.reset_peak()
    stream = memory.empty((batches[0].num_tokens, shape.hidden), "float16")
    for (_, window, group, _, _), batch in zip(geometry.layer_groups, inputs, strict=True):
        for cached in layers[: len(group)]:
            run.layer(stream, cached, batch, window)
    run.logits(stream, batches[0].num_sequences)
    run.peaks.workspace += arrays
    return run.peaks
