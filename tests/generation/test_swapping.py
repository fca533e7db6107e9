"""A tiny pool with a host tier gives the tokens of a big pool, while blocks really move between the two."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from golden_items import GoldenItem

from kvpager import BlockPool, PrefixIndex, Scheduler
from kvpager.engine import Engine, EngineConfig, Generation, GenerationParams, SamplingParams
from kvpager.runner import LlamaModel, LlamaRunner, LoadedModel

pytestmark = pytest.mark.model

BLOCK_SIZE = 8
MAX_TOKENS = 24
TINY = 12
"""Blocks of the tiny pool: the longest request fits, and little beside it."""


def new_engine(demo: LoadedModel, num_blocks: int, **options: Any) -> Engine:
    config = EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_running=16, **options)
    return Engine(LlamaRunner(demo.model), config, fingerprint=demo.fingerprint(block_size=BLOCK_SIZE))


def chosen(golden: list[GoldenItem]) -> list[GoldenItem]:
    """Five prompts of 5 to 36 tokens."""
    return [item for item in golden if item.kind != "long"][::2]


def generate(engine: Engine, items: list[GoldenItem]) -> list[Generation]:
    """Each prompt greedily and with draws, all at once."""
    generations = []
    for seed, item in enumerate(items):
        for sampling in (SamplingParams(), SamplingParams(temperature=0.9, top_p=0.95, seed=seed)):
            params = GenerationParams(max_tokens=MAX_TOKENS, stop_token_ids=(2,), sampling=sampling)
            generations += engine.submit(item.prompt_ids, params)
    engine.run()
    return generations


def teach_short_outputs(engine: Engine, items: list[GoldenItem]) -> None:
    """Many outputs of two tokens where more were allowed, so that a forecast expects such."""
    for _ in range(8):
        for item in items:
            stop = (item.greedy_ids[1],)
            engine.submit(item.prompt_ids, GenerationParams(max_tokens=MAX_TOKENS, stop_token_ids=stop))
    engine.run()


@pytest.fixture(scope="module")
def with_room(demo: LoadedModel, golden: list[GoldenItem]) -> list[list[int]]:
    engine = new_engine(demo, 512)
    outputs = [generation.token_ids for generation in generate(engine, chosen(golden))]
    assert outputs[::2] == [item.greedy_ids[:MAX_TOKENS] for item in chosen(golden)]
    assert outputs[1::2] != outputs[::2], "some are drawn"
    engine.close()
    return outputs


@pytest.mark.parametrize("open_steps", [1, 2])
@pytest.mark.parametrize("policy", ["watermark", "forecast"])
def test_greedy_and_seeded_tokens_are_those_of_a_big_pool(
    demo: LoadedModel,
    golden: list[GoldenItem],
    with_room: list[list[int]],
    policy: Literal["watermark", "forecast"],
    open_steps: int,
) -> None:
    engine = new_engine(
        demo, TINY, policy=policy, overflow="swap", host_blocks=256, max_open_steps=open_steps
    )
    if policy == "forecast":
        teach_short_outputs(engine, chosen(golden))
    before = engine.scheduler.stats()
    generations = generate(engine, chosen(golden))
    assert [generation.token_ids for generation in generations] == with_room
    stats = engine.scheduler.stats()
    assert stats.swapped_out_blocks > before.swapped_out_blocks
    assert stats.swapped_out_blocks == stats.swapped_in_blocks
    assert stats.recomputed_tokens == 0
    assert sum(generation.account.preemptions for generation in generations if generation.account) > 0
    engine.close()
    blocks = engine.pool.stats()
    assert (blocks.held, blocks.reserved, blocks.quarantined) == (0, 0, 0)


def followed(inputs: list[int], samples: list[int]) -> list[int]:
    """The samples of one row that follow right tokens; sample `i` comes after `inputs[i]`."""
    taken = samples[:1]
    for before, sample in zip(inputs[1:], samples[1:], strict=True):
        if before != taken[-1]:
            break
        taken.append(sample)
    return taken


class Drafting:
    """Greedy generation with drafts, by a scheduler and a model."""

    def __init__(self, model: LlamaModel, num_blocks: int, host_blocks: int) -> None:
        pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            pool,
            PrefixIndex(pool, block_size=BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_running=16,
            max_model_tokens=128,
            policy="watermark",
            overflow="swap",
            host_blocks=host_blocks,
        )
        self.model = model
        self.cache = model.new_cache(num_blocks=num_blocks, block_size=BLOCK_SIZE, host_blocks=host_blocks)
        self.outputs: dict[int, list[int]] = {}

    def turn(self) -> None:
        """One step."""
        batch = self.scheduler.step()
        self.cache.prepare(batch)
        samples = np.zeros(0, np.int64)
        if batch.num_tokens:
            samples = self.model.forward(batch, self.cache).argmax(axis=1)
        owners = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
        rows = []
        for row, sequence in enumerate(batch.sequence_ids.tolist()):
            own = np.flatnonzero(owners == row)
            inputs = batch.token_ids[batch.sample_rows[own]].tolist()
            rows.append(followed(inputs, samples[own].tolist()))
            self.outputs[sequence] += rows[-1]
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        self.scheduler.commit(batch.step_id, starts, [token for row in rows for token in row])

    def propose(self, sequence: int, continuation: list[int]) -> None:
        """Two right drafts and a wrong one."""
        done = len(self.outputs[sequence])
        drafts = [*continuation[done : done + 2], 0]
        self.scheduler.propose([sequence], [0, len(drafts)], drafts)


def test_drafts_over_swapped_blocks_change_no_token(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    engine = Drafting(demo.model, TINY, 256)
    tenant = engine.scheduler.add_tenant("alice")
    items: dict[int, GoldenItem] = {}
    for item in chosen(golden):
        request = engine.scheduler.submit(tenant, item.prompt_ids, max_tokens=MAX_TOKENS, stop_token_ids=[2])
        items[request] = item
        engine.outputs[request] = []
    while engine.scheduler.has_work():
        for request, item in items.items():
            engine.propose(request, item.greedy_ids)
        engine.turn()
    assert list(engine.outputs.values()) == [item.greedy_ids[:MAX_TOKENS] for item in items.values()]
    stats = engine.scheduler.stats()
    assert stats.swapped_out_blocks > 0
    assert stats.swapped_out_blocks == stats.swapped_in_blocks
    assert sum(engine.scheduler.draft_counts()[1]) > 0
