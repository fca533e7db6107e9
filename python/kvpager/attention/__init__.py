"""Paged attention over block tables: one front for NumPy, CuPy and torch arrays.

The first array decides where a call runs: NumPy arrays (and whatever offers DLPack from host memory) on the
native CPU kernels, CuPy arrays on the CUDA kernels, torch tensors where their device is, without a copy. All
arrays of a call are of one kind. Caches are `[num_blocks, block_size, num_kv_heads, head_dim]`, K and V
apart, any strides; queries, keys and values float32, float16 or bfloat16; caches also float8_e4m3fn,
float8_e5m2 and int8 with scales. Accumulation is in float32.

On a GPU, `kvpager.attention.device_plan.AttentionPlan` and
`kvpager.attention.device_tables.DeviceBlockTables` keep what a captured graph reads current, and
`kvpager.attention.kernels.compile_all` compiles ahead.

A call that raises has written nothing. While a call runs, nobody else may write its arrays (the interpreter
lock is released); entries of a block table past a sequence's length may be appended meanwhile.

Example:
    >>> import numpy as np
    >>> from kvpager.attention import append_kv, paged_attention
    >>> k_cache = np.zeros((4, 16, 1, 64), np.float32)
    >>> v_cache = np.zeros_like(k_cache)
    >>> rows = np.ones((3, 1, 64), np.float32)
    >>> append_kv(rows, 2 * rows, k_cache, v_cache, np.array([32, 33, 34]))
    >>> out = paged_attention(
    ...     rows,
    ...     k_cache,
    ...     v_cache,
    ...     block_tables=np.array([[2, -1]], np.int32),
    ...     query_start=np.array([0, 3], np.int32),
    ...     context_lens=np.array([3], np.int32),
    ... )
    >>> out.shape, float(out[0, 0, 0])
    ((3, 1, 64), 2.0)
"""

from kvpager.attention._front_attention import merge_states, mla_decode, paged_attention, workspace_bytes
from kvpager.attention._front_memory import (
    append_kv,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    zero_blocks,
)
from kvpager.attention._front_prefixes import cascade_attention, prefix_groups, prefix_groups_of
from kvpager.attention._front_threads import get_num_threads, instruction_sets, set_num_threads

__all__ = [
    "append_kv",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "get_num_threads",
    "instruction_sets",
    "merge_states",
    "mla_decode",
    "paged_attention",
    "prefix_groups",
    "prefix_groups_of",
    "scatter_blocks",
    "set_num_threads",
    "workspace_bytes",
    "zero_blocks",
]
