"""Every integer argument of the core refuses what is no number in its range, with the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from every_call import Calls, arguments

from kvpager import BlockPool, Scheduler, errors

BAD = (-1, -(2**70), 2**70, True, 1.5, "7", object(), np.float32(1))
SIGNED = {
    ("Scheduler", "submit", "priority"),
    ("Scheduler", "open_session", "priority"),
    ("Retention", "__new__", "priority"),
}
"""Arguments that may be negative."""


PUBLIC = [argument[:3] for argument in arguments() if argument.annotation in ("int", "int | None")]


def test_the_stub_has_many_integer_arguments() -> None:
    assert len(PUBLIC) > 80


@pytest.mark.parametrize(("owner", "method", "argument"), PUBLIC)
def test_bad_integers_are_refused_with_the_numbers(owner: str, method: str, argument: str) -> None:
    calls = Calls()
    call, good = calls.get(owner, method)
    before = repr(calls.pool.stats())
    for bad in BAD:
        if bad == -1 and (owner, method, argument) in SIGNED:
            continue
        with pytest.raises(errors.InvalidArgumentError) as caught:
            call(**{**good, argument: bad})
        assert argument in str(caught.value), str(caught.value)
        if type(bad) is int:
            assert str(bad)[:40] in str(caught.value), str(caught.value)
    assert repr(calls.pool.stats()) == before
    calls.pool.check_invariants()


def test_integers_of_other_types_are_taken() -> None:
    pool = BlockPool(np.uint16(8), max_accounts=np.int64(2))
    account = pool.add_account(limit=np.int8(4))
    block = np.uint64(pool.allocate_one(np.uint8(account)))
    pool.release_one(block)
    assert pool.stats().free == 8


def test_counts_no_device_can_have_are_refused() -> None:
    for num_blocks in (0, 2**31, 2**32, 2**40, 10**5000):
        with pytest.raises(errors.InvalidArgumentError, match="num_blocks is"):
            BlockPool(num_blocks)


def test_integers_in_sequences_are_refused_with_their_place() -> None:
    pool = BlockPool(8)
    for blocks, text in (
        ([0, -1], r"blocks\[1\] is -1, must be 0 to 18446744073709551615"),
        ([2**64], r"blocks\[0\] is 18446744073709551616"),
        ([3, 1.5], r"blocks\[1\] is 1.5"),
        (np.array([1, -7], np.int8), r"blocks\[1\] is -7"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            pool.release(blocks)  # type: ignore[arg-type]


def test_handles_of_late_generations_may_come_in_lists() -> None:
    pool = BlockPool(8)
    with pytest.raises(errors.InvalidHandleError, match="generation 4294967295"):
        pool.release([(2**32 - 1) << 32])


def test_a_tenant_must_have_a_name() -> None:
    scheduler = Scheduler(BlockPool(8))
    with pytest.raises(errors.InvalidArgumentError, match="empty"):
        scheduler.add_tenant("")


def test_a_note_that_names_no_argument_stays_a_note() -> None:
    error = errors.InvalidArgumentError("text")
    error.add_note("more")
    assert (str(error), error.__notes__) == ("text", ["more"])
