"""What the scheduler's tests share."""

from __future__ import annotations

import numpy as np

import kvpager
from kvpager import BlockPool, PrefixIndex, Scheduler


def make(num_blocks: int = 32, block_size: int = 4, **options: object) -> tuple[BlockPool, Scheduler]:
    pool = BlockPool(num_blocks)
    index = PrefixIndex(pool, block_size=block_size)
    settings_: dict[str, object] = {"max_batch_tokens": 64, "max_running": 8, "max_model_tokens": 128}
    return pool, Scheduler(pool, index, block_size=block_size, **{**settings_, **options})  # type: ignore[arg-type]


def commit_samples(scheduler: Scheduler, batch: kvpager.Batch, token: int = 5) -> kvpager.CommitOutcome:
    ends = batch.query_start[1:] - 1
    samples = np.isin(ends, batch.sample_rows)
    token_start = np.concatenate([[0], np.cumsum(samples)]).astype(np.int32)
    return scheduler.commit(batch.step_id, token_start, np.full(token_start[-1], token, np.int32))
