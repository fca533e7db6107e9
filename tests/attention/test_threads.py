"""Threads: a bounded crew, the interpreter released, forks and several callers at once."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from kvpager.attention import (
    append_kv,
    copy_blocks,
    gather_blocks,
    get_num_threads,
    paged_attention,
    scatter_blocks,
    set_num_threads,
    zero_blocks,
)
from kvpager.errors import InvalidArgumentError
from waiting import PATIENCE

from .reference import Case, make_case


def num_threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True)
def _restore_threads() -> object:
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.fixture
def case() -> Case:
    return make_case(1, [(1, 900)] * 6, heads=8, kv_heads=4)


def test_the_crew_has_the_size_that_the_caller_set(case: Case) -> None:
    set_num_threads(1)
    case.call(paged_attention)
    time.sleep(0.05)
    alone = num_threads_of_process()
    set_num_threads(4)
    assert get_num_threads() == 4
    for _ in range(3):
        case.call(paged_attention)
    assert num_threads_of_process() <= alone + 3


@pytest.mark.parametrize("count", [0, 1025])
def test_impossible_sizes_are_refused(count: int) -> None:
    with pytest.raises((InvalidArgumentError, OverflowError)):
        set_num_threads(count)


def test_several_callers_at_once_get_their_own_results(case: Case) -> None:
    set_num_threads(3)
    expected = case.call(paged_attention).tobytes()
    wrong: list[int] = []

    def work() -> None:
        for _ in range(20):
            if case.call(paged_attention).tobytes() != expected:
                wrong.append(1)

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_other_python_threads_run_during_a_call() -> None:
    case = make_case(2, [(400, 2000)], heads=16, kv_heads=4, dim=128)
    set_num_threads(1)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    during, deadline = 0, time.monotonic() + PATIENCE
    while (
        during < 2 and time.monotonic() < deadline
    ):  # again where the machine gave the other one no processor
        before = ticks[0]
        case.call(paged_attention)
        during = ticks[0] - before
    stop.set()
    ticker.join()
    assert during >= 2


def _child(case: Case, expected: bytes, queue: multiprocessing.Queue[bool]) -> None:
    queue.put(case.call(paged_attention).tobytes() == expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_a_crew_of_its_own(case: Case) -> None:
    set_num_threads(3)
    expected = case.call(paged_attention).tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(case, expected, queue))
    child.start()
    assert queue.get(timeout=PATIENCE)
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert case.call(paged_attention).tobytes() == expected


def test_results_do_not_depend_on_the_number_of_threads_for_one_long_sequence() -> None:
    case = make_case(3, [(1, 5000)], heads=4, kv_heads=1)
    results = set()
    for count in (1, 2, 7):
        set_num_threads(count)
        results.add(case.call(paged_attention).tobytes())
    assert len(results) == 1
    assert np.isfinite(np.frombuffer(results.pop(), np.float32)).all()


def moved(layout: str) -> bytes:
    """Every byte of a pool after appends, copies, gathers, scatters and zeroing of some megabytes."""
    rng = np.random.default_rng(4)
    shape = (256, 16, 4, 64)
    caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    if layout == "heads first":
        caches = [np.full((256, 4, 16, 64), np.nan, np.float32).transpose(0, 2, 1, 3) for _ in range(2)]
    rows = rng.standard_normal((3000, 4, 64)).astype(np.float32)
    slots = rng.integers(-1, 200 * 16, 3000)  # many slots twice: the last token stays
    append_kv(rows, 2 * rows, *caches, slots)
    last = {int(slot): token for token, slot in enumerate(slots) if slot >= 0}
    for cache, factor in zip(caches, (1, 2), strict=True):
        for slot in range(0, 200 * 16, 37):
            stored = cache[slot // 16, slot % 16]
            assert np.isnan(stored).all() if slot not in last else (stored == factor * rows[last[slot]]).all()
    copy_blocks(*caches, np.stack([np.arange(50), np.arange(200, 250)], axis=1))
    assert caches[1][200:250].tobytes() == caches[1][:50].tobytes()
    ids = rng.permutation(256)[:120].astype(np.int32)
    gathered = gather_blocks(caches[0], ids)
    assert gathered.tobytes() == caches[0][ids].tobytes()
    scatter_blocks(caches[1], ids[::-1].copy(), gathered)
    zero_blocks(caches[0], np.repeat(ids[:40], 2))
    assert (caches[0][ids[:40]] == 0).all()
    return b"".join(cache.tobytes() for cache in caches)


@pytest.mark.parametrize("layout", ["dense", "heads first"])
def test_memory_moves_give_the_same_bytes_for_any_number_of_threads(layout: str) -> None:
    results = set()
    for count in (1, 2, 5):
        set_num_threads(count)
        results.add(moved(layout))
    assert len(results) == 1


def test_int8_scales_of_a_slot_named_twice_are_the_last_tokens() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((4096, 4, 64)).astype(np.float32)
    slots = rng.integers(0, 512, 4096)
    results = set()
    for count in (1, 4):
        set_num_threads(count)
        cache, scales = np.zeros((32, 16, 4, 64), np.int8), np.zeros((32, 16, 4), np.float32)
        append_kv(rows, None, cache, None, slots, k_scale=scales)
        results.add(cache.tobytes() + scales.tobytes())
    assert len(results) == 1
    last = {int(slot): token for token, slot in enumerate(slots)}
    expected = np.abs(rows[[last[slot] for slot in sorted(last)]]).max(-1) / 127
    np.testing.assert_allclose(scales.reshape(512, 4)[sorted(last)], expected, rtol=1e-6)
