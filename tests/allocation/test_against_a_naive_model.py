"""The block pool against a naive model: dictionaries and lists that do the same in the plainest way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpager import BlockPool, Reservation, errors

NUM_BLOCKS = 70
NUM_ACCOUNTS = 3
MAX_OPEN_STEPS = 3


class PoolMachine(RuleBasedStateMachine):
    """Every call, legal and illegal, by one thread."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, max_accounts=NUM_ACCOUNTS, max_open_steps=MAX_OPEN_STEPS)
        self.quotas = {}
        for guaranteed, limit in ((10, 30), (0, NUM_BLOCKS), (5, 64)):
            account = self.pool.add_account(guaranteed=guaranteed, limit=limit)
            self.quotas[account] = (guaranteed, limit)
        self.references: Counter[int] = Counter()
        self.owner: dict[int, int] = {}
        self.reservations: list[tuple[Reservation, int, int]] = []
        self.waiting: list[tuple[int, int, int]] = []  # (newest epoch at release, block, account)
        self.open: list[int] = []
        self.closed: set[int] = set()
        self.ended: list[int] = []
        self.peak = 0

    def committed(self, account: int) -> int:
        held = sum(1 for block in self.references if self.owner[block] == account)
        reserved = sum(count for _, owner, count in self.reservations if owner == account)
        return held + reserved + sum(1 for _, _, owner in self.waiting if owner == account)

    def may_commit(self, account: int, count: int) -> bool:
        _, limit = self.quotas[account]
        if self.committed(account) + count > limit:
            return False
        taken = sum(
            max(self.committed(other) + (count if other == account else 0), quota[0])
            for other, quota in self.quotas.items()
        )
        return taken <= NUM_BLOCKS

    def note(self, account: int, blocks: list[int]) -> None:
        ids = {block & 0xFFFFFFFF for block in [*self.references, *(b for _, b, _ in self.waiting)]}
        for block in blocks:
            assert block & 0xFFFFFFFF not in ids, "a block in use was handed out"
            ids.add(block & 0xFFFFFFFF)
            self.references[block] = 1
            self.owner[block] = account
        self.peak = max(self.peak, len(self.references))

    @rule(account=st.integers(0, NUM_ACCOUNTS - 1), count=st.integers(0, NUM_BLOCKS))
    def allocate(self, account: int, count: int) -> None:
        if self.may_commit(account, count):
            out = np.zeros(count, np.uint64)
            self.pool.allocate(account, out=out)
            self.note(account, [int(block) for block in out])
        else:
            with pytest.raises((errors.OutOfBlocksError, errors.OverQuotaError)):
                self.pool.allocate(account, count)

    @rule(account=st.integers(0, NUM_ACCOUNTS - 1))
    def allocate_one(self, account: int) -> None:
        if self.may_commit(account, 1):
            self.note(account, [self.pool.allocate_one(account)])

    @rule(account=st.integers(0, NUM_ACCOUNTS - 1), count=st.integers(0, 40))
    def reserve(self, account: int, count: int) -> None:
        if self.may_commit(account, count):
            self.reservations.append((self.pool.reserve(account, count), account, count))
        else:
            with pytest.raises((errors.OutOfBlocksError, errors.OverQuotaError)):
                self.pool.reserve(account, count)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), count=st.integers(0, 40))
    def draw(self, data: st.DataObject, count: int) -> None:
        at = data.draw(st.integers(0, len(self.reservations) - 1))
        reservation, account, left = self.reservations[at]
        if count <= left:
            blocks = reservation.allocate(count)
            self.reservations[at] = (reservation, account, left - count)
            self.note(account, blocks.tolist())
        else:
            with pytest.raises(errors.InvalidArgumentError):
                reservation.allocate(count)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.reservations) - 1))
        self.reservations.pop(at)[0].close()

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.references)), max_size=5))
        self.pool.retain(blocks)
        self.references.update(blocks)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.references)), max_size=40))
        if any(self.references[block] < count for block, count in Counter(blocks).items()):
            with pytest.raises(errors.InvalidHandleError):
                self.pool.release(blocks)
            return
        self.pool.release(np.array(blocks, np.uint64))
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                del self.references[block]
                self.ended.append(block)
                if self.open:
                    self.waiting.append((self.newest, block, self.owner[block]))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_stale(self, data: st.DataObject) -> None:
        stale = data.draw(st.sampled_from(self.ended))
        live = (
            data.draw(st.lists(st.sampled_from(list(self.references)), max_size=3)) if self.references else []
        )
        for call in (self.pool.release, self.pool.retain):
            with pytest.raises(errors.InvalidHandleError):
                call([*live, stale])
        with pytest.raises(errors.InvalidHandleError):
            self.pool.is_exclusive(stale)

    @rule()
    def open_step(self) -> None:
        oldest = min(self.open, default=None)
        if oldest is not None and self.newest - oldest + 1 >= MAX_OPEN_STEPS:
            with pytest.raises(errors.WrongStateError):
                self.pool.open_step()
            return
        self.newest = self.pool.open_step()
        self.open.append(self.newest)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close_step(self, data: st.DataObject) -> None:
        epoch = data.draw(st.sampled_from(self.open))
        self.pool.close_step(epoch)
        self.open.remove(epoch)
        self.waiting = [entry for entry in self.waiting if any(step <= entry[0] for step in self.open)]
        with pytest.raises(errors.WrongStateError):
            self.pool.close_step(epoch)

    @rule(
        account=st.integers(0, NUM_ACCOUNTS - 1),
        guaranteed=st.integers(0, 40),
        limit=st.integers(1, NUM_BLOCKS),
    )
    def set_quota(self, account: int, guaranteed: int, limit: int) -> None:
        taken = sum(
            max(self.committed(other), guaranteed if other == account else quota[0])
            for other, quota in self.quotas.items()
        )
        if guaranteed <= limit and taken <= NUM_BLOCKS:
            self.pool.set_quota(account, guaranteed=guaranteed, limit=limit)
            self.quotas[account] = (guaranteed, limit)
        else:
            with pytest.raises(errors.InvalidArgumentError):
                self.pool.set_quota(account, guaranteed=guaranteed, limit=limit)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        stats = self.pool.stats()
        reserved = sum(count for _, _, count in self.reservations)
        expected = (len(self.references), reserved, len(self.waiting), self.peak)
        assert (stats.held, stats.reserved, stats.quarantined, stats.peak_held) == expected
        assert stats.held + stats.free + stats.quarantined == NUM_BLOCKS
        for account in self.quotas:
            assert self.pool.account_stats(account).committed == self.committed(account)
        for block, count in list(self.references.items())[:3]:
            assert self.pool.is_exclusive(block) == (count == 1)


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
