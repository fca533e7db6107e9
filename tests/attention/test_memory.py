"""What attention reads and writes: nothing outside the visible range, nothing on error, any strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpager.attention import (
    append_kv,
    copy_blocks,
    gather_blocks,
    get_num_threads,
    paged_attention,
    scatter_blocks,
    set_num_threads,
    zero_blocks,
)
from kvpager.errors import InvalidArgumentError

from .reference import make_case

PAIRS = [(1, 40), (0, 7), (5, 17), (1, 1), (33, 50), (1, 0), (2, 128)]


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 5])
def test_slots_never_written_do_not_reach_the_result(fill: float, kv_dtype: str, window: int | None) -> None:
    clean = make_case(1, PAIRS, kv_dtype=kv_dtype, fill=0.0, window=window)
    dirty = make_case(1, PAIRS, kv_dtype=kv_dtype, fill=fill, window=window)
    results = [case.call(paged_attention, return_lse=True) for case in (clean, dirty)]
    assert results[0][0].tobytes() == results[1][0].tobytes()
    assert results[0][1].tobytes() == results[1][1].tobytes()


@pytest.mark.parametrize("length", range(1, 18))
def test_a_partly_written_block_of_nan_gives_finite_results(length: int) -> None:
    case = make_case(length, [(length, length)], block_size=4)
    assert np.isfinite(case.call(paged_attention)).all()


def test_blocks_left_of_the_window_may_be_gone() -> None:
    case = make_case(2, [(2, 100)], window=20)
    expected = case.call(paged_attention)
    case.block_tables[0, : (100 - 2 + 1 - 20) // 16] = -1
    assert case.call(paged_attention).tobytes() == expected.tobytes()


def test_empty_batches_and_padded_rows_give_zeros() -> None:
    case = make_case(3, [(1, 9), (1, 0), (2, 12)])
    rows = np.array([0, -1, 2], np.int32)
    out, lse = case.call(paged_attention, table_rows=rows, return_lse=True)
    assert (out[1] == 0).all()
    assert np.isneginf(lse[1]).all()
    padded = np.concatenate([case.query, np.full_like(case.query, np.nan)])
    case.query = padded
    again = case.call(paged_attention, table_rows=rows)
    assert again[: len(out)].tobytes() == out.tobytes()
    assert (again[len(out) :] == 0).all()
    empty = make_case(3, [])
    assert empty.call(paged_attention).shape == (0, 4, 64)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_results_are_the_same_bits_however_a_batch_is_put_together(kv_dtype: str) -> None:
    case = make_case(4, [(70, 70), (1, 2500), (6, 300), (1, 33)], heads=8, kv_heads=2, kv_dtype=kv_dtype)
    threads = get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            set_num_threads(count)
            results.append(case.call(paged_attention))
    finally:
        set_num_threads(threads)
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    for sequence in range(4):
        first, end = case.query_start[sequence : sequence + 2]
        for step in (1, 3, 64):
            for at in range(first, end, step):
                stop = min(at + step, end)
                alone = paged_attention(
                    case.query[at:stop],
                    case.k_cache,
                    case.v_cache,
                    block_tables=case.block_tables,
                    table_rows=np.array([sequence], np.int32),
                    query_start=np.array([0, stop - at], np.int32),
                    context_lens=np.array([case.context_lens[sequence] - (end - stop)], np.int32),
                )
                assert alone.tobytes() == results[0][at:stop].tobytes()


def strided(array: Any, kind: str) -> Any:
    """The same values with other strides."""
    if kind == "reversed":
        return np.ascontiguousarray(array[:, ::-1])[:, ::-1]
    if kind == "heads_first":
        order = (0, 2, 1, 3) if array.ndim == 4 else (1, 0, 2)
        return np.ascontiguousarray(array.transpose(order)).transpose(order)
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


@pytest.mark.parametrize("kind", ["reversed", "heads_first", "gaps"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_any_strides_give_the_same_bits(kind: str, kv_dtype: str) -> None:
    case = make_case(5, PAIRS, kv_dtype=kv_dtype)
    expected = case.call(paged_attention)
    case.query, case.k_cache, case.v_cache = (
        strided(array, kind) for array in (case.query, case.k_cache, case.v_cache)
    )
    wide = np.full((case.block_tables.shape[0] * 2, case.block_tables.shape[1] * 3), -7, np.int32)
    wide[::2, ::3] = case.block_tables
    case.block_tables = wide[::2, ::3]
    out = strided(np.zeros_like(expected), kind)
    assert case.call(paged_attention, out=out) is out
    assert out.tobytes() == expected.tobytes()


def test_append_writes_exactly_the_named_slots() -> None:
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 5, 2, 64)).astype(np.float32)
    slots = np.array([3, -1, 0, 17, 31])
    for dtype in (np.float32, np.float16):
        k_cache = np.full((2, 16, 2, 64), 7, dtype)
        v_cache = np.full((2, 16, 2, 64), 8, dtype)
        append_kv(key, value, k_cache, v_cache, slots)
        for cache, rows, rest in ((k_cache, key, 7), (v_cache, value, 8)):
            flat = cache.reshape(32, 2, 64)
            for slot, row in zip(slots, rows, strict=True):
                if slot >= 0:
                    assert (flat[slot] == row.astype(dtype)).all()
            assert (np.delete(flat, slots[slots >= 0], axis=0) == rest).all()


def test_blocks_are_copied_zeroed_gathered_and_scattered_whole() -> None:
    rng = np.random.default_rng(1)
    for shape in [(6, 4, 2, 8), (6, 4, 2), (6, 16)]:
        cache = rng.standard_normal(shape).astype(np.float32)
        other, before = cache + 1, cache.copy()
        copy_blocks(cache, other, np.array([[0, 3], [5, 1]], np.int32))
        assert (cache[[3, 1]] == before[[0, 5]]).all()
        assert (other[[3, 1]] == before[[0, 5]] + 1).all()
        assert (cache[[0, 2, 4, 5]] == before[[0, 2, 4, 5]]).all()
        saved = gather_blocks(cache, [4, 0, 4])
        assert (saved == cache[[4, 0, 4]]).all()
        zero_blocks(cache, [4, 0])
        assert (cache[[4, 0]] == 0).all()
        scatter_blocks(cache, [2, 0], saved[:2])
        assert (cache[[2, 0]] == saved[:2]).all()


def replaced(**changes: Any) -> Any:
    def call() -> None:
        case = make_case(6, [(1, 20), (3, 33)])
        arguments: dict[str, Any] = {
            "query": case.query,
            "k_cache": case.k_cache,
            "v_cache": case.v_cache,
            "block_tables": case.block_tables,
            "query_start": case.query_start,
            "context_lens": case.context_lens,
            "out": np.full_like(case.query, 5),
        }
        for name, change in changes.items():
            arguments[name] = change(case) if callable(change) else change
        out = arguments["out"]
        try:
            paged_attention(
                arguments.pop("query"), arguments.pop("k_cache"), arguments.pop("v_cache"), **arguments
            )
        finally:
            assert (out == 5).all(), "something was written"

    return call


def table_with(value: int) -> Any:
    def change(case: Any) -> Any:
        table = case.block_tables.copy()
        table[1, 2] = value
        return table

    return change


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"query": lambda c: c.query[:, :3]},
            "3 query heads cannot be shared evenly by 2 KV heads|out has shape",
        ),
        ({"query": lambda c: c.query[..., :32]}, r"k_cache has shape .*expected \[8, 16, 2, 32\]"),
        ({"query": lambda c: c.query.astype(np.float64)}, "query has dtype float64"),
        ({"query": lambda c: c.query[0]}, "query has 2 dimensions, expected 3"),
        ({"query": lambda c: c.query.tolist()}, "query is a list, expected an array"),
        ({"v_cache": lambda c: c.v_cache[1:]}, r"v_cache has shape \[7, "),
        ({"v_cache": lambda c: c.v_cache.astype(np.float16)}, "v_cache has dtype float16, expected float32"),
        (
            {"block_tables": table_with(-1)},
            r"block_tables\[1, 2\] is -1 inside the used range, must be 0 to 7",
        ),
        ({"block_tables": table_with(8)}, r"block_tables\[1, 2\] is 8 inside the used range, must be 0 to 7"),
        ({"block_tables": lambda c: c.block_tables[:, :2]}, "33 tokens need 3 blocks of 16"),
        ({"block_tables": lambda c: c.block_tables[:1]}, "sequence 1 has no table row: 1 of 1"),
        ({"block_tables": lambda c: c.block_tables.astype(float)}, "block_tables has dtype float64"),
        ({"context_lens": [20, 2]}, r"context_lens\[1\] is 2, but the sequence has 3 query tokens"),
        ({"context_lens": [20, -1]}, r"context_lens\[1\] is -1"),
        ({"context_lens": [20]}, "query_start has 3 entries, expected 2"),
        ({"query_start": [0, 1, 9]}, r"query_start\[2\] is 9, must be 1 to 4"),
        ({"query_start": [0, 2, 1]}, r"query_start\[2\] is 1, must be 2 to 4"),
        ({"query_start": [1, 1, 4]}, r"query_start\[0\] is 1, expected 0"),
        ({"table_rows": [0]}, "table_rows has 1 entry, expected 2"),
        ({"table_rows": [0, -1]}, "sequence 1 has no table row: -1 of 2"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"alibi_slopes": [0.1]}, "alibi_slopes has 1 entry, expected 4"),
        ({"sinks": [0.1] * 5}, "sinks has 5 entries, expected 4"),
        ({"k_scale": 2.0}, "k_cache of float32 takes no k_scale"),
        ({"out": lambda c: np.full((4, 4, 32), 5, np.float32)}, "out has shape"),
        ({"out": lambda c: np.full(c.query.shape, 5, np.int8)}, "out has dtype int8"),
    ],
)
def test_what_does_not_fit_is_an_error_with_numbers_and_writes_nothing(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        replaced(**changes)()


def test_a_read_only_array_is_never_written() -> None:
    out = np.full((4, 4, 64), 5, np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="out is read-only"):
        replaced(out=out)()


@pytest.mark.parametrize("block_size", [3, 512])
def test_impossible_block_sizes_are_refused(block_size: int) -> None:
    case = make_case(7, [(1, 5)], block_size=block_size)
    with pytest.raises(InvalidArgumentError, match=f"block size is {block_size}"):
        case.call(paged_attention)


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([0, 32], r"slot_mapping\[1\] is 32, must be -1 to 31"),
        ([-2, 0], r"slot_mapping\[0\] is -2"),
        ([0], "slot_mapping has 1 entry, but key has 2 tokens"),
    ],
)
def test_append_to_a_slot_outside_the_cache_writes_nothing(slots: list[int], text: str) -> None:
    rows, cache = np.ones((2, 2, 64), np.float32), np.zeros((2, 16, 2, 64), np.float32)
    with pytest.raises(InvalidArgumentError, match=text):
        append_kv(rows, rows, cache, v_cache := cache.copy(), slots)
    assert (cache == 0).all()
    assert (v_cache == 0).all()


@pytest.mark.parametrize(
    ("copies", "text"),
    [
        ([[0, 6]], r"block_copies\[0\] is 6, must be 0 to 5"),
        ([[-1, 0]], r"block_copies\[0\] is -1"),
        ([[0, 1], [2, 1]], "block 1 twice"),
        ([[0, 1], [1, 2]], "block 1 as a source and a destination"),
        ([[3, 3]], "block 3 as a source and a destination"),
    ],
)
def test_copies_that_do_not_fit_write_nothing(copies: list[list[int]], text: str) -> None:
    cache = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    before = cache.copy()
    with pytest.raises(InvalidArgumentError, match=text):
        copy_blocks(cache, None, copies)
    assert (cache == before).all()


def test_outputs_go_to_the_callers_arrays() -> None:
    case = make_case(5, [(1, 30), (4, 20)])
    expected, expected_lse = case.call(paged_attention, return_lse=True)
    out, lse = np.full_like(expected, np.nan), np.full_like(expected_lse, np.nan)
    assert case.call(paged_attention, out=out, lse=lse) is out
    assert out.tobytes() == expected.tobytes()
    assert lse.tobytes() == expected_lse.tobytes()
    assert case.call(paged_attention, out=out, lse=lse, return_lse=True)[1] is lse
    with pytest.raises(InvalidArgumentError, match="lse has"):
        case.call(paged_attention, lse=lse[:-1])
    with pytest.raises(InvalidArgumentError, match="lse has dtype float16"):
        case.call(paged_attention, lse=lse.astype(np.float16))
