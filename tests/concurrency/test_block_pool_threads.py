"""The block pool under Python threads, forks and signals."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvpager import BlockPool, Magazine, errors
from waiting import PATIENCE


@pytest.fixture
def _short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_short_switch_interval")
def test_eight_threads_lose_nothing() -> None:
    num_blocks, num_threads = 4095, 8
    pool = BlockPool(num_blocks)
    accounts = [pool.add_account(guaranteed=100) for _ in range(num_threads)]
    owner = np.zeros(num_blocks, np.int64)
    problems: list[str] = []

    def work(me: int) -> None:
        chance = random.Random(me)
        mine: list[np.ndarray] = []
        for _ in range(300):
            try:
                blocks = pool.allocate(accounts[me], chance.randint(1, 100))
            except (errors.OutOfBlocksError, errors.OverQuotaError):
                blocks = np.zeros(0, np.uint64)
            ids = (blocks & 0xFFFFFFFF).astype(np.int64)
            if owner[ids].any():
                problems.append(f"thread {me} got a block that is in use")
            owner[ids] = me + 1
            mine.append(blocks)
            while mine and chance.random() < 0.6:
                gone = mine.pop(chance.randrange(len(mine)))
                ids = (gone & 0xFFFFFFFF).astype(np.int64)
                if (owner[ids] != me + 1).any():
                    problems.append(f"thread {me} lost a block")
                owner[ids] = 0
                pool.release(gone)
        for gone in mine:
            owner[(gone & 0xFFFFFFFF).astype(np.int64)] = 0
            pool.release(gone)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert pool.stats().free == num_blocks
    pool.check_invariants()
    everything = pool.allocate(pool.add_account(limit=num_blocks), num_blocks - 100 * num_threads)
    assert len(np.unique(everything)) == num_blocks - 100 * num_threads


@pytest.mark.usefixtures("_short_switch_interval")
def test_only_one_of_many_releases_of_a_block_succeeds() -> None:
    pool = BlockPool(64)
    account = pool.add_account()
    for _ in range(50):
        blocks = pool.allocate(account, 8)
        succeeded: list[bool] = []
        barrier = threading.Barrier(4)

        def release(blocks: np.ndarray, barrier: threading.Barrier, succeeded: list[bool]) -> None:
            barrier.wait()
            with contextlib.suppress(errors.InvalidHandleError):
                pool.release(blocks)
                succeeded.append(True)

        arguments = (blocks, barrier, succeeded)
        threads = [threading.Thread(target=release, args=arguments) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert succeeded == [True]
        assert pool.stats().free == 64
        pool.check_invariants()


def test_a_waiter_leaves_the_interpreter_to_others() -> None:
    pool = BlockPool(4)
    account = pool.add_account()
    blocks = pool.allocate(account, 4)
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(pool.wait_for_blocks(4, PATIENCE)))
    waiter.start()
    time.sleep(0.05)
    pool.release(blocks)
    waiter.join()
    assert found == [True]


def test_a_reservation_in_use_says_so_or_works() -> None:
    pool = BlockPool(4000)
    account = pool.add_account()
    reservation = pool.reserve(account, 4000)
    taken: list[int] = []

    def draw() -> None:
        for _ in range(500):
            try:
                taken.append(reservation.allocate_one())
            except errors.WrongStateError:
                continue

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == len(taken)
    assert reservation.num_blocks == 4000 - len(taken)
    pool.check_invariants()


@pytest.mark.usefixtures("_short_switch_interval")
def test_quotas_change_while_threads_allocate() -> None:
    pool = BlockPool(400)
    accounts = [pool.add_account(limit=200) for _ in range(4)]
    stop = threading.Event()

    def work(account: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(errors.OutOfBlocksError, errors.OverQuotaError):
                pool.release(pool.allocate(account, 30))

    threads = [threading.Thread(target=work, args=(account,)) for account in accounts]
    for thread in threads:
        thread.start()
    chance = random.Random(0)
    for _ in range(2000):
        with contextlib.suppress(errors.InvalidArgumentError):
            pool.set_quota(
                chance.choice(accounts), guaranteed=chance.randint(0, 100), limit=chance.randint(100, 400)
            )
    stop.set()
    for thread in threads:
        thread.join()
    pool.check_invariants()
    assert pool.stats().free == 400
    assert all(pool.account_stats(account).committed == 0 for account in accounts)


def test_calls_go_on_beside_threads_that_hold_the_interpreter() -> None:
    pool = BlockPool(20_000)
    account = pool.add_account()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(10_000))

    spinning = [threading.Thread(target=spin) for _ in range(3)]
    for thread in spinning:
        thread.start()
    try:
        with Magazine(pool, account) as magazine:
            for _ in range(20):
                large = pool.allocate(account, 10_000)  # releases the interpreter and has to get it back
                small = pool.allocate(account, 100)
                magazine.release_one(magazine.allocate_one())
                pool.release(large)
                pool.release(small)
        begin = time.monotonic()
        assert not pool.wait_for_blocks(20_000, 0.2, account=pool.add_account(limit=1))
        assert time.monotonic() - begin < PATIENCE
    finally:
        stop.set()
        for thread in spinning:
            thread.join()
    assert pool.stats().free == 20_000


@pytest.mark.usefixtures("_short_switch_interval")
def test_shared_blocks_are_freed_by_their_last_thread() -> None:
    pool = BlockPool(64)
    account = pool.add_account()
    for _ in range(60):
        blocks = pool.allocate(account, 32)
        for _ in range(3):
            pool.retain(blocks)
        threads = [threading.Thread(target=pool.release, args=(blocks,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats().free == 64
        with pytest.raises(errors.InvalidHandleError):
            pool.release(blocks)
        pool.check_invariants()


INTERRUPTED = """
import sys, time
from kvpager import BlockPool
pool = BlockPool(4)
blocks = pool.allocate(pool.add_account(), 4)
try:
    print("ready", flush=True)
    pool.wait_for_blocks(1, 600)
except KeyboardInterrupt:
    pool.release(blocks)
    pool.check_invariants()
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_wait_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # so that it waits; on a machine that stands still it does not yet, and ends as well
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert output == "interrupted\n"
    assert process.returncode == 0


def _in_the_child(
    pool: BlockPool, magazine: Magazine, answers: multiprocessing.queues.SimpleQueue[str]
) -> None:
    refused = 0
    calls = (
        pool.stats,
        pool.check_invariants,
        pool.open_step,
        lambda: pool.allocate_one(0),
        lambda: Magazine(pool, 0),
        magazine.allocate_one,
        magazine.close,
    )
    for call in calls:
        try:
            call()
        except errors.WrongStateError:
            refused += 1
    fresh = BlockPool(4)
    fresh.allocate_one(fresh.add_account())
    answers.put(f"{refused} refused, {fresh.stats().held} held")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own_pool() -> None:
    context = multiprocessing.get_context("fork")
    pool = BlockPool(4)
    pool.allocate(pool.add_account(), 2)
    magazine = Magazine(pool, 0)
    answers: multiprocessing.queues.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_in_the_child, args=(pool, magazine, answers))
    child.start()
    child.join(timeout=PATIENCE)
    assert child.exitcode == 0
    assert answers.get() == "7 refused, 1 held"
    assert pool.stats().held == 2


def test_a_pool_cannot_be_sent_to_another_process() -> None:
    with pytest.raises(TypeError):
        multiprocessing.get_context("spawn").Process(target=print, args=(BlockPool(4),)).start()
