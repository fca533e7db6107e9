"""A model of your own: `ModelRunner` over paged memory.

This "model" keeps one number a token in its KV memory, the token id, and its next token is the sum of all
tokens before, modulo the vocabulary. It is small enough to check by hand, and does all that a runner must: it
writes the slots it is told, reads only through the block tables, and moves blocks in the order that the batch
asks for, in steps without tokens too.

    python examples/own_model_runner.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpager import Batch
from kvpager.engine import Engine, EngineConfig, Generation, GenerationParams


class SumRunner:
    """Next token = sum of the context, modulo the vocabulary."""

    vocab_size = 1000
    max_model_tokens = 512
    gives_logits = False  # `run` returns tokens; with True it returns logits [R, vocab_size] fp32

    def allocate(self, *, num_blocks: int, block_size: int, host_blocks: int) -> None:
        self.block_size = block_size
        self.kv = np.full(
            (num_blocks, block_size), 10**6
        )  # rubbish: nothing may be read before it is written
        self.host_kv = np.zeros((host_blocks, block_size), np.int64)

    def run(self, batch: Batch, _sampled: Sequence[Generation], /) -> np.ndarray:
        self.move_blocks(batch)
        self.kv.reshape(-1)[batch.slot_mapping] = batch.token_ids  # append_kv of a real model
        return np.array([self.next_token(batch, row) for row in batch.sample_rows], np.int32)

    def move_blocks(self, batch: Batch) -> None:
        """The order matters: a destination here is never a source of a later one."""
        self.host_kv[batch.swap_out[:, 1]] = self.kv[batch.swap_out[:, 0]]
        self.kv[batch.block_zeros] = 0
        self.kv[batch.swap_in[:, 1]] = self.host_kv[batch.swap_in[:, 0]]
        self.kv[batch.block_copies[:, 1]] = self.kv[batch.block_copies[:, 0]]

    def next_token(self, batch: Batch, row: int) -> int:
        """What paged attention does: follow one sequence's table, up to its length."""
        sequence = int(np.searchsorted(batch.query_start, row, side="right")) - 1
        length = int(batch.context_lens[sequence])
        blocks = batch.block_tables[batch.table_rows[sequence], : -(-length // self.block_size)]
        return int(self.kv[blocks].reshape(-1)[:length].sum() % self.vocab_size)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % SumRunner.vocab_size)
    return tokens[len(prompt) :]


def main() -> None:
    engine = Engine(SumRunner(), EngineConfig(num_blocks=40, block_size=4, max_batch_tokens=24))
    shared = list(range(1, 18))
    prompts = [[*shared, 100 + i] for i in range(12)]
    generations = [engine.submit(prompt, GenerationParams(max_tokens=20))[0] for prompt in prompts]
    engine.run()
    right = sum(g.token_ids == expected(p, 20) for g, p in zip(generations, prompts, strict=True))
    cached = sum(g.cached_tokens or 0 for g in generations)
    print(f"{right} of {len(prompts)} answers are right, {cached} prompt tokens came from the cache")
    print(f"blocks held at the end: {engine.pool.stats().held}")


if __name__ == "__main__":
    main()
