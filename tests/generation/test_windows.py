"""Sliding windows: the runner over grouped tables gives the tokens of a dense masked forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models
from test_weights import model_of_directory, plain_frequencies

from kvpager import BlockPool, Scheduler
from kvpager.engine import Engine, EngineConfig, GenerationParams, SamplingParams
from kvpager.errors import InvalidArgumentError
from kvpager.runner import LlamaConfig, LlamaModel
from kvpager.runner.layer_groups import RunnerGroups
from kvpager.runner.llama_runner import LlamaRunner

WINDOW = 6
SLIDING_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention"] * 2
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4], [5] * 20]


def windowed(directory: Path, layer_types: list[str] | None) -> tuple[LlamaModel, tiny_models.Tensors]:
    tensors = tiny_models.random_tensors(num_layers=6)
    changes = {"model_type": "mistral", "sliding_window": WINDOW, "layer_types": layer_types}
    tiny_models.write_hugging_face(directory, tensors, num_hidden_layers=6, **changes)
    return model_of_directory(directory), tensors


def dense_tokens(model: LlamaModel, tensors: tiny_models.Tensors, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = tiny_models.dense_logits(tensors, tokens, plain_frequencies(), model.config.layer_windows)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def paged_tokens(
    model: LlamaModel,
    prompts: list[list[int]],
    count: int,
    num_blocks: int,
    policy: str,
    host_blocks: int = 0,
) -> tuple[list[list[int]], Scheduler]:
    """Greedy tokens by a scheduler of few blocks; what is not held is poisoned before every step."""
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(
        pool,
        block_size=4,
        max_batch_tokens=12,
        max_running=3,
        max_model_tokens=128,
        policy=policy,  # type: ignore[arg-type]
        overflow="swap" if host_blocks else "auto",
        host_blocks=host_blocks,
        layer_groups=model.groups.spans,
    )
    tenant = scheduler.add_tenant("alice")
    outputs: dict[int, list[int]] = {
        scheduler.submit(tenant, prompt, max_tokens=count): [] for prompt in prompts
    }
    cache = model.new_cache(num_blocks=num_blocks, block_size=4, host_blocks=host_blocks)
    while scheduler.has_work():
        batch = scheduler.step()
        held = np.unique(np.concatenate([group.block_tables.ravel() for group in batch.groups]))
        # Tails of 32 blocks and less: of what is parked, nothing stays on the device.
        free = np.setdiff1d(np.arange(num_blocks), np.union1d(held, batch.swap_out[:, 0]))
        for array in (*cache.keys, *cache.values):
            array[free] = np.nan
        cache.prepare(batch)
        tokens = np.zeros(0, np.int32)
        if batch.num_tokens:
            tokens = model.forward(batch, cache).argmax(axis=1).astype(np.int32)
        samples = np.isin(batch.query_start[1:] - 1, batch.sample_rows)
        for request, token in zip(batch.sequence_ids[samples].tolist(), tokens.tolist(), strict=True):
            outputs[request].append(token)
        scheduler.commit(batch.step_id, np.concatenate([[0], np.cumsum(samples)]).astype(np.int32), tokens)
    assert pool.stats().held == 0
    return list(outputs.values()), scheduler


@pytest.mark.parametrize("layer_types", [SLIDING_AND_FULL, None])
@pytest.mark.parametrize(("policy", "num_blocks"), [("reserve", 90), ("watermark", 40)])
def test_windowed_layers_give_the_tokens_of_a_dense_masked_forward_pass(
    tmp_path: Path, layer_types: list[str] | None, policy: str, num_blocks: int
) -> None:
    model, tensors = windowed(tmp_path, layer_types)
    outputs, scheduler = paged_tokens(model, PROMPTS, 30, num_blocks, policy)
    assert outputs == [dense_tokens(model, tensors, prompt, 30) for prompt in PROMPTS]
    if policy == "reserve":
        assert scheduler.stats().num_preemptions == 0
    unmasked = tiny_models.dense_logits(tensors, PROMPTS[0], plain_frequencies())
    masked = tiny_models.dense_logits(tensors, PROMPTS[0], plain_frequencies(), model.config.layer_windows)
    assert abs(unmasked[-1] - masked[-1]).max() > 1e-2, "the mask matters to this model"


def test_tails_of_all_groups_move_to_the_host_and_back(tmp_path: Path) -> None:
    model, tensors = windowed(tmp_path, SLIDING_AND_FULL)
    outputs, scheduler = paged_tokens(model, PROMPTS, 30, 26, "watermark", host_blocks=128)
    assert outputs == [dense_tokens(model, tensors, prompt, 30) for prompt in PROMPTS]
    stats = scheduler.stats()
    assert stats.swapped_out_blocks > 0
    assert stats.swapped_out_blocks == stats.swapped_in_blocks


@pytest.mark.parametrize(("layer_types", "num_cached"), [(SLIDING_AND_FULL, 36), (None, 36)])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_windowed_model_generates_through_the_engine(
    tmp_path: Path, reuse: bool, layer_types: list[str] | None, num_cached: int
) -> None:
    model, tensors = windowed(tmp_path, layer_types)
    config = EngineConfig(num_blocks=256, block_size=4, max_batch_tokens=16, max_running=4, reuse=reuse)
    engine = Engine(LlamaRunner(model), config)
    params = GenerationParams(max_tokens=12)
    generations = [engine.submit(prompt, params)[0] for prompt in PROMPTS]
    engine.run()
    expected = [dense_tokens(model, tensors, prompt, 12) for prompt in PROMPTS]
    assert [generation.token_ids for generation in generations] == expected
    again = [engine.submit(prompt, params)[0] for prompt in PROMPTS]
    engine.run()
    assert [generation.token_ids for generation in again] == expected
    assert sum(generation.cached_tokens for generation in again) == (num_cached if reuse else 0)


@pytest.mark.parametrize("layer_types", [SLIDING_AND_FULL, None])
@pytest.mark.parametrize("reuse", [False, True])
def test_samples_of_a_windowed_model_are_those_of_requests_of_their_own(
    tmp_path: Path, reuse: bool, layer_types: list[str] | None
) -> None:
    model, _ = windowed(tmp_path, layer_types)
    config = EngineConfig(num_blocks=256, block_size=4, max_batch_tokens=16, max_running=8, reuse=reuse)
    engine = Engine(LlamaRunner(model), config)

    def tokens(prompt: list[int], seed: int, n: int) -> list[list[int]]:
        params = GenerationParams(max_tokens=14, n=n, sampling=SamplingParams(temperature=1.0, seed=seed))
        generations = engine.submit(prompt, params)
        engine.run()
        return [generation.token_ids for generation in generations]

    for prompt in PROMPTS:
        together = tokens(prompt, 7, 4)
        assert together == [tokens(prompt, 7 + i, 1)[0] for i in range(4)]
        assert len(set(map(tuple, together))) > 1
    assert engine.pool.stats().held == 0


@pytest.mark.parametrize("layer_types", [SLIDING_AND_FULL, None])
@pytest.mark.parametrize(("policy", "num_blocks"), [("reserve", 128), ("watermark", 90)])
def test_beams_of_a_windowed_model_are_those_of_a_search_without_cache(
    tmp_path: Path, layer_types: list[str] | None, policy: str, num_blocks: int
) -> None:
    model, tensors = windowed(tmp_path, layer_types)
    sizes = {"num_blocks": num_blocks, "block_size": 4, "max_batch_tokens": 16, "max_running": 8}
    engine = Engine(LlamaRunner(model), EngineConfig(**sizes, policy=policy))  # type: ignore[arg-type]
    params = GenerationParams(max_tokens=10, n=3, beam_width=3)
    searches = [engine.submit(prompt, params) for prompt in PROMPTS]
    engine.run()
    for prompt, generations in zip(PROMPTS, searches, strict=True):
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(10):
            ranked = []
            for score, tokens in beams:
                context = [*prompt, *tokens]
                dense = tiny_models.dense_logits(
                    tensors, context, plain_frequencies(), model.config.layer_windows
                )
                row = np.asarray(dense[-1], np.float64)
                chances = row - row.max() - np.log(np.exp(row - row.max()).sum())
                ranked += [(score + chance, [*tokens, token]) for token, chance in enumerate(chances)]
            beams = sorted(ranked, key=lambda beam: -beam[0])[:3]
        assert [generation.token_ids for generation in generations] == [tokens for _, tokens in beams]
    assert engine.pool.stats().held == 0


@pytest.mark.parametrize("block_size", [24, 512])
def test_an_engine_is_not_made_with_blocks_that_attention_does_not_do(
    tmp_path: Path, block_size: int
) -> None:
    model, _ = windowed(tmp_path, None)
    config = EngineConfig(num_blocks=16, block_size=block_size)
    with pytest.raises(InvalidArgumentError, match=f"^block_size is {block_size}, must be a power of two"):
        Engine(LlamaRunner(model), config)


def test_groups_share_the_memory_of_a_block(tmp_path: Path) -> None:
    model, _ = windowed(tmp_path, SLIDING_AND_FULL)
    assert model.groups == RunnerGroups(
        (("full", None), ("sliding", WINDOW), ("sliding", WINDOW)), (1, 1, 0, 2, 2, 0), (0, 1, 0, 0, 1, 1)
    )
    assert len(model.new_cache(num_blocks=4, block_size=4).keys) == 2, "6 layers, 2 in every group"


def test_windows_that_the_runner_cannot_compute_are_refused() -> None:
    mistral = tiny_models.CONFIG | {"model_type": "mistral", "sliding_window": 8}
    for changes, text in [
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 windows for 2 layers"),
        ({"sliding_window": 0}, "a window of 0 tokens"),
    ]:
        with pytest.raises(InvalidArgumentError, match=text):
            LlamaConfig.from_hugging_face(mistral | changes)
    assert LlamaConfig.from_hugging_face(mistral | {"sliding_window": None}).layer_windows == ()
