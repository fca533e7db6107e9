"""Magazines through Python: what they keep is counted, and comes back."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from kvpager import BlockPool, Magazine, errors


def test_blocks_in_a_magazine_are_counted_and_come_back() -> None:
    pool = BlockPool(200)
    account = pool.add_account()
    magazine = Magazine(pool, account)
    blocks = [magazine.allocate_one() for _ in range(100)]
    assert len({block & 0xFFFFFFFF for block in blocks}) == 100
    assert pool.stats().stranded == magazine.num_blocks
    assert pool.stats().held == 100 + magazine.num_blocks
    for block in blocks:
        magazine.release_one(block)
    assert magazine.num_blocks <= 64
    pool.check_invariants()
    magazine.close()
    magazine.close()
    assert (magazine.num_blocks, magazine.is_open) == (0, False)
    assert (pool.stats().stranded, pool.stats().free) == (0, 200)


def test_a_magazine_gives_its_blocks_back_however_it_ends() -> None:
    pool = BlockPool(100)
    account = pool.add_account()
    with Magazine(pool, account) as magazine:
        magazine.release_one(magazine.allocate_one())
        assert pool.stats().stranded == magazine.num_blocks > 0
    assert pool.stats().free == 100
    dropped = Magazine(pool, account)
    dropped.release_one(dropped.allocate_one())
    del dropped
    gc.collect()
    assert pool.stats().free == 100
    pool.check_invariants()
    for call in (magazine.allocate_one, magazine.__enter__, lambda: magazine.release_one(0)):
        with pytest.raises(errors.WrongStateError, match="closed"):
            call()


def test_a_magazine_refuses_what_the_pool_refuses() -> None:
    pool = BlockPool(4)
    account = pool.add_account(limit=3)
    magazine = Magazine(pool, account)
    blocks = [magazine.allocate_one() for _ in range(3)]
    with pytest.raises(errors.OverQuotaError):
        magazine.allocate_one()
    magazine.release_one(blocks[0])
    for again in (magazine.release_one, pool.release_one, pool.is_exclusive):
        with pytest.raises(errors.InvalidHandleError):
            again(blocks[0])
    with pytest.raises(errors.InvalidHandleError):
        magazine.release_one(4)
    with pytest.raises(errors.InvalidArgumentError, match="account 7"):
        Magazine(pool, 7)


def test_a_block_released_in_a_step_waits_though_it_goes_into_a_magazine() -> None:
    pool = BlockPool(64)
    magazine = Magazine(pool, pool.add_account())
    block = magazine.allocate_one()
    step = pool.open_step()
    magazine.release_one(block)
    assert pool.stats().quarantined == 1
    pool.close_step(step)
    assert pool.stats().quarantined == 0


def test_a_magazine_in_use_says_so_or_works() -> None:
    pool = BlockPool(4000)
    magazine = Magazine(pool, pool.add_account())
    taken: list[int] = []

    def draw() -> None:
        for _ in range(500):
            try:
                taken.append(magazine.allocate_one())
            except errors.WrongStateError:
                continue

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({block & 0xFFFFFFFF for block in taken}) == len(taken) > 0
    pool.check_invariants()


def test_drafts_that_were_not_accepted_are_put_back() -> None:
    pool = BlockPool(10)
    account = pool.add_account()
    reservation = pool.reserve(account, 4)
    drafts = reservation.allocate(4)
    others = pool.allocate(account, 6)
    with pytest.raises(errors.InvalidHandleError):
        reservation.put_back(np.array([drafts[0], drafts[0]], np.uint64))
    reservation.put_back(drafts[1:])
    assert (reservation.num_blocks, pool.stats().reserved, pool.stats().held) == (3, 3, 7)
    with pytest.raises(errors.InvalidHandleError, match="stale"):
        reservation.put_back(drafts[1:2])
    step = pool.open_step()
    with pytest.raises(errors.WrongStateError, match="step is open"):
        reservation.put_back(drafts[:1])
    pool.close_step(step)
    assert len(reservation.allocate(3)) == 3
    pool.release(others)
    pool.check_invariants()


def test_what_an_account_can_reach_and_which_steps_closed() -> None:
    pool = BlockPool(10)
    assert pool.num_accounts == 0
    first = pool.add_account(guaranteed=4, limit=8)
    second = pool.add_account()
    assert pool.num_accounts == 2
    assert (pool.reachable(first), pool.reachable(second)) == (8, 6)
    one, two = pool.open_step(), pool.open_step()
    pool.close_step(two)
    assert not pool.epoch_closed(two)
    pool.close_step(one)
    assert pool.epoch_closed(two)
