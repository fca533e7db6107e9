"""Items inside prompts (images, embeddings): reused only where the same one stands at the same place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import BlockPool, PrefixIndex, ShareScope
from kvpager.errors import InvalidArgumentError

from .test_tenants_of_a_scheduler import BLOCK_SIZE, Server

Items = list[tuple[int, bytes]]
TOKENS = np.zeros(4 * BLOCK_SIZE + 1, dtype=np.uint32)  # placeholders everywhere


def run(server: Server, items: Items) -> int:
    """A request with these items to its end; returns the blocks it found."""
    tenant = server.tenants[0]
    request = server.scheduler.submit(tenant, TOKENS, max_tokens=1, items=items)
    return server.finish()[request][1] // BLOCK_SIZE


@pytest.fixture
def server() -> Server:
    made = Server()
    made.tenants.append(made.scheduler.add_tenant("alice"))
    return made


def test_equal_placeholders_with_different_images_share_only_what_comes_before(server: Server) -> None:
    assert [run(server, [(5, image)]) for image in (b"cat", b"dog", b"cat", b"dog")] == [0, 1, 4, 4]


def test_the_same_image_at_another_place_is_another_prompt(server: Server) -> None:
    assert [run(server, [(offset, b"cat")]) for offset in (5, 6, 9, 5)] == [0, 1, 1, 4]


def test_an_image_differs_from_none_and_order_counts(server: Server) -> None:
    assert run(server, []) == 0
    assert run(server, [(0, b"cat")]) == 0
    assert run(server, [(0, b"cat"), (8, b"dog")]) == 2
    assert run(server, [(0, b"dog"), (8, b"cat")]) == 0
    assert run(server, []) == 4


def test_overlapping_requests_wait_only_for_the_same_image(server: Server) -> None:
    tenant = server.tenants[0]
    for image in (b"cat", b"dog", b"cat"):
        server.scheduler.submit(tenant, TOKENS, max_tokens=1, items=[(0, image)])
    assert len(server.scheduler.step().token_ids) == 2 * len(TOKENS)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([(17, b"x")], "at offset 17, the prompt has 17 tokens"),
        ([(3, b"")], "digest of 0 bytes"),
        ([(3, bytes(65))], "digest of 65 bytes"),
        ([(3, b"x"), (3, b"y")], "not after 3"),
    ],
)
def test_bad_items_are_refused_with_the_numbers(server: Server, items: Items, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        server.scheduler.submit(server.tenants[0], TOKENS, items=items)
    with pytest.raises(InvalidArgumentError, match=text):
        server.index.key_items(TOKENS, items)


def flood(index: PrefixIndex, count: int, start: int = 0) -> int:
    """Keys `count` different digests; returns the most memory that the index took meanwhile."""
    most = 0
    for number in range(start, start + count):
        index.key_items([1, 2], [(0, number.to_bytes(64))])
        if number % 500 == 0:
            most = max(most, index.memory_bytes)
    return most


def test_digests_that_nothing_resident_has_are_counted_and_forgotten() -> None:
    index = PrefixIndex(BlockPool(50), block_size=16)
    empty = index.memory_bytes
    flood(index, 1_000)
    assert index.memory_bytes >= empty + 1_000 * 64
    assert flood(index, 60_000, start=1_000) < empty + (2 << 20)
    index.clear()
    assert index.memory_bytes == empty


def test_digests_of_resident_blocks_are_remembered(server: Server) -> None:
    cat, dog = ([(offset, image)] for offset, image in ((5, b"cat"), (9, b"dog")))
    assert [run(server, cat), run(server, dog)] == [0, 1]
    for start in range(0, 60_000, 20_000):
        flood(server.index, 20_000, start)
        assert [run(server, cat), run(server, dog)] == [4, 4]
    server.index.clear()
    assert [run(server, cat), run(server, cat)] == [0, 4]


def test_what_is_held_through_clear_is_matched_after_it() -> None:
    index = PrefixIndex(BlockPool(50), block_size=4)
    namespace = index.namespace(ShareScope.private("alice"))
    held, _ = index.insert_prefix(namespace, index.key_items(TOKENS, [(5, b"cat")]))
    index.clear()
    assert index.peek_prefix(namespace, index.key_items(TOKENS, [(5, b"cat")])) == 16
    held.release()


def test_an_id_is_never_given_to_another_item() -> None:
    index = PrefixIndex(BlockPool(50), block_size=4)
    namespace = index.namespace(ShareScope.private("alice"))
    before = index.key_items(TOKENS, [(0, b"cat")])
    index.clear()
    others = {int(index.key_items(TOKENS, [(0, b"%d" % number)])[0]) for number in range(10_000)}
    assert (len(others), int(before[0]) in others) == (10_000, False)
    index.insert_prefix(namespace, before)[0].release()
    assert index.peek_prefix(namespace, index.key_items(TOKENS, [(0, b"cat")])) == 0


prompts = st.tuples(
    st.lists(st.integers(0, 1), min_size=4, max_size=8),
    st.dictionaries(st.integers(0, 3), st.binary(min_size=1, max_size=2), max_size=2),
)


@given(st.lists(prompts, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_prompt_with_items_finds_what_a_dictionary_of_whole_prefixes_has(
    drawn: list[tuple[list[int], dict[int, bytes]]],
) -> None:
    index = PrefixIndex(BlockPool(256), block_size=2)
    space = index.namespace(ShareScope.private("alice"))
    known: set[tuple[object, ...]] = set()
    for tokens, items in drawn:
        exact = [(token, items.get(i)) for i, token in enumerate(tokens)]
        prefixes = [tuple(exact[:end]) for end in range(2, len(tokens) + 1, 2)]
        expected = max((len(prefix) for prefix in prefixes if prefix in known), default=0)
        keys = index.key_items(tokens, sorted(items.items()))
        match, found = index.insert_prefix(space, keys)
        match.release()
        assert found == expected
        known.update(prefixes)
