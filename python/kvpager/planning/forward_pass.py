"""One forward pass of a batch with every buffer of a decoder layer, to see what memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpager._core import KvGeometry
from kvpager.attention import append_kv, paged_attention
from kvpager.attention.block_sizes import MAX_BLOCK_SIZE, is_block_size
from kvpager.errors import InvalidArgumentError
from kvpager.planning.limits import Limits
from kvpager.planning.memory import Memory
from kvpager.planning.split_plans import LayerKind, layer_kinds, split_plans
from kvpager.planning.worst_batch import Batch, copy_arrays

__all__ = ["Peaks", "Widths", "cache_arrays", "check_runs", "run_pass"]

_CACHE_DTYPES = {"bf16": "float16", "fp16": "float16", "fp32": "float32", "fp8": "uint8", "int8": "int8"}
"""KV dtype to the array's; bf16 runs as float16, which NumPy has too and which takes the same bytes."""

MAX_HEAD_DIM = 1024


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What a pass is as wide as, on one device.

    Attributes:
        hidden: elements of the residual stream.
        intermediate: elements of the feed-forward part.
        vocab: size of the vocabulary; 0 if unknown.
    """

    hidden: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, geometry: KvGeometry) -> Widths:
        """The widths of a deployed model."""
        return cls(
            hidden=geometry.hidden_size,
            intermediate=(geometry.intermediate_size or 4 * geometry.hidden_size) // geometry.tensor_parallel,
            vocab=geometry.vocab_size or 0,
        )


def check_runs(geometry: KvGeometry, block_size: int) -> None:
    """Refuses a cache that attention does not run.

    Raises:
        InvalidArgumentError: with what it is, and what runs.
    """
    dtype, scaled = geometry.kv_dtype, geometry.scaled_by_head
    if scaled != (dtype == "int8"):
        scales = "per_token_head" if scaled else "per_tensor"
        raise InvalidArgumentError(
            f"--measure and --verify run int8 with a scale for each token and head, and the other dtypes "
            f"without; this plan keeps {dtype} with --kv-scales {scales}"
        )
    if not is_block_size(block_size):
        raise InvalidArgumentError(
            f"--measure and --verify run blocks of a power of two up to {MAX_BLOCK_SIZE} tokens, "
            f"as attention does; this plan has blocks of {block_size}"
        )
    for kind in {kind for kinds in layer_kinds(geometry) for kind in kinds}:
        if kind.key_dim > MAX_HEAD_DIM or kind.query_heads % kind.kv_heads:
            raise InvalidArgumentError(
                f"--measure and --verify run heads of up to {MAX_HEAD_DIM} elements, and as many query heads "
                f"for each KV head; this plan has {kind.query_heads} query and {kind.kv_heads} KV heads of "
                f"{kind.key_dim}"
            )


def cache_arrays(
    memory: Memory, cache: Any, kinds: list[LayerKind], kv_dtype: str, block_size: int
) -> list[dict[str, Any]]:
    """The arrays of each layer of a group as attention takes them, as views of whole blocks.

    Args:
        memory: where the cache is.
        cache: uint8 `[num_blocks, block_bytes]`.
        kinds: the layers.
        kv_dtype: their dtype.
        block_size: tokens of a block.

    Returns:
        `k_cache` and `v_cache` `[num_blocks, block_size, heads, dim]`, which under MLA share their memory,
        and for int8 `k_scale` and `v_scale` `[num_blocks, block_size, heads]`.
    """
    dtype = _CACHE_DTYPES[kv_dtype]
    offset = 0

    def part(dtype: str, *shape: int) -> Any:
        nonlocal offset
        size = block_size * int(np.prod(shape)) * np.dtype(dtype).itemsize
        view = memory.view(cache[:, offset : offset + size], dtype)
        offset += size
        return view.reshape((len(cache), block_size, *shape))

    layers = []
    for kind in kinds:
        arrays = {"k_cache": part(dtype, kind.kv_heads, kind.key_dim)}
        if kind.latent:
            arrays["v_cache"] = arrays["k_cache"][..., : kind.value_dim]
        else:
            arrays["v_cache"] = part(dtype, kind.kv_heads, kind.value_dim)
        if dtype == "int8":
            arrays["k_scale"] = part("float32", kind.kv_heads)
            arrays["v_scale"] = arrays["k_scale"] if kind.latent else part("float32", kind.kv_heads)
        layers.append(arrays)
    return layers


@dataclass
class Peaks:
    """Most bytes at once, over a pass.

    Attributes:
        activations: what the layers and the logits allocate.
        workspace: the batch's arrays, and what attention keeps besides on a device.
    """

    activations: int = 0
    workspace: int = 0


class _Pass:
    def __init__(self, memory: Memory, widths: Widths, weights: Any) -> None:
        self.memory = memory
        self.widths = widths
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

    def heads(self, normed: Any, heads: int, dim: int) -> Any:
        """`[T, heads, dim]` in 16 bits."""
        return self.project(normed, heads * dim).reshape(len(normed), heads, dim)

    def attend(self, normed: Any, kind: LayerKind, cache: dict[str, Any], batch: dict[str, Any]) -> None:
        """Makes Q, K and V (or the latent), writes them, and attends.

        What that allocates besides is workspace on a device; on the host it counts with the activations.
        """
        memory = self.memory
        query = self.heads(normed, kind.query_heads, kind.key_dim)
        key = self.heads(normed, kind.kv_heads, kind.key_dim)
        value = None if kind.latent else self.heads(normed, kind.kv_heads, kind.value_dim)
        out = memory.empty((len(normed), kind.query_heads, kind.value_dim), "float16")
        self.mark()
        before = memory.live_bytes()
        kv_dtype = "float8_e4m3fn" if str(cache["k_cache"].dtype).endswith("uint8") else None
        kept = cache | ({"v_cache": None, "v_scale": None} if kind.latent else {})
        append_kv(key, value, slot_mapping=batch["slot_mapping"], kv_dtype=kv_dtype, **kept)
        paged_attention(
            query,
            **cache,
            block_tables=batch["block_tables"],
            table_rows=batch["table_rows"],
            query_start=batch["query_start"],
            context_lens=batch["context_lens"],
            window=kind.window,
            kv_dtype=kv_dtype,
            out=out,
        )
        if memory.on_device:
            self.peaks.workspace = max(self.peaks.workspace, memory.peak_bytes() - before)
            memory.reset_peak()

    def layer(self, stream: Any, kind: LayerKind, cache: dict[str, Any], batch: dict[str, Any]) -> None:
        """One decoder layer: the residual stream and its normed copy live throughout."""
        normed = self.memory.empty(stream.shape, "float16")
        self.attend(normed, kind, cache, batch)
        gated = self.project(normed, 2 * self.widths.intermediate)
        acted = self.memory.empty((len(stream), self.widths.intermediate), "float16")
        self.mark()
        del gated, acted

    def logits(self, stream: Any, rows: int) -> None:
        """Logits of the sampled rows and the probabilities made of them, in float32."""
        if self.widths.vocab:
            logits = self.memory.empty((rows, self.widths.vocab), "float32")
            probabilities = self.memory.empty((rows, self.widths.vocab), "float32")
            self.mark()
            del logits, probabilities
        del stream


def run_pass(
    memory: Memory, geometry: KvGeometry, limits: Limits, *, cache: Any, weights: Any, batches: list[Batch]
) -> Peaks:
    """Runs a batch through every layer that keeps something, and measures.

    On the host, whose kernels keep no split plans, those of a device are made and allocated.

    Args:
        memory: where it runs.
        geometry: the model.
        limits: that the batches were made for.
        cache: uint8 `[num_blocks, block_bytes]`.
        weights: uint8 `[n]`: what the dense products read, or None to leave them out.
        batches: one for each layer group, alike but for their blocks.
    """
    before = memory.live_bytes()
    inputs = copy_arrays(memory, geometry, limits, batches)
    plans = [] if memory.on_device else _hold_plans(memory, geometry, limits, batches)
    arrays = memory.live_bytes() - before
    widths = Widths.of(geometry)
    run = _Pass(memory, widths, weights)
    memory.reset_peak()
    stream = memory.empty((limits.max_batch_tokens, widths.hidden), "float16")
    for kinds, batch in zip(layer_kinds(geometry), inputs, strict=True):
        caches = cache_arrays(memory, cache, kinds, geometry.kv_dtype, limits.block_size)
        for kind, layer in zip(kinds, caches, strict=True):
            run.layer(stream, kind, layer, batch)
    run.logits(stream, limits.sampled_rows)
    run.peaks.workspace += arrays
    del plans
    return run.peaks


def _hold_plans(memory: Memory, geometry: KvGeometry, limits: Limits, batches: list[Batch]) -> list[Any]:
    """The arrays of the split plans, once each has planned its batch in its room."""
    held = []
    for plan in split_plans(geometry, limits):
        batch = batches[plan.group]
        plan.check(batch.query_start, batch.context_lens)
        held += [memory.empty(shape, dtype.name) for shape, dtype in plan.arrays()]
    return held
