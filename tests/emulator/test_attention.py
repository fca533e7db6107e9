"""The attention kernels on the emulator against the float64 reference: any batch, in three thread orders."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.reference import BOUNDS, attend, error, make_case
from kvpager.attention._manifest import HEAD_DIMS, all_instantiations
from kvpager.errors import InvalidArgumentError

from . import run as emulator
from .build import library
from .shapes import DIMS, MIXED_TYPES, SAME_TYPES, features, lengths, relaid, with_heads

MAP_NORESERVE = 0x4000  # Linux; the mmap module does not name it on Python 3.11
QUICK = settings(max_examples=30, deadline=None, derandomize=True)


def check(case: Any, bound: float | None = None, **how: Any) -> None:
    """Output and log-sum-exp equal the reference's."""
    expected, expected_lse, largest = case.call(attend)
    out, lse = case.call(emulator.attend, **how)
    assert error(out, expected, largest) <= (BOUNDS[case.query.dtype.name] if bound is None else bound)
    seen = np.isfinite(expected_lse)
    assert (np.isfinite(lse) == seen).all()
    np.testing.assert_allclose(lse[seen], expected_lse[seen], rtol=2e-5, atol=2e-5)


@QUICK
@given(
    seed=st.integers(0, 2**32 - 1),
    pairs=lengths(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (8, 1), (3, 1), (14, 2), (6, 2)]),
    dim=st.sampled_from(DIMS),
    block_size=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256]),
    dtypes=st.sampled_from(SAME_TYPES + MIXED_TYPES),
    style=st.sampled_from(["plain", "peaked", "cancelling", "late"]),
    layout=st.sampled_from(["dense", "heads_first", "padded", "joint"]),
    options=features(),
    order=st.sampled_from(emulator.ORDERS),
    target_blocks=st.sampled_from([1, 8, 64]),
)
def test_any_batch_matches_the_reference_in_every_thread_order(
    seed: int,
    pairs: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtypes: tuple[str, str],
    style: str,
    layout: str,
    options: dict[str, Any],
    order: str,
    target_blocks: int,
) -> None:
    case = make_case(
        seed,
        pairs,
        heads=heads[0],
        kv_heads=heads[1],
        dim=dim,
        block_size=block_size,
        query_dtype=dtypes[0],
        kv_dtype=dtypes[1],
        style=style,
        **with_heads(options, heads[0]),
    )
    case.k_cache, case.v_cache = relaid(case.k_cache, layout), relaid(case.v_cache, layout)
    check(case, order=order, seed=seed, target_blocks=target_blocks)


@pytest.mark.parametrize("rows", [1, 40])
def test_weights_that_all_round_the_same_way_do_not_move_the_output(rows: int) -> None:
    heads = 16
    case = make_case(
        2, [(rows, 300)], heads=heads, kv_heads=1, query_dtype="bfloat16", kv_dtype="bfloat16", scale=0.6893
    )
    case.query[...] = 0
    case.query[..., 0] = 1
    # One key with weight 1, the others with 0.5019, which bfloat16 rounds to 0.5.
    case.k_cache[...] = 0
    block, slot = int(case.block_tables[0, 0]), 3
    case.k_cache[block, slot, 0, 0] = 1
    case.v_cache[...] = 1.25
    check(case, 1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 2), (14, 2)])
def test_the_result_has_the_same_bits_in_every_thread_order(dtype: str, heads: tuple[int, int]) -> None:
    case = make_case(
        5, [(1, 300), (5, 50), (40, 77)], heads=heads[0], kv_heads=heads[1], query_dtype=dtype, kv_dtype=dtype
    )
    results = [case.call(emulator.attend, order=order, seed=9)[0].tobytes() for order in emulator.ORDERS]
    assert results[0] == results[1] == results[2]


def _quantised(seed: int, kv_dtype: str, **shape: Any) -> Any:
    """A case whose cache holds quantised values with their scales; unwritten slots hold NaN or extremes."""
    case = make_case(seed, [(1, 150), (3, 40), (20, 33), (0, 0)], **shape)
    written = ~np.isnan(case.k_cache.astype(np.float32))
    rng = np.random.default_rng(seed)
    scales = {}
    for name, cache in (("k", case.k_cache), ("v", case.v_cache)):
        values = np.where(written, cache.astype(np.float32), 0)
        if kv_dtype == "int8":
            scale = np.maximum(np.abs(values).max(axis=-1), 1e-3).astype(np.float32) / 127
            codes = np.where(written, np.rint(values / scale[..., None]), -128).astype(np.int8)
            scales[f"{name}_scale"] = np.where(written[..., 0], scale, np.nan).astype(np.float32)
        else:
            scale = rng.uniform(0.02, 0.2, values.shape[2]).astype(np.float32)
            fp8 = getattr(ml_dtypes, kv_dtype)
            codes = (values / scale[:, None]).astype(fp8)
            codes[~written] = fp8(np.nan)
            scales[f"{name}_scale"] = scale
        setattr(case, f"{name}_cache", codes)
    case.options |= scales
    return case


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("query_dtype", "heads"), [("float16", (8, 2)), ("bfloat16", (8, 1)), ("float32", (4, 2))]
)
def test_quantised_caches_match_the_reference_on_their_dequantised_values(
    kv_dtype: str, query_dtype: str, heads: tuple[int, int]
) -> None:
    case = _quantised(7, kv_dtype, query_dtype=query_dtype, heads=heads[0], kv_heads=heads[1], dim=64)
    for order in emulator.ORDERS:
        check(case, order=order)


@pytest.mark.parametrize("heads", [(4, 2), (16, 2)])
def test_one_scale_for_a_tensor_is_a_number(heads: tuple[int, int]) -> None:
    case = _quantised(3, "float8_e4m3fn", query_dtype="float16", heads=heads[0], kv_heads=heads[1], dim=64)
    case.options |= {"k_scale": 0.05, "v_scale": 0.11}
    check(case)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_a_window_never_reads_blocks_that_were_given_up(block_size: int) -> None:
    case = make_case(2, [(1, 600), (3, 300)], block_size=block_size, window=70)
    for row, (rows, context) in enumerate([(1, 600), (3, 300)]):
        gone = max(0, context - rows - 70 + 1) // block_size
        case.block_tables[row, :gone] = -1
    out, _ = case.call(emulator.attend)
    case.block_tables[case.block_tables < 0] = 0
    expected, _, largest = case.call(attend)
    assert error(out, expected, largest) <= BOUNDS["float32"]


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_split_work_joins_to_what_one_block_computes(rows: int) -> None:
    sinks = np.linspace(-1, 2, 4).astype(np.float32)
    case = make_case(4, [(rows, 900), (1, 70)], query_dtype="float16", kv_dtype="float16", sinks=sinks)
    split = case.call(emulator.Attention, target_blocks=64)
    assert split.num_merges > 0
    whole = case.call(emulator.Attention, target_blocks=1)
    assert whole.num_merges == 0
    out, lse = split.run()
    whole_out, whole_lse = whole.run()
    np.testing.assert_allclose(out.astype(np.float32), whole_out.astype(np.float32), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5)


def test_rows_past_the_last_sequence_are_zero() -> None:
    case = make_case(1, [(2, 20), (1, 5)])
    padded = np.concatenate([case.query, np.full((3, *case.query.shape[1:]), np.nan, np.float32)])
    out, lse = emulator.attend(
        padded,
        case.k_cache,
        case.v_cache,
        block_tables=case.block_tables,
        query_start=case.query_start,
        context_lens=case.context_lens,
    )
    assert (out[3:] == 0).all()
    assert np.isneginf(lse[3:]).all()
    assert np.isfinite(out[:3]).all()


def test_a_plan_made_for_longer_batches_runs_a_short_one() -> None:
    # A captured launch covers the plan's room; what counts is read from memory.
    short = make_case(8, [(1, 40)])
    attention = short.call(emulator.Attention, target_blocks=4096)
    assert attention.launches[0].grid[0] > 100
    out, _ = attention.run()
    expected, _, largest = short.call(attend)
    assert error(out, expected, largest) <= BOUNDS["float32"]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(64, 8), (24, 8), (32, 2), (12, 4), (8, 8), (8, 1), (40, 10)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_query_head_reads_its_own_kv_head(q_heads: int, kv_heads: int, dtype: str) -> None:
    case = make_case(6, [(1, 20)], heads=q_heads, kv_heads=kv_heads, query_dtype=dtype, kv_dtype=dtype)
    case.v_cache[:] = np.arange(kv_heads, dtype=np.float32)[:, None].astype(dtype)
    out, _ = case.call(emulator.attend)
    expected = np.repeat(np.arange(kv_heads), q_heads // kv_heads)
    np.testing.assert_array_equal(np.rint(out[0, :, 0].astype(np.float64)), expected)


def sparse_pool(block_stride: int, block_ids: list[int], heads: int, dim: int, rng: Any) -> Any:
    """A cache of more than 2^31 elements, of which only the named blocks exist in memory."""
    blocks = max(block_ids) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    area = mmap.mmap(-1, blocks * block_stride * 2, flags=flags)
    flat = np.frombuffer(area, np.float16)
    cache = np.lib.stride_tricks.as_strided(
        flat, (blocks, 16, heads, dim), (block_stride * 2, heads * dim * 2, dim * 2, 2), writeable=True
    )
    for block in block_ids:
        cache[block] = rng.standard_normal((16, heads, dim)).astype(np.float16)
    return cache


def far_case(heads: int) -> Any:
    """A case in a pool of 4.3 billion elements; 32-bit offsets of its blocks wrap to other blocks."""
    rng = np.random.default_rng(3)
    case = make_case(3, [(1, 30)], heads=heads, kv_heads=1, query_dtype="float16", kv_dtype="float16")
    ids = [4096 + 3, 4096 + 1]  # the products wrap to 3 and 1 blocks in 32 bits
    case.k_cache = sparse_pool(2**20, ids, 1, 64, rng)
    case.v_cache = sparse_pool(2**20, ids, 1, 64, rng)
    case.block_tables[0, :2] = ids
    return case


def far_reference(case: Any) -> Any:
    """The reference on the two blocks that exist."""
    ids = case.block_tables[0, :2].copy()
    near = make_case(
        3, [(1, 30)], heads=case.query.shape[1], kv_heads=1, query_dtype="float16", kv_dtype="float16"
    )
    near.k_cache, near.v_cache = case.k_cache[ids].copy(), case.v_cache[ids].copy()
    near.block_tables[0, :2] = (0, 1)
    return near.call(attend)


@pytest.mark.parametrize("heads", [1, 8])
def test_pools_beyond_two_to_the_31_elements_are_addressed_in_64_bits(heads: int) -> None:
    case = far_case(heads)
    out, _ = case.call(emulator.attend)
    expected, _, largest = far_reference(case)
    assert error(out, expected, largest) <= BOUNDS["float16"]


def test_a_block_id_outside_the_pool_is_reported_by_debug_builds() -> None:
    case = make_case(1, [(1, 30)])
    case.block_tables[0, 1] = case.k_cache.shape[0]
    with pytest.raises(emulator.EmulatorError, match="block >= 0"):
        case.call(emulator.attend)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"window": 0}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"scale": float("nan")}, "scale"),
        ({"k_scale": 0.5}, "only 8-bit"),
        ({"alibi_slopes": np.zeros(3, np.float32)}, "alibi_slopes"),
        ({"sinks": np.zeros(4, np.float64)}, "sinks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_the_call(change: dict[str, Any], text: str) -> None:
    case = make_case(1, [(1, 30)], **change)
    with pytest.raises(InvalidArgumentError, match=text):
        case.call(emulator.Attention)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"dim": 72}, "head_dim 72"),
        ({"heads": 3, "kv_heads": 2}, "no multiple"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 512}, "power of two"),
        ({"dim": 64, "value_dim": 128}, "only a latent cache"),
    ],
)
def test_shapes_without_a_kernel_are_refused_at_the_call(shape: dict[str, Any], text: str) -> None:
    case = make_case(1, [(1, 30)], **shape)
    with pytest.raises(InvalidArgumentError, match=text):
        case.call(emulator.Attention)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    case = _quantised(3, "float8_e4m3fn", query_dtype="float16", dim=64)
    case.options |= {"k_scale": scale}
    with pytest.raises(InvalidArgumentError, match="k_scale"):
        case.call(emulator.Attention)


@pytest.mark.parametrize("style", ["peaked", "peaked+late", "peaked+cancelling"])
@pytest.mark.parametrize(("kv_dtype", "heads"), [("float32", 2), ("float32", 8), ("bfloat16", 8)])
@pytest.mark.parametrize("peak", [3, 8, 30])
def test_large_scores_keep_the_fp32_bound(style: str, kv_dtype: str, heads: int, peak: float) -> None:
    alibi = np.linspace(-0.4, 1.0, heads).astype(np.float32)
    for options in ({}, {"softcap": 50.0}, {"alibi_slopes": alibi}):
        pairs = [(1, 200), (3, 70)]
        case = make_case(3, pairs, heads=heads, dim=128, kv_dtype=kv_dtype, style=style, peak=peak, **options)
        check(case, target_blocks=4)


@pytest.fixture(scope="module")
def _every_kernel_built() -> None:
    """Compiles all attention kernels side by side, which is most of the time of the tests that use them."""
    attention = ("paged_decode", "paged_prefill", "mla_decode", "merge_splits", "zero_tail")
    units = [emulator.unit_of(item) for item in all_instantiations() if item.kernel in attention]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(library, units))


@pytest.mark.slow
@pytest.mark.usefixtures("_every_kernel_built")
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtypes", SAME_TYPES + MIXED_TYPES, ids="-".join)
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1)])
def test_every_head_size_matches_the_reference(
    dim: int, dtypes: tuple[str, str], heads: tuple[int, int]
) -> None:
    case = make_case(
        dim,
        [(1, 200), (5, 60), (33, 80)],
        dim=dim,
        heads=heads[0],
        kv_heads=heads[1],
        query_dtype=dtypes[0],
        kv_dtype=dtypes[1],
    )
    for order in emulator.ORDERS:
        check(case, order=order)


@pytest.mark.slow
@pytest.mark.usefixtures("_every_kernel_built")
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("query_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [(1, 1), (8, 1)])
def test_every_head_size_of_quantised_caches_matches_the_reference(
    dim: int, kv_dtype: str, query_dtype: str, heads: tuple[int, int]
) -> None:
    check(_quantised(dim, kv_dtype, query_dtype=query_dtype, heads=heads[0], kv_heads=heads[1], dim=dim))


def _latent_case(seed: int, dtype: str, heads: int, **options: Any) -> Any:
    """A case whose values are the first 512 elements of its keys."""
    pairs = [(1, 90), (2, 33), (0, 0), (5, 5)]
    case = make_case(
        seed,
        pairs,
        heads=heads,
        kv_heads=1,
        dim=576,
        query_dtype=dtype,
        kv_dtype=dtype,
        scale=0.07,
        **options,
    )
    case.v_cache = case.k_cache[..., :512]
    return case


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [3, 16])
def test_a_latent_cache_is_key_and_value_at_once(dtype: str, heads: int) -> None:
    case = _latent_case(11, dtype, heads)
    for order in emulator.ORDERS:
        check(case, order=order, target_blocks=4)


def test_a_latent_cache_without_a_kernel_is_refused() -> None:
    case = _latent_case(11, "float16", 4)
    case.v_cache = case.v_cache.copy()
    with pytest.raises(InvalidArgumentError, match="front of the keys"):
        case.call(emulator.Attention)
    with pytest.raises(InvalidArgumentError, match="latent cache of float32"):
        _latent_case(11, "float32", 4).call(emulator.Attention)
