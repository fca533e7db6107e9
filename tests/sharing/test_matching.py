"""What the Python front of the index promises."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvpager import BlockPool, Fingerprint, Match, PrefixIndex, ShareScope
from kvpager.errors import (
    InvalidArgumentError,
    InvalidHandleError,
    OutOfMemoryError,
    OverQuotaError,
    WrongStateError,
)


def make(num_blocks: int = 16, block_size: int = 4) -> tuple[BlockPool, PrefixIndex, int]:
    pool = BlockPool(num_blocks)
    index = PrefixIndex(pool, block_size=block_size)
    return pool, index, index.namespace(ShareScope.private("alice"))


def test_a_dropped_match_releases_itself() -> None:
    pool, index, space = make()
    match, _ = index.insert_prefix(space, range(8))
    assert pool.stats().held == 2
    del match
    gc.collect()
    assert (pool.stats().held, pool.stats().cached) == (0, 2)


def test_a_match_is_released_once_and_says_so_after() -> None:
    pool, index, space = make()
    with index.insert_prefix(space, range(8))[0] as match:
        assert match.num_tokens == 8
    assert match.is_released
    match.release()
    assert pool.stats().held == 0
    with pytest.raises(WrongStateError, match="released"):
        _ = match.block_ids


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "uint16", "list"])
def test_tokens_of_any_integer_type_match_alike(dtype: str) -> None:
    _, index, space = make()
    index.insert_prefix(space, np.arange(8, dtype=np.uint32))
    tokens = list(range(9)) if dtype == "list" else np.arange(9, dtype=dtype)
    assert index.match_prefix(space, tokens).num_tokens == 8
    assert index.match_prefix(space, np.arange(18, dtype=np.uint32)[::2]).num_tokens == 0


def test_an_unaligned_array_is_refused_not_misread() -> None:
    _, index, space = make()
    unaligned = np.frombuffer(b"x" + np.arange(9, dtype=np.uint32).tobytes(), np.uint32, offset=1)
    with pytest.raises(InvalidArgumentError, match=r"tokens cannot be read: .* aligned"):
        index.match_prefix(space, unaligned)


@pytest.mark.parametrize("tokens", [[-1], [2**32], np.array([0.5]), np.zeros((2, 2), np.uint32), "text"])
def test_what_is_not_token_ids_is_refused(tokens: object) -> None:
    _, index, space = make()
    with pytest.raises(InvalidArgumentError):
        index.match_prefix(space, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("namespace", [-1, 1, 2**40])
def test_an_unknown_namespace_is_refused(namespace: int) -> None:
    _, index, _ = make()
    with pytest.raises(InvalidArgumentError):
        index.match_prefix(namespace, [1, 2, 3])


def test_bad_settings_are_refused() -> None:
    pool = BlockPool(4)
    with pytest.raises(InvalidArgumentError, match="block_size is 0, must be 1 to 65536"):
        PrefixIndex(pool, block_size=0)
    with pytest.raises(InvalidArgumentError, match="block_size is 2147483648, must be 1 to 65536"):
        PrefixIndex(pool, block_size=2**31)
    with pytest.raises(InvalidArgumentError, match="lru, learned, clock"):
        PrefixIndex(pool, eviction="mru")  # type: ignore[arg-type]


def test_tokens_that_do_not_fit_in_memory_are_refused_with_the_numbers() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_blocks = memory // (4 * 65_536) + 1
    num_bytes = num_blocks * 4 * 65_536
    with pytest.raises(OutOfMemoryError, match=f"takes {num_bytes} bytes of memory, more than"):
        PrefixIndex(BlockPool(num_blocks), block_size=65_536)


def test_an_unknown_account_is_refused() -> None:
    _, index, _ = make()
    calls: list[Callable[[], object]] = [
        lambda: index.isolation(7),
        lambda: index.reclaim(7, 1),
        lambda: index.make_room(7, 1),
        lambda: index.salt_stats(7),
        lambda: index.set_isolation(7, "strict"),
        lambda: index.namespace(ShareScope.private("x"), account=7),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="account 7"):
            call()
    index.check_invariants()


def _refused_in_a_child(index: PrefixIndex, space: int, match: Match) -> int:
    """How many calls a forked child is refused. A match that it drops stays the parent's."""
    calls: list[Callable[[], object]] = [
        lambda: index.match_prefix(space, range(9)),
        lambda: index.match_many(space, [range(9)]),
        lambda: index.peek_prefix(space, range(9)),
        lambda: index.insert_prefix(space, range(4)),
        lambda: index.extend(match, range(4), [0]),
        lambda: index.evict(1),
        lambda: index.reclaim(0, 1),
        lambda: index.root(space),
        lambda: index.purge(ShareScope.private("alice")),
        lambda: index.namespace(ShareScope.private("bob")),
        index.check_invariants,
        index.clear,
        lambda: match.num_tokens,
        lambda: match.is_released,
        match.release,
    ]
    refused = 0 if "of a parent process" in repr(match) else 100
    for call in calls:
        try:
            call()
        except WrongStateError:
            refused += 1
    return refused


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_index_is_refused_in_a_forked_child() -> None:
    pool, index, space = make()
    matches = [index.insert_prefix(space, range(8))[0]]
    child = os.fork()
    if child == 0:
        refused = _refused_in_a_child(index, space, matches[0])
        matches.clear()
        gc.collect()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 15
    assert (pool.stats().held, matches[0].num_tokens) == (2, 8)


def test_many_prompts_match_as_one_by_one() -> None:
    _, index, space = make(64)
    prompts = [np.arange(start, start + 12, dtype=np.uint32) for start in range(0, 40, 8)]
    for prompt in prompts[::2]:
        index.insert_prefix(space, prompt)
    single = [index.match_prefix(space, prompt).block_ids.tolist() for prompt in prompts]
    assert [match.block_ids.tolist() for match in index.match_many(space, prompts)] == single


def test_a_full_pool_refuses_with_the_numbers_and_changes_nothing() -> None:
    pool, index, space = make(4)
    pinned, _ = index.insert_prefix(space, range(12))
    with pytest.raises(OverQuotaError) as error:
        index.insert_prefix(space, range(100, 108))
    assert (error.value.needed, error.value.available) == (2, 1)
    assert pool.stats().held == 3
    index.check_invariants()
    del pinned


def test_a_block_that_is_not_held_cannot_be_inserted() -> None:
    _, index, space = make()
    match, _ = index.insert_prefix(space, range(4))
    with pytest.raises(InvalidHandleError):
        index.extend(match, range(4), match.blocks)
    with pytest.raises(InvalidArgumentError, match="for 2 blocks 8 tokens are needed, got 4"):
        index.extend(match, range(4), np.zeros(2, np.uint64))
    assert match.num_blocks == 1


def test_a_part_of_a_block_is_found_and_pinned() -> None:
    pool, index, space = make()
    index.insert_prefix(space, [1, 2, 3, 4, 5, 6, 7, 8])
    match = index.match_prefix(space, [1, 2, 3, 4, 5, 6, 9])
    found = index.match_partial(match, [5, 6])
    assert found is not None
    block, num_tokens = found
    assert (num_tokens, block.num_blocks, pool.stats().held) == (2, 1, 2)
    assert index.match_partial(match, [6, 5]) is None
    match.release()
    with pytest.raises(WrongStateError, match="released"):
        index.match_partial(match, [5])
    assert (index.evict(9), block.block_ids.tolist()) == (
        0,
        index.match_prefix(space, range(1, 10)).block_ids[1:].tolist(),
    )


def test_a_foreign_prefix_looks_like_an_absent_one() -> None:
    _, index, alice = make()
    bob = index.namespace(ShareScope.private("bob"))
    salted = index.namespace(ShareScope.private("alice", salt=b"s"))
    other = index.namespace(ShareScope.private("alice"), Fingerprint(model="m"))
    index.insert_prefix(alice, range(8))
    for space in (bob, salted, other):
        assert index.peek_prefix(space, range(9)) == index.peek_prefix(space, range(50, 59)) == 0
        assert index.match_prefix(space, range(9)).num_tokens == 0


def test_threads_match_insert_and_evict_at_once() -> None:
    pool = BlockPool(256)
    index = PrefixIndex(pool, block_size=4)
    spaces = [index.namespace(ShareScope.private(name)) for name in ("a", "b")]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        try:
            for _ in range(300):
                space = spaces[int(draw.integers(2))]
                tokens = np.repeat(draw.integers(0, 3, 6, dtype=np.uint32), 4)
                match, _ = index.insert_prefix(space, tokens)
                again = index.match_prefix(space, tokens, whole=True)
                assert again.block_ids.tolist() == match.block_ids.tolist()
                if draw.integers(4) == 0:
                    index.evict(8)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    index.check_invariants()
    pool.check_invariants()
    assert pool.stats().held == 0
