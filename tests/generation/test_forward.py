"""The forward pass over paged memory gives the logits of an independent implementation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from golden_items import GoldenItem

from kvpager.errors import InvalidArgumentError
from kvpager.runner import LoadedModel

pytestmark = pytest.mark.model


def packed_batch(prompts: list[list[int]], block_size: int) -> tuple[SimpleNamespace, int]:
    """All prompts in one batch, their blocks shuffled over a pool; returns it and the pool's size."""
    lengths = np.array([len(prompt) for prompt in prompts])
    needed = -(-lengths // block_size)
    ids = np.random.default_rng(0).permutation(int(needed.sum())).astype(np.int32)
    tables = np.full((len(prompts), needed.max()), -1, np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum(needed) - needed, needed, strict=True)):
        tables[row, :count] = ids[start : start + count]
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    rows = np.repeat(np.arange(len(prompts)), lengths)
    ends = np.cumsum(lengths)
    batch = SimpleNamespace(
        token_ids=np.concatenate(prompts).astype(np.int32),
        positions=positions,
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        sample_rows=(ends - 1).astype(np.int32),
        slot_mapping=tables[rows, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        context_lens=lengths.astype(np.int32),
        table_rows=np.arange(len(prompts), dtype=np.int32),
        block_tables=tables,
    )
    return batch, int(needed.sum())


def test_top_logits_of_every_golden_prompt_are_close_in_one_ragged_batch(
    demo: LoadedModel, golden: list[GoldenItem]
) -> None:
    batch, num_blocks = packed_batch([item.prompt_ids for item in golden], block_size=16)
    cache = demo.model.new_cache(num_blocks=num_blocks, block_size=16)
    logits = demo.model.forward(batch, cache)
    assert logits.shape == (len(golden), demo.model.config.vocab_size)
    for row, item in zip(logits, golden, strict=True):
        assert np.argsort(-row)[:5].tolist() == [token for token, _ in item.top5]
        assert max(abs(row[token] - logit) for token, logit in item.top5) < 1e-3


def test_rows_that_need_no_logits_cost_none(demo: LoadedModel) -> None:
    batch, num_blocks = packed_batch([[1, 2, 3]], block_size=16)
    batch.sample_rows = batch.sample_rows[:0]
    cache = demo.model.new_cache(num_blocks=num_blocks, block_size=16)
    assert demo.model.forward(batch, cache).shape == (0, demo.model.config.vocab_size)


def test_token_outside_the_vocabulary_is_an_error_with_the_numbers(demo: LoadedModel) -> None:
    batch, num_blocks = packed_batch([[1, 49152]], block_size=16)
    cache = demo.model.new_cache(num_blocks=num_blocks, block_size=16)
    with pytest.raises(InvalidArgumentError, match="from 1 to 49152: the vocabulary has 49152"):
        demo.model.forward(batch, cache)


def test_cache_that_no_memory_can_hold_is_refused_with_its_bytes(demo: LoadedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="take 4718592000000000 bytes"):
        demo.model.new_cache(num_blocks=6_400_000_000, block_size=16)
