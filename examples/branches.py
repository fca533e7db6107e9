"""Branches of one request: they share its blocks, and the last one is copied when a branch writes to it.

`Scheduler.fork` makes requests that go on from where a running one is. Here three branches leave a request
after eight tokens and go their own ways; the model of `own_model_runner` shows that each reads its own past.

    python examples/branches.py
"""

from __future__ import annotations

import numpy as np

from kvpager import BlockPool, Scheduler
from own_model_runner import SumRunner

PROMPT, BEFORE, AFTER = list(range(1, 31)), 8, 12


def main() -> None:
    runner, pool = SumRunner(), BlockPool(64)
    runner.allocate(num_blocks=64, block_size=4, host_blocks=0)
    scheduler = Scheduler(pool, block_size=4, max_batch_tokens=64, max_running=8)
    root = scheduler.submit(scheduler.add_tenant("alice"), PROMPT, max_tokens=BEFORE + AFTER)
    outputs: dict[int, list[int]] = {root: []}
    steps_aside = {root: 0}
    copied = 0

    def step() -> int:
        batch = scheduler.step()
        ids = batch.sequence_ids.tolist()
        sums = runner.run(batch, ()).tolist()
        tokens = [
            (total + steps_aside[one]) % SumRunner.vocab_size for one, total in zip(ids, sums, strict=True)
        ]
        for one, token in zip(ids, tokens, strict=True):
            outputs[one].append(token)
        copies = len(batch.block_copies)
        scheduler.commit(batch.step_id, np.arange(len(ids) + 1, dtype=np.int32), tokens)
        return copies

    for _ in range(BEFORE):
        step()
    alone = pool.stats().held
    for number, branch in enumerate(scheduler.fork(root, 3), 1):
        outputs[branch], steps_aside[branch] = list(outputs[root]), number
    print(f"one request holds {alone} blocks, with its three branches {pool.stats().held}")
    while scheduler.has_work():
        copied += step()

    right = 0
    for branch, output in outputs.items():
        tokens = list(PROMPT)
        for place in range(BEFORE + AFTER):
            aside = steps_aside[branch] if place >= BEFORE else 0
            tokens.append((sum(tokens) + aside) % SumRunner.vocab_size)
        right += output == tokens[len(PROMPT) :]
    print(f"{right} of {len(outputs)} branches are right, {len(set(map(tuple, outputs.values())))} differ")
    print(f"blocks copied before a write: {copied}; held at the end: {pool.stats().held}")


if __name__ == "__main__":
    main()
