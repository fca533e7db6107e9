"""Launches that move memory: append, copies and zeroing of blocks, merged states, table changes."""

from __future__ import annotations

from dataclasses import dataclass

from kvpager.attention import _manifest as manifest
from kvpager.attention import _params as params
from kvpager.attention._launch import Launch
from kvpager.attention._manifest import Instantiation
from kvpager.attention._views import (
    ArrayView,
    cache_strides,
    check_cache,
    check_ints,
    check_rows,
    fail,
    resolve_scale,
    scale_strides,
)

__all__ = [
    "append_launches",
    "copy_launches",
    "delta_launches",
    "merge_states_launches",
    "zero_launches",
]


def _check_append(key: ArrayView, value: ArrayView, k_cache: ArrayView, v_cache: ArrayView) -> None:
    for name, new, cache in (("key", key, k_cache), ("value", value, v_cache)):
        check_rows(name, new, 3)
        if new.shape[1:] != cache.shape[2:]:
            raise fail(f"{name} is {new.shape}, the cache has heads of {cache.shape[2:]}")
    if key.shape != value.shape or key.dtype != value.dtype or key.dtype not in manifest.DTYPE_CODES:
        raise fail(
            f"key {key.shape} {key.dtype} and value {value.shape} {value.dtype} must be alike, "
            "fp32, fp16 or bf16"
        )
    if k_cache.dtype not in manifest.KV_TYPES:
        raise fail(f"no kernel for a cache of {k_cache.dtype}; there are {', '.join(manifest.KV_TYPES)}")
    if key.shape[2] % 8 or key.shape[2] > 1024:
        raise fail(f"head_dim must be a multiple of 8 up to 1024, is {key.shape[2]}")


def append_launches(
    key: ArrayView,
    value: ArrayView | None,
    k_cache: ArrayView,
    v_cache: ArrayView | None,
    slot_mapping: ArrayView,
    *,
    k_scale: ArrayView | float | None = None,
    v_scale: ArrayView | float | None = None,
) -> list[Launch]:
    """The launch of `append_kv`; none for an empty batch.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], fp32, fp16 or bf16.
        value: the same; None with `v_cache` None for a latent cache.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: the same.
        slot_mapping: int64 [num_tokens]; -1 skips the token.
        k_scale: of an 8-bit cache; for int8 an array that is written.
        v_scale: the same for values.

    Returns:
        At most one launch.

    Raises:
        InvalidArgumentError: Shapes, dtypes, strides or scales do not fit.
    """
    if (value is None) != (v_cache is None):
        raise fail("value and v_cache must both be given or both be None")
    sides = 1 if value is None else 2
    if value is None or v_cache is None:
        value, v_cache, v_scale = key, k_cache, k_scale
    shift = check_cache(k_cache, v_cache)
    _check_append(key, value, k_cache, v_cache)
    tokens, heads, head_dim = key.shape
    check_ints("slot_mapping", slot_mapping, "int64", 1, tokens)
    k_resolved = resolve_scale("k_scale", k_scale, k_cache)
    v_resolved = resolve_scale("v_scale", v_scale, v_cache)
    if tokens == 0:
        return []
    arguments = params.pack(
        params.APPEND,
        key=key.pointer,
        value=value.pointer,
        k_cache=k_cache.pointer,
        v_cache=v_cache.pointer,
        slot_mapping=slot_mapping.pointer,
        k_scale=k_resolved.pointer,
        v_scale=v_resolved.pointer,
        key_token_stride=key.strides[0],
        key_head_stride=key.strides[1],
        value_token_stride=value.strides[0],
        value_head_stride=value.strides[1],
        num_slots=k_cache.shape[0] * k_cache.shape[1],
        k_scale_value=k_resolved.value,
        v_scale_value=v_resolved.value,
        num_tokens=tokens,
        num_kv_heads=heads,
        head_dim=head_dim,
        block_shift=shift,
        dtype=manifest.DTYPE_CODES[key.dtype],
        **cache_strides(k_cache, v_cache),
        **scale_strides(k_resolved, v_resolved),
    )
    grid = (-(-tokens * heads // 4), sides, 1)
    return [Launch(manifest.append_kernel(k_cache.dtype), grid, 128, 0, arguments)]


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array of blocks as rows of bytes: [num_blocks, num_slots, num_heads] rows."""

    pointer: int
    blocks: int
    slots: int
    heads: int
    row_bytes: int
    block_bytes: int
    slot_bytes: int
    head_bytes: int

    def like(self, other: _Rows) -> bool:
        """Whether one launch can move both."""
        return (self.blocks, self.slots, self.heads) == (other.blocks, other.slots, other.heads)


def _as_rows(name: str, view: ArrayView) -> _Rows:
    """Reads an array of blocks, [num_blocks, ...] with up to 4 dimensions, as rows of bytes."""
    if not 1 <= len(view.shape) <= 4:
        raise fail(f"{name} must have 1 to 4 dimensions, has {len(view.shape)}")
    shape, strides = list(view.shape), list(view.strides)
    dense = len(shape) > 1 and (shape[-1] <= 1 or strides[-1] == 1)
    row = shape.pop() if dense else 1
    if dense:
        strides.pop()
    if len(shape) > 3:
        raise fail(f"{name} must be contiguous in its last dimension, has stride {strides[-1]}")
    while len(shape) < 3:  # missing axes have one entry
        shape.insert(1, 1)
        strides.insert(1, 0)
    size = view.itemsize
    block_bytes, slot_bytes, head_bytes = (stride * size for stride in strides)
    return _Rows(view.pointer, shape[0], shape[1], shape[2], row * size, block_bytes, slot_bytes, head_bytes)


def _block_launches(
    kernel: str,
    sources: list[_Rows],
    targets: list[_Rows],
    from_ids: tuple[int, int],
    to_ids: tuple[int, int],
    num_items: int,
) -> list[Launch]:
    """One launch over up to two arrays alike in blocks, slots and heads; zeroing has no other sources."""
    if num_items == 0 or 0 in (targets[0].blocks, targets[0].slots, targets[0].heads):
        return []
    pairs = list(zip(sources, targets, strict=True))
    for source, target in pairs:
        if (source.slots, source.heads, source.row_bytes) != (target.slots, target.heads, target.row_bytes):
            raise fail(f"blocks differ: {source.slots, source.heads} and {target.slots, target.heads} rows")
    numbers = [
        n
        for rows in sources + targets
        for n in (rows.pointer, rows.row_bytes, rows.block_bytes, rows.slot_bytes, rows.head_bytes)
    ]
    word_bytes, word = manifest.word_type(*numbers)

    def both(name: str, rows: list[_Rows]) -> tuple[int, int]:
        values = [getattr(r, name) for r in rows]
        return (values[0], values[1] if len(values) > 1 else 0)

    arguments = params.pack(
        params.BLOCK,
        to=both("pointer", targets),
        from_ids=from_ids[0],
        to_ids=to_ids[0],
        from_block_bytes=both("block_bytes", sources),
        from_slot_bytes=both("slot_bytes", sources),
        from_head_bytes=both("head_bytes", sources),
        to_block_bytes=both("block_bytes", targets),
        to_slot_bytes=both("slot_bytes", targets),
        to_head_bytes=both("head_bytes", targets),
        from_ids_stride=from_ids[1],
        to_ids_stride=to_ids[1],
        num_items=num_items,
        num_slots=targets[0].slots,
        num_heads=targets[0].heads,
        row_bytes=both("row_bytes", targets),
        word_bytes=word_bytes,
        from_blocks=sources[0].blocks,
        to_blocks=targets[0].blocks,
        **{"from": both("pointer", sources)},
    )
    words = targets[0].slots * targets[0].heads * max(r.row_bytes for r in targets) // word_bytes
    parts = max(1, min(64, words // 512))
    instantiation = Instantiation(kernel, f"kvpager::{kernel}<{word}>")
    return [Launch(instantiation, (num_items, parts, len(targets)), 128, 0, arguments)]


def _pair_up(moves: list[tuple[_Rows, _Rows]]) -> list[list[tuple[_Rows, _Rows]]]:
    """Moves (source, target) two at a time, as many as one launch makes, where their blocks are alike."""
    found: list[list[tuple[_Rows, _Rows]]] = []
    for move in moves:
        last = found[-1] if found else []
        if len(last) == 1 and all(a.like(b) for a, b in zip(last[0], move, strict=True)):
            last.append(move)
        else:
            found.append([move])
    return found


def copy_launches(
    sources: list[ArrayView],
    targets: list[ArrayView],
    *,
    from_ids: ArrayView | None,
    to_ids: ArrayView | None,
    num_items: int,
) -> list[Launch]:
    """Copies `num_items` blocks from each source array to the target array at the same place in the lists.

    Args:
        sources: arrays of blocks [num_blocks, block_size, num_kv_heads(, head_dim)].
        targets: the same arrays (copy on write) or others of the same block shape.
        from_ids: int32, any stride; None: item i is block i of the source.
        to_ids: the same for the target.
        num_items: blocks to copy.

    Returns:
        One launch for every two arrays whose blocks are alike.

    Raises:
        InvalidArgumentError: The blocks of a pair differ, or ids have a wrong dtype.
    """
    views = [("source", a) for a in sources] + [("target", a) for a in targets]
    rows = [_as_rows(name, a) for name, a in views]
    ids = [_ids(from_ids), _ids(to_ids)]
    half = len(sources)
    found: list[Launch] = []
    for moves in _pair_up(list(zip(rows[:half], rows[half:], strict=True))):
        sources_of, targets_of = [move[0] for move in moves], [move[1] for move in moves]
        found += _block_launches("copy_blocks", sources_of, targets_of, ids[0], ids[1], num_items)
    return found


def zero_launches(arrays: list[ArrayView], block_ids: ArrayView) -> list[Launch]:
    """Zeroes the named blocks of each array; one launch for every two arrays."""
    rows = [_as_rows("cache", a) for a in arrays]
    ids = _ids(block_ids)
    found: list[Launch] = []
    for moves in _pair_up([(array, array) for array in rows]):
        pair = [move[0] for move in moves]
        found += _block_launches("zero_blocks", pair, pair, ids, ids, block_ids.shape[0])
    return found


def _ids(view: ArrayView | None) -> tuple[int, int]:
    """Address and stride of a list of block ids; (0, 0) for none."""
    if view is None:
        return (0, 0)
    if view.dtype != "int32" or len(view.shape) != 1:
        raise fail(f"block ids must be int32 with 1 dimension, are {view.dtype} {view.shape}")
    return (view.pointer, view.strides[0])


def merge_states_launches(
    out_a: ArrayView,
    lse_a: ArrayView,
    out_b: ArrayView,
    lse_b: ArrayView,
    out: ArrayView,
    lse: ArrayView | None,
    b_rows: ArrayView | None = None,
) -> list[Launch]:
    """Joins two attention results over disjoint positions; `out` may be one of the inputs.

    Args:
        out_a: [num_tokens, num_heads, head_dim], fp32, fp16 or bf16.
        lse_a: float32 [num_tokens, num_heads].
        out_b: as out_a; with `b_rows` of any number of rows.
        lse_b: as lse_a, of as many rows as `out_b`.
        out: of the shape of out_a, fp32, fp16 or bf16.
        lse: as lse_a, or None.
        b_rows: int32 [num_tokens], trusted: which row of b goes with each row of a, -1: none. None: the same.

    Returns:
        At most one launch.

    Raises:
        InvalidArgumentError: Shapes or dtypes differ.
    """
    b_shape = out_a.shape if b_rows is None else (out_b.shape[0], *out_a.shape[1:])
    for name, view, shape in (
        ("out_a", out_a, out_a.shape),
        ("out_b", out_b, b_shape),
        ("out", out, out_a.shape),
    ):
        if view.shape != shape or len(shape) != 3 or (view is out_b and view.dtype != out_a.dtype):
            raise fail(f"{name} is {view.dtype} {view.shape}, out_a is {out_a.dtype} {out_a.shape}")
        if view.shape[-1] > 1 and view.strides[-1] != 1:
            raise fail(f"{name} must be contiguous in its last dimension")
        if view.dtype not in manifest.DTYPE_CODES:
            raise fail(f"{name}: no kernel for {view.dtype}; there are {', '.join(manifest.DTYPE_CODES)}")
    for name, state, shape in (
        ("lse_a", lse_a, out_a.shape),
        ("lse_b", lse_b, b_shape),
        ("lse", lse, out_a.shape),
    ):
        if state is not None and (state.dtype != "float32" or state.shape != shape[:2]):
            raise fail(f"{name} must be float32 {shape[:2]}, is {state.dtype} {state.shape}")
    if b_rows is not None:
        check_ints("b_rows", b_rows, "int32", 1, out_a.shape[0])
    tokens, heads, head_dim = out_a.shape
    if 0 in out_a.shape:
        return []
    arguments = params.pack(
        params.MERGE_STATES,
        out_a=out_a.pointer,
        out_b=out_b.pointer,
        lse_a=lse_a.pointer,
        lse_b=lse_b.pointer,
        b_rows=b_rows.pointer if b_rows else 0,
        out=out.pointer,
        lse=lse.pointer if lse else 0,
        a_token_stride=out_a.strides[0],
        a_head_stride=out_a.strides[1],
        b_token_stride=out_b.strides[0],
        b_head_stride=out_b.strides[1],
        out_token_stride=out.strides[0],
        out_head_stride=out.strides[1],
        lse_a_token_stride=lse_a.strides[0],
        lse_a_head_stride=lse_a.strides[1],
        lse_b_token_stride=lse_b.strides[0],
        lse_b_head_stride=lse_b.strides[1],
        lse_token_stride=lse.strides[0] if lse else 0,
        lse_head_stride=lse.strides[1] if lse else 0,
        num_tokens=tokens,
        num_heads=heads,
        head_dim=head_dim,
        dtype=manifest.DTYPE_CODES[out_a.dtype],
        out_dtype=manifest.DTYPE_CODES[out.dtype],
    )
    instantiation = Instantiation("merge_states", "kvpager::merge_states")
    return [Launch(instantiation, (-(-tokens * heads // 4), 1, 1), 128, 0, arguments)]


def delta_launches(block_tables: ArrayView, deltas: ArrayView, count: int) -> list[Launch]:
    """Applies a step's log of changed table entries.

    Args:
        block_tables: int32 [rows, max_blocks], on the device.
        deltas: int32 [capacity, 4] of (row, column, value, unused), readable by the device.
        count: address of an int32: entries of the log that are valid.

    Returns:
        One launch, of a size that depends on the capacity only.

    Raises:
        InvalidArgumentError: A wrong dtype or shape.
    """
    check_ints("block_tables", block_tables, "int32", 2)
    if deltas.dtype != "int32" or len(deltas.shape) != 2 or deltas.shape[1] != 4 or deltas.strides != (4, 1):
        raise fail(f"deltas must be a contiguous int32 [capacity, 4], is {deltas.dtype} {deltas.shape}")
    arguments = params.pack(
        params.DELTA,
        block_tables=block_tables.pointer,
        deltas=deltas.pointer,
        count=count,
        table_stride=block_tables.strides[0],
        capacity=deltas.shape[0],
        num_rows=block_tables.shape[0],
        max_blocks=block_tables.shape[1],
    )
    blocks = max(1, min(64, -(-deltas.shape[0] // 128)))
    return [Launch(Instantiation("apply_deltas", "kvpager::apply_deltas"), (blocks, 1, 1), 128, 0, arguments)]
