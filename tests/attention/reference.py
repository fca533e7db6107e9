"""Paged attention in float64, one query row and head at a time: what every backend is held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BOUNDS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}
"""Error of a head vector, relative to the largest visible |V|, by the output's dtype."""

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}


def dequantise(cache: Array, scale: Any) -> Array:
    """The values that a cache stands for, in float64."""
    values = cache.astype(np.float64)
    if scale is None:
        return values
    scale = np.asarray(scale, np.float64)
    if scale.ndim == 3:
        return values * scale[..., None]
    return values * scale.reshape(1, 1, -1, 1)


def attend(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_tables: Array,
    query_start: Array,
    context_lens: Array,
    table_rows: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
) -> tuple[Array, Array, Array]:
    """Returns (output, log-sum-exp, largest visible |V|), float64, `[tokens, heads(, value_dim)]`."""
    tokens, heads, dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    keys_of, values_of = dequantise(k_cache, k_scale), dequantise(v_cache, v_scale)
    out = np.zeros((tokens, heads, v_cache.shape[3]))
    lse = np.full((tokens, heads), -np.inf)
    largest = np.zeros((tokens, heads))
    if sinks is not None:
        lse[:] = sinks
    scale = dim**-0.5 if scale is None else scale
    rows = np.arange(len(context_lens)) if table_rows is None else table_rows
    for sequence, context in enumerate(context_lens):
        first, end = query_start[sequence], query_start[sequence + 1]
        if context == 0:
            continue
        for token in range(first, end):
            position = context - (end - first) + token - first
            high = position + 1 if causal else context
            low = 0 if window is None else max(0, position + 1 - window)
            seen = np.arange(low, high)
            blocks = block_tables[rows[sequence], seen // block_size]
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                keys = keys_of[blocks, seen % block_size, kv_head]
                values = values_of[blocks, seen % block_size, kv_head]
                scores = keys @ query[token, head].astype(np.float64) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores = scores + float(alibi_slopes[head]) * (seen - position)
                highest = scores.max()
                if sinks is not None:
                    highest = max(highest, float(sinks[head]))
                weights = np.exp(scores - highest)
                total = weights.sum()
                if sinks is not None:
                    total += np.exp(float(sinks[head]) - highest)
                out[token, head] = weights @ values / total
                lse[token, head] = highest + np.log(total)
                largest[token, head] = np.abs(values).max()
    return out, lse, largest


def error(result: Array, expected: Array, largest: Array) -> float:
    """The largest error of a head vector relative to its largest visible |V|."""
    if result.size == 0:
        return 0.0
    difference = np.abs(result.astype(np.float64) - expected).max(axis=-1)
    assert not np.isnan(difference).any(), "the result has NaN"
    return float((difference / np.maximum(largest, 1e-30)).max())


@dataclass
class Case:
    """A batch whose sequences lie in shuffled blocks of a pool that is otherwise full of NaN."""

    query: Array
    k_cache: Array
    v_cache: Array
    block_tables: Array
    query_start: Array
    context_lens: Array
    options: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Any, **extra: Any) -> Any:
        """Calls a function with the arguments of `paged_attention`."""
        return function(
            self.query,
            self.k_cache,
            self.v_cache,
            block_tables=self.block_tables,
            query_start=self.query_start,
            context_lens=self.context_lens,
            **self.options,
            **extra,
        )


def make_case(
    seed: int,
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    query_dtype: str = "float32",
    kv_dtype: str = "float32",
    style: str = "plain",
    peak: float = 4.0,
    fill: float = np.nan,
    **options: Any,
) -> Case:
    """A random batch.

    Args:
        seed: of the generator.
        lengths: (query rows, context length) of each sequence.
        heads: query heads.
        kv_heads: KV heads.
        dim: size of a key.
        value_dim: size of a value, `dim` if None.
        block_size: positions of a block.
        query_dtype: of the query.
        kv_dtype: float32, float16 or bfloat16.
        style: words of "plain", "peaked" (large scores: `peak` times the plain ones), "cancelling" (values of
            both signs that nearly cancel) and "late" (the largest scores in the last block), joined by "+".
        peak: factor of the keys where the style is peaked.
        fill: what every slot holds that no sequence wrote.
        options: more arguments of `paged_attention`.
    """
    rng = np.random.default_rng(seed)
    value_dim = dim if value_dim is None else value_dim
    used = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(used) + 3
    columns = max([*used, 1]) + 1
    order = rng.permutation(num_blocks)
    tables = np.full((len(lengths), columns), -1, np.int32)
    kv_type = DTYPES[kv_dtype]
    k_cache = np.full((num_blocks, block_size, kv_heads, dim), fill).astype(kv_type)
    v_cache = np.full((num_blocks, block_size, kv_heads, value_dim), fill).astype(kv_type)
    at = 0
    for row, (blocks, (_, context)) in enumerate(zip(used, lengths, strict=True)):
        tables[row, :blocks] = order[at : at + blocks]
        at += blocks
        keys = rng.standard_normal((context, kv_heads, dim))
        values = rng.standard_normal((context, kv_heads, value_dim))
        if "peaked" in style:
            keys *= peak
        if "late" in style and context:
            keys[-min(context, block_size) :] *= 3
        if "cancelling" in style:
            values = np.where(np.arange(context)[:, None, None] % 2, 1000.0, -1000.0) + values
        positions = np.arange(context)
        k_cache[tables[row, positions // block_size], positions % block_size] = keys.astype(kv_type)
        v_cache[tables[row, positions // block_size], positions % block_size] = values.astype(kv_type)
    starts = np.cumsum([0, *(rows for rows, _ in lengths)]).astype(np.int32)
    query = rng.standard_normal((int(starts[-1]), heads, dim)).astype(DTYPES[query_dtype])
    contexts = np.array([context for _, context in lengths], np.int32)
    return Case(query, k_cache, v_cache, tables, starts, contexts, options)
