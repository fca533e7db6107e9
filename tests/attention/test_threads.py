"""Threads: a bounded crew, the interpreter released, forks and several callers at once."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest

from kvpager.attention import get_num_threads, paged_attention, set_num_threads
from kvpager.errors import InvalidArgumentError

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
    before = ticks[0]
    case.call(paged_attention)
    during = ticks[0] - before
    stop.set()
    ticker.join()
    assert during >= 2


def _child(case: Case, expected: bytes, queue: multiprocessing.Queue[bool]) -> None:
    queue.put(case.call(paged_attention).tobytes() == expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.timeout(60)
def test_a_forked_child_starts_a_crew_of_its_own(case: Case) -> None:
    set_num_threads(3)
    expected = case.call(paged_attention).tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(case, expected, queue))
    child.start()
    assert queue.get(timeout=30)
    child.join(10)
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
