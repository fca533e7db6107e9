"""Layer groups through Python: arrays by group, and errors at the call."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from kvpager import BlockPool, PrefixIndex, Scheduler, errors
from kvpager._core import KvGeometry, num_allocations

from .engine import commit_samples

WINDOWED = [("full", None), ("sliding", 4), ("chunked", 8)]


def grouped(num_blocks: int = 64, **options: object) -> tuple[BlockPool, Scheduler]:
    pool = BlockPool(num_blocks)
    settings_: dict[str, object] = {"max_batch_tokens": 64, "max_running": 8, "max_model_tokens": 128}
    merged = {**settings_, "block_size": 4, "layer_groups": WINDOWED, **options}
    return pool, Scheduler(pool, **merged)  # type: ignore[arg-type]


def test_each_group_has_its_slots_and_tables() -> None:
    pool, scheduler = grouped()
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(10), max_tokens=4)
    batch = scheduler.step(pad_to=3)
    assert [(group.span, group.window) for group in batch.groups] == WINDOWED
    slots = np.stack([group.slot_mapping for group in batch.groups])
    assert (slots[0] == batch.slot_mapping).all()
    assert (slots[:, 10:] == -1).all()
    assert len(np.unique(slots[:, :10])) == 30, "one pool, one id space"
    for group in batch.groups:
        row = group.block_tables[group.table_rows[0]]
        assert (row[np.arange(10) // 4] * 4 + np.arange(10) % 4 == group.slot_mapping[:10]).all()
        assert len(group.table_changes) == 3
    commit_samples(scheduler, batch)
    batch = scheduler.step()
    held = [np.flatnonzero(group.block_tables[group.table_rows[0]] >= 0).tolist() for group in batch.groups]
    assert held == [[0, 1, 2], [1, 2], [2]], "position 10 sees 7.. of a window of 4, and 8.. of a chunk of 8"
    assert pool.stats().held <= 9


def test_the_groups_of_a_plan_are_those_of_a_scheduler() -> None:
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 4096,
    }
    geometry = KvGeometry.from_config_json(json.dumps(config))
    groups = [(span, window) for span, window, *_ in geometry.layer_groups]
    assert groups == [("full", None), ("sliding", 128)]
    need = geometry.blocks_for_length(1000, block_size=16, chunk=32)
    options = {"block_size": 16, "max_model_tokens": 4096, "max_prefill_chunk": 32, "layer_groups": groups}
    _, enough = grouped(need, **options)
    enough.submit(enough.add_tenant("alice"), range(500), max_tokens=501)
    _, short = grouped(need - 1, **options)
    with pytest.raises(errors.RefusedError, match=f"need {need} blocks"):
        short.submit(short.add_tenant("alice"), range(500), max_tokens=501)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([], "0 groups"),
        (7, "layer_groups must be pairs"),
        ([("sliding", 0)], r"layer_groups\[0\] sees 0 tokens"),
        ([("full", None), ("sliding", None)], r"layer_groups\[1\] is"),
        ([("full", 3)], r"layer_groups\[0\] is"),
        ([("round", 3)], "it is one of"),
        ([("sliding", True)], "is a bool"),
        ([("sliding", -3)], "is -3"),
    ],
)
def test_groups_that_are_none_are_refused(groups: object, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        grouped(layer_groups=groups)


def test_forks_share_the_blocks_of_every_group() -> None:
    pool, scheduler = grouped()
    tenant = scheduler.add_tenant("alice")
    parent = scheduler.submit(tenant, range(10), max_tokens=6)
    batch = scheduler.step()
    scheduler.commit(batch.step_id, [0, 1], [3])
    held = pool.stats().held
    children = scheduler.fork(parent, 2)
    assert pool.stats().held == held
    batch = scheduler.step()
    assert batch.sequence_ids.tolist() == [parent, *children]
    # Each group has a partly filled block, which two of three copy.
    assert len(batch.block_copies) == 2 * len(batch.groups)
    assert len(np.unique(batch.block_copies[:, 0])) == len(batch.groups)
    scheduler.abandon(batch.step_id, "over", fail=True)
    assert pool.stats().held == 0


def test_samples_that_can_never_fit_are_refused_with_the_numbers() -> None:
    _, scheduler = grouped(16)
    tenant = scheduler.add_tenant("alice")
    with pytest.raises(errors.RefusedError, match=r"8 samples of 10 prompt tokens .* need \d+ blocks"):
        scheduler.submit(tenant, range(10), max_tokens=6, n=8)


def reusing(groups: list[tuple[str, int | None]]) -> tuple[BlockPool, PrefixIndex, Scheduler]:
    pool = BlockPool(64)
    index = PrefixIndex(pool, block_size=4)
    return pool, index, Scheduler(pool, index, block_size=4, max_model_tokens=128, layer_groups=groups)


def test_a_prefix_is_reused_in_every_group() -> None:
    pool, index, scheduler = reusing(WINDOWED)
    tenant = scheduler.add_tenant("alice")
    cached = []
    for _ in range(3):
        scheduler.submit(tenant, range(30), max_tokens=1)
        batch = scheduler.step()
        ended = commit_samples(scheduler, batch).finished
        cached.append((ended[0].cached_tokens, batch.num_tokens))
        # What a window has left behind goes first, and no later match needs it.
        assert index.evict(4) == 4
    assert cached == [(0, 30), (28, 2), (28, 2)]
    index.evict(64)
    assert pool.stats().free == 64


@pytest.mark.parametrize("groups", [[("sliding", 8)], [("chunked", 16), ("sliding", 6)]])
@pytest.mark.parametrize("eviction", ["lru", "learned", "clock"])
@pytest.mark.parametrize("policy", ["reserve", "watermark", "forecast"])
def test_a_model_of_windows_alone_is_reused_by_the_ends_of_its_windows(
    groups: list[tuple[str, int | None]], eviction: str, policy: str
) -> None:
    pool = BlockPool(64)
    index = PrefixIndex(pool, block_size=4, eviction=eviction)  # type: ignore[arg-type]
    scheduler = Scheduler(
        pool,
        index,
        block_size=4,
        max_batch_tokens=8,
        max_running=4,
        max_model_tokens=128,
        layer_groups=groups,
        policy=policy,  # type: ignore[arg-type]
    )
    tenant = scheduler.add_tenant("alice")
    cached = []
    for _ in range(3):
        scheduler.submit(tenant, range(46), max_tokens=2)
        while scheduler.has_work():
            batch = scheduler.step()
            # A chunk of 8 and a window: not the 12 blocks of each group that 47 tokens have.
            assert pool.stats().held <= 6 * len(groups)
            for request in commit_samples(scheduler, batch).finished:
                cached.append(request.cached_tokens)
        # What the windows left behind goes first, and no later match needs it.
        index.evict(3)
    assert cached == [0, 44, 44]
    index.evict(64)
    assert pool.stats().free == 64


def test_an_index_of_windows_alone_is_its_schedulers() -> None:
    _, index, scheduler = reusing([("sliding", 4)])
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(9), max_tokens=1)
    commit_samples(scheduler, scheduler.step())
    with pytest.raises(errors.WrongStateError, match="only its scheduler matches"):
        index.match_prefix(tenant.namespace, np.arange(9, dtype=np.uint32))


def test_a_published_prefix_is_found_in_every_group() -> None:
    pool, index, scheduler = reusing(WINDOWED)
    house = scheduler.add_tenant("house", scope="public")
    alice = scheduler.add_tenant("alice", public=house)
    scheduler.submit(house, range(30), max_tokens=1)
    commit_samples(scheduler, scheduler.step())
    index.evict(64)
    scheduler.submit(alice, [*range(30), 7, 8], max_tokens=1)
    ended = commit_samples(scheduler, scheduler.step()).finished
    assert ended[0].cached_tokens == 28
    assert scheduler.unpublish(house) == 1
    index.evict(64)
    assert pool.stats().free == 64


def test_events_tell_where_a_group_has_its_blocks() -> None:
    pool = BlockPool(64)
    index = PrefixIndex(pool, block_size=4, event_key=bytes(32))
    scheduler = Scheduler(
        pool, index, block_size=4, max_model_tokens=128, layer_groups=[("full", None), ("sliding", 4)]
    )
    start = index.snapshot()
    assert (len(start), len(start.attached_groups)) == (0, 0)
    scheduler.submit(scheduler.add_tenant("alice"), range(9), max_tokens=1)
    commit_samples(scheduler, scheduler.step())
    index.evict(64)
    batch = index.poll_events()
    assert batch.kinds.tolist() == [0, 3, 3, 4, 4, 1]
    assert batch.groups.tolist() == [0, 1, 1, 1, 1, 0]
    digests = [batch.digests[i:j].tolist() for i, j in pairwise(batch.digest_start.tolist())]
    stored = batch.digests[:2].tolist()
    assert digests == [stored, stored[:1], stored[1:], stored[:1], stored[1:], stored[::-1]]


def allocations_per_step(
    groups: list[tuple[str, int | None]] | None, *, reuse: bool, running: int = 16
) -> list[int]:
    """Allocations of the extension in steps of sequences that decode far beyond every window."""
    pool = BlockPool(4096)
    index = PrefixIndex(pool, block_size=4) if reuse else None
    scheduler = Scheduler(
        pool, index, block_size=4, max_running=16, max_model_tokens=256, layer_groups=groups
    )
    tenant = scheduler.add_tenant("alice")
    for first in range(running):
        scheduler.submit(tenant, np.arange(10 + first % 4) + 1000 * first, max_tokens=200)
    token_start, tokens = np.arange(running + 1, dtype=np.int32), np.full(running, 7, np.int32)
    counts = []
    for _ in range(150):
        before = num_allocations()
        batch = scheduler.step()
        scheduler.commit(batch.step_id, token_start, tokens)
        counts.append(num_allocations() - before)
    return counts[80:]


@pytest.mark.parametrize("reuse", [False, True])
def test_further_groups_allocate_nothing_in_a_steady_step(reuse: bool) -> None:
    assert allocations_per_step(WINDOWED, reuse=reuse) == allocations_per_step(None, reuse=reuse)


@pytest.mark.parametrize("groups", [None, WINDOWED])
def test_a_block_s_edge_allocates_nothing(groups: list[tuple[str, int | None]] | None) -> None:
    """One sequence comes to it in every fourth step."""
    assert len(set(allocations_per_step(groups, reuse=False, running=1))) == 1
