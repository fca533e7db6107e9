"""Choosing a policy: the same load under each, in a pool that is too small for all of it.

Answers may take 200 tokens and mostly end much earlier. `reserve` keeps room for the longest answer and never
takes a block back; `watermark` and `forecast` let more requests run, and take blocks back when they were
wrong.

    python examples/policies.py
"""

from __future__ import annotations

import random

import numpy as np

from kvpager.engine import Engine, EngineConfig, GenerationParams, NullRunner

END = 2


class DrawnLengths(NullRunner):
    """Answers of drawn lengths: the end token comes when a request has as many tokens as its length says."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[int, int] = {}

    def run(self, _batch, sampled, /) -> np.ndarray:
        ends = [one.num_sampled + 1 >= self.lengths[one.request_id] for one in sampled]
        return np.where(ends, END, 5).astype(np.int32)


def run(policy: str) -> Engine:
    runner, generator = DrawnLengths(), random.Random(3)
    engine = Engine(runner, EngineConfig(num_blocks=160, policy=policy, reuse=False))
    for _ in range(150):
        prompt = [generator.randrange(3, 30_000) for _ in range(generator.randrange(10, 60))]
        params = GenerationParams(max_tokens=200, stop_token_ids=(END,))
        (generation,) = engine.submit(prompt, params)
        runner.lengths[generation.request_id] = int(generator.expovariate(1 / 40)) + 1
    engine.run()
    return engine


def main() -> None:
    print(f"{'policy':10} {'steps':>6} {'peak held':>10} {'preemptions':>12} {'recomputed':>11}")
    for policy in ("reserve", "watermark", "forecast"):
        engine = run(policy)
        scheduler, pool = engine.scheduler.stats(), engine.pool.stats()
        print(
            f"{policy:10} {scheduler.steps:6} {pool.peak_held:10} {scheduler.num_preemptions:12} "
            f"{scheduler.recomputed_tokens:11}"
        )


if __name__ == "__main__":
    main()
