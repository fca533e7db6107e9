"""Random calls in random order, with a model that sees every wrong slot.

The invariants hold after each call, every accepted request ends, and every token is what its own history
gives, whatever else was scheduled.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpager import BlockPool, PrefixIndex, Retention, Scheduler, Session, errors

from .engine import Engine, token_after

PICK = st.integers(0, 2**16)


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler with two tenants on a tiny pool, driven by a model that sees every wrong slot."""

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.integers(1, 4),
        policy=st.sampled_from(["reserve", "watermark", "forecast"]),
        reuse=st.booleans(),
        host_blocks=st.sampled_from([0, 4, 64]),
        overflow=st.sampled_from(["auto", "swap"]),
    )
    def start(
        self, num_blocks: int, block_size: int, policy: Any, reuse: bool, host_blocks: int, overflow: Any
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, block_size=block_size) if reuse else None
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            block_size=block_size,
            max_batch_tokens=9,
            max_running=6,
            max_model_tokens=64,
            policy=policy,
            urgent_preempts=policy != "reserve",
            host_blocks=host_blocks,
            overflow=overflow if host_blocks else "auto",
            ageing_steps=8,
        )
        self.engine = Engine(self.pool, self.scheduler)
        self.limit = num_blocks
        self.tenants = [
            self.scheduler.add_tenant("a"),
            self.scheduler.add_tenant("b", guaranteed=num_blocks // 4, limit=num_blocks // 2),
        ]
        self.accepted: set[int] = set()
        self.paused: set[int] = set()
        self.sessions: list[Session] = []

    def pick(self, number: int) -> int | None:
        live = sorted(self.accepted - set(self.engine.ended))
        return live[number % len(live)] if live else None

    @rule(
        tenant=st.integers(0, 1),
        family=st.integers(0, 2),
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 8),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        stop=st.booleans(),
        turn=st.one_of(st.none(), PICK),
        retention=st.one_of(
            st.none(),
            st.builds(
                Retention,
                steps=st.one_of(st.none(), st.integers(1, 20)),
                num_tokens=st.one_of(st.none(), st.integers(1, 12)),
                priority=st.integers(-1, 1),
            ),
        ),
    )
    def submit(
        self,
        tenant: int,
        family: int,
        length: int,
        max_tokens: int,
        n: int,
        priority: int,
        stop: bool,
        turn: int | None,
        retention: Retention | None,
    ) -> None:
        prompt = [family * 7 + i % 3 for i in range(length)]
        session = None
        if turn is not None and self.sessions:
            session = self.sessions[turn % len(self.sessions)]
            n = 1
        try:
            request = self.scheduler.submit(
                session.tenant if session else self.tenants[tenant],
                prompt,
                max_tokens=max_tokens,
                n=n,
                session=session,
                retention=retention if self.index is not None and session is None else None,
                priority=priority,
                stop_token_ids=[3] if stop else [],
            )
        except errors.RefusedError:
            return
        self.accepted.add(request)
        self.engine.histories[request] = tuple(prompt)

    @precondition(lambda self: self.index is not None)
    @rule(tenant=st.integers(0, 1), idle_steps=st.one_of(st.none(), st.integers(1, 6)))
    def open_session(self, tenant: int, idle_steps: int | None) -> None:
        self.sessions.append(self.scheduler.open_session(self.tenants[tenant], idle_steps=idle_steps))

    @precondition(lambda self: self.sessions)
    @rule(number=PICK)
    def close_session(self, number: int) -> None:
        session = self.sessions.pop(number % len(self.sessions))
        assert self.scheduler.close_session(session)

    @rule()
    def turn(self) -> None:
        self.engine.turn()
        self.accepted |= set(self.engine.histories)

    @rule(ran=st.booleans(), fail=st.sampled_from([False, False, True]))
    def crash(self, ran: bool, fail: bool) -> None:
        self.engine.crash(ran=ran, fail=fail)

    @rule(number=PICK, right=st.integers(0, 4), wrong=st.integers(0, 2))
    def propose(self, number: int, right: int, wrong: int) -> None:
        sequence = self.pick(number)
        if sequence is None:
            return
        history = self.engine.histories[sequence]
        drafts: list[int] = []
        for _ in range(right):
            drafts.append(token_after((*history, *drafts)))
        drafts += [99] * wrong
        self.scheduler.propose([sequence], [0, len(drafts)], drafts)

    @rule(number=PICK, count=st.integers(1, 2))
    def fork(self, number: int, count: int) -> None:
        sequence = self.pick(number)
        if sequence is None:
            return
        try:
            children = self.scheduler.fork(sequence, count)
        except (errors.WrongStateError, errors.RefusedError, errors.OutOfBlocksError, errors.OverQuotaError):
            return
        for child in children:
            self.accepted.add(child)
            self.engine.histories[child] = self.engine.histories[sequence]

    @rule(first=PICK, second=PICK, token=st.integers(0, 39))
    def reorder(self, first: int, second: int, token: int) -> None:
        to, source = self.pick(first), self.pick(second)
        if to is None or source is None:
            return
        try:
            self.scheduler.reorder([to], [source], [token])
        except (errors.WrongStateError, errors.InvalidArgumentError):
            return
        self.engine.histories[to] = (*self.engine.histories[source][:-1], token)

    @rule(number=PICK)
    def abort(self, number: int) -> None:
        sequence = self.pick(number)
        if sequence is not None:
            self.scheduler.abort(sequence)

    @rule(number=PICK, resumes=st.booleans())
    def pause(self, number: int, resumes: bool) -> None:
        sequence = self.pick(number)
        if sequence is not None:
            (self.scheduler.resume if resumes else self.scheduler.pause)(sequence)

    @rule(share=st.integers(1, 4))
    def change_quota(self, share: int) -> None:
        self.pool.set_quota(self.tenants[0].account, guaranteed=0, limit=self.limit * share // 4)

    @precondition(lambda self: self.index is not None)
    @rule(num_blocks=st.integers(1, 4))
    def evict(self, num_blocks: int) -> None:
        assert self.index is not None
        self.index.evict(num_blocks)

    @invariant()
    def nothing_is_lost_or_promised_twice(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        if self.index is not None:
            self.index.check_invariants()
        stats = self.pool.stats()
        assert stats.held + stats.reserved + stats.quarantined <= self.limit
        assert stats.held + stats.cached + stats.free + stats.quarantined == self.limit

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.set_quota(self.tenants[0].account, guaranteed=0, limit=self.limit)
        for request in sorted(self.accepted):
            self.scheduler.resume(request)
        for session in self.sessions:
            self.scheduler.close_session(session)
        self.scheduler.drain()  # what is retained goes
        self.engine.turn()
        for _ in range(2000):
            if not self.scheduler.has_work():
                break
            self.engine.turn()
        self.accepted |= set(self.engine.histories)
        assert not self.scheduler.has_work()
        left = [request for request in self.accepted if self.scheduler.abort(request)]
        assert not left, "a request was accepted and did not end"
        stats = self.pool.stats()
        assert (stats.held, stats.reserved, stats.quarantined) == (0, 0, 0)


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
