"""Parts put together: merged states, shared prefixes read once, latent caches, pools beyond 2^31 elements."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.attention import (
    append_kv,
    cascade_attention,
    merge_states,
    mla_decode,
    paged_attention,
    prefix_groups,
)
from kvpager.errors import InvalidArgumentError

from .reference import BOUNDS, Case, attend, error, make_case


@pytest.mark.parametrize("cut", [0, 16, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_two_ranges_of_keys_equals_attending_to_all(cut: int, dtype: str) -> None:
    case = make_case(1, [(1, 64)] * 3, query_dtype=dtype)
    parts = []
    for columns, length in ((slice(0, cut // 16), cut), (slice(cut // 16, None), 64 - cut)):
        part = Case(
            case.query,
            case.k_cache,
            case.v_cache,
            case.block_tables[:, columns],
            case.query_start,
            case.context_lens,
        )
        part.context_lens = np.full(3, length, np.int32)
        parts += part.call(paged_attention, return_lse=True)
    if cut == 0:
        parts[0][...] = np.nan  # the output of an empty part is not read
    out, lse = merge_states(*parts)
    expected, expected_lse, largest = case.call(attend)
    assert error(out, expected, largest) <= 2 * BOUNDS[dtype]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    again = merge_states(*parts, out=parts[2], lse=parts[3])
    assert again[0] is parts[2]
    assert again[0].tobytes() == out.tobytes()


def test_states_without_any_key_merge_to_zero() -> None:
    out, lse = np.full((2, 1, 8), np.nan, np.float32), np.full((2, 1), -np.inf, np.float32)
    merged = merge_states(out, lse, out, lse)
    assert (merged[0] == 0).all()
    assert np.isneginf(merged[1]).all()


def test_the_log_sum_exp_has_the_sink_in_it_and_is_the_sink_where_nothing_is_seen() -> None:
    sinks = np.array([-1.0, 0.5, -np.inf, 2.0], np.float32)
    case = make_case(3, [(2, 40), (1, 0)], heads=4, kv_heads=2)
    out, bare = case.call(paged_attention, return_lse=True)
    weighed, lse = case.call(paged_attention, return_lse=True, sinks=sinks)
    np.testing.assert_allclose(lse[:2], np.logaddexp(bare[:2], sinks), rtol=1e-6)
    np.testing.assert_allclose(weighed[:2], out[:2] * np.exp(bare[:2] - lse[:2])[..., None], atol=1e-6)
    assert np.isneginf(bare[2]).all()
    np.testing.assert_array_equal(lse[2], sinks)
    assert not weighed[2].any()
    # A part with the sinks and one without them are the whole.
    empty, nothing = np.zeros_like(out), np.broadcast_to(sinks, bare.shape).copy()
    merged, merged_lse = merge_states(out, bare, empty, nothing)
    np.testing.assert_allclose(merged_lse[:2], lse[:2], rtol=1e-6)
    np.testing.assert_allclose(merged[:2], weighed[:2], atol=1e-6)


def test_merge_refuses_what_does_not_fit() -> None:
    out, lse = np.zeros((2, 3, 8), np.float32), np.zeros((2, 3), np.float32)
    for arguments in (
        (out, lse[:1], out, lse),
        (out, lse, out[..., :4], lse),
        (out, lse.astype(np.float16), out, lse),
    ):
        with pytest.raises(InvalidArgumentError):
            merge_states(*arguments)


def shared_case(seed: int, prefix: int, lengths: list[tuple[int, int]], **options: Any) -> Case:
    """A batch whose sequences all begin with the first one's first `prefix` tokens."""
    case = make_case(seed, lengths, heads=8, kv_heads=2, **options)
    case.block_tables[:, : prefix // 16] = case.block_tables[0, : prefix // 16]
    return case


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 4),
    members=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 90),
    extras=st.booleans(),
    causal=st.booleans(),
)
def test_a_cascade_gives_what_separate_sequences_give(
    seed: int, blocks: int, members: list[tuple[int, int]], window: int | None, extras: bool, causal: bool
) -> None:
    prefix = 16 * blocks
    options: dict[str, Any] = {"window": window, "causal": causal}
    if extras:
        options["sinks"] = np.linspace(-1, 1, 8).astype(np.float32)
        options["alibi_slopes"] = np.full(8, 0.1, np.float32)
        options["softcap"] = 10.0
    lengths = [(rows, prefix + rows + more) for rows, more in members]
    case = shared_case(seed, prefix, lengths, **options)
    groups = {
        "group_start": [0, len(members)],
        "group_sequences": np.arange(len(members)),
        "prefix_lens": [prefix],
    }
    out, lse = case.call(cascade_attention, **groups, return_lse=True)
    expected, expected_lse, largest = case.call(attend)
    assert error(out, expected, largest) <= BOUNDS["float32"]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_cascades_mix_with_sequences_of_their_own_and_with_long_prefixes() -> None:
    lengths = [(1, 2100), (1, 2200), (3, 2080), (1, 77), (1, 0)]
    case = make_case(3, lengths, heads=8, kv_heads=2)
    case.block_tables[[1, 2], :128] = case.block_tables[0, :128]
    groups = {"group_start": [0, 3], "group_sequences": [2, 0, 1], "prefix_lens": [2048]}
    out = case.call(cascade_attention, **groups)
    expected, _, largest = case.call(attend)
    assert error(out, expected, largest) <= BOUNDS["float32"]


def test_groups_found_in_the_tables_give_what_separate_sequences_give() -> None:
    lengths = [(1, 200), (1, 150), (3, 90), (1, 77), (1, 0), (1, 120)]
    case = make_case(7, lengths, heads=8, kv_heads=2)
    case.block_tables[[1, 5], :6] = case.block_tables[0, :6]
    case.block_tables[3, :4] = case.block_tables[2, :4]
    places = {"query_start": case.query_start, "context_lens": case.context_lens}
    groups = prefix_groups(case.block_tables, **places, block_size=16)
    members = np.split(groups["group_sequences"], groups["group_start"][1:-1])
    found = {tuple(m.tolist()): int(n) for m, n in zip(members, groups["prefix_lens"], strict=True)}
    assert found == {(0, 1, 5): 96, (2, 3): 64}
    out = case.call(cascade_attention, **groups)
    expected, _, largest = case.call(attend)
    assert error(out, expected, largest) <= BOUNDS["float32"]
    none = prefix_groups(case.block_tables, **places, block_size=16, min_tokens=1000)
    assert case.call(cascade_attention, **none).tobytes() == case.call(paged_attention).tobytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prefix_lens": [24]}, r"prefix_lens\[0\] is 24, .* in blocks of 16"),
        ({"prefix_lens": [64]}, r"prefix_lens\[0\] is 64, but sequence 1 has 60 tokens"),
        ({"prefix_lens": [0]}, r"prefix_lens\[0\] is 0"),
        ({"group_sequences": [0, 3]}, "group 0 names sequence 3 of 3"),
        ({"group_sequences": [0, 0]}, "sequence 0 is in two groups"),
        ({"group_sequences": [0, 2]}, "sequences 0 and 2 do not share their first 32 tokens: entry 0"),
        ({"group_start": [0, 1]}, "does not cut 2 members into 1 group"),
        ({"group_start": [0]}, "does not cut 2 members into 1 group"),
        ({"group_start": []}, "does not cut 2 members into 1 group"),
    ],
)
def test_groups_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    case = make_case(4, [(1, 80), (1, 61), (1, 90)], heads=8, kv_heads=2)
    case.block_tables[1, :4] = case.block_tables[0, :4]
    groups = {"group_start": [0, 2], "group_sequences": [0, 1], "prefix_lens": [32], **change}
    with pytest.raises(InvalidArgumentError, match=text):
        case.call(cascade_attention, **groups)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_decode_uses_the_head_of_each_key_as_its_value(dtype: str) -> None:
    case = make_case(
        5, [(1, 70), (2, 33), (1, 1)], heads=16, kv_heads=1, dim=576, query_dtype=dtype, kv_dtype=dtype
    )
    out = mla_decode(
        case.query,
        case.k_cache,
        kv_lora_rank=512,
        block_tables=case.block_tables,
        query_start=case.query_start,
        context_lens=case.context_lens,
        scale=192**-0.5,
    )
    case.v_cache = case.k_cache[..., :512]
    expected, _, largest = case.call(attend, scale=192**-0.5)
    assert error(out, expected, largest) <= BOUNDS[dtype]


def test_offsets_beyond_two_to_the_31_elements_are_exact() -> None:
    shape = (131072 + 64, 16, 8, 128)
    k_cache, v_cache = (np.zeros(shape, np.uint8) for _ in range(2))
    assert k_cache.size > 2**31
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((20, 8, 128)).astype(np.float32)
    blocks = np.array([131072 + 63, 5], np.int32)
    slots = np.concatenate([blocks[0] * np.int64(16) + np.arange(16), blocks[1] * 16 + np.arange(4)])
    append_kv(rows, rows, k_cache, v_cache, slots, kv_dtype="float8_e4m3fn")
    arguments = {"query_start": [0, 1], "context_lens": [20]}
    big = paged_attention(
        rows[:1], k_cache, v_cache, block_tables=[blocks], kv_dtype="float8_e4m3fn", **arguments
    )
    small = [cache[blocks].view(ml_dtypes.float8_e4m3fn) for cache in (k_cache, v_cache)]
    assert big.tobytes() == paged_attention(rows[:1], *small, block_tables=[[0, 1]], **arguments).tobytes()
    assert np.abs(big).max() > 0
