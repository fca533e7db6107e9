"""Attention parity: the native kernels against the float64 reference, over shapes, dtypes and features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.attention import _numpy as backend
from kvpager.attention import instruction_sets, paged_attention

from .reference import BOUNDS, attend, error, make_case

FAST = settings(max_examples=60, deadline=None)


def check(case: Any, bound: float | None = None) -> None:
    out, lse = case.call(paged_attention, return_lse=True)
    expected, expected_lse, largest = case.call(attend)
    bound = BOUNDS[case.query.dtype.name] if bound is None else bound
    assert error(out, expected, largest) <= bound
    seen = np.isfinite(expected_lse)
    assert (np.isfinite(lse) == seen).all()
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=1e-5, atol=1e-5)


@st.composite
def lengths(draw: st.DrawFn, longest: int = 90) -> list[tuple[int, int]]:
    pairs = []
    for _ in range(draw(st.integers(0, 5))):
        context = draw(st.integers(0, longest))
        kind = draw(st.sampled_from(["decode", "verify", "prefill", "none"]))
        rows = {"decode": 1, "verify": min(4, context), "prefill": context, "none": 0}[kind]
        pairs.append((rows, context))
    return pairs


@FAST
@given(
    seed=st.integers(0, 2**32 - 1),
    pairs=lengths(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (8, 1), (3, 1), (12, 4), (7, 1)]),
    dim=st.sampled_from([8, 16, 20, 64, 80, 96, 128, 192, 256]),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    dtypes=st.sampled_from(
        [(q, kv) for q in ("float32", "float16", "bfloat16") for kv in ("float32", "float16", "bfloat16")]
    ),
    style=st.sampled_from(["plain", "peaked", "cancelling", "late"]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(1.0, 50.0),
    extras=st.tuples(st.booleans(), st.booleans()),
)
def test_any_batch_matches_the_reference(
    seed: int,
    pairs: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtypes: tuple[str, str],
    style: str,
    causal: bool,
    window: int | None,
    softcap: float | None,
    extras: tuple[bool, bool],
) -> None:
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
    rng = np.random.default_rng(seed)
    if extras[0]:
        options["alibi_slopes"] = rng.uniform(0.0, 0.5, heads[0]).astype(np.float32)
    if extras[1]:
        options["sinks"] = rng.standard_normal(heads[0]).astype(np.float32)
    check(
        make_case(
            seed,
            pairs,
            heads=heads[0],
            kv_heads=heads[1],
            dim=dim,
            block_size=block_size,
            query_dtype=dtypes[0],
            kv_dtype=dtypes[1],
            style=style,
            **options,
        )
    )


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
def test_every_instruction_set_matches_the_reference(
    name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "instruction_set", name)
    for heads, kv_heads in [(4, 1), (2, 2), (7, 1)]:
        options = {"softcap": 20.0, "alibi_slopes": np.full(heads, 0.02, np.float32)}
        for extra in ({}, options):
            pairs = [(1, 77), (9, 60), (40, 40), (1, 1)]
            check(make_case(1, pairs, heads=heads, kv_heads=kv_heads, dim=80, kv_dtype=kv_dtype, **extra))


@pytest.mark.parametrize("heads", [(64, 8), (24, 8), (32, 2), (12, 4), (8, 8), (8, 1), (40, 10)])
def test_each_query_head_reads_its_own_kv_head(heads: tuple[int, int]) -> None:
    case = make_case(0, [(1, 20), (3, 9)], heads=heads[0], kv_heads=heads[1], dim=64)
    case.v_cache[...] = np.arange(heads[1], dtype=np.float32)[:, None]
    out = case.call(paged_attention)
    expected = np.arange(heads[0]) // (heads[0] // heads[1])
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None], out.shape), atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 1), (4, 4)])
@pytest.mark.parametrize("context", [1023, 1024, 1025, 3000])
def test_long_sequences_match_the_reference(heads: tuple[int, int], context: int) -> None:
    check(make_case(3, [(1, context), (2, context)], heads=heads[0], kv_heads=heads[1]))


def test_a_very_long_sequence_stays_within_its_bound() -> None:
    for style in ("plain", "cancelling", "late"):
        check(make_case(5, [(1, 131072)], heads=2, kv_heads=1, dim=64, style=style), 4e-6)


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("style", ["peaked", "peaked+late", "peaked+cancelling"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_large_scores_keep_the_fp32_bound(
    name: str, style: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "instruction_set", name)
    for seed, peak in enumerate((3, 4, 8, 30, 100)):  # the last: scores of 300, whose fp32 spacing is 3e-5
        for dim in (64, 128):
            pairs = [(1, 400), (3, 70), (9, 30)]
            check(make_case(seed, pairs, dim=dim, kv_dtype=kv_dtype, style=style, peak=peak))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 50.0},
        {"alibi_slopes": np.linspace(-0.4, 1.0, 4).astype(np.float32)},
        {"sinks": np.array([20.0, 0.0, -5.0, 33.0], np.float32)},
        {"window": 77, "causal": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_large_scores_keep_the_fp32_bound_with_every_feature(options: dict[str, Any]) -> None:
    for seed, peak in enumerate((3, 8, 30)):
        for style in ("peaked", "peaked+cancelling"):
            check(make_case(seed, [(1, 400), (3, 200)], dim=128, style=style, peak=peak, **options))
