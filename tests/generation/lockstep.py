"""Many schedulers whose batches are computed in one forward pass: trying every chunk size costs few steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from kvpager import Batch, BlockPool, Scheduler
from kvpager.runner import LlamaModel

BLOCK_SIZE = 16
NUM_BLOCKS = 64
"""Of each scheduler; its block ids are shifted to a range of its own in one cache."""


def run_in_lockstep(
    model: LlamaModel, prompts: dict[int, list[list[int]]], *, max_tokens: int
) -> dict[int, list[list[int]]]:
    """Generates greedily with one scheduler for each chunk size.

    Args:
        model: computes all of them together.
        prompts: chunk size to prompts.
        max_tokens: tokens for each prompt at most; the model's end token ends it too.

    Returns:
        Chunk size to the outputs, in the order of the prompts.
    """
    schedulers = {size: new_scheduler(size) for size in prompts}
    outputs: dict[int, dict[int, list[int]]] = {}
    for size, scheduler in schedulers.items():
        tenant = scheduler.add_tenant("alice")
        outputs[size] = {
            scheduler.submit(tenant, ids, max_tokens=max_tokens, stop_token_ids=[2]): []
            for ids in prompts[size]
        }
    cache = model.new_cache(num_blocks=NUM_BLOCKS * len(schedulers), block_size=BLOCK_SIZE)
    while any(scheduler.has_work() for scheduler in schedulers.values()):
        batches = {size: scheduler.step() for size, scheduler in schedulers.items()}
        tokens = model.forward(combined(list(batches.values())), cache).argmax(axis=1).astype(np.int32)
        for size, batch in batches.items():
            own, tokens = np.split(tokens, [len(batch.sample_rows)])
            owners = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
            for request_id, token in zip(batch.sequence_ids[owners].tolist(), own.tolist(), strict=True):
                outputs[size][request_id].append(token)
            counts = np.bincount(owners, minlength=batch.num_sequences)
            token_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            schedulers[size].commit(batch.step_id, token_start, own)
    return {size: list(by_request.values()) for size, by_request in outputs.items()}


def new_scheduler(chunk_size: int) -> Scheduler:
    return Scheduler(
        BlockPool(NUM_BLOCKS),
        None,
        block_size=BLOCK_SIZE,
        max_running=16,
        max_model_tokens=128,
        max_prefill_chunk=chunk_size,
    )


def combined(batches: list[Batch]) -> SimpleNamespace:
    """The batches end to end, each with its own rows, tables and blocks."""
    first_token = np.cumsum([0, *(batch.num_tokens for batch in batches)])
    first_row = np.cumsum([0, *(len(batch.block_tables) for batch in batches)])

    def joined(name: str, *shifts: np.ndarray) -> np.ndarray:
        arrays = [getattr(batch, name) for batch in batches]
        return np.concatenate(
            [array + shift for array, shift in zip(arrays, *shifts, strict=True)], dtype=arrays[0].dtype
        )

    nothing = np.zeros(len(batches), np.int64)
    first_block = np.arange(len(batches)) * NUM_BLOCKS
    ends = [batch.query_start[1:] + start for batch, start in zip(batches, first_token[:-1], strict=True)]
    return SimpleNamespace(
        token_ids=joined("token_ids", nothing),
        positions=joined("positions", nothing),
        query_start=np.concatenate([[0], *ends]).astype(np.int32),
        sample_rows=joined("sample_rows", first_token[:-1]),
        slot_mapping=joined("slot_mapping", first_block * BLOCK_SIZE),
        context_lens=joined("context_lens", nothing),
        table_rows=joined("table_rows", first_row[:-1]),
        block_tables=joined("block_tables", first_block),
    )
