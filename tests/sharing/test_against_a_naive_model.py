"""The index through Python against a dictionary of whole prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvpager import BlockPool, Match, PrefixIndex, ShareScope
from kvpager.errors import KvPagerError

NUM_BLOCKS = 16
BLOCK_SIZE = 2
paths = st.lists(st.integers(0, 2), max_size=6).map(tuple)
tenants = st.sampled_from(["alice", "bob"])
Path = tuple[int, ...]


def tokens_of(path: Path) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.repeat(np.array(path, dtype=np.uint32), BLOCK_SIZE)


class IndexAgainstDictionary(RuleBasedStateMachine):
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.index = PrefixIndex(self.pool, block_size=BLOCK_SIZE)
        self.spaces = {t: self.index.namespace(ShareScope.private(t)) for t in ("alice", "bob")}
        self.resident: dict[tuple[str, Path], list[int]] = {}  # (block id, time of release)
        self.pinned: dict[int, tuple[str, Path]] = {}
        self.clock = 0

    def longest(self, tenant: str, path: Path) -> int:
        return max(n for n in range(len(path) + 1) if n == 0 or (tenant, path[:n]) in self.resident)

    def is_held(self, tenant: str, prefix: Path) -> bool:
        return any(t == tenant and p[: len(prefix)] == prefix for t, p in self.pinned.values())

    def num_held(self) -> int:
        return sum(self.is_held(*key) for key in self.resident)

    def unpin(self, number: int) -> None:
        tenant, path = self.pinned.pop(number)
        self.clock += 1
        for n in range(1, len(path) + 1):
            if not self.is_held(tenant, path[:n]):
                self.resident[tenant, path[:n]][1] = self.clock

    def evict_one(self) -> bool:
        parents = {(tenant, path[:-1]) for tenant, path in self.resident}
        leaves = [key for key in self.resident if key not in parents and not self.is_held(*key)]
        if not leaves:
            return False
        del self.resident[min(leaves, key=lambda key: self.resident[key][1])]
        return True

    @rule(target=pins, tenant=tenants, path=paths)
    def match(self, tenant: str, path: Path) -> Match | None:
        found = self.longest(tenant, path)
        needed = sum(not self.is_held(tenant, path[:n]) for n in range(1, found + 1))
        try:
            match = self.index.match_prefix(self.spaces[tenant], tokens_of(path), whole=True)
        except KvPagerError:
            assert self.num_held() + needed > NUM_BLOCKS
            return None
        assert self.num_held() + needed <= NUM_BLOCKS
        expected = [self.resident[tenant, path[:n]][0] for n in range(1, found + 1)]
        assert match.block_ids.tolist() == expected
        assert match.num_tokens == found * BLOCK_SIZE
        self.pinned[id(match)] = (tenant, path[:found])
        return match

    @rule(target=pins, tenant=tenants, path=paths)
    def insert(self, tenant: str, path: Path) -> Match | None:
        found = self.longest(tenant, path)
        unheld = sum(not self.is_held(tenant, path[:n]) for n in range(1, found + 1))
        held = self.num_held()
        try:
            match, hit = self.index.insert_prefix(self.spaces[tenant], tokens_of(path))
        except KvPagerError:
            assert held + unheld + len(path) - found > NUM_BLOCKS
            if held + unheld <= NUM_BLOCKS:  # the match was pinned for a moment
                self.pinned[0] = (tenant, path[:found])
                self.unpin(0)
            return None
        assert hit == found * BLOCK_SIZE
        self.pinned[id(match)] = (tenant, path[:found])
        while len(self.resident) + len(path) - found > NUM_BLOCKS:
            assert self.evict_one()
        for n in range(found + 1, len(path) + 1):
            self.resident[tenant, path[:n]] = [int(match.block_ids[n - 1]), 0]
        self.pinned[id(match)] = (tenant, path)
        return match

    @rule(match=consumes(pins))
    def release(self, match: Match | None) -> None:
        if match is not None:
            match.release()
            self.unpin(id(match))

    @rule(num_blocks=st.integers(0, 4))
    def evict(self, num_blocks: int) -> None:
        assert self.index.evict(num_blocks) == sum(self.evict_one() for _ in range(num_blocks))

    @precondition(lambda self: self.resident)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        while self.evict_one():
            pass

    @rule(tenant=tenants, path=paths)
    def peek(self, tenant: str, path: Path) -> None:
        found = min(self.longest(tenant, path), max(0, (len(path) * BLOCK_SIZE - 1) // BLOCK_SIZE))
        assert self.index.peek_prefix(self.spaces[tenant], tokens_of(path)) == found * BLOCK_SIZE

    @invariant()
    def states_add_up(self) -> None:
        self.index.check_invariants()
        self.pool.check_invariants()
        stats = self.pool.stats()
        assert stats.held == self.num_held()
        assert stats.held + stats.cached == len(self.resident)
        assert stats.held + stats.cached + stats.free == NUM_BLOCKS


TestIndexAgainstDictionary = IndexAgainstDictionary.TestCase
TestIndexAgainstDictionary.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
