"""Beam search: the most likely answers of a small model, in blocks that the beams share.

The model is a chain of letters: each letter depends on the one before. Its best answer does not start with
its best letter, so greedy decoding misses it and a beam search finds it; trying out every answer shows that.

    python examples/beams.py
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpager import Batch
from kvpager.engine import Engine, EngineConfig, GenerationParams

LETTERS, LENGTH, WIDTH = 6, 6, 6
CHAIN = np.random.default_rng(12).dirichlet(np.full(LETTERS, 0.5), LETTERS).clip(1e-6)
CHAIN /= CHAIN.sum(axis=1, keepdims=True)
PROMPT = [0, 1, 2, 3, 4, 5] * 20


class ChainRunner:
    """Logits of the next letter, from the last one alone: it needs no memory."""

    vocab_size, max_model_tokens, gives_logits = LETTERS, 4096, True

    def allocate(self, *, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Nothing to keep."""

    def run(self, batch: Batch, _sampled: Sequence[Any], /) -> np.ndarray:
        return np.log(CHAIN[batch.token_ids[batch.sample_rows]]).astype(np.float32)


def log_probability(answer: Sequence[int]) -> float:
    return sum(float(np.log(CHAIN[pair])) for pair in itertools.pairwise([PROMPT[-1], *answer]))


def main() -> None:
    engine = Engine(ChainRunner(), EngineConfig(num_blocks=128, block_size=4))
    (greedy,) = engine.submit(PROMPT, GenerationParams(max_tokens=LENGTH))
    engine.run()
    params = GenerationParams(max_tokens=LENGTH, beam_width=WIDTH, n=3, logprobs=0)
    most = 0
    best = engine.submit(PROMPT, params)
    while engine.has_work():
        engine.step()
        most = max(most, engine.pool.stats().held)
    print(f"greedy: {greedy.token_ids}, log-probability {log_probability(greedy.token_ids):.2f}")
    for answer in best:
        total = sum(each.logprob for each in answer.logprobs)
        print(f"beam {answer.index}: {answer.token_ids}, log-probability {total:.2f}")
    found = max(itertools.product(range(LETTERS), repeat=LENGTH), key=log_probability)
    print(f"best of all {LETTERS**LENGTH} answers: found {list(found) == best[0].token_ids}")
    alone = -(-(len(PROMPT) + LENGTH) // 4)
    print(f"{WIDTH} beams hold {most} blocks at most, {WIDTH} requests would hold {WIDTH * alone}")
    print(f"blocks held at the end: {engine.pool.stats().held}")


if __name__ == "__main__":
    main()
