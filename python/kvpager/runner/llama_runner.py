"""The Llama model as an engine's `ModelRunner`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpager.errors import WrongStateError
from kvpager.runner.kv_cache import KvCache
from kvpager.runner.llama import LlamaModel

if TYPE_CHECKING:
    from kvpager._core import Batch
    from kvpager.engine.generation import Generation

__all__ = ["LlamaRunner"]


class LlamaRunner:
    """A Llama model and its KV memory."""

    gives_logits = True

    def __init__(self, model: LlamaModel) -> None:
        """Takes the model; the memory comes with `allocate`."""
        self._model = model
        self._cache: KvCache | None = None
        self.vocab_size = model.config.vocab_size
        self.max_model_tokens = model.config.max_positions
        self.layer_groups = model.groups.spans

    def allocate(self, *, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes K and V arrays for every layer, on the device and for the host tier.

        Raises:
            InvalidArgumentError: a block size that attention does not do, or more memory than there is (with
                the bytes).
        """
        self._cache = self._model.new_cache(
            num_blocks=num_blocks, block_size=block_size, host_blocks=host_blocks
        )

    def run(self, batch: Batch, _sampled: Sequence[Generation], /) -> npt.NDArray[np.float32]:
        """Zeroes and copies what the batch asks for, then computes its logits [R, vocab_size]."""
        if self._cache is None:
            raise WrongStateError("the runner has no KV memory: call `allocate` first")
        self._cache.prepare(batch)
        if batch.num_tokens == 0:
            return np.zeros((0, self.vocab_size), np.float32)
        return self._model.to_host(self._model.forward(batch, self._cache))
