"""What can be asked of requests through Python: deadlines, bounds, pause, drain, reset; from any thread."""

from __future__ import annotations

import os
import threading

import pytest

from kvpager import BlockPool, PrefixIndex, Scheduler, errors

from .engine import commit_samples, make


def test_a_deadline_on_the_callers_clock_ends_a_request() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, range(5), max_tokens=50, deadline_seconds=2.0)
    other = scheduler.submit(tenant, range(5), max_tokens=50, deadline_steps=2)
    reasons = {}
    for now in (10.0, 11.0, 11.9, 12.0):
        batch = scheduler.step(now=now)
        reasons |= {ended.request_id: (ended.reason, now) for ended in batch.finished}
        commit_samples(scheduler, batch)
    assert reasons == {request: ("deadline", 12.0), other: ("deadline", 11.9)}
    with pytest.raises(errors.InvalidArgumentError, match="0 steps away"):
        scheduler.submit(tenant, range(5), deadline_steps=0)


def test_a_refusal_says_when_to_come_back() -> None:
    _, scheduler = make(max_waiting=3, max_waiting_tokens=30)
    tenant = scheduler.add_tenant("alice", max_waiting=2)
    other = scheduler.add_tenant("bob", max_waiting_tokens=8)
    for _ in range(2):
        scheduler.submit(tenant, range(5))
    with pytest.raises(errors.RefusedError, match=r'tenant "alice": 2 requests wait') as refused:
        scheduler.submit(tenant, range(5))
    assert refused.value.retryable
    assert refused.value.retry_after_steps == 1
    with pytest.raises(errors.RefusedError, match="9 tokens; at most 8") as refused:
        scheduler.submit(other, range(9))
    assert (refused.value.retryable, refused.value.retry_after_steps) == (False, None)
    scheduler.submit(other, range(8))
    assert (tenant.num_waiting, other.num_waiting_tokens) == (2, 8)
    with pytest.raises(errors.InvalidArgumentError, match="max_waiting is 0"):
        scheduler.add_tenant("carol", max_waiting=0)
    with pytest.raises(errors.InvalidArgumentError, match="max_waiting_tokens is 0"):
        make(max_waiting_tokens=0)


def test_pause_resume_drain_and_reset_through_python() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, range(9), max_tokens=4)
    commit_samples(scheduler, scheduler.step())
    with pytest.raises(errors.WrongStateError, match="1 request with blocks"):
        scheduler.reset_cache()
    assert scheduler.pause(request)
    commit_samples(scheduler, scheduler.step())
    assert (scheduler.has_work(), scheduler.stats().num_paused) == (False, 1)
    assert scheduler.reset_cache(requeue_running=True) == (2, 1)
    assert (pool.stats().free, scheduler.stats().num_forced_out) == (32, 1)
    assert scheduler.resume(request)
    scheduler.drain(deadline_steps=100)
    with pytest.raises(errors.RefusedError, match="drained"):
        scheduler.submit(tenant, range(9))
    finished = []
    while scheduler.has_work():
        finished += commit_samples(scheduler, scheduler.step()).finished
    assert [(ended.reason, ended.output_tokens) for ended in finished] == [("length", 4)]
    assert not scheduler.resume(request)
    assert not scheduler.abort(request)


def test_threads_pause_and_resume_while_the_engine_runs() -> None:
    pool, scheduler = make(num_blocks=12)
    tenant = scheduler.add_tenant("alice")
    requests = [scheduler.submit(tenant, range(i, i + 9), max_tokens=6) for i in range(24)]

    def client(own: list[int]) -> None:
        for _ in range(10):
            for request in own:
                scheduler.pause(request)
            for request in own:
                scheduler.resume(request)

    threads = [threading.Thread(target=client, args=(requests[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    ended = []
    while scheduler.has_work() or any(thread.is_alive() for thread in threads):
        batch = scheduler.step()
        ended += commit_samples(scheduler, batch).finished
    assert sorted(request.request_id for request in ended) == requests
    assert {request.output_tokens for request in ended} == {6}
    assert (pool.stats().held, pool.stats().reserved) == (0, 0)


def test_more_padding_than_a_batch_can_have_is_refused() -> None:
    scheduler = Scheduler(BlockPool(8), None, block_size=4, max_batch_tokens=32, max_running=4)
    with pytest.raises(errors.InvalidArgumentError, match="at most 32 rows"):
        scheduler.step(pad_to=2**40)
    batch = scheduler.step(pad_to=32)
    assert batch.num_sequences == 32
    scheduler.abandon(batch.step_id, "test")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_scheduler_is_refused_in_a_forked_child() -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, block_size=4)
    scheduler = Scheduler(pool, index, block_size=4)
    tenant = scheduler.add_tenant("a")
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            scheduler.step,
            scheduler.has_work,
            lambda: scheduler.submit(tenant, [1], max_tokens=1),
            lambda: Scheduler(pool, block_size=4),
            lambda: Scheduler(BlockPool(8), index, block_size=4),
            lambda: PrefixIndex(pool, block_size=4),
        ):
            try:
                call()
            except errors.WrongStateError as error:
                refused += "parent process" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    scheduler.submit(tenant, [1], max_tokens=1)


def test_a_pool_has_one_scheduler_at_a_time() -> None:
    pool = BlockPool(8)
    first = Scheduler(pool, block_size=4)
    with pytest.raises(errors.WrongStateError, match="has a scheduler already"):
        Scheduler(pool, block_size=4)
    first.add_tenant("alice")
    del first
    Scheduler(pool, block_size=4)


def test_a_sample_aborted_before_its_request_splits_ends_with_a_record() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    first = scheduler.submit(tenant, range(10), max_tokens=3, n=3)
    assert scheduler.abort(first + 1)
    batch = scheduler.step()
    outcome = scheduler.commit(batch.step_id, [0, 3], [5, 6, 7])
    ends = {ended.sequence_id: ended.reason for ended in outcome.finished}
    while scheduler.has_work():
        outcome = commit_samples(scheduler, scheduler.step())
        ends |= {ended.sequence_id: ended.reason for ended in outcome.finished}
    assert ends == {first: "length", first + 1: "aborted", first + 2: "length"}


@pytest.mark.parametrize("cause", ["aborted", "deadline", "drained", "error"])
def test_each_id_of_a_request_that_ends_before_it_splits_is_reported_once(cause: str) -> None:
    _, scheduler = make(max_prefill_chunk=4)
    tenant = scheduler.add_tenant("alice")
    steps = 2 if cause == "deadline" else None
    first = scheduler.submit(tenant, range(20), max_tokens=3, n=3, deadline_steps=steps)
    batch = scheduler.step()
    finished = list(batch.finished)
    if cause == "error":
        finished += scheduler.abandon(batch.step_id, "the device is gone", fail=True).finished
    else:
        finished += commit_samples(scheduler, batch).finished
    if cause == "aborted":
        assert scheduler.abort(first)
    if cause == "drained":
        scheduler.drain(deadline_steps=1)
    while scheduler.has_work():
        batch = scheduler.step()
        finished += [*batch.finished, *commit_samples(scheduler, batch).finished]
    assert [(one.sequence_id, one.branch, one.reason) for one in finished] == [
        (first + branch, branch, cause) for branch in range(3)
    ]
    assert {one.request_id for one in finished} == {first}
    assert {repr(one) for one in finished} == {
        f'FinishedRequest(request_id={first}, branch={branch}, reason="{cause}")' for branch in range(3)
    }
    assert [one.prompt_tokens for one in finished] == [20, 0, 0]
    assert [one.steps for one in finished[1:]] == [0, 0]
