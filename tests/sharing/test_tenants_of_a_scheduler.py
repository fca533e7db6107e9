"""Scopes, levels, salts and publishing as a scheduler's tenants use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpager import BlockPool, Fingerprint, PrefixIndex, Scheduler, ShareScope, Tenant
from kvpager.errors import InvalidArgumentError

BLOCK_SIZE = 4


def tokens(*blocks: int) -> npt.NDArray[np.uint32]:
    """Whole blocks, and one more token that is always computed."""
    return np.append(np.repeat(np.array(blocks, dtype=np.uint32), BLOCK_SIZE), 7)


class Server:
    def __init__(self, num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.tenants: list[Tenant] = []
        self.index = PrefixIndex(self.pool, block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            block_size=BLOCK_SIZE,
            max_batch_tokens=64,
            max_running=8,
            max_model_tokens=128,
        )

    def submit(self, tenant: Tenant, *blocks: int, **options: Any) -> int:
        return self.scheduler.submit(
            tenant, tokens(*blocks), max_tokens=options.pop("max_tokens", 1), **options
        )

    def step(self) -> dict[int, tuple[str, int]]:
        """One step; (reason, cached tokens) of what ended."""
        batch = self.scheduler.step()
        samples = np.isin(batch.query_start[1:] - 1, batch.sample_rows)
        start = np.concatenate([[0], np.cumsum(samples)]).astype(np.int32)
        outcome = self.scheduler.commit(batch.step_id, start, np.full(start[-1], 5, np.int32))
        ended = list(batch.finished) + outcome.finished
        return {done.request_id: (done.reason, done.cached_tokens) for done in ended}

    def finish(self) -> dict[int, tuple[str, int]]:
        ended: dict[int, tuple[str, int]] = {}
        while self.scheduler.has_work():
            ended |= self.step()
        self.index.check_invariants()
        self.pool.check_invariants()
        return ended

    def run(self, tenant: Tenant, *blocks: int, **options: Any) -> int:
        """A request to its end; returns the blocks it found."""
        request = self.submit(tenant, *blocks, **options)
        reason, cached = self.finish()[request]
        assert reason == "length"
        return cached // BLOCK_SIZE

    def committed(self, *tenants: Tenant) -> list[int]:
        return [self.pool.account_stats(tenant.account).committed for tenant in tenants]


def test_a_published_prompt_is_found_by_every_tenant_that_names_it_and_continued_privately() -> None:
    server = Server()
    system = server.scheduler.add_tenant("system", scope="public", limit=8)
    alice, bob = (server.scheduler.add_tenant(name, public=system) for name in ("alice", "bob"))
    apart = server.scheduler.add_tenant("apart")
    assert server.run(system, 1, 2) == 0
    assert [server.run(tenant, 1, 2, 3) for tenant in (alice, alice, bob, apart)] == [2, 3, 2, 0]
    assert (system.scope, alice.scope, alice.isolation) == ("public", "private", "scoped")


def test_published_blocks_are_charged_once_to_the_public_account_and_stay_under_pressure() -> None:
    server = Server(32)
    system = server.scheduler.add_tenant("system", scope="public", limit=8)
    tenants = [server.scheduler.add_tenant(name, public=system) for name in ("a", "b", "c")]
    server.run(system, 1, 2, 3)
    for tenant in tenants:
        server.submit(tenant, 1, 2, 3, max_tokens=4)
    server.step()
    assert server.committed(system, *tenants) == [3, 1, 1, 1]
    server.finish()
    for path in range(10, 60):
        server.run(tenants[0], path, path + 1, path + 2, path + 3)
    assert server.committed(system, *tenants) == [3, 0, 0, 0]
    assert server.run(tenants[1], 1, 2, 3) == 3


def test_unpublishing_takes_a_prompt_away_and_a_private_continuation_returns_with_it() -> None:
    server = Server()
    system = server.scheduler.add_tenant("system", scope="public", limit=8)
    alice = server.scheduler.add_tenant("alice", public=system)
    server.run(system, 1, 2)
    server.run(alice, 1, 2, 3)
    assert server.scheduler.unpublish(system) == 1
    assert server.committed(system) == [0]
    assert server.index.match_prefix(system.namespace or 0, tokens(1, 2)).num_blocks == 0
    assert server.run(system, 1, 2) == 0
    assert server.run(alice, 1, 2, 3) == 3
    server.index.purge(ShareScope.private("alice"))
    assert server.run(alice, 1, 2, 3) == 2
    with pytest.raises(InvalidArgumentError, match="private scope"):
        server.scheduler.unpublish(alice)


def test_a_request_that_no_longer_fits_the_public_quota_ends_and_says_so() -> None:
    server = Server()
    system = server.scheduler.add_tenant("system", scope="public", limit=4)
    server.run(system, 1, 2, 3)
    refused = server.submit(system, 8, 9)
    assert server.finish()[refused][0] == "capacity"
    assert server.run(system, 1, 2, 3) == 3
    server.scheduler.unpublish(system)
    assert server.run(system, 8, 9) == 0


def test_an_aborted_publication_leaves_nothing_pinned() -> None:
    server = Server()
    system = server.scheduler.add_tenant("system", scope="public", limit=16)
    request = server.submit(system, 1, 2, max_tokens=20)
    server.step()
    server.scheduler.abort(request)
    server.finish()
    assert server.committed(system) == [0]
    server.index.clear()
    assert server.pool.stats().free == 64


def test_members_use_what_was_submitted_for_their_group_and_keep_their_own_to_themselves() -> None:
    server = Server()
    team = server.scheduler.add_tenant("team", scope="group")
    alice, bob = (server.scheduler.add_tenant(name, group=team) for name in ("alice", "bob"))
    server.run(team, 1, 2)
    assert [server.run(tenant, 1, 2, 3) for tenant in (alice, bob, alice, bob)] == [2, 2, 3, 3]
    assert server.run(team, 1, 2, 3) == 2


def test_a_group_without_room_to_hold_its_blocks_costs_its_members_the_hit_and_nothing_else() -> None:
    server = Server()
    team = server.scheduler.add_tenant("team", scope="group", limit=4)
    alice = server.scheduler.add_tenant("alice", group=team)
    server.run(team, 1, 2)
    server.submit(team, 5, 6, 7, max_tokens=4)
    server.step()
    assert server.run(alice, 1, 2, 3) == 0


def test_a_salt_narrows_to_its_own_requests_and_public_prefixes() -> None:
    server = Server()
    system = server.scheduler.add_tenant("system", scope="public", limit=8)
    alice = server.scheduler.add_tenant("alice", public=system)
    server.run(system, 1)
    server.run(alice, 1, 2, 3)
    assert [server.run(alice, 1, 2, 3, salt=salt) for salt in (b"x", b"x", b"y", None)] == [1, 3, 1, 3]
    assert server.index.salt_stats(alice.account).num_salted == 2
    server.index.set_max_salts(2)
    for salt in range(30):
        assert server.run(alice, 1, 2, salt=bytes([salt, 1])) == 1
    stats = server.index.salt_stats(alice.account)
    assert (stats.num_salted, stats.num_reclaimed) == (2, 30)


def test_more_salts_at_once_than_are_allowed_wait_and_all_end() -> None:
    server = Server()
    alice = server.scheduler.add_tenant("alice")
    server.index.set_max_salts(2)
    requests = [server.submit(alice, salt, max_tokens=3, salt=bytes([salt])) for salt in range(6)]
    ended = server.finish()
    assert {ended[request][0] for request in requests} == {"length"}


@pytest.mark.parametrize("salt", [b"", bytes(257)])
def test_a_salt_of_a_wrong_length_is_refused_with_the_number(salt: bytes) -> None:
    server = Server()
    alice = server.scheduler.add_tenant("alice")
    with pytest.raises(InvalidArgumentError, match=f"{len(salt)} bytes, must have 1 to 256"):
        server.submit(alice, 1, salt=salt)


def test_without_reuse_a_request_neither_finds_nor_leaves_anything() -> None:
    server = Server()
    alice = server.scheduler.add_tenant("alice")
    server.run(alice, 1, 2)
    assert server.run(alice, 1, 2, reuse=False) == 0
    assert server.run(alice, 3, 4, reuse=False) == 0
    assert server.run(alice, 3, 4) == 0
    assert server.run(alice, 3, 4) == 2


def test_a_strict_tenants_committed_and_cached_blocks_stay_within_its_limit() -> None:
    server = Server(32)
    alice = server.scheduler.add_tenant("alice", guaranteed=6, isolation="strict")
    bob = server.scheduler.add_tenant("bob", guaranteed=20, isolation="strict")
    assert server.pool.quota(alice.account) == (6, 6)
    server.run(bob, 1, 2, 3, 4)
    for path in range(20):
        server.submit(alice, path, path + 1, max_tokens=3)
        while server.scheduler.has_work():
            server.step()
            stats = server.pool.account_stats(alice.account)
            assert stats.committed + stats.cached <= 6
    assert server.run(bob, 1, 2, 3, 4) == 4


def test_a_scoped_tenant_evicts_its_own_blocks_first() -> None:
    server = Server(16)
    alice, bob = (server.scheduler.add_tenant(name, limit=12) for name in ("alice", "bob"))
    server.run(bob, 1, 2, 3, 4)
    for path in range(10, 40, 3):
        server.run(alice, path, path + 1, path + 2)
    assert server.run(bob, 1, 2, 3, 4) == 4


def test_what_a_tenant_finds_does_not_depend_on_how_many_others_have_it() -> None:
    found = []
    for others in (0, 1, 5):
        server = Server()
        alice = server.scheduler.add_tenant("alice")
        for i in range(others):
            server.run(server.scheduler.add_tenant(f"other{i}"), 1, 2, 3)
        found.append([server.run(alice, 1, 2, 3), server.run(alice, 1, 2, 3)])
    assert found == [[0, 3]] * 3


def test_scopes_and_levels_that_do_not_go_together_are_refused() -> None:
    server = Server()
    add = server.scheduler.add_tenant
    system, team = add("system", scope="public"), add("team", scope="group")
    alice = add("alice")
    other = Server().scheduler.add_tenant("system", scope="public")
    bare = Scheduler(BlockPool(8), block_size=4, max_batch_tokens=64, max_running=8, max_model_tokens=32)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("a", {"public": alice}, "has private scope, public is needed"),
        ("b", {"group": system}, "has public scope, group is needed"),
        ("c", {"public": other}, "same scheduler"),
        ("d", {"scope": "public", "public": system}, "no other public scope"),
        ("e", {"scope": "group", "group": team}, "only a tenant of private scope has a group"),
        ("f", {"guaranteed": 4, "isolation": "strict", "group": team}, "strict isolation has no group scope"),
        ("g", {"guaranteed": 4, "limit": 8, "isolation": "strict"}, "guaranteed = limit, got 4 and 8"),
        ("h", {"scope": "secret"}, "private, group, public"),
        ("i", {"public": system, "fingerprint": Fingerprint(model="m")}, "different fingerprints"),
    ]
    for name, options, text in wrong:
        with pytest.raises(InvalidArgumentError, match=text):
            add(name, **options)
    with pytest.raises(InvalidArgumentError, match="narrows a tenant of private scope"):
        server.submit(system, 1, salt=b"x")
    with pytest.raises(InvalidArgumentError, match="needs a prefix index"):
        bare.add_tenant("x", scope="public")
