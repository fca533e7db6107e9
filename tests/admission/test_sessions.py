"""Sessions through Python: turns, limits, closing, draining."""

from __future__ import annotations

import pytest

from kvpager import BlockPool, Scheduler, Session, errors

from .engine import commit_samples, finish, make


def test_turns_of_a_session_find_their_blocks_and_the_session_lets_go() -> None:
    pool, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    session = scheduler.open_session(tenant, idle_steps=3)
    assert (repr(session), session.tenant.name) == ('Session(tenant="alice", is_open=true)', "alice")
    scheduler.submit(tenant, range(10), max_tokens=4, session=session)
    finish(scheduler)
    assert (pool.stats().held, scheduler.stats().num_sessions_kept) == (3, 1)
    turn = scheduler.submit(tenant, [*range(10), 5, 5, 5, 5, 1, 2], max_tokens=2, session=session)
    assert finish(scheduler) == {turn: ("length", 12)}
    for _ in range(5):
        commit_samples(scheduler, scheduler.step())
    assert (pool.stats().held, session.is_open) == (0, True)
    assert scheduler.close_session(session)
    assert not scheduler.close_session(session)
    with pytest.raises(errors.InvalidArgumentError, match="was closed"):
        scheduler.submit(tenant, range(10), session=session)


def test_turns_of_a_model_with_layer_groups_find_what_every_group_has() -> None:
    pool, scheduler = make(64, layer_groups=[("full", None), ("sliding", 8), ("chunked", 8)])
    tenant = scheduler.add_tenant("alice")
    session = scheduler.open_session(tenant)
    conversation, found = list(range(100, 110)), []
    for _ in range(3):
        turn = scheduler.submit(tenant, conversation, max_tokens=6, session=session)
        found.append(finish(scheduler)[turn])
        assert pool.stats().held >= (len(conversation) + 5) // 4
        assert scheduler.stats().num_sessions_kept == 1
        conversation += [5] * 6 + list(range(8))
    assert found == [("length", 0), ("length", 12), ("length", 28)]
    assert scheduler.close_session(session)
    commit_samples(scheduler, scheduler.step())
    assert pool.stats().held == 0


def test_what_a_session_cannot_be_opened_for_is_refused() -> None:
    _, scheduler = make()
    tenant = scheduler.add_tenant("alice")
    with pytest.raises(errors.InvalidArgumentError, match="0 steps away"):
        scheduler.open_session(tenant, idle_steps=0)
    _, other = make()
    with pytest.raises(errors.InvalidArgumentError, match="of another scheduler"):
        other.open_session(tenant)
    bare = Scheduler(BlockPool(8), None, block_size=4)
    with pytest.raises(errors.InvalidArgumentError, match="in a prefix index"):
        bare.open_session(bare.add_tenant("alice"))
    scheduler.drain()
    with pytest.raises(errors.RefusedError, match="drained"):
        scheduler.open_session(tenant)
    assert isinstance(Session, type)


def test_the_bound_of_a_tenants_sessions_and_the_urgent_option() -> None:
    pool, scheduler = make(policy="watermark", urgent_preempts=True)
    tenant = scheduler.add_tenant("alice", max_kept_blocks=4)
    for first in (0, 100):
        session = scheduler.open_session(tenant)
        scheduler.submit(tenant, range(first, first + 12), max_tokens=2, session=session)
        finish(scheduler)
    assert pool.stats().held == 3
    assert scheduler.service(tenant) > 24
    with pytest.raises(errors.InvalidArgumentError, match="urgent_preempts is true and the policy reserve"):
        make(urgent_preempts=True)
