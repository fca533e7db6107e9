"""Generated ids equal those of an independent implementation, however the work is cut, shared and queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from golden_items import GoldenItem
from lockstep import run_in_lockstep

from kvpager.engine import Engine, EngineConfig, Generation, GenerationParams, SamplingParams
from kvpager.runner import LlamaRunner, LoadedModel

pytestmark = pytest.mark.model

FULL = 48
"""Tokens of a golden continuation at most."""


def new_engine(demo: LoadedModel, *, num_blocks: int = 512, block_size: int = 16, **sizes: object) -> Engine:
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, **sizes)  # type: ignore[arg-type]
    engine = Engine(LlamaRunner(demo.model), config, fingerprint=demo.fingerprint(block_size=block_size))
    engine.add_tenant("alice")
    engine.add_tenant("bob")
    return engine


def generate(
    engine: Engine, items: Sequence[GoldenItem], *, max_tokens: int = FULL, tenant: str = "alice"
) -> list[Generation]:
    """Submits all items at once, runs them, checks their ids, and returns what became of each."""
    params = GenerationParams(max_tokens=max_tokens, stop_token_ids=(2,))
    generations = [engine.submit(item.prompt_ids, params, tenant=tenant)[0] for item in items]
    engine.run()
    for item, generation in zip(items, generations, strict=True):
        assert generation.token_ids == item.greedy_ids[:max_tokens], item.text[:60]
        assert generation.account is not None
        ended = item.greedy_ids[:max_tokens][-1] == 2
        assert generation.account.reason == ("stop" if ended else "length")
        assert generation.account.output_tokens == len(generation.token_ids)
    check_pool(engine)
    return generations


def check_pool(engine: Engine) -> None:
    """Nothing is held when nothing runs, and every block is accounted for."""
    stats = engine.pool.stats()
    assert (stats.held, stats.reserved, stats.quarantined) == (0, 0, 0)
    assert stats.cached + stats.free == stats.capacity
    engine.pool.check_invariants()


def short(golden: list[GoldenItem]) -> list[GoldenItem]:
    return [item for item in golden if item.kind != "long"]


def the_long(golden: list[GoldenItem]) -> GoldenItem:
    return next(item for item in golden if item.kind == "long")


def test_each_prompt_alone(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    engine = new_engine(demo, num_blocks=64, reuse=False)
    for item in golden:
        (generation,) = generate(engine, [item])
        assert generation.account is not None
        assert generation.account.cached_tokens == 0


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_all_prompts_in_one_batch_and_again_from_the_cache(
    demo: LoadedModel, golden: list[GoldenItem], block_size: int
) -> None:
    engine = new_engine(demo, num_blocks=4096 // block_size, block_size=block_size)
    generate(engine, golden)
    for item, generation in zip(golden, generate(engine, golden), strict=True):
        whole_blocks = (len(item.prompt_ids) - 1) // block_size * block_size
        assert generation.account is not None
        assert generation.account.cached_tokens == whole_blocks


def test_prompts_chunked_at_every_size(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    longest = max(len(item.prompt_ids) for item in short(golden))
    items = {
        size: [item for item in short(golden) if len(item.prompt_ids) >= size]
        for size in range(1, longest + 1)
    }
    prompts = {size: [item.prompt_ids for item in items[size]] for size in items}
    for size, outputs in run_in_lockstep(demo.model, prompts, max_tokens=FULL).items():
        assert outputs == [item.greedy_ids for item in items[size]], f"chunks of {size}"


def test_prompts_chunked_small_to_the_last_token(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    generate(new_engine(demo, max_prefill_chunk=5, max_batch_tokens=24), short(golden))


@pytest.mark.parametrize("size", [29, 256, 511, 802])
def test_long_prompt_chunked(demo: LoadedModel, golden: list[GoldenItem], size: int) -> None:
    engine = new_engine(demo, max_batch_tokens=1024, max_prefill_chunk=size, reuse=False)
    (generation,) = generate(engine, [the_long(golden)])
    assert generation.account is not None
    assert generation.account.steps == -(-803 // size) + len(generation.token_ids) - 1


def test_pool_so_small_that_requests_wait(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    engine = new_engine(demo, num_blocks=12, max_batch_tokens=24)
    generations = generate(engine, short(golden))
    accounts = [generation.account for generation in generations if generation.account]
    assert sum(account.queue_steps > 0 for account in accounts) >= 4
    assert engine.pool.stats().peak_held <= 12


def test_pool_with_room_for_the_long_prompt_alone(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    engine = new_engine(demo, num_blocks=54, max_batch_tokens=512)
    generate(engine, [the_long(golden), *short(golden)])


def test_no_index_reuses_nothing_and_gives_the_same(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    engine = new_engine(demo, reuse=False)
    for _ in range(2):
        for generation in generate(engine, golden):
            assert generation.account is not None
            assert generation.account.cached_tokens == 0
    assert engine.pool.stats().cached == 0


def test_cache_of_one_tenant_is_never_used_for_another(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    engine = new_engine(demo)
    item = next(item for item in golden if item.kind == "chat")
    cached = [
        generation.account.cached_tokens
        for tenant in ("alice", "bob", "alice", "bob")
        for generation in generate(engine, [item], max_tokens=2, tenant=tenant)
        if generation.account
    ]
    assert cached == [0, 0, 32, 32]


def test_prompts_of_one_token_are_normal(demo: LoadedModel) -> None:
    engine = new_engine(demo)
    outputs = []
    for _ in range(2):
        generation = engine.submit([504], GenerationParams(max_tokens=3), tenant="alice")[0]
        engine.run()
        assert generation.account is not None
        assert generation.account.cached_tokens == 0
        outputs.append(generation.token_ids)
    assert outputs[0] == outputs[1]
    check_pool(engine)


def test_seeded_draws_are_the_same_alone_and_in_a_batch(demo: LoadedModel, golden: list[GoldenItem]) -> None:
    items = short(golden)[:4]

    def run(engine: Engine, item: GoldenItem, seed: int) -> Generation:
        sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        params = GenerationParams(max_tokens=6, sampling=sampling)
        return engine.submit(item.prompt_ids, params, tenant="alice")[0]

    engine = new_engine(demo)
    together = [run(engine, item, seed) for seed, item in enumerate(items)]
    engine.run()
    for seed, (item, generation) in enumerate(zip(items, together, strict=True)):
        alone = run(engine, item, seed)
        engine.run()
        assert alone.token_ids == generation.token_ids
    assert any(
        generation.token_ids != item.greedy_ids[:6] for item, generation in zip(items, together, strict=True)
    )


def test_model_failure_ends_the_requests_of_the_step_and_frees_their_blocks(
    demo: LoadedModel, golden: list[GoldenItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(demo)
    generation = engine.submit(golden[0].prompt_ids, GenerationParams(max_tokens=4), tenant="alice")[0]

    def broken(*_: object) -> np.ndarray:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(demo.model, "forward", broken)
        engine.run()
    assert generation.error == "the model failed: RuntimeError: the device is gone"
    assert generation.account is not None
    assert generation.account.reason == "error"
    check_pool(engine)
    generate(engine, golden[:1], max_tokens=4)
