"""Scopes through Python: the chain from public to private, publishing, purging, levels of isolation."""

from __future__ import annotations

import gc

import numpy as np
import numpy.typing as npt
import pytest

from kvpager import BlockPool, Fingerprint, Match, PrefixIndex, ShareScope
from kvpager.errors import InvalidArgumentError, OverQuotaError, RefusedError, WrongStateError

BLOCK_SIZE = 2


def whole(*blocks: int) -> npt.NDArray[np.uint32]:
    return np.repeat(np.array(blocks, dtype=np.uint32), BLOCK_SIZE)


class World:
    def __init__(self, num_blocks: int = 32) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, block_size=BLOCK_SIZE)
        self.accounts = [self.pool.add_account() for _ in range(4)]
        scopes = [ShareScope.public("system"), ShareScope.group("team")]
        scopes += [ShareScope.private("alice"), ShareScope.private("bob")]
        spaces = [self.index.namespace(s, account=a) for s, a in zip(scopes, self.accounts, strict=True)]
        self.public, self.group, self.alice, self.bob = spaces
        self.chains = [self.index.chain([self.public, self.group, who]) for who in (self.alice, self.bob)]

    def run(self, tenant: int, *path: int) -> int:
        """A request over the tenant's chain; returns the blocks found."""
        match, found = self.index.insert_prefix(self.chains[tenant], whole(*path))
        match.release()
        self.index.check_invariants()
        self.pool.check_invariants()
        return found // BLOCK_SIZE

    def committed(self, account: int) -> int:
        return self.pool.account_stats(self.accounts[account]).committed


def test_a_public_prefix_is_continued_privately_and_seen_by_its_tenant_only() -> None:
    w = World()
    published, _ = w.index.publish_prefix(w.public, whole(1, 2))
    assert [w.run(0, 1, 2, 3, 4), w.run(0, 1, 2, 3, 4), w.run(1, 1, 2, 3, 4)] == [2, 4, 2]
    match = w.index.match_prefix(w.chains[0], whole(1, 2, 3, 4, 5))
    assert match.parts == [(w.public, 2), (w.alice, 2)]
    assert (match.namespace, match.num_tokens, match.block_ids.size) == (w.alice, 8, 4)
    assert published.num_blocks == 2


def test_a_public_block_is_charged_once_and_to_the_public_account() -> None:
    w = World()
    published, _ = w.index.publish_prefix(w.public, whole(1, 2, 3))
    matches = [w.index.match_prefix(chain, whole(1, 2, 3, 9)) for chain in w.chains * 3]
    assert [match.num_blocks for match in matches] == [3] * 6
    assert [w.committed(i) for i in range(4)] == [3, 0, 0, 0]
    del matches, published


def test_a_published_prefix_stays_under_pressure_while_its_match_is_kept() -> None:
    w = World(8)
    published, _ = w.index.publish_prefix(w.public, whole(1, 2))
    for path in range(10, 40):
        w.run(0, path, path + 1, path + 2)
    assert w.run(1, 1, 2, 3) == 2
    published.release()
    w.index.clear()
    assert w.run(1, 1, 2, 3) == 0


def test_a_continuation_survives_eviction_and_republication_of_its_public_head() -> None:
    w = World()
    w.index.publish_prefix(w.public, whole(1, 2))[0].release()
    w.run(0, 1, 2, 3, 4)
    assert w.index.purge(ShareScope.public("system")) == (1, 2)
    assert w.run(1, 1, 2) == 0
    assert w.index.match_prefix(w.chains[0], whole(1, 2, 3, 4, 5)).num_blocks == 0
    published, _ = w.index.publish_prefix(w.public, whole(1, 2))
    assert w.index.match_prefix(w.chains[0], whole(1, 2, 3, 4, 5)).num_blocks == 4
    assert w.index.purge(ShareScope.private("alice"))[0] == 1
    assert w.index.match_prefix(w.chains[0], whole(1, 2, 3, 4, 5)).num_blocks == 2
    assert published.num_blocks == 2


def test_publish_passes_blocks_of_the_caller_and_nothing_else_inserts_publicly() -> None:
    w = World()
    root = w.index.root(w.public)
    blocks = w.pool.allocate(w.accounts[0], 2)
    with pytest.raises(InvalidArgumentError, match="only publish"):
        w.index.extend(root, whole(1, 2), blocks)
    assert w.index.publish(root, whole(1, 2), blocks)[:2] == (2, 0)
    with pytest.raises(InvalidArgumentError, match="not public"):
        w.index.publish_prefix(w.alice, whole(1))
    with pytest.raises(InvalidArgumentError, match="not public"):
        w.index.publish(w.index.root(w.alice), whole(1), w.pool.allocate(w.accounts[0], 1))
    chained = w.index.match_prefix(w.chains[0], whole(1, 2, 9))
    with pytest.raises(InvalidArgumentError, match="not of a chain"):
        w.index.publish(chained, whole(1), w.pool.allocate(w.accounts[0], 1))
    assert w.run(1, 1, 2) == 2


def test_publishing_is_bounded_by_the_public_quota() -> None:
    pool = BlockPool(16)
    index = PrefixIndex(pool, block_size=BLOCK_SIZE)
    public = index.namespace(ShareScope.public("system"), account=pool.add_account(limit=2))
    kept = index.publish_prefix(public, whole(1, 2))[0]
    with pytest.raises(OverQuotaError) as error:
        index.publish_prefix(public, whole(3))
    assert (error.value.needed, error.value.limit) == (1, 2)
    assert kept.num_blocks == 2


@pytest.mark.parametrize(
    "order", [[], ["public"], ["alice", "public"], ["alice", "bob"], ["group", "public"]]
)
def test_a_chain_goes_from_public_to_private_and_ends_where_inserts_may_go(order: list[str]) -> None:
    w = World()
    with pytest.raises(InvalidArgumentError):
        w.index.chain([getattr(w, name) for name in order])
    other = w.index.namespace(ShareScope.private("alice"), Fingerprint(model="m"), account=w.accounts[2])
    with pytest.raises(InvalidArgumentError, match="different fingerprints"):
        w.index.chain([w.public, other])


def test_members_of_a_group_share_what_is_inserted_there() -> None:
    w = World()
    group = w.index.chain([w.public, w.group])
    w.index.insert_prefix(group, whole(5, 6))[0].release()
    assert (w.run(0, 5, 6, 7), w.run(1, 5, 6, 7), w.run(1, 5, 6, 7)) == (2, 2, 3)


def test_no_sequence_of_private_requests_shows_anything_to_another_tenant() -> None:
    w = World(64)
    published, _ = w.index.publish_prefix(w.public, whole(1))
    for path in ([1, 2, 3], [1, 2, 4], [5, 6, 7]) * 2:
        w.run(0, *path)
        assert w.index.match_prefix(w.chains[1], whole(*path, 0)).num_blocks == (path[0] == 1)
    assert published.num_blocks == 1


def test_a_purge_is_complete_while_a_request_runs() -> None:
    w = World()
    running, _ = w.index.insert_prefix(w.alice, whole(1, 2, 3))
    salted = w.index.namespace(ShareScope.private("alice", salt=b"x"), account=w.accounts[2])
    w.index.insert_prefix(salted, whole(1, 2))[0].release()
    w.run(1, 1, 2, 3)
    assert w.index.purge(ShareScope.private("alice")) == (2, 2)
    assert w.index.peek_prefix(w.alice, whole(1, 2, 3, 4)) == w.index.peek_prefix(salted, whole(1, 2)) == 0
    stats = w.index.namespace_stats(w.alice)
    assert (stats.num_blocks, stats.num_purged_blocks, stats.num_purges) == (0, 3, 1)
    assert w.index.peek_prefix(w.bob, whole(1, 2, 3, 4)) == 6
    running.release()
    assert w.index.namespace_stats(w.alice).num_purged_blocks == 0
    assert w.pool.account_stats(w.accounts[2]).cached == 0


def test_namespace_counts_tell_blocks_and_nodes() -> None:
    w = World()
    w.run(0, 1, 2, 3)
    w.run(0, 1, 2, 4)
    stats = w.index.namespace_stats(w.alice)
    assert (stats.num_blocks, stats.num_nodes, stats.num_purges) == (4, 3, 0)
    assert w.index.namespace_stats(w.bob).num_blocks == 0


def test_levels_are_set_before_the_first_namespace_and_strict_needs_all_its_quota_promised() -> None:
    pool = BlockPool(16)
    index = PrefixIndex(pool, block_size=BLOCK_SIZE)
    lent, own = pool.add_account(guaranteed=2, limit=4), pool.add_account(guaranteed=4, limit=4)
    assert index.isolation(own) == "scoped"
    with pytest.raises(InvalidArgumentError, match="guaranteed = limit; account 0 has 2 and 4"):
        index.set_isolation(lent, "strict")
    with pytest.raises(InvalidArgumentError, match="open, scoped, strict"):
        index.set_isolation(own, "tight")  # type: ignore[arg-type]
    index.set_isolation(own, "strict")
    assert index.isolation(own) == "strict"
    index.namespace(ShareScope.private("a"), account=own)
    with pytest.raises(WrongStateError):
        index.set_isolation(own, "open")


def test_a_strict_account_keeps_held_and_cached_blocks_within_its_limit() -> None:
    pool = BlockPool(16)
    index = PrefixIndex(pool, block_size=BLOCK_SIZE)
    account = pool.add_account(guaranteed=4, limit=4)
    index.set_isolation(account, "strict")
    space = index.namespace(ShareScope.private("a"), account=account)
    for path in range(10, 30):
        index.insert_prefix(space, whole(path, path + 1))[0].release()
        stats = pool.account_stats(account)
        assert stats.committed + stats.cached <= 4
    assert index.make_room(account, 3) == 3
    assert pool.account_stats(account).cached == 1


def test_reclaim_takes_own_blocks_first_and_none_within_another_guarantee() -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, block_size=BLOCK_SIZE)
    ours, theirs = pool.add_account(), pool.add_account(guaranteed=3)
    own = index.namespace(ShareScope.private("a"), account=ours)
    other = index.namespace(ShareScope.private("b"), account=theirs)
    index.insert_prefix(other, whole(1, 2, 3, 4))[0].release()
    index.insert_prefix(own, whole(5, 6))[0].release()
    assert index.reclaim(ours, 1) == 1
    assert (pool.account_stats(ours).cached, pool.account_stats(theirs).cached) == (1, 4)
    assert index.reclaim(ours, 8) == 2
    assert (pool.account_stats(ours).cached, pool.account_stats(theirs).cached) == (0, 3)


def test_a_dropped_match_of_a_chain_releases_every_part() -> None:
    w = World()
    w.index.publish_prefix(w.public, whole(1, 2))[0].release()
    match: Match | None = w.index.insert_prefix(w.chains[0], whole(1, 2, 3))[0]
    assert [w.committed(i) for i in range(4)] == [2, 0, 1, 0]
    del match
    gc.collect()
    assert [w.committed(i) for i in range(4)] == [0, 0, 0, 0]


def test_a_clients_salts_are_limited_and_the_oldest_gives_way() -> None:
    pool = BlockPool(32)
    index = PrefixIndex(pool, block_size=BLOCK_SIZE)
    account = pool.add_account()
    index.set_max_salts(2)
    spaces = []
    for salt in range(20):
        spaces.append(index.namespace(ShareScope.private("a", salt=bytes([salt])), account=account))
        assert [index.insert_prefix(spaces[-1], whole(1, 2))[1] for _ in range(2)] == [0, 4]
    stats = index.salt_stats(account)
    assert (stats.num_salted, stats.max_salted, stats.num_reclaimed) == (2, 2, 18)
    assert index.num_namespaces == 2
    with pytest.raises(InvalidArgumentError, match="given to another one"):
        index.peek_prefix(spaces[0], whole(1, 2))
    kept = [index.root(space) for space in spaces[-2:]]
    with pytest.raises(RefusedError) as error:
        index.namespace(ShareScope.private("a", salt=b"more"), account=account)
    assert error.value.retryable
    del kept
