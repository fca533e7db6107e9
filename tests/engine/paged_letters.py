"""A model of made-up logits that reads its past through block tables, as a real one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager._core import Batch


def logits_of(context: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """[vocab] logits that every token of the context changes."""
    generator = np.random.Generator(np.random.Philox(key=hash(tuple(context)) % 2**64))
    return generator.normal(0.0, 1.5, vocab_size).astype(np.float32)


class PagedRunner:
    """Keeps tokens where a model keeps K and V, and makes logits of all that a sequence's table shows."""

    gives_logits = True

    def __init__(self, vocab_size: int = 16, max_model_tokens: int = 512) -> None:
        self.vocab_size, self.max_model_tokens = vocab_size, max_model_tokens
        self.num_copies = 0
        self.num_runs = 0
        self.before_run: Any = lambda: None

    def allocate(self, *, num_blocks: int, block_size: int, host_blocks: int) -> None:
        self.memory = np.full((num_blocks, block_size), -1)
        self.block_size = block_size

    def run(self, batch: Batch, sampled: Sequence[Any], /) -> npt.NDArray[np.float32]:
        self.num_runs += 1
        self.before_run()
        self.memory[batch.block_zeros] = 0
        for source, target in batch.block_copies.tolist():
            self.memory[target] = self.memory[source]
            self.num_copies += 1
        slots = batch.slot_mapping
        self.memory[slots // self.block_size, slots % self.block_size] = batch.token_ids
        rows = []
        for row in batch.sample_rows.tolist():
            owner = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            length = int(batch.context_lens[owner]) - (int(batch.query_start[owner + 1]) - 1 - row)
            blocks = batch.block_tables[batch.table_rows[owner]][: -(-length // self.block_size)]
            context = self.memory[blocks].ravel()[:length]
            assert (context >= 0).all()
            rows.append(logits_of(context.tolist(), self.vocab_size))
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)
