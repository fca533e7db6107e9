"""What an engine keeps after a request's end, and the options of its tenants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from synthetic import idle

from kvpager import Retention
from kvpager.engine import AsyncEngine, Engine, EngineConfig, GenerationParams, NullRunner
from kvpager.errors import InvalidArgumentError, RefusedError, WrongStateError


def kept(engine: Engine) -> tuple[int, int, int]:
    scheduler = engine.snapshot().scheduler
    return scheduler.num_sessions_kept, scheduler.num_retained, scheduler.num_kept_blocks


def test_a_turn_finds_what_its_session_kept(engine: Engine) -> None:
    engine.add_tenant("alice")
    session = engine.open_session("alice", idle_steps=100)
    tokens = list(range(40))
    for output in engine.generate(tokens, GenerationParams(max_tokens=10), session=session):
        tokens = [*tokens, *output.token_ids]
    assert kept(engine) == (1, 0, 3)
    assert engine.index is not None
    assert engine.index.evict(256) == 0, "it is held"
    (turn,) = engine.submit([*tokens, 1, 2, 3], session=session)
    engine.run()
    assert (turn.tenant, turn.cached_tokens) == ("alice", 48)
    assert engine.close_session(session)
    assert not engine.close_session(session)
    engine.run()
    assert kept(engine) == (0, 0, 0)
    with pytest.raises(InvalidArgumentError, match="was closed"):
        engine.submit(tokens, session=session)


def test_a_turn_that_does_not_fit_its_session_is_refused(engine: Engine) -> None:
    for name in ("alice", "bob"):
        engine.add_tenant(name)
    session = engine.open_session("alice")
    with pytest.raises(InvalidArgumentError, match='of tenant "alice" is submitted for tenant "bob"'):
        engine.submit([1], tenant="bob", session=session)
    with pytest.raises(InvalidArgumentError, match="has one sequence, 2 are asked for"):
        engine.submit([1], GenerationParams(n=2), session=session)
    with pytest.raises(InvalidArgumentError, match="is no turn of a session"):
        engine.submit([1], GenerationParams(retention=Retention()), session=session)
    with pytest.raises(InvalidArgumentError, match="unknown tenant 'eve'"):
        engine.open_session("eve")
    with pytest.raises(InvalidArgumentError, match="retention needs reuse"):
        GenerationParams(retention=Retention(), reuse=False)
    bare = Engine(NullRunner(), EngineConfig(num_blocks=8, reuse=False))
    with pytest.raises(InvalidArgumentError, match="needs a prefix index"):
        bare.submit([1], GenerationParams(retention=Retention()))
    engine.stop_accepting()
    with pytest.raises(WrongStateError, match="it is draining"):
        engine.open_session("alice")


def test_sessions_and_retention_through_the_async_engine() -> None:
    async def main() -> None:
        engine = Engine(NullRunner(), EngineConfig(num_blocks=64))
        async with AsyncEngine(engine) as outer:
            session = outer.open_session(idle_seconds=3600)
            tokens = [7] * 32
            async for output in outer.generate(tokens, GenerationParams(max_tokens=17), session=session):
                tokens = [*tokens, *output.token_ids]
            retained = GenerationParams(max_tokens=1, retention=Retention(num_tokens=16))
            async for _ in outer.generate([9] * 32, retained):
                pass
            assert kept(engine) == (1, 1, 4)
            stream = outer.generate([*tokens, 1], session=session)
            async for _ in stream:
                pass
            assert stream.cached_tokens == 48
            assert outer.close_session(session)
        assert idle(engine), "the end of an engine lets go of what is kept"

    asyncio.run(main())


def test_what_is_retained_yields_to_a_request_that_needs_the_room(engine: Engine) -> None:
    for place in range(8):
        retention = Retention(priority=place)
        params = GenerationParams(max_tokens=1, retention=retention)
        list(engine.generate([place] * 32 * 16, params))
    assert kept(engine) == (0, 8, 256)
    (large,) = engine.submit([50] * 1000, GenerationParams(max_tokens=24))
    engine.run()
    assert (large.finish_reason, kept(engine)) == ("length", (0, 6, 192))
    engine.close()
    assert kept(engine) == (0, 0, 0)


def test_samples_retain_their_prompt_once() -> None:
    engine = Engine(NullRunner(), EngineConfig(num_blocks=64))
    params = GenerationParams(max_tokens=4, n=3, retention=Retention(num_tokens=32))
    list(engine.generate([3] * 40, params))
    assert kept(engine) == (0, 1, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_running": 2}, "are shares of a strict tenant"),
        ({"max_batch_tokens": 2}, "are shares of a strict tenant"),
        ({"isolation": "strict", "guaranteed": 8, "max_running": 65}, "65 of max_running"),
        ({"isolation": "strict", "guaranteed": 8, "max_batch_tokens": 513}, "513 of max_batch_tokens"),
    ],
)
def test_shares_of_a_tenant_reach_the_scheduler(engine: Engine, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        engine.add_tenant("alice", **options)


def test_bounds_of_a_tenant_reach_the_scheduler(engine: Engine) -> None:
    engine.add_tenant("alice", max_waiting_tokens=50, max_kept_blocks=2)
    engine.submit([1] * 40, GenerationParams(max_tokens=1, retention=Retention()), tenant="alice")
    with pytest.raises(RefusedError, match="50") as refused:
        engine.submit([1] * 20, tenant="alice")
    assert refused.value.retryable
    engine.run()
    assert kept(engine) == (0, 1, 2)
    engine.close()


def test_urgent_requests_preempt_a_lower_class_only_where_the_engine_is_told_so() -> None:
    with pytest.raises(InvalidArgumentError, match="urgent_preempts is true and the policy reserve"):
        Engine(NullRunner(), EngineConfig(num_blocks=8, urgent_preempts=True))
    for urgent_preempts in (False, True):
        config = EngineConfig(num_blocks=24, policy="watermark", urgent_preempts=urgent_preempts)
        engine = Engine(NullRunner(), config)
        slow = [
            engine.submit([place] * 160, GenerationParams(max_tokens=30, priority=1))[0] for place in range(2)
        ]
        engine.step()
        engine.step()
        (urgent,) = engine.submit([9] * 160, GenerationParams(max_tokens=4))
        while not urgent.has_ended:
            engine.step()
        preempted = engine.snapshot().scheduler.num_preemptions
        assert (preempted, slow[0].has_ended) == ((1, False) if urgent_preempts else (0, True))
        engine.run()
        assert idle(engine)
