"""Events through Python: a follower that starts from a snapshot and applies them holds the same tree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import BlockPool, EventBatch, PrefixIndex, ShareScope
from kvpager.errors import InvalidArgumentError

BLOCK_SIZE = 2
KEY = bytes(range(32))
Known = dict[tuple[int, bytes], bytes]


def whole(*blocks: int) -> npt.NDArray[np.uint32]:
    return np.repeat(np.array(blocks, dtype=np.uint32), BLOCK_SIZE)


class Follower:
    """Parent of every known block."""

    def __init__(self, index: PrefixIndex) -> None:
        snapshot = index.snapshot()
        digests, parents = rows(snapshot.digests), rows(snapshot.parents)
        keys = zip(snapshot.namespaces.tolist(), digests, strict=True)
        self.known: Known = dict(zip(keys, parents, strict=True))
        self.next = snapshot.next_number

    def apply(self, batch: EventBatch) -> bool:
        if batch.must_resync:
            return False
        digests, parents, start = rows(batch.digests), rows(batch.parents), batch.digest_start.tolist()
        for i, number in enumerate(batch.numbers.tolist()):
            if number < self.next:
                continue
            assert number == self.next
            self.next += 1
            space, kind = int(batch.namespaces[i]), int(batch.kinds[i])
            own = digests[start[i] : start[i + 1]]
            if kind == 0:
                for parent, digest in zip([parents[i], *own[:-1]], own, strict=True):
                    assert self.known.setdefault((space, digest), parent) == parent
            elif kind == 1:
                for digest in own:
                    del self.known[space, digest]
                    assert not any(s == space and p == digest for (s, _), p in self.known.items())
            else:
                self.known = {key: parent for key, parent in self.known.items() if key[0] != space}
        return True


def rows(array: npt.NDArray[np.uint8]) -> list[bytes]:
    assert array.dtype == np.uint8
    assert array.shape[1:] == (32,)
    return [row.tobytes() for row in array]


def make(num_blocks: int = 16, capacity: int = 1024, key: bytes = KEY) -> tuple[PrefixIndex, list[int]]:
    index = PrefixIndex(
        BlockPool(num_blocks),
        block_size=BLOCK_SIZE,
        event_key=key,
        event_capacity=capacity,
        event_tokens=True,
    )
    return index, [index.namespace(ShareScope.private(name)) for name in ("alice", "bob")]


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)
steps = st.one_of(
    st.tuples(st.just("run"), st.integers(0, 1), paths),
    st.tuples(st.just("evict"), st.integers(1, 4), st.none()),
    st.tuples(st.just("purge"), st.integers(0, 1), st.none()),
    st.tuples(st.just("poll"), st.integers(1, 3), st.none()),
)


@given(st.lists(steps, max_size=40), st.integers(0, 40), st.sampled_from([2, 1024]))
@settings(max_examples=100, deadline=None)
def test_a_follower_from_a_snapshot_holds_the_same_tree(
    acts: list[tuple[str, int, list[int] | None]], start: int, capacity: int
) -> None:
    index, spaces = make(capacity=capacity)
    follower = None
    for number, (name, value, path) in enumerate(acts):
        if number == start:
            follower = Follower(index)
        if name == "run":
            index.insert_prefix(spaces[value], whole(*(path or [])))[0].release()
        elif name == "evict":
            index.evict(value)
        elif name == "purge":
            index.purge(ShareScope.private(["alice", "bob"][value]))
        elif follower is not None and not follower.apply(index.poll_events(value)):
            follower = Follower(index)
    follower = follower or Follower(index)
    while batch := index.poll_events():
        if not follower.apply(batch):
            follower = Follower(index)
    assert follower.known == Follower(index).known


def test_events_carry_tokens_and_chain_from_parent_to_child() -> None:
    index, (alice, _) = make()
    index.insert_prefix(alice, whole(1, 2))[0].release()
    index.insert_prefix(alice, whole(1, 2, 3))[0].release()
    batch = index.poll_events()
    assert (batch.numbers.tolist(), batch.kinds.tolist()) == ([0, 1], [0, 0])
    assert batch.tokens.tolist() == [1, 1, 2, 2, 3, 3]
    assert batch.token_start.tolist() == [0, 4, 6]
    assert batch.digest_start.tolist() == [0, 2, 3]
    assert batch.parents[1].tobytes() == batch.digests[1].tobytes()


def test_what_makes_room_is_told_before_what_takes_its_place() -> None:
    index, (alice, _) = make(num_blocks=4)
    index.insert_prefix(alice, whole(1, 2, 3, 4))[0].release()
    stored = set(rows(index.poll_events().digests))
    index.insert_prefix(alice, whole(7, 8, 9))[0].release()
    batch = index.poll_events()
    assert batch.kinds.tolist() == sorted(batch.kinds.tolist(), reverse=True), "removed, then stored"
    removed = batch.digest_start[1 + batch.kinds.tolist().index(0) - 1]
    assert removed >= 3
    assert set(rows(batch.digests)[:removed]) <= stored


def test_reading_empties_the_queue_and_what_is_known_already_is_no_event() -> None:
    index, (alice, _) = make()
    index.insert_prefix(alice, whole(1, 2))[0].release()
    assert len(index.poll_events()) == 1
    assert len(index.poll_events()) == 0
    index.insert_prefix(alice, whole(1, 2))[0].release()
    index.insert_prefix(alice, whole(1))[0].release()
    assert len(index.poll_events()) == 0


def test_digests_tell_nothing_without_the_key_and_nothing_across_namespaces() -> None:
    streams = []
    for key in (KEY, KEY, bytes(32)):
        index, spaces = make(key=key)
        for space in spaces:
            index.insert_prefix(space, whole(1, 2))[0].release()
        streams.append(rows(index.poll_events().digests))
    assert streams[0] == streams[1]
    assert not set(streams[0]) & set(streams[2])
    assert len(set(streams[0])) == 4


def test_a_follower_that_lags_is_told_to_start_again_once() -> None:
    index, (alice, _) = make(64, capacity=4)
    for path in range(10):
        index.insert_prefix(alice, whole(path))[0].release()
    batch = index.poll_events()
    assert batch.must_resync
    assert not index.poll_events().must_resync
    assert index.snapshot().next_number == 10


def test_off_is_empty_and_bad_settings_are_refused() -> None:
    index = PrefixIndex(BlockPool(4), block_size=BLOCK_SIZE)
    index.insert_prefix(index.namespace(ShareScope.private("a")), whole(1))
    assert len(index.poll_events()) == len(index.snapshot()) == 0
    with pytest.raises(InvalidArgumentError, match="32 random bytes, has 5"):
        PrefixIndex(BlockPool(4), event_key=b"short")
    with pytest.raises(InvalidArgumentError, match="at least 1 event"):
        PrefixIndex(BlockPool(4), event_key=KEY, event_capacity=0)
