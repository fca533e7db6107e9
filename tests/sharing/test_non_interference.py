"""Non-interference of the index: an attacker runs twice beside different victims; all it sees is compared.

What is drawn: what the attacker does, and what the victim does before each of its acts. What is seen: hits,
errors with their numbers, and the counts of its own account and namespace. Block ids are for the operator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from kvpager import BlockPool, Match, PrefixIndex, ScopeChain, ShareScope
from kvpager.errors import KvPagerError

BLOCK_SIZE = 2
DRAW_ONLY = settings(derandomize=True, max_examples=2000, phases=[Phase.generate], deadline=None)
Act = tuple[str, tuple[int, ...]]

paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
act = st.one_of(
    st.tuples(st.just("run"), paths),
    st.tuples(st.just("start"), paths),
    st.tuples(st.sampled_from(["end", "purge"]), st.just(())),
    st.tuples(st.just("peek"), paths),
)
attackers = st.lists(act, min_size=1, max_size=16)
victims = st.lists(st.lists(act, max_size=4), min_size=16, max_size=16)


def other_content(victim: list[list[Act]]) -> list[list[Act]]:
    """The same lengths at the same times; other tokens."""
    return [[(name, tuple(block * 7 + 100 for block in path)) for name, path in acts] for acts in victim]


@dataclass(frozen=True)
class Setting:
    isolation: Literal["open", "scoped", "strict"]
    eviction: Literal["lru", "learned", "clock"] = "lru"
    num_blocks: int = 18


class Tenant:
    def __init__(
        self, index: PrefixIndex, pool: BlockPool, name: str, account: int, place: ScopeChain
    ) -> None:
        self.index, self.pool, self.account, self.place = index, pool, account, place
        self.scope = ShareScope.private(name)
        self.running: deque[Match] = deque()

    def act(self, name: str, path: tuple[int, ...]) -> object:
        """What the tenant sees of it."""
        try:
            seen = self.do(name, np.repeat(np.array(path, dtype=np.uint32), BLOCK_SIZE))
        except KvPagerError as error:
            seen = str(error)
        stats, space = self.pool.account_stats(self.account), self.place.namespaces[-1]
        counts = self.index.namespace_stats(space)
        return seen, stats.committed, stats.cached, counts.num_blocks, counts.num_nodes

    def do(self, name: str, tokens: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> int:
        if name == "end":
            if self.running:
                self.running.popleft().release()
            return 0
        if name == "purge":
            return self.index.purge(self.scope)[1]
        if name == "peek":
            return self.index.match_prefix(self.place, tokens).num_tokens
        match, found = self.index.insert_prefix(self.place, tokens)
        if name == "start":
            self.running.append(match)
        else:
            match.release()
        return found


def observed(setting: Setting, attacker: list[Act], victim: list[list[Act]]) -> list[object]:
    """All that the attacker sees."""
    pool = BlockPool(setting.num_blocks)
    index = PrefixIndex(pool, block_size=BLOCK_SIZE, eviction=setting.eviction)
    half = (setting.num_blocks - 2) // 2
    operator = pool.add_account(guaranteed=2, limit=2)
    public = index.namespace(ShareScope.public("system"), account=operator)
    published, _ = index.publish_prefix(public, np.repeat(np.array([0, 1], dtype=np.uint32), BLOCK_SIZE))
    tenants = []
    everybody = pool.add_account()
    index.set_isolation(everybody, "open")
    for name in ("attacker", "victim"):
        if setting.isolation == "open":
            account, scope = everybody, ShareScope.group("all")
        else:
            account = pool.add_account(guaranteed=half if setting.isolation == "strict" else 0, limit=half)
            index.set_isolation(account, setting.isolation)
            scope = ShareScope.private(name)
        place = index.chain([public, index.namespace(scope, account=account)])
        tenants.append(Tenant(index, pool, name, account, place))
    ours, theirs = tenants
    seen = []
    for (name, path), before in zip(attacker, victim, strict=False):
        for other in before:
            theirs.act(*other)
        seen.append(ours.act(name, path))
    index.check_invariants()
    assert published.num_blocks == 2
    return seen


@given(attackers, victims, victims, st.sampled_from(["lru", "learned", "clock"]))
@settings(max_examples=150, deadline=None)
def test_under_strict_nothing_seen_depends_on_any_victim(
    attacker: list[Act],
    one: list[list[Act]],
    other: list[list[Act]],
    eviction: Literal["lru", "learned", "clock"],
) -> None:
    setting = Setting("strict", eviction)
    assert observed(setting, attacker, one) == observed(setting, attacker, other)


@given(attackers, victims)
@settings(max_examples=100, deadline=None)
def test_under_scoped_without_pressure_nothing_seen_depends_on_a_victims_content(
    attacker: list[Act], victim: list[list[Act]]
) -> None:
    setting = Setting("scoped", num_blocks=4096)
    assert observed(setting, attacker, victim) == observed(setting, attacker, other_content(victim))


def test_open_is_seen_to_leak_by_the_same_harness() -> None:
    setting = Setting("open", num_blocks=4096)

    def leaks(case: tuple[list[Act], list[list[Act]]]) -> bool:
        return observed(setting, *case) != observed(setting, case[0], other_content(case[1]))

    assert find(st.tuples(attackers, victims), leaks, settings=DRAW_ONLY)


def test_scoped_under_pressure_is_seen_to_leak_and_strict_is_what_closes_it() -> None:
    def leaks(case: tuple[list[Act], list[list[Act]]]) -> bool:
        setting = Setting("scoped", num_blocks=10)
        return observed(setting, *case) != observed(setting, case[0], other_content(case[1]))

    attacker, victim = find(st.tuples(attackers, victims), leaks, settings=DRAW_ONLY)
    strict = Setting("strict", num_blocks=10)
    assert observed(strict, attacker, victim) == observed(strict, attacker, other_content(victim))
