"""The KV cache arrays that a scheduler's block ids index.

One K and one V array, `[num_blocks, block_size, num_kv_heads, head_dim]`, fp32 on the CPU, for each layer
that a block has memory for: every layer of the model, or those of the largest layer group. A block id is the
same index in all of them. Which block holds what is the pool's and the scheduler's business; this only owns
the memory and does a batch's zeroing, swapping and copying over every array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager import attention
from kvpager.attention.block_sizes import check_block_size
from kvpager.errors import InvalidArgumentError
from kvpager.runner.config import LlamaConfig
from kvpager.runner.layer_groups import RunnerGroups
from kvpager.runner.weights import Array

__all__ = ["KvCache"]


class KvCache:
    """K and V arrays of every layer.

    Attributes:
        groups: which layer has which arrays.
        keys: per place in a group [num_blocks, block_size, num_kv_heads, head_dim], fp32.
        values: same.
        host_keys, host_values: of the host tier, same with [host_blocks, ...], in host memory.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        array_module: Any = np,
    ) -> None:
        """Allocates the arrays; memory is touched by the first write.

        Raises:
            InvalidArgumentError: no blocks, a block size that attention does not do, or more memory than
                there is (with the bytes).
        """
        if num_blocks < 1:
            raise InvalidArgumentError(f"a KV cache has at least 1 block, num_blocks is {num_blocks}")
        check_block_size(block_size)
        self._xp = array_module
        self.groups = RunnerGroups.of(config)
        places = range(self.groups.num_places)
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.keys: list[Array] = [array_module.zeros(shape, array_module.float32) for _ in places]
            self.values: list[Array] = [array_module.zeros(shape, array_module.float32) for _ in places]
            host_shape = (host_blocks, *shape[1:])
            self.host_keys = [np.zeros(host_shape, np.float32) for _ in places]
            self.host_values = [np.zeros(host_shape, np.float32) for _ in places]
        except MemoryError as error:
            num_places, num_layers = self.groups.num_places, config.num_layers
            block_bytes = block_size * config.kv_bytes_per_token * num_places // num_layers
            num_bytes = (num_blocks + host_blocks) * block_bytes
            raise InvalidArgumentError(
                f"{num_blocks + host_blocks} blocks of {block_size} tokens take {num_bytes} bytes, more than "
                "there is"
            ) from error

    def of_layer(self, layer: int) -> tuple[Array, Array]:
        """The K and V arrays of a layer."""
        place = self.groups.place_of[layer]
        return self.keys[place], self.values[place]

    def prepare(self, batch: Any) -> None:
        """Does what a batch asks for before its forward pass: swap out, zero, swap in, copy, in this order.

        Args:
            batch: a scheduler's batch; reads `swap_out` and `swap_in` i32[n, 2], `block_zeros` i32[Z] and
                `block_copies` i32[C, 2].
        """
        if len(batch.swap_out):
            for device, host in self._tiers():
                device_ids, host_ids = batch.swap_out.T
                host[host_ids] = _on_host(device[device_ids])
        if len(batch.block_zeros):
            for cache in (*self.keys, *self.values):
                attention.zero_blocks(cache, batch.block_zeros)
        if len(batch.swap_in):
            for device, host in self._tiers():
                host_ids, device_ids = batch.swap_in.T
                device[device_ids] = self._xp.asarray(host[host_ids])
        if len(batch.block_copies):
            for keys, values in zip(self.keys, self.values, strict=True):
                attention.copy_blocks(keys, values, batch.block_copies)

    def _tiers(self) -> Iterator[tuple[Array, npt.NDArray[np.float32]]]:
        """Each array on the device with the one of the host tier."""
        yield from zip(self.keys, self.host_keys, strict=True)
        yield from zip(self.values, self.host_values, strict=True)


def _on_host(array: Array) -> npt.NDArray[np.float32]:
    """The array in host memory; CuPy's arrays have `get`."""
    host: npt.NDArray[np.float32] = array.get() if hasattr(array, "get") else array
    return host
