"""Planning ahead, drafts and forks through Python."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager import errors

from .engine import commit_samples, make


def test_two_steps_are_open_and_committed_in_order() -> None:
    pool, scheduler = make(max_open_steps=2)
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(5), max_tokens=3)
    first = scheduler.step()
    second = scheduler.step()
    assert (second.token_ids.tolist(), second.token_source.tolist()) == ([-1], [0])
    with pytest.raises(errors.WrongStateError, match="max_open_steps is 2"):
        scheduler.step()
    with pytest.raises(errors.WrongStateError, match="step 2 is open after step 1"):
        commit_samples(scheduler, second)
    commit_samples(scheduler, first, token=7)
    commit_samples(scheduler, second, token=8)
    third = scheduler.step()
    assert third.token_ids.tolist() == [8]
    assert [ended.reason for ended in commit_samples(scheduler, third).finished] == ["length"]
    assert pool.stats().held == 0


def test_drafts_are_verified_in_one_step() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, range(5), max_tokens=10)
    commit_samples(scheduler, scheduler.step(), token=30)
    assert scheduler.propose([request], [0, 3], [31, 32, 33]) == 3
    batch = scheduler.step()
    assert batch.token_ids.tolist() == [30, 31, 32, 33]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3]
    with pytest.raises(errors.InvalidArgumentError, match="1 to 4 are needed"):
        scheduler.commit(batch.step_id, [0, 5], [31, 32, 33, 34, 35])
    with pytest.raises(errors.InvalidArgumentError, match="its draft was 32"):
        scheduler.commit(batch.step_id, [0, 3], [31, 99, 33])
    scheduler.commit(batch.step_id, [0, 3], [31, 32, 99])
    batch = scheduler.step()
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([99], [8])
    assert scheduler.draft_counts() == ([1, 1, 1], [1, 1, 0])
    with pytest.raises(errors.InvalidArgumentError, match="draft_start has 1 entry and runs from 0 to 0;"):
        scheduler.propose([request], [0], [])
    with pytest.raises(errors.InvalidArgumentError, match=f"sequence {request} is named twice"):
        scheduler.propose([request, request], [0, 1, 2], [1, 2])
    scheduler.commit(batch.step_id, [0, 1], [98])
    scheduler.pause(request)
    commit_samples(scheduler, scheduler.step())
    assert scheduler.propose([request], [0, 1], [1]) == 0


def test_a_fork_shares_blocks_and_its_first_write_copies() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, range(6), max_tokens=4)
    commit_samples(scheduler, scheduler.step())
    (child,) = scheduler.fork(request)
    assert pool.stats().held == 2
    batch = scheduler.step()
    assert batch.sequence_ids.tolist() == [request, child]
    ((source, copy),) = batch.block_copies.tolist()
    assert {source, copy} == set((batch.slot_mapping // 4).tolist())
    assert np.array_equal(
        batch.block_tables[batch.table_rows, 0], np.repeat(batch.block_tables[batch.table_rows[0], 0], 2)
    )
    with pytest.raises(errors.WrongStateError, match="is in an open step"):
        scheduler.fork(request)
    commit_samples(scheduler, batch)
    ended = []
    while scheduler.has_work():
        ended += commit_samples(scheduler, scheduler.step()).finished
    assert [(end.request_id, end.output_tokens) for end in ended] == [(request, 4), (child, 4)]


def test_samples_share_their_prompt_and_have_ids_in_a_row() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, range(6), max_tokens=3, n=3)
    batch = scheduler.step()
    assert (batch.sequence_ids.tolist(), batch.sample_rows.tolist()) == ([request], [5, 5, 5])
    scheduler.commit(batch.step_id, [0, 3], [11, 12, 13])
    assert pool.stats().held == 2
    batch = scheduler.step()
    assert batch.token_ids.tolist() == [11, 12, 13]
    commit_samples(scheduler, batch)
    scheduler.reorder([request, request + 1], [request + 2, request + 2], [20, 21])
    batch = scheduler.step()
    assert batch.token_ids.tolist() == [20, 21, 5]
    ended = commit_samples(scheduler, batch).finished
    assert [(end.request_id, end.sequence_id, end.branch) for end in ended] == [
        (request, request + branch, branch) for branch in range(3)
    ]
    assert pool.stats().held == 0
    with pytest.raises(errors.RefusedError, match="9 samples, and 8 sequences"):
        scheduler.submit(tenant, range(6), n=9)
