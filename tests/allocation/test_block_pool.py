"""The block pool through Python: what each call promises, and that a failed one changes nothing."""

from __future__ import annotations

import array

import numpy as np
import pytest

from kvpager import BlockPool, errors


def snapshot(pool: BlockPool) -> str:
    pool.check_invariants()
    return repr(pool.stats())


def test_no_block_is_handed_out_twice() -> None:
    pool = BlockPool(300)
    account = pool.add_account()
    first = pool.allocate(account, 200)
    second = pool.allocate(account, 100)
    ids = np.concatenate([first, second]) & 0xFFFFFFFF
    assert np.array_equal(np.sort(ids), np.arange(300))
    with pytest.raises(errors.OverQuotaError):
        pool.allocate(account, 1)
    pool.release(first)
    pool.release(second)
    assert pool.stats().free == 300
    pool.check_invariants()


def test_more_than_is_free_takes_nothing_and_an_empty_pool_gives_nothing() -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    pool.allocate(account, 6)
    for asked in (3, 1):
        before = snapshot(pool)
        free = pool.stats().free
        with pytest.raises(errors.OverQuotaError) as error:
            pool.allocate(account, asked)
        assert (error.value.needed, error.value.available) == (asked, free)
        assert snapshot(pool) == before
        pool.allocate(account, free)


@pytest.mark.parametrize("count", [0, 1, 5, 70])
def test_a_batch_takes_what_single_takes_would_and_gives_it_back(count: int) -> None:
    batch, single = BlockPool(100), BlockPool(100)
    taken = batch.allocate(batch.add_account(), count)
    account = single.add_account()
    one_by_one = [int(single.allocate(account, 1)[0]) for _ in range(count)]
    assert taken.tolist() == one_by_one
    assert snapshot(batch) == snapshot(single)
    batch.release(taken)
    assert batch.stats().free == 100


def test_a_callers_buffer_is_filled_in_place() -> None:
    pool = BlockPool(8192 + 16)
    account = pool.add_account()
    for out in (np.zeros(3, np.uint64), array.array("Q", [0] * 5), memoryview(bytearray(64)).cast("Q")):
        assert pool.allocate(account, out=out) is out
        pool.release(out)
    large = np.zeros(8192, np.uint64)
    assert pool.allocate(account, out=large) is large
    assert len(np.unique(large)) == 8192
    pool.release(large)
    assert pool.stats().free == pool.num_blocks


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(3, np.int64),
        np.zeros(3, np.float64),
        np.zeros((2, 2), np.uint64),
        np.zeros(6, np.uint64)[::2],
        np.array(5, np.uint64),
        bytes(24),
        [0, 0],
        7,
    ],
)
def test_a_buffer_of_another_kind_is_refused(out: object) -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    before = snapshot(pool)
    with pytest.raises(errors.InvalidArgumentError):
        pool.allocate(account, out=out)  # type: ignore[arg-type]
    assert snapshot(pool) == before


@pytest.mark.parametrize("count", [3, 5000])
def test_a_misaligned_buffer_is_refused_before_anything_is_taken(count: int) -> None:
    pool = BlockPool(8192)
    account = pool.add_account()
    out = np.frombuffer(bytearray(8 * count + 1), np.uint64, offset=1)
    with pytest.raises(errors.InvalidArgumentError):
        pool.allocate(account, out=out)
    assert pool.stats().free == 8192


def test_a_read_only_buffer_is_refused() -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    out = np.zeros(3, np.uint64)
    out.flags.writeable = False
    with pytest.raises(errors.InvalidArgumentError):
        pool.allocate(account, out=out)
    assert pool.stats().free == 8


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.uint32, np.int32, np.uint16, np.int8])
def test_handles_of_any_integer_dtype_are_checked(dtype: type) -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    blocks = pool.allocate(account, 4).astype(dtype)
    pool.release(blocks[::2])
    pool.release(blocks[1::2].tolist())
    assert pool.stats().free == 8
    if np.issubdtype(dtype, np.signedinteger):
        with pytest.raises(errors.InvalidArgumentError):
            pool.release(np.array([-1], dtype))


def test_arrays_of_other_types_are_refused() -> None:
    pool = BlockPool(8)
    for blocks in (np.zeros(1), np.zeros(1, bool), np.zeros((1, 1), np.uint64), ["a"], [1.5], None, "ab", 5):
        with pytest.raises(errors.InvalidArgumentError):
            pool.release(blocks)  # type: ignore[arg-type]


def test_a_double_release_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    blocks = pool.allocate(account, 4)
    pool.release(blocks[:1])
    before = snapshot(pool)
    with pytest.raises(errors.InvalidHandleError, match="stale"):
        pool.release(blocks)
    with pytest.raises(errors.InvalidHandleError, match="more often"):
        pool.release([blocks[1], blocks[2], blocks[1]])
    with pytest.raises(errors.InvalidHandleError, match="never issued"):
        pool.release([blocks[1], 8])
    with pytest.raises(errors.InvalidHandleError):
        pool.retain([blocks[1], blocks[0]])
    assert snapshot(pool) == before
    assert pool.is_exclusive(int(blocks[1]))
    pool.release(blocks[1:])
    assert pool.stats().free == 8


def test_a_shared_block_is_not_exclusive_until_it_is_released_once() -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    block = pool.allocate_one(account)
    assert pool.is_exclusive(block)
    pool.retain([block])
    assert not pool.is_exclusive(block)
    assert pool.stats().held == 1
    pool.release_one(block)
    assert pool.is_exclusive(block)
    pool.release_one(block)
    with pytest.raises(errors.InvalidHandleError):
        pool.release_one(block)
    with pytest.raises(errors.InvalidHandleError):
        pool.is_exclusive(block)


def test_a_reservation_gives_the_rest_back() -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    with pool.reserve(account, 6) as reservation:
        assert (reservation.num_blocks, reservation.account) == (6, account)
        blocks = reservation.allocate(2)
        one = reservation.allocate_one()
        assert pool.stats().reserved == 3
        with pytest.raises(errors.OverQuotaError):
            pool.allocate(account, 3)
        with pytest.raises(errors.InvalidArgumentError):
            reservation.allocate(4)
        reservation.grow(2)
        reservation.shrink(4)
        assert reservation.num_blocks == 1
        with pytest.raises(errors.InvalidArgumentError):
            reservation.shrink(2)
        with pytest.raises(errors.OverQuotaError):
            reservation.grow(5)
    assert not reservation.is_open
    assert pool.stats().reserved == 0
    reservation.close()
    for call in (lambda: reservation.allocate(1), lambda: reservation.grow(1), reservation.__enter__):
        with pytest.raises(errors.WrongStateError):
            call()
    pool.release(blocks)
    pool.release_one(one)
    pool.reserve(account, 8)  # dropped at once: it gives itself back
    assert pool.stats().free == 8
    assert pool.account_stats(account).committed == 0


def test_a_guarantee_is_never_lent_out() -> None:
    pool = BlockPool(10)
    alice = pool.add_account(guaranteed=4)
    bob = pool.add_account(limit=8)
    assert pool.available(bob) == 6
    blocks = pool.allocate(bob, 6)
    with pytest.raises(errors.OutOfBlocksError) as caught:
        pool.allocate(bob, 1)
    assert (caught.value.needed, caught.value.available, caught.value.capacity) == (1, 0, 10)
    with pytest.raises(errors.InvalidArgumentError, match="lent out"):
        pool.set_quota(alice, guaranteed=5)
    pool.allocate(alice, 4)
    pool.set_quota(bob, limit=2)
    assert pool.quota(bob) == (0, 2)
    with pytest.raises(errors.OverQuotaError):
        pool.reserve(bob, 1)
    pool.release(blocks[:5])
    pool.reserve(bob, 1)
    with pytest.raises(errors.InvalidArgumentError):
        pool.add_account(guaranteed=7)
    pool.check_invariants()


def test_a_block_released_in_a_step_comes_back_when_it_closes() -> None:
    pool = BlockPool(4)
    account = pool.add_account()
    blocks = pool.allocate(account, 4)
    first, second = pool.open_step(), pool.open_step()
    pool.release(blocks)
    stats = pool.stats()
    assert (stats.quarantined, stats.free, stats.held) == (4, 0, 0)
    pool.close_step(second)
    with pytest.raises(errors.OverQuotaError):
        pool.allocate(account, 1)
    with pytest.raises(errors.WrongStateError):
        pool.close_step(second)
    pool.close_step(first)
    assert pool.stats().free == 4
    assert pool.account_stats(account).quarantined == 0


def test_steps_that_may_be_open_are_limited() -> None:
    pool = BlockPool(4, max_open_steps=2)
    epochs = [pool.open_step(), pool.open_step()]
    with pytest.raises(errors.WrongStateError, match="2 steps open"):
        pool.open_step()
    pool.close_step(epochs[0])
    pool.open_step()


def test_waiting_ends_when_blocks_come_or_time_is_up() -> None:
    pool = BlockPool(4)
    account = pool.add_account(limit=3)
    assert pool.wait_for_blocks(4)
    assert pool.wait_for_blocks(3, 0, account=account)
    assert not pool.wait_for_blocks(4, 0.01, account=account)
    pool.allocate(account, 2)
    assert not pool.wait_for_blocks(3, timeout=0.01)
    with pytest.raises(errors.InvalidArgumentError):
        pool.wait_for_blocks(5)
    for timeout in (-1, float("nan"), "a"):
        with pytest.raises(errors.InvalidArgumentError):
            pool.wait_for_blocks(1, timeout)  # type: ignore[arg-type]
    assert pool.wait_for_blocks(1, float("inf"))


def test_peak_held_is_the_most_that_was_held_at_once() -> None:
    pool = BlockPool(8)
    account = pool.add_account()
    pool.release(pool.allocate(account, 5))
    pool.allocate(account, 2)
    assert (pool.stats().peak_held, pool.stats().held) == (5, 2)
