"""The caller's memory for partial results: how much a call needs, and that it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager import _core
from kvpager.attention import (
    cascade_attention,
    get_num_threads,
    mla_decode,
    paged_attention,
    set_num_threads,
    workspace_bytes,
)
from kvpager.errors import InvalidArgumentError
from waiting import wait_until

from .reference import Case, make_case

LONG = [(1, 5000), (2, 3000), (1, 7), (1, 0)]
"""Lengths whose work is split among several threads."""


@pytest.fixture(autouse=True)
def _three_threads() -> Any:
    before = get_num_threads()
    set_num_threads(3)
    yield
    set_num_threads(before)


@pytest.fixture
def case() -> Case:
    return make_case(1, LONG, heads=8, kv_heads=2)


def poisoned(size: int, before: int = 0) -> Any:
    """Memory of NaN, whose start is `before` bytes past an address that NumPy likes."""
    return np.full(size + before, 0xFF, np.uint8)[before:]


@pytest.mark.parametrize("shift", [0, 1, 17])
def test_partial_results_go_to_the_callers_memory_and_the_bits_are_the_same(case: Case, shift: int) -> None:
    expected, expected_lse = case.call(paged_attention, return_lse=True)
    size = case.call(workspace_bytes)
    # Two floats and a value a split row and head, of at least the pieces of 1,024 of the long sequence.
    assert size > 5 * 8 * (64 + 2) * 4
    memory = poisoned(size, shift)
    for _ in range(2):  # whatever the last call left there
        out, lse = case.call(paged_attention, return_lse=True, workspace=memory)
        assert out.tobytes() == expected.tobytes()
        assert lse.tobytes() == expected_lse.tobytes()
    assert (memory != 0xFF).any()


def test_a_call_with_a_workspace_allocates_no_partial_results(case: Case) -> None:
    memory = poisoned(case.call(workspace_bytes))
    out = np.empty_like(case.query)
    counts = []
    for extra in ({}, {"workspace": memory}):
        case.call(paged_attention, out=out, **extra)
        before = _core.num_allocations()
        case.call(paged_attention, out=out, **extra)
        counts.append(_core.num_allocations() - before)
    assert counts[0] == counts[1] + 1


def test_a_workspace_that_is_too_small_is_refused_with_both_numbers(case: Case) -> None:
    size = case.call(workspace_bytes)
    out = np.full_like(case.query, 5)
    with pytest.raises(InvalidArgumentError, match=f"workspace has {size - 1} bytes, this call needs {size}"):
        case.call(paged_attention, out=out, workspace=poisoned(size - 1))
    assert (out == 5).all()
    wide = np.zeros((size // 4, 2), np.float32)
    with pytest.raises(InvalidArgumentError, match="contiguous and writable"):
        case.call(paged_attention, out=out, workspace=wide[:, 0])
    wide.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="contiguous and writable"):
        case.call(paged_attention, out=out, workspace=wide)
    with pytest.raises(InvalidArgumentError, match="workspace is a list"):
        case.call(paged_attention, out=out, workspace=[1])
    with pytest.raises(InvalidArgumentError, match="workspace and out share memory"):
        case.call(paged_attention, out=out, workspace=out)
    assert (out == 5).all()


def test_work_that_is_not_split_needs_no_workspace(case: Case) -> None:
    short = make_case(2, [(1, 20), (4, 9)])
    assert short.call(workspace_bytes) == 0
    expected = short.call(paged_attention)
    assert short.call(paged_attention, workspace=np.empty(0, np.uint8)).tobytes() == expected.tobytes()
    set_num_threads(1)
    assert case.call(workspace_bytes) == 0


def test_cascades_latent_caches_and_tensors_take_a_workspace() -> None:
    case = make_case(9, [(1, 90), (3, 70), (1, 33)], heads=4, kv_heads=2)
    case.block_tables[1, :3] = case.block_tables[0, :3]
    groups: dict[str, Any] = {"group_start": [0, 2], "group_sequences": [0, 1], "prefix_lens": [48]}
    expected = case.call(cascade_attention, **groups)
    size = case.call(workspace_bytes, **groups)
    assert size >= 4 * 4 * (64 + 2) * 4
    memory = poisoned(size)
    assert case.call(cascade_attention, workspace=memory, **groups).tobytes() == expected.tobytes()
    with pytest.raises(InvalidArgumentError, match=f"this call needs {size}"):
        case.call(cascade_attention, workspace=memory[1:], **groups)

    latent = make_case(3, [(1, 6000)], heads=8, kv_heads=1, dim=96)
    batch = {name: getattr(latent, name) for name in ("block_tables", "query_start", "context_lens")}
    plain = mla_decode(latent.query, latent.k_cache, kv_lora_rank=64, scale=0.1, **batch)
    memory = poisoned(
        workspace_bytes(latent.query, latent.k_cache, latent.k_cache[..., :64], scale=0.1, **batch)
    )
    again = mla_decode(latent.query, latent.k_cache, kv_lora_rank=64, scale=0.1, workspace=memory, **batch)
    assert again.tobytes() == plain.tobytes()

    torch = pytest.importorskip("torch")
    long = make_case(1, LONG, heads=8, kv_heads=2)
    tensors = Case(*map(torch.from_numpy, (long.query, long.k_cache, long.v_cache)), *long_integers(long))
    memory = torch.empty(tensors.call(workspace_bytes), dtype=torch.uint8)
    assert torch.equal(tensors.call(paged_attention, workspace=memory), tensors.call(paged_attention))


def long_integers(case: Case) -> tuple[Any, Any, Any]:
    return case.block_tables, case.query_start, case.context_lens


def test_threads_end_when_fewer_are_asked_for(case: Case) -> None:
    def names() -> Iterator[str]:
        for task in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                yield task.read_text()

    def wait_for(count: int) -> None:
        """Waits for as many threads; those of earlier calls may still be ending."""
        wait_until(lambda: sum(name.startswith("kvpager-") for name in names()) == count, f"{count} threads")

    set_num_threads(4)
    case.call(paged_attention)
    wait_for(3)
    set_num_threads(1)
    wait_for(0)
