"""The public functions that move keys and values: what each call means, for every backend."""

from __future__ import annotations

from typing import Any

from kvpager.attention._arguments import check_kv_dtype
from kvpager.attention._dispatch import Array, backend_of
from kvpager.errors import InvalidArgumentError

__all__ = ["append_kv", "copy_blocks", "gather_blocks", "scatter_blocks", "zero_blocks"]


def append_kv(
    key: Array,
    value: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    slot_mapping: Array,
    *,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Writes new keys and values to their slots, converting and quantising on the way.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`, float32, float16 or bfloat16; shares no memory with the
            caches.
        value: the same for values, or None with `v_cache` None (a latent cache has one array).
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, written.
        v_cache: the same for values, written; shares no element with `k_cache` (views of one array may lie in
            turns).
        slot_mapping: `[num_tokens]`, int64: `block_id * block_size + offset`; -1 skips the token.
        k_scale: for float8 caches the divisor, a number or `[num_kv_heads]` float32 (default 1); values
            beyond the format's range saturate. For int8 caches a float32 array `[num_blocks, block_size,
            num_kv_heads]` that is written: the largest magnitude of each token and head over 127.
        v_scale: the same for values.
        kv_dtype: what the bytes of uint8 caches are: "float8_e4m3fn" or "float8_e5m2".

    Raises:
        InvalidArgumentError: shapes, dtypes, slots or scales that do not fit. Nothing is written then.
    """
    check_kv_dtype(kv_dtype)
    if (value is None) != (v_cache is None):
        raise InvalidArgumentError("value and v_cache must both be given or both be None")
    backend = backend_of({"k_cache": k_cache, "key": key}, {"value": value, "v_cache": v_cache})
    backend.append_kv(
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
    )


def copy_blocks(k_cache: Array, v_cache: Array | None, block_copies: Array) -> None:
    """Copies whole blocks inside each cache: copy on write.

    Args:
        k_cache: `[num_blocks, ...]`, up to 4 dimensions, elements of 1, 2 or 4 bytes; written.
        v_cache: another such array, or None.
        block_copies: `[num_copies, 2]`, int32: (from, to). No block is a destination twice, or a destination
            and a source.

    Raises:
        InvalidArgumentError: ids that do not fit. Nothing is written then.
    """
    shape = getattr(block_copies, "shape", None)
    if shape is not None and 0 not in shape and (len(shape) != 2 or shape[1] != 2):
        raise InvalidArgumentError(f"block_copies has shape {tuple(shape)}, expected [num_copies, 2]")
    backend_of({"k_cache": k_cache}, {"v_cache": v_cache}).copy_blocks(k_cache, v_cache, block_copies)


def zero_blocks(cache: Array, block_ids: Array) -> None:
    """Fills whole blocks with zeros.

    Args:
        cache: `[num_blocks, ...]`, up to 4 dimensions; written.
        block_ids: `[num_ids]`, int32.

    Raises:
        InvalidArgumentError: ids that do not fit. Nothing is written then.
    """
    backend_of({"cache": cache}).zero_blocks(cache, block_ids)


def gather_blocks(cache: Array, block_ids: Array, *, out: Array | None = None) -> Any:
    """Copies blocks out of a cache, to swap them out.

    Args:
        cache: `[num_blocks, ...]`, up to 4 dimensions.
        block_ids: `[num_ids]`, int32.
        out: `[num_ids, ...]`, written and returned; a new array if None. It shares no memory with the cache.

    Returns:
        The blocks, in the order of the ids.

    Raises:
        InvalidArgumentError: ids, shapes or dtypes that do not fit. Nothing is written then.
    """
    return backend_of({"cache": cache}, {"out": out}).gather_blocks(cache, block_ids, out=out)


def scatter_blocks(cache: Array, block_ids: Array, values: Array) -> None:
    """Copies blocks into a cache, to swap them in.

    Args:
        cache: `[num_blocks, ...]`, up to 4 dimensions; written.
        block_ids: `[num_ids]`, int32, each at most once.
        values: `[num_ids, ...]`, the dtype of the cache, whose memory they do not share.

    Raises:
        InvalidArgumentError: ids, shapes or dtypes that do not fit. Nothing is written then.
    """
    backend_of({"cache": cache, "values": values}).scatter_blocks(cache, block_ids, values)
