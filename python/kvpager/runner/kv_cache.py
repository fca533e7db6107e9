"""The KV cache arrays that a scheduler's block ids index.

Per layer one K and one V array, `[num_blocks, block_size, num_kv_heads, head_dim]`, fp32 on the CPU. A block
id means the same index in all of them. Which block holds what is the pool's and the scheduler's business;
this only owns the memory and does a batch's zeroing and copying over every array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpager import attention
from kvpager.errors import InvalidArgumentError
from kvpager.runner.config import LlamaConfig
from kvpager.runner.weights import Array

__all__ = ["KvCache"]


class KvCache:
    """K and V arrays of every layer.

    Attributes:
        keys: per layer [num_blocks, block_size, num_kv_heads, head_dim], fp32.
        values: same.
    """

    def __init__(
        self, config: LlamaConfig, *, num_blocks: int, block_size: int, array_module: Any = np
    ) -> None:
        """Allocates the arrays; memory is touched by the first write.

        Raises:
            InvalidArgumentError: no blocks, empty blocks, or more memory than there is (with the bytes).
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidArgumentError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens: both must be positive"
            )
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.keys: list[Array] = [
                array_module.zeros(shape, array_module.float32) for _ in range(config.num_layers)
            ]
            self.values: list[Array] = [
                array_module.zeros(shape, array_module.float32) for _ in range(config.num_layers)
            ]
        except MemoryError as error:
            num_bytes = num_blocks * block_size * config.kv_bytes_per_token
            raise InvalidArgumentError(
                f"{num_blocks} blocks of {block_size} tokens take {num_bytes} bytes, more than there is"
            ) from error

    def prepare(self, batch: Any) -> None:
        """Does what a batch asks for before its forward pass: zeroing, then copies.

        Args:
            batch: a scheduler's batch; reads `block_zeros` i32[Z] and `block_copies` i32[C, 2].
        """
        if len(batch.block_zeros):
            for cache in (*self.keys, *self.values):
                attention.zero_blocks(cache, batch.block_zeros)
        if len(batch.block_copies):
            for keys, values in zip(self.keys, self.values, strict=True):
                attention.copy_blocks(keys, values, batch.block_copies)
