"""What a steady decode step costs: `step` + `commit` through Python, running decodes at random block phases.

    python benches/python/scheduler_step.py [--steps 2000]

Prints one row a batch size: median, p99 and maximum of a step, and nanoseconds a sequence.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from kvpager import BlockPool, PrefixIndex, Scheduler


def measure(running: int, steps: int, *, waiting: int = 0) -> np.ndarray:
    """Times of `steps` steady steps in nanoseconds, with `waiting` more requests in the queue."""
    block_size, prompt = 16, 64
    lifetime = (prompt + block_size + steps * 2) // block_size + 2
    pool = BlockPool(running * lifetime)
    index = PrefixIndex(pool, block_size=block_size)
    scheduler = Scheduler(
        pool,
        index,
        block_size=block_size,
        max_batch_tokens=max(16384, running),
        max_running=running,
        max_model_tokens=8192,
        max_waiting=running + waiting,
    )
    tenant = scheduler.add_tenant("bench")
    random = np.random.default_rng(0)
    for i in range(running + waiting):
        length = prompt + int(random.integers(block_size))
        tokens = random.integers(0, 50_000, length, dtype=np.int32)
        scheduler.submit(tenant, tokens, max_tokens=steps * 2 - i % 2, stop_token_ids=[2])
    token_start = np.arange(running + 1, dtype=np.int32)
    times = np.empty(steps, np.int64)
    done = 0
    gc.disable()
    while done < steps:
        tokens = random.integers(3, 50_000, running, dtype=np.int32)
        start = time.perf_counter_ns()
        batch = scheduler.step()
        planned = time.perf_counter_ns()
        steady = batch.num_tokens == running
        starts = token_start
        if not steady:
            samples = np.isin(batch.query_start[1:] - 1, batch.sample_rows)
            starts = np.concatenate([[0], np.cumsum(samples)]).astype(np.int32)
            tokens = tokens[: starts[-1]]
        resumed = time.perf_counter_ns()
        scheduler.commit(batch.step_id, starts, tokens)
        if steady:
            times[done] = planned - start + time.perf_counter_ns() - resumed
            done += 1
    gc.enable()
    return times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    print("| running | waiting | p50 us | p99 us | max us | ns a sequence |")
    print("|---|---|---|---|---|---|")
    for running, waiting in [(64, 0), (256, 0), (1024, 0), (256, 100_000)]:
        times = measure(running, steps, waiting=waiting)
        p50, p99 = np.percentile(times, [50, 99])
        print(
            f"| {running} | {waiting} | {p50 / 1e3:.1f} | {p99 / 1e3:.1f} | {times.max() / 1e3:.1f} "
            f"| {p50 / running:.1f} |"
        )


if __name__ == "__main__":
    main()
