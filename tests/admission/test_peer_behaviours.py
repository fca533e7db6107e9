"""Behaviours that users of other engines rely on: the map of them, and those that no other file tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .engine import commit_samples, make

MUST = [*range(1, 15), *range(16, 26), *range(28, 45), 54, 55, 56, 57, 58, 60, 61, *range(64, 76)]
MUST += [77, 79, 80, 84, 85]


def rows(repository: Path) -> dict[int, str]:
    text = (repository / "docs/peer_behaviours.md").read_text()
    return {int(number): rest for number, rest in re.findall(r"^\| (\d+) \|(.*)\|$", text, re.MULTILINE)}


def test_every_behaviour_has_a_test_or_a_sentence(repository: Path) -> None:
    table = rows(repository)
    assert sorted(table) == sorted({*MUST, *table})
    for number, text in table.items():
        shown = text.split("|")[1]
        assert "`" in shown or len(shown.split()) > 8, number


def test_every_test_that_the_map_names_exists(repository: Path) -> None:
    python, rust = (repository / "tests").rglob("*.py"), (repository / "rust").rglob("*.rs")
    is_test = re.compile(r"^def (test_\w+)\(|#\[test\]\n(?: *#\[.*\]\n)* *fn (\w+)\(", re.MULTILINE)
    names = {
        name for path in [*python, *rust] for found in is_test.findall(path.read_text()) for name in found
    }
    named = {name for text in rows(repository).values() for name in re.findall(r"`([a-z_0-9]{25,})`", text)}
    assert len(named) > 30
    assert sorted(named - names) == []


def test_free_blocks_are_taken_before_anything_cached_goes() -> None:
    pool, scheduler = make(num_blocks=8)
    tenant = scheduler.add_tenant("alice")
    cached = []
    for start, length in ((0, 17), (100, 13), (200, 8)):
        scheduler.submit(tenant, range(start, start + length), max_tokens=1)
        commit_samples(scheduler, scheduler.step())
        cached.append(pool.stats().cached)
    # 4 full blocks and a tail; 3 more and a tail, in the 4 that were free; 2 more with 1 free.
    assert cached == [4, 7, 8]


def test_a_hit_takes_the_room_of_the_blocks_that_it_pins() -> None:
    pool, scheduler = make(num_blocks=8)
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(16), max_tokens=1)
    commit_samples(scheduler, scheduler.step())
    assert pool.stats().cached == 4
    running = scheduler.submit(tenant, range(100, 112), max_tokens=4)
    commit_samples(scheduler, scheduler.step())
    # 4 blocks are left, those of the hit, and it needs one more.
    hit = scheduler.submit(tenant, range(20), max_tokens=1)
    ended = []
    while not ended:
        batch = scheduler.step()
        assert batch.sequence_ids.tolist() == [running]
        ended += commit_samples(scheduler, batch).finished
    (last,) = commit_samples(scheduler, scheduler.step()).finished
    assert (last.request_id, last.cached_tokens) == (hit, 16)


def test_a_block_that_is_used_again_is_not_found_by_its_old_content() -> None:
    pool, scheduler = make(num_blocks=4)
    tenant = scheduler.add_tenant("alice")
    ended = []
    for prompt in (range(13), range(13), range(100, 116), range(13)):
        scheduler.submit(tenant, prompt, max_tokens=1)
        ended += commit_samples(scheduler, scheduler.step()).finished
    assert [request.cached_tokens for request in ended] == [0, 12, 0, 0]
    pool.check_invariants()


def test_who_was_preempted_has_all_its_tokens_and_hits_its_own_blocks() -> None:
    _, scheduler = make(num_blocks=8, policy="watermark")
    tenant = scheduler.add_tenant("alice")
    for start in (0, 100):
        scheduler.submit(tenant, range(start, start + 8), max_tokens=12)
    ended = []
    while scheduler.has_work():
        ended += commit_samples(scheduler, scheduler.step()).finished
    assert [(request.preemptions, request.output_tokens) for request in ended] == [(0, 12), (1, 12)]
    # It had computed 16 tokens; the first one needed one of its four blocks.
    assert scheduler.stats().recomputed_tokens == 4


def test_what_is_written_under_a_salt_is_not_found_without_it() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    ended = []
    for salt in (b"x", None, b"y", b"x", None):
        scheduler.submit(tenant, range(13), max_tokens=1, salt=salt)
        ended += commit_samples(scheduler, scheduler.step()).finished
    assert [request.cached_tokens for request in ended] == [0, 0, 0, 12, 12]


def test_requests_enter_in_order_and_batches_keep_it() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    requests = [scheduler.submit(tenant, range(i, i + 4), max_tokens=4) for i in range(5)]
    for _ in range(3):
        batch = scheduler.step()
        assert batch.sequence_ids.tolist() == requests
        commit_samples(scheduler, batch)


def test_the_urgent_run_first_then_who_came_first() -> None:
    _, scheduler = make(max_running=2)
    tenant = scheduler.add_tenant("alice")
    priorities = [3, 1, 3, 2, 1]
    requests = [
        scheduler.submit(tenant, range(i, i + 4), max_tokens=1, priority=p) for i, p in enumerate(priorities)
    ]
    order: list[int] = []
    while scheduler.has_work():
        batch = scheduler.step()
        assert batch.num_sequences <= 2
        order += batch.sequence_ids.tolist()
        commit_samples(scheduler, batch)
    expected = sorted(range(5), key=lambda i: (priorities[i], i))
    # Two run at a time, the older of the two first in its batch.
    assert [sorted(order[i : i + 2]) for i in (0, 2, 4)] == [
        sorted(requests[i] for i in expected[j : j + 2]) for j in (0, 2, 4)
    ]


def test_decoding_inside_a_block_takes_none_and_a_full_one_becomes_matchable() -> None:
    pool, scheduler = make(num_blocks=8)
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(6), max_tokens=8)
    held = []
    for _ in range(8):
        commit_samples(scheduler, scheduler.step(), token=9)
        held.append(pool.stats().held)
    # 6 prompt tokens and 7 computed outputs: a block more at positions 8 and 12; at the end nothing is held.
    assert held == [2, 2, 2, 3, 3, 3, 3, 0]
    again = scheduler.submit(tenant, [*range(6), *[9] * 7], max_tokens=1)
    (ended,) = commit_samples(scheduler, scheduler.step()).finished
    assert (ended.request_id, ended.cached_tokens) == (again, 12)


@pytest.mark.parametrize("steps", [1, 6])
def test_a_hit_is_counted_once_however_long_a_request_waited(steps: int) -> None:
    _, scheduler = make(num_blocks=10, max_running=1)
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(8), max_tokens=1)
    commit_samples(scheduler, scheduler.step())
    scheduler.submit(tenant, range(50, 60), max_tokens=steps)
    scheduler.submit(tenant, range(9), max_tokens=1)
    ended = []
    while scheduler.has_work():
        ended += commit_samples(scheduler, scheduler.step()).finished
    assert [request.cached_tokens for request in ended] == [0, 8]
