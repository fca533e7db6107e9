"""Whatever is passed, a call either works or raises what its documentation says, and the pool stays whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import BlockPool, errors

integers = st.one_of(
    st.integers(-3, 20),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), 10**5000]),
)
scalars = st.one_of(
    integers,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=9),
    st.sampled_from([np.int8(-1), np.uint64(3), np.float32(2), np.array(2), object(), BlockPool, {}]),
)
arrays = st.one_of(
    scalars,
    st.lists(scalars, max_size=4),
    st.lists(st.integers(0, 9), max_size=4),
    st.builds(
        lambda values, dtype: np.array(values).astype(dtype),
        st.lists(st.integers(0, 120), max_size=5),
        st.sampled_from(["u8", "i8", "i4", "u2", "i1", "f8", "?", ">u8", "U2", "O", "c16", "M8[s]"]),
    ),
    st.builds(lambda shape: np.zeros(shape, "u8"), st.sampled_from([(0,), (1, 1), (), (0, 3), (2, 0, 2)])),
)


def calls(pool: BlockPool) -> list[tuple[Callable[..., Any], int]]:
    reservation = pool.reserve(0, 3)
    return [
        (pool.allocate_one, 1),
        (pool.release_one, 1),
        (pool.retain, 1),
        (pool.release, 1),
        (pool.is_exclusive, 1),
        (pool.close_step, 1),
        (pool.quota, 1),
        (pool.account_stats, 1),
        (pool.available, 1),
        (lambda a, b: pool.set_quota(0, guaranteed=a, limit=b), 2),
        (lambda a, b: pool.add_account(guaranteed=a, limit=b), 2),
        (lambda a, b: pool.allocate(a, out=b), 2),
        (pool.allocate, 2),
        (pool.reserve, 2),
        (lambda a, b: pool.wait_for_blocks(a, 0, account=b), 2),
        (reservation.allocate, 1),
        (lambda a: reservation.allocate(out=a), 1),
        (reservation.grow, 1),
        (reservation.shrink, 1),
    ]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_odd_arguments_raise_only_what_is_documented(data: st.DataObject) -> None:
    pool = BlockPool(16)
    pool.add_account(guaranteed=2)
    pool.allocate(0, 4)
    methods = calls(pool)
    for _ in range(3):
        call, arity = data.draw(st.sampled_from(methods))
        arguments = [data.draw(arrays) for _ in range(arity)]
        before = repr(pool.stats())
        failed = False
        try:
            call(*arguments)
        except errors.KvPagerError:
            failed = True
        assert not failed or repr(pool.stats()) == before
        pool.check_invariants()


@given(scalars, scalars, scalars)
def test_a_pool_is_made_or_refused(num_blocks: object, max_accounts: object, max_open_steps: object) -> None:
    if isinstance(num_blocks, int) and num_blocks > 10_000:
        num_blocks = -num_blocks
    with contextlib.suppress(errors.KvPagerError):
        BlockPool(num_blocks, max_accounts=max_accounts, max_open_steps=max_open_steps)  # type: ignore[arg-type]
