"""The parameter structs of the kernels, as NumPy dtypes, and the one place that fills them.

Field order and widths are those of `cuda/include/kvpager/params.cuh`; a test compares the offsets with the
compiler's. CuPy passes a one-element array of such a dtype by value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpager.errors import InvalidArgumentError

__all__ = ["APPEND", "ATTENTION", "BLOCK", "DELTA", "MERGE_STATES", "STRUCTS", "pack", "pointer_fields"]

_POINTER = np.dtype(np.uint64)
_LONG = np.dtype(np.int64)
_INT = np.dtype(np.int32)
_FLOAT = np.dtype(np.float32)


def _struct(**groups: tuple[np.dtype[Any], str]) -> np.dtype[Any]:
    """A struct of fields in order; a group is a dtype and field names, `name[2]` for an array of two."""
    fields: list[Any] = []
    for kind, names in groups.values():
        for name in names.split():
            if name.endswith("[2]"):
                fields.append((name[:-3], kind, (2,)))
            else:
                fields.append((name, kind))
    return np.dtype(fields, align=True)


ATTENTION = _struct(
    pointers=(
        _POINTER,
        "query k_cache v_cache k_scale v_scale block_tables table_rows query_start context_lens counts work "
        "merges alibi_slopes sinks out lse partial_out partial_state",
    ),
    strides=(
        _LONG,
        "query_token_stride query_head_stride k_block_stride k_slot_stride k_head_stride v_block_stride "
        "v_slot_stride v_head_stride k_scale_block_stride k_scale_slot_stride k_scale_head_stride "
        "v_scale_block_stride v_scale_slot_stride v_scale_head_stride table_stride out_token_stride "
        "out_head_stride lse_token_stride lse_head_stride",
    ),
    floats=(_FLOAT, "scale out_scale softcap"),
    ints=(
        _INT,
        "window causal num_kv_heads group block_shift num_blocks query_dtype out_dtype tile_rows "
        "head_dim num_sequences num_tokens",
    ),
)
"""Parameters of `paged_decode`, `paged_prefill`, `mla_decode` and `merge_splits`."""

APPEND = _struct(
    pointers=(_POINTER, "key value k_cache v_cache k_scale v_scale slot_mapping"),
    strides=(
        _LONG,
        "key_token_stride key_head_stride value_token_stride value_head_stride k_block_stride k_slot_stride "
        "k_head_stride v_block_stride v_slot_stride v_head_stride k_scale_block_stride k_scale_slot_stride "
        "k_scale_head_stride v_scale_block_stride v_scale_slot_stride v_scale_head_stride num_slots",
    ),
    floats=(_FLOAT, "k_scale_value v_scale_value"),
    ints=(_INT, "num_tokens num_kv_heads head_dim block_shift dtype unused"),
)
"""Parameters of `append_kv`."""

BLOCK = _struct(
    pointers=(_POINTER, "from[2] to[2] from_ids to_ids"),
    strides=(
        _LONG,
        "from_block_bytes[2] from_slot_bytes[2] from_head_bytes[2] to_block_bytes[2] to_slot_bytes[2] "
        "to_head_bytes[2] from_ids_stride to_ids_stride",
    ),
    ints=(_INT, "num_items num_slots num_heads row_bytes[2] word_bytes from_blocks to_blocks"),
)
"""Parameters of `copy_blocks` and `zero_blocks`."""

MERGE_STATES = _struct(
    pointers=(_POINTER, "out_a out_b lse_a lse_b b_rows out lse"),
    strides=(
        _LONG,
        "a_token_stride a_head_stride b_token_stride b_head_stride out_token_stride out_head_stride "
        "lse_a_token_stride lse_a_head_stride lse_b_token_stride lse_b_head_stride lse_token_stride "
        "lse_head_stride",
    ),
    ints=(_INT, "num_tokens num_heads head_dim dtype out_dtype"),
)
"""Parameters of `merge_states`."""

DELTA = _struct(
    pointers=(_POINTER, "block_tables deltas count"),
    strides=(_LONG, "table_stride"),
    ints=(_INT, "capacity num_rows max_blocks unused"),
)
"""Parameters of `apply_deltas`."""

STRUCTS = {
    "AttentionParams": ATTENTION,
    "AppendParams": APPEND,
    "BlockParams": BLOCK,
    "MergeStatesParams": MERGE_STATES,
    "DeltaParams": DELTA,
}
"""C++ name to dtype."""


def pointer_fields(struct: np.dtype[Any]) -> list[tuple[str, int]]:
    """The pointer words of a struct as (field, byte offset); an array of two has two entries."""
    found: list[tuple[str, int]] = []
    for name in struct.names or ():
        kind, offset = struct.fields[name][:2]  # type: ignore[index]
        if kind.base == _POINTER:
            found += [(name, offset + 8 * i) for i in range(kind.itemsize // 8)]
    return found


def _checked(name: str, value: object, kind: np.dtype[Any]) -> object:
    """`value` if the field's type holds it exactly enough: integers in range, no booleans."""
    if kind == _FLOAT:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
            raise InvalidArgumentError(f"kernel argument {name} must be a number, is {value!r}")
        return float(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InvalidArgumentError(f"kernel argument {name} must be an integer, is {value!r}")
    limits = np.iinfo(kind)
    if not limits.min <= int(value) <= limits.max:
        raise InvalidArgumentError(f"kernel argument {name} is {value}, outside {kind.name}")
    return int(value)


def pack(struct: np.dtype[Any], /, **values: object) -> np.ndarray[Any, np.dtype[Any]]:
    """A one-element array of `struct`, every field given and checked against its width.

    Args:
        struct: one of this module's structs.
        **values: all fields but `unused`; a pair for an array of two; pointers as integers, 0 for null.

    Returns:
        The struct, to be passed by value.

    Raises:
        InvalidArgumentError: A field is missing, unknown, or does not fit its type.
    """
    names = [name for name in struct.names or () if name != "unused"]
    if set(names) != set(values):
        wrong = sorted(set(names) ^ set(values))
        raise InvalidArgumentError(f"kernel arguments missing or unknown: {', '.join(wrong)}")
    packed = np.zeros(1, dtype=struct)
    for name in names:
        kind = struct.fields[name][0]  # type: ignore[index]
        value = values[name]
        if kind.shape:
            pair = value if isinstance(value, tuple) else (value,)
            if len(pair) != kind.shape[0]:
                raise InvalidArgumentError(f"kernel argument {name} takes {kind.shape[0]} values")
            packed[name] = [tuple(_checked(name, item, kind.base) for item in pair)]
        else:
            packed[name] = _checked(name, value, kind)
    return packed
