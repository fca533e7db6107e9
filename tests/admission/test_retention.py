"""Retention through Python: how long, how much, what goes first, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvpager import BlockPool, Retention, Scheduler, errors

from .engine import commit_samples, finish, make


def test_a_retention_says_what_it_was_given() -> None:
    retention = Retention(seconds=2.5, num_tokens=100, priority=-1)
    assert repr(retention) == "Retention(seconds=2.5, steps=None, num_tokens=100, priority=-1)"
    parts = (retention.seconds, retention.steps, retention.num_tokens, retention.priority)
    assert parts == (2.5, None, 100, -1)
    same = Retention(seconds=2.5, num_tokens=100, priority=-1)
    assert (retention == same, hash(retention) == hash(same)) == (True, True)
    assert retention != Retention(seconds=2.5, num_tokens=100)
    assert retention != "a retention"


def test_what_is_retained_is_counted_and_let_go_after_its_time() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    request = scheduler.submit(tenant, range(10), max_tokens=4, retention=Retention(steps=3, num_tokens=8))
    assert finish(scheduler) == {request: ("length", 0)}
    stats = scheduler.snapshot().scheduler
    assert (stats.num_retained, stats.num_kept_blocks, stats.num_sessions_kept) == (1, 2, 0)
    assert (pool.stats().held, pool.stats().cached, tenant.num_kept_blocks) == (2, 1, 2)
    for _ in range(5):
        commit_samples(scheduler, scheduler.step())
    assert (pool.stats().held, scheduler.stats().num_retained, tenant.num_kept_blocks) == (0, 0, 0)


def test_the_higher_priority_stays_longer_within_the_bound_for_all_that_is_kept() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice", max_kept_blocks=6)
    session = scheduler.open_session(tenant, priority=1)
    for first, options in (
        (0, {"retention": Retention(priority=2)}),
        (100, {"session": session}),
        (200, {"retention": Retention()}),
        (300, {"retention": Retention(priority=2)}),
    ):
        scheduler.submit(tenant, range(first, first + 12), max_tokens=1, **options)  # type: ignore[arg-type]
        finish(scheduler)
    stats = scheduler.stats()
    assert (pool.stats().held, stats.num_retained, stats.num_sessions_kept) == (6, 2, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_tokens": 0}, "keeps 0 tokens"),
        ({"steps": 0}, "the end of the retention is 0 steps away"),
        ({"seconds": 0.0}, "the end of the retention is 0 seconds away"),
        ({"seconds": float("inf")}, "inf seconds away"),
        ({"num_tokens": -1}, "is -1, must be 0 to"),
        ({"priority": 2**31}, "must be -2147483648 to 2147483647"),
    ],
)
def test_a_retention_out_of_range_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        Retention(**arguments)


def test_a_request_that_cannot_be_retained_is_refused() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    public = scheduler.add_tenant("system", scope="public")
    session = scheduler.open_session(tenant)
    for owner, options, text in (
        (tenant, {"reuse": False}, "reuse must be true"),
        (tenant, {"session": session}, "is no turn of a session"),
        (public, {}, "is of no public scope"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=text):
            scheduler.submit(owner, range(9), retention=Retention(), **options)  # type: ignore[arg-type]
    bare = Scheduler(BlockPool(8), None, block_size=4)
    with pytest.raises(errors.InvalidArgumentError, match="needs a prefix index"):
        bare.submit(bare.add_tenant("alice"), range(4), retention=Retention())
    with pytest.raises(errors.InvalidArgumentError, match=r"retention must be a Retention, is 3\.0"):
        scheduler.submit(tenant, range(4), retention=3.0)  # type: ignore[arg-type]
