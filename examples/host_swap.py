"""Swapping to host memory: what outgrew the pool moves there and comes back, and nothing is computed twice.

python examples/host_swap.py
"""

from __future__ import annotations

from kvpager.engine import Engine, EngineConfig, Generation, GenerationParams
from own_model_runner import SumRunner, expected

PROMPTS = [[i + 1, 2 * i + 3, 7] for i in range(12)]


def run(overflow: str, host_blocks: int) -> tuple[Engine, list[Generation]]:
    config = EngineConfig(
        num_blocks=40,
        block_size=4,
        max_batch_tokens=64,
        policy="watermark",  # lets more run than can grow to the end, so something must give way
        overflow=overflow,
        host_blocks=host_blocks,
    )
    engine = Engine(SumRunner(), config)
    generations = [engine.submit(prompt, GenerationParams(max_tokens=60))[0] for prompt in PROMPTS]
    engine.run()
    return engine, generations


def main() -> None:
    for overflow, host_blocks in (("recompute", 0), ("swap", 200)):
        engine, generations = run(overflow, host_blocks)
        right = sum(g.token_ids == expected(p, 60) for g, p in zip(generations, PROMPTS, strict=True))
        stats = engine.scheduler.stats()
        print(
            f"{overflow}: {right} of {len(PROMPTS)} answers are right; {stats.swapped_out_blocks} blocks "
            f"out, {stats.swapped_in_blocks} in, {stats.recomputed_tokens} tokens computed again"
        )


if __name__ == "__main__":
    main()
