"""Quantised caches: what append stores, and attention against the reference on the dequantised values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.attention import append_kv, paged_attention
from kvpager.errors import InvalidArgumentError

from .reference import BOUNDS, DTYPES, Case, attend, dequantise, error, make_case

SCALES = ["none", "whole", "head"]


def quantised(case: Case, kv_dtype: str, scale: str, fill: float = np.nan) -> Case:
    """The case with its keys and values appended to a quantised cache."""
    blocks, block_size, kv_heads = case.k_cache.shape[:3]
    caches, scales = [], []
    for cache in (case.k_cache, case.v_cache):
        target = np.zeros(cache.shape, DTYPES[kv_dtype])
        if kv_dtype != "int8":
            target[...] = DTYPES[kv_dtype](fill)
        caches.append(target)
        if kv_dtype == "int8":
            scales.append(np.full((blocks, block_size, kv_heads), np.nan, np.float32))
        else:
            heads = np.linspace(0.02, 0.05, kv_heads).astype(np.float32)
            scales.append({"none": None, "whole": 0.03, "head": heads}[scale])
    used = ~np.isnan(case.k_cache.astype(np.float32)).any(axis=(2, 3)).reshape(-1)
    slots = np.flatnonzero(used)
    rows = [cache.reshape(-1, *cache.shape[2:])[slots] for cache in (case.k_cache, case.v_cache)]
    append_kv(*rows, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    options = {**case.options, "k_scale": scales[0], "v_scale": scales[1]}
    return Case(case.query, *caches, case.block_tables, case.query_start, case.context_lens, options)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kv_dtype=st.sampled_from(["float8_e4m3fn", "float8_e5m2", "int8"]),
    scale=st.sampled_from(SCALES),
    query_dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    dim=st.sampled_from([8, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 8, 16, 64]),
    window=st.none() | st.integers(1, 60),
)
def test_quantised_caches_match_the_reference_on_what_they_stand_for(
    seed: int, kv_dtype: str, scale: str, query_dtype: str, dim: int, block_size: int, window: int | None
) -> None:
    pairs = [(1, 50), (20, 33), (1, 0), (2, 17)]
    plain = make_case(
        seed,
        pairs,
        heads=8,
        kv_heads=2,
        dim=dim,
        block_size=block_size,
        query_dtype=query_dtype,
        window=window,
    )
    case = quantised(plain, kv_dtype, scale)
    out, lse = case.call(paged_attention, return_lse=True)
    for cache, name in ((case.k_cache, "k_scale"), (case.v_cache, "v_scale")):
        dequantised = dequantise(cache, case.options[name])
        assert np.isnan(dequantised).any()
    expected, expected_lse, largest = case.call(attend)
    assert error(out, expected, largest) <= BOUNDS[query_dtype]
    seen = np.isfinite(expected_lse)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_rounds_as_ml_dtypes_and_saturates_beyond_its_range(kv_dtype: str) -> None:
    kind = DTYPES[kv_dtype]
    top = float(ml_dtypes.finfo(kind).max)
    rng = np.random.default_rng(0)
    inside = np.concatenate(
        [rng.uniform(-top, top, 5000), rng.standard_normal(5000) * 0.01, [0.0, top, -top]]
    )
    rows = np.zeros((len(inside), 1, 1), np.float32)
    rows[:, 0, 0] = inside
    cache = np.zeros((len(inside), 1, 1, 1), kind)
    append_kv(rows, None, cache, None, np.arange(len(inside)))
    assert (cache.view(np.uint8)[:, 0, 0, 0] == rows[:, 0, 0].astype(kind).view(np.uint8)).all()
    beyond = np.array([1e6, -1e6, np.inf, -np.inf, np.nan], np.float32).reshape(5, 1, 1)
    append_kv(beyond, None, cache, None, np.arange(5))
    stored = cache[:5, 0, 0, 0].astype(np.float32)
    assert stored[:4].tolist() == [top, -top, top, -top]
    assert np.isnan(stored[4])


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_uint8_caches_are_fp8_where_the_caller_says_so(kv_dtype: str) -> None:
    case = quantised(make_case(1, [(1, 40), (9, 20)]), kv_dtype, "head")
    expected = case.call(paged_attention)
    case.k_cache, case.v_cache = case.k_cache.view(np.uint8), case.v_cache.view(np.uint8)
    assert case.call(paged_attention, kv_dtype=kv_dtype).tobytes() == expected.tobytes()
    with pytest.raises(InvalidArgumentError, match="uint8"):
        case.call(paged_attention)


def test_an_int8_scale_is_its_own_tokens_and_heads_alone() -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((3, 2, 64)).astype(np.float32)
    rows[1] *= 100
    rows[2, 1] = 0
    cache, scales = np.zeros((1, 4, 2, 64), np.int8), np.zeros((1, 4, 2), np.float32)
    append_kv(rows, None, cache, None, [0, 1, 3], k_scale=scales)
    np.testing.assert_allclose(scales[0, [0, 1]], np.abs(rows[:2]).max(-1) / 127, rtol=1e-6)
    assert scales[0, 3, 1] == 1
    assert (scales[0, 2] == 0).all()
    stored = cache[0, [0, 1, 3]].astype(np.float64) * scales[0, [0, 1, 3]][..., None]
    assert (np.abs(stored - rows) <= scales[0, [0, 1, 3]][..., None] * 0.5 + 1e-7).all()


def call_with(kv_dtype: str, **scales: Any) -> None:
    rows, cache = np.ones((1, 2, 64), np.float32), np.zeros((2, 4, 2, 64), DTYPES[kv_dtype])
    before = cache.copy()
    for call in (
        lambda: append_kv(rows, rows, cache, cache.copy(), [0], **scales),
        lambda: paged_attention(
            rows, cache, cache, block_tables=[[0]], query_start=[0, 1], context_lens=[1], **scales
        ),
    ):
        with pytest.raises(InvalidArgumentError, match="scale"):
            call()
    assert cache.tobytes() == before.tobytes()


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_impossible_scales_are_refused_on_every_path(bad: float, kv_dtype: str) -> None:
    call_with(kv_dtype, k_scale=bad)
    call_with(kv_dtype, v_scale=np.array([1.0, bad]))


def test_scales_of_the_wrong_kind_are_refused() -> None:
    right = np.ones((2, 4, 2), np.float32)
    call_with("int8")
    call_with("int8", k_scale=0.5, v_scale=right)
    call_with("int8", k_scale=right, v_scale=right[:1])
    call_with("int8", k_scale=right, v_scale=right.astype(np.float16))
    call_with("float8_e4m3fn", k_scale=right)
    call_with("float8_e5m2", v_scale=[1.0, 2.0, 3.0])
    call_with("float32", k_scale=1.0)
    call_with("bfloat16", v_scale=right)
