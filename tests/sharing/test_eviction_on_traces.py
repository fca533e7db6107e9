"""Hit rates of the eviction policies on real traces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest

from .conftest import Prompts

CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
SESSIONS = "claude_code_sessions_A.tar.xz"


def footprint(prompts: Prompts) -> int:
    return int(np.unique(np.concatenate(prompts)).size)


def rate(hits: int, prompts: Prompts) -> float:
    return 100 * hits / sum(len(ids) for ids in prompts)


@pytest.mark.parametrize(("blocks", "hits"), [(34_179, 99_115), (8_544, 55_906), (1_708, 15_037)])
def test_leaf_lru_hits_of_the_conversation_trace_are_the_known_ones(
    load_prompts: Callable[..., Prompts], replay: Callable[..., int], blocks: int, hits: int
) -> None:
    prompts = load_prompts(CONVERSATION)
    assert sum(len(ids) for ids in prompts) == 276_491
    assert replay(prompts, blocks=blocks, block_size=512, eviction="lru") == hits


def block_lru(prompts: Prompts, capacity: int, *, head_first: bool) -> int:
    """Block LRU in an ordered dict: released head first (the mutant), or tail first as leaf LRU does."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in (ids[:capacity].tolist() for ids in prompts):
        found = 0
        while found < len(ids) and ids[found] in resident:
            found += 1
        hits += found
        for block in ids:
            resident.pop(block, None)
        while len(resident) + len(ids) > capacity:
            resident.popitem(last=False)
        for block in ids if head_first else reversed(ids):
            resident[block] = None
    return hits


def test_eviction_that_takes_heads_first_is_told_apart_by_long_sessions(
    load_prompts: Callable[..., Prompts], replay: Callable[..., int]
) -> None:
    prompts = load_prompts(SESSIONS)[:1000]
    capacity = footprint(prompts) // 25
    ours = replay(prompts, blocks=capacity, block_size=1, eviction="lru")
    assert ours == block_lru(prompts, capacity, head_first=False)
    mutant = block_lru(prompts, capacity, head_first=True)
    assert rate(ours, prompts) > rate(mutant, prompts) + 2


@pytest.mark.parametrize(("percent", "bar"), [(1, 9.9), (2, 13.5), (5, 22.2), (10, 29.3)])
def test_learned_eviction_beats_the_best_known_policy_on_chat(
    load_prompts: Callable[..., Prompts], replay: Callable[..., int], percent: int, bar: float
) -> None:
    prompts = load_prompts(CONVERSATION)
    blocks = footprint(prompts) * percent // 100
    hits = replay(prompts, blocks=blocks, block_size=512, eviction="learned")
    assert rate(hits, prompts) > bar


@pytest.mark.parametrize(
    ("name", "block_size", "seed", "percents"),
    [
        (CONVERSATION, 512, 0, (1, 2, 5, 10, 20, 50)),
        (SESSIONS, 64, 0, (1, 2, 20)),
        (SESSIONS, 64, 7, (1,)),
    ],
)
def test_learned_eviction_is_never_a_point_below_lru(
    load_prompts: Callable[..., Prompts],
    replay: Callable[..., int],
    name: str,
    block_size: int,
    seed: int,
    percents: tuple[int, ...],
) -> None:
    prompts = load_prompts(name, seed=seed)
    for percent in percents:
        blocks = footprint(prompts) * percent // 100
        lru = rate(replay(prompts, blocks=blocks, block_size=block_size, eviction="lru"), prompts)
        learned = rate(replay(prompts, blocks=blocks, block_size=block_size, eviction="learned"), prompts)
        print(f"{name} seed {seed} {percent} %: lru {lru:.2f} learned {learned:.2f}")
        assert learned > lru - 1, f"{percent} %"


def test_learned_eviction_is_never_a_point_below_lru_in_blocks_of_16(
    load_prompts: Callable[..., Prompts], replay: Callable[..., int]
) -> None:
    parts = np.arange(32, dtype=np.uint32)
    prompts = [(ids[:, None] * 32 + parts).ravel() for ids in load_prompts(CONVERSATION)[:1000]]
    blocks = footprint(prompts) * 2 // 100
    lru = rate(replay(prompts, blocks=blocks, block_size=16, eviction="lru"), prompts)
    learned = rate(replay(prompts, blocks=blocks, block_size=16, eviction="learned"), prompts)
    assert learned > lru - 1
