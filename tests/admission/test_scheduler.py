"""The scheduler through Python: arrays without copies, errors by the caller's reaction, nothing lost."""

from __future__ import annotations

import contextlib
import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import BlockPool, PrefixIndex, Scheduler, errors

from .engine import commit_samples, make


def test_a_request_runs_to_its_end_through_python() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, np.arange(10, dtype=np.int64), max_tokens=3, stop_token_ids=[7])
    finished = []
    while scheduler.has_work():
        batch = scheduler.step()
        finished += commit_samples(scheduler, batch).finished
    (ended,) = finished
    assert (ended.request_id, ended.reason, ended.prompt_tokens) == (request, "length", 10)
    assert (ended.output_tokens, ended.tenant.name, ended.preemptions) == (3, "alice", 0)
    stats = pool.stats()
    assert stats.held == stats.reserved == 0


def test_batch_arrays_are_read_only_views_with_the_documented_shapes_and_dtypes() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(6), max_tokens=2)
    scheduler.submit(tenant, range(3), max_tokens=2)
    batch = scheduler.step(pad_to=4)
    sequences, tokens = 4, 6 + 3 + 2
    shapes = {
        "sequence_ids": (np.uint64, (sequences,)),
        "query_start": (np.int32, (sequences + 1,)),
        "token_ids": (np.int32, (tokens,)),
        "positions": (np.int32, (tokens,)),
        "token_source": (np.int32, (tokens,)),
        "sample_rows": (np.int32, (2,)),
        "slot_mapping": (np.int64, (tokens,)),
        "context_lens": (np.int32, (sequences,)),
        "table_rows": (np.int32, (sequences,)),
        "table_changes": (np.int32, (3, 3)),
        "block_tables": (np.int32, (9, 32)),
        "block_copies": (np.int32, (0, 2)),
        "swap_out": (np.int32, (0, 2)),
        "swap_in": (np.int32, (0, 2)),
        "block_zeros": (np.int32, (0,)),
    }
    for name, (dtype, shape) in shapes.items():
        array = getattr(batch, name)
        assert (array.dtype, array.shape) == (dtype, shape), name
        assert not array.flags.writeable, name
        assert array.base is not None, name
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0]
    assert batch.sample_rows.tolist() == [5, 8]
    assert batch.slot_mapping.tolist()[-2:] == [-1, -1]


def test_a_view_outlives_its_batch_and_is_never_overwritten() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(20), max_tokens=20)
    batch = scheduler.step()
    view, tables = batch.token_ids, batch.block_tables
    commit_samples(scheduler, batch)
    del batch
    for _ in range(10):
        gc.collect()
        commit_samples(scheduler, scheduler.step())
    assert view.tolist() == list(range(20))
    del scheduler
    gc.collect()
    assert tables.shape == (9, 32)


def test_the_change_log_rebuilds_the_block_tables() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    copy = None
    for seed in range(6):
        scheduler.submit(tenant, range(seed, seed + 9), max_tokens=9)
    while scheduler.has_work():
        batch = scheduler.step()
        if copy is None:
            copy = np.full_like(batch.block_tables, -1)
        for row, column, block in batch.table_changes:
            copy[row, column] = block
        np.testing.assert_array_equal(copy, batch.block_tables)
        commit_samples(scheduler, batch)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        ([], {}, errors.InvalidArgumentError, "0 tokens"),
        ([1, -2], {}, errors.InvalidArgumentError, r"prompt_ids\[1\] is -2"),
        ([1.5], {}, errors.InvalidArgumentError, "integer"),
        (np.ones(3), {}, errors.InvalidArgumentError, "integers"),
        (np.ones((2, 2), np.int32), {}, errors.InvalidArgumentError, "1 dimension"),
        ([1], {"max_tokens": 0}, errors.InvalidArgumentError, "max_tokens is 0"),
        (range(100), {"max_tokens": 100}, errors.RefusedError, "128 positions"),
        (range(100), {"max_tokens": 2}, errors.RefusedError, "26 blocks"),
    ],
)
def test_a_bad_request_is_one_clear_error(
    prompt: object, options: dict[str, int], error: type[Exception], text: str
) -> None:
    pool, scheduler = make(num_blocks=20)
    tenant = scheduler.add_tenant("alice")
    with pytest.raises(error, match=text):
        scheduler.submit(tenant, prompt, **options)  # type: ignore[arg-type]
    assert scheduler.num_waiting == 0
    assert pool.stats().free == 20


def test_bad_options_come_in_one_message() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"max_running is 0.*max_model_tokens is 0"):
        make(max_running=0, max_model_tokens=0)
    with pytest.raises(errors.InvalidArgumentError, match="one of reserve"):
        make(policy="hope")
    pool = BlockPool(4)
    with pytest.raises(errors.InvalidArgumentError, match="block_size is 8, the index has blocks of 4"):
        Scheduler(pool, PrefixIndex(pool, block_size=4), block_size=8)
    with pytest.raises(errors.InvalidArgumentError, match=r"another pool \(of 5 blocks\)"):
        Scheduler(BlockPool(4), PrefixIndex(BlockPool(5), block_size=4), block_size=4)


def test_a_step_ends_once_and_only_once() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    scheduler.submit(tenant, range(5), max_tokens=5)
    batch = scheduler.step()
    with pytest.raises(errors.WrongStateError, match="is open"):
        scheduler.step()
    with pytest.raises(
        errors.InvalidArgumentError, match=r"2 tokens for row 0 \(sequence 1\) of step 1: 1 is needed"
    ):
        scheduler.commit(batch.step_id, [0, 2], [1, 1])
    commit_samples(scheduler, batch)
    with pytest.raises(errors.WrongStateError, match="not open"):
        commit_samples(scheduler, batch)
    batch = scheduler.step()
    outcome = scheduler.abandon(batch.step_id, "the device is gone", fail=True)
    assert [(ended.reason, ended.detail) for ended in outcome.finished] == [("error", "the device is gone")]


@settings(deadline=None, max_examples=150)
@given(
    data=st.lists(
        st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.binary(), st.booleans()), max_size=4
    ),
    method=st.sampled_from(["submit", "abort", "step", "commit", "abandon", "add_tenant"]),
)
def test_odd_arguments_raise_documented_exceptions_only(data: list[object], method: str) -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    arguments = [tenant, *data] if method == "submit" else data
    with contextlib.suppress(errors.KvPagerError, TypeError):
        getattr(scheduler, method)(*arguments)
    assert scheduler.submit(tenant, [1], max_tokens=1) > 0


def test_threads_submit_and_abort_while_the_engine_runs() -> None:
    pool, scheduler = make(num_blocks=24, max_waiting=16)
    tenants = [scheduler.add_tenant(name) for name in "ab"]
    accepted: list[list[int]] = [[] for _ in range(4)]

    def client(number: int) -> None:
        for i in range(60):
            try:
                request = scheduler.submit(tenants[number % 2], range(1 + i % 11), max_tokens=1 + i % 5)
            except errors.RefusedError as error:
                if not error.retryable:
                    raise
                continue
            accepted[number].append(request)
            if i % 4 == number:
                scheduler.abort(request)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    ended = []
    while scheduler.has_work() or any(thread.is_alive() for thread in threads):
        batch = scheduler.step()
        ended += [request.request_id for request in batch.finished]
        ended += [request.request_id for request in commit_samples(scheduler, batch).finished]
    assert sorted(ended) == sorted(request for requests in accepted for request in requests)
    stats = pool.stats()
    assert (stats.held, stats.reserved) == (0, 0)
    assert stats.free + stats.cached == 24
