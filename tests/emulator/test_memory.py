"""Append, copy, zero, gather, scatter, merge and table updates on the emulator, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.attention import _memory_launch as launch
from kvpager.attention import append_kv
from kvpager.errors import InvalidArgumentError

from . import run as emulator
from .run import view
from .shapes import relaid

TYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
QUICK = settings(max_examples=25, deadline=None, derandomize=True)
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def _converted(values: Any, dtype: str, scale: float) -> Any:
    """What a cache of this dtype holds of float32 values, saturated to its range."""
    if dtype in LARGEST:
        return np.clip(values / np.float32(scale), -LARGEST[dtype], LARGEST[dtype]).astype(TYPES[dtype])
    return values.astype(TYPES[dtype])


@QUICK
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(0, 9),
    heads=st.sampled_from([1, 2, 3]),
    dim=st.sampled_from([8, 64, 80, 256]),
    block_size=st.sampled_from([1, 4, 16]),
    dtypes=st.tuples(st.sampled_from(["float32", "float16", "bfloat16"]), st.sampled_from(list(TYPES))),
    layout=st.sampled_from(["dense", "heads_first", "padded"]),
    order=st.sampled_from(emulator.ORDERS),
)
def test_append_writes_each_token_to_its_slot_and_nothing_else(
    seed: int,
    tokens: int,
    heads: int,
    dim: int,
    block_size: int,
    dtypes: tuple[str, str],
    layout: str,
    order: str,
) -> None:
    rng = np.random.default_rng(seed)
    source, target = dtypes
    blocks = 12 // min(block_size, 4) + 1
    new = [rng.standard_normal((tokens, heads, dim)).astype(TYPES[source]) for _ in range(2)]
    caches = [
        relaid(np.full((blocks, block_size, heads, dim), 7, np.float32).astype(TYPES[target]), layout)
        for _ in range(2)
    ]
    slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    options: dict[str, Any] = {}
    if target == "int8":
        scales = [np.full((blocks, block_size, heads), 7, np.float32) for _ in range(2)]
        options = {"k_scale": view(scales[0]), "v_scale": view(scales[1])}
    elif target in LARGEST:
        options = {"k_scale": 0.25, "v_scale": 0.25}
    emulator.run(
        launch.append_launches(
            view(new[0]), view(new[1]), view(caches[0]), view(caches[1]), view(slots), **options
        ),
        order=order,
    )
    for side in range(2):
        expected = np.full((blocks, block_size, heads, dim), 7, np.float32).astype(TYPES[target])
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            values = new[side][token].astype(np.float32)
            at = (slot // block_size, slot % block_size)
            if target == "int8":
                scale = np.abs(values).max(axis=-1) / np.float32(127)
                np.testing.assert_array_equal(scales[side][at], scale)
                expected[at] = np.rint(values / scale[:, None]).astype(np.int8)
            else:
                expected[at] = _converted(values, target, 0.25)
        np.testing.assert_array_equal(caches[side].astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_saturate_and_round_as_ml_dtypes_does(dtype: str) -> None:
    rng = np.random.default_rng(0)
    edges = np.array(
        [0.0, -0.0, 1e9, -1e9, np.inf, -np.inf, 1e-9, 2.0**-17, 464.0, 61440.0, 0.0146484375, 3e-3],
        np.float32,
    )
    spread = (rng.standard_normal(4084) * np.exp(rng.uniform(-12, 12, 4084))).astype(np.float32)
    values = np.concatenate([edges, spread]).reshape(16, 1, 256)
    cache, other = np.zeros((16, 1, 1, 256), TYPES[dtype]), np.zeros((16, 1, 1, 256), TYPES[dtype])
    slots = np.arange(16, dtype=np.int64)
    emulator.run(launch.append_launches(view(values), view(values), view(cache), view(other), view(slots)))
    expected = _converted(values, dtype, 1.0)
    np.testing.assert_array_equal(cache[:, 0].view(np.uint8), expected.view(np.uint8))


def test_a_vector_of_zeros_gets_a_scale_that_can_be_divided_by() -> None:
    zeros = np.zeros((1, 1, 64), np.float32)
    cache, scale = np.full((1, 1, 1, 64), 5, np.int8), np.zeros((1, 1, 1), np.float32)
    slots = np.zeros(1, np.int64)
    emulator.run(
        launch.append_launches(
            view(zeros),
            view(zeros),
            view(cache),
            view(cache),
            view(slots),
            k_scale=view(scale),
            v_scale=view(scale),
        )
    )
    assert scale[0, 0, 0] == 1.0
    assert not cache.any()


def test_int8_scales_are_those_of_the_native_kernels() -> None:
    rows = np.ones((5, 1, 64), np.float32)
    rows[1, 0, 9], rows[2, 0, 63], rows[3], rows[4, 0, 5] = np.nan, np.inf, 1e-42, -3.0
    slots = np.arange(5, dtype=np.int64)
    scales = [np.zeros((5, 1, 1), np.float32) for _ in range(2)]
    caches = [np.zeros((5, 1, 1, 64), np.int8) for _ in range(2)]
    emulator.run(
        launch.append_launches(
            view(rows), None, view(caches[0]), None, view(slots), k_scale=view(scales[0]), v_scale=None
        )
    )
    append_kv(rows, None, caches[1], None, slots, k_scale=scales[1])
    np.testing.assert_array_equal(scales[0], scales[1])
    assert np.isnan(scales[0][[1, 2]]).all()
    finite = [0, 3, 4]
    np.testing.assert_array_equal(caches[0][finite], caches[1][finite])


@pytest.mark.parametrize("scale", [0.0, -2.0, float("nan"), float("inf")])
def test_append_refuses_a_scale_that_is_no_positive_number(scale: float) -> None:
    new, cache = np.zeros((1, 1, 64), np.float32), np.zeros((1, 1, 1, 64), TYPES["float8_e4m3fn"])
    slots = np.zeros(1, np.int64)
    with pytest.raises(InvalidArgumentError, match="k_scale"):
        launch.append_launches(view(new), view(new), view(cache), view(cache), view(slots), k_scale=scale)


def test_a_slot_past_the_pool_is_reported_by_debug_builds() -> None:
    new, cache = np.zeros((1, 1, 64), np.float32), np.zeros((2, 4, 1, 64), np.float32)
    slots = np.array([8], np.int64)
    with pytest.raises(emulator.EmulatorError, match="num_slots"):
        emulator.run(launch.append_launches(view(new), view(new), view(cache), view(cache), view(slots)))


@QUICK
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(["float32", "float16", "int8", "float8_e5m2"]),
    shape=st.sampled_from([(9, 4, 2, 64), (8, 1, 3, 80), (7, 16, 1, 5)]),
    layout=st.sampled_from(["dense", "heads_first", "padded"]),
    order=st.sampled_from(emulator.ORDERS),
)
def test_blocks_are_copied_gathered_scattered_and_zeroed_bit_for_bit(
    seed: int, dtype: str, shape: tuple[int, ...], layout: str, order: str
) -> None:
    rng = np.random.default_rng(seed)
    k, v = (relaid((rng.standard_normal(shape) * 40).astype(TYPES[dtype]), layout) for _ in range(2))
    expected_k, expected_v = k.copy(), v.copy()
    ids = rng.permutation(shape[0])[:6].astype(np.int32)
    pairs = ids.reshape(3, 2)
    emulator.run(
        launch.copy_launches(
            [view(k), view(v)],
            [view(k), view(v)],
            from_ids=view(pairs[:, 0]),
            to_ids=view(pairs[:, 1]),
            num_items=3,
        ),
        order=order,
    )
    for expected in (expected_k, expected_v):
        expected[pairs[:, 1]] = expected[pairs[:, 0]]
    _same(k, expected_k)
    _same(v, expected_v)

    gathered = np.zeros((6, *shape[1:]), TYPES[dtype])
    emulator.run(
        launch.copy_launches([view(k)], [view(gathered)], from_ids=view(ids), to_ids=None, num_items=6),
        order=order,
    )
    _same(gathered, expected_k[ids])

    emulator.run(
        launch.copy_launches([view(gathered)], [view(v)], from_ids=None, to_ids=view(ids), num_items=6),
        order=order,
    )
    expected_v[ids] = gathered
    _same(v, expected_v)

    emulator.run(launch.zero_launches([view(k), view(v)], view(ids[:2])), order=order)
    expected_k[ids[:2]] = expected_v[ids[:2]] = 0
    _same(k, expected_k)
    _same(v, expected_v)


def _same(array: Any, expected: Any) -> None:
    assert np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(expected).tobytes()


def test_no_ids_is_no_launch() -> None:
    cache, none = np.zeros((2, 4, 1, 64), np.float32), np.zeros(0, np.int32)
    assert launch.zero_launches([view(cache)], view(none)) == []
    assert (
        launch.copy_launches(
            [view(cache)], [view(cache)], from_ids=view(none), to_ids=view(none), num_items=0
        )
        == []
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merged_states_equal_attention_over_the_union(dtype: str) -> None:
    rng = np.random.default_rng(2)
    outs = [rng.standard_normal((5, 3, 80)).astype(TYPES[dtype]) for _ in range(2)]
    states = [rng.standard_normal((5, 3)).astype(np.float32) * 4 for _ in range(2)]
    states[0][1], states[1][2] = -np.inf, -np.inf
    states[0][3] = states[1][3] = -np.inf
    outs[0][1], outs[1][2] = np.nan, np.nan
    outs[0][3] = outs[1][3] = np.nan
    out, lse = np.full_like(outs[0], np.nan), np.full((5, 3), np.nan, np.float32)
    emulator.run(
        launch.merge_states_launches(
            view(outs[0]), view(states[0]), view(outs[1]), view(states[1]), view(out), view(lse)
        )
    )
    with np.errstate(all="ignore"):
        total = np.logaddexp(states[0].astype(np.float64), states[1])
        shares = [np.where(np.isneginf(s), 0, np.exp(s - total))[..., None] for s in states]
    parts = [
        np.where(share > 0, share * o.astype(np.float64), 0) for share, o in zip(shares, outs, strict=True)
    ]
    np.testing.assert_allclose(
        out.astype(np.float64), parts[0] + parts[1], atol={"float32": 1e-6, "float16": 2e-3}.get(dtype, 2e-2)
    )
    np.testing.assert_allclose(lse, total, rtol=1e-5)


def test_table_changes_are_applied_up_to_the_count_that_memory_says() -> None:
    table = np.full((6, 10), -1, np.int32)
    rng = np.random.default_rng(4)
    cells = rng.permutation(60)[:40]
    log = np.zeros((300, 4), np.int32)
    log[:40, 0], log[:40, 1], log[:40, 2] = cells // 10, cells % 10, np.arange(40) + 100
    count = np.array([25], np.int32)
    launches = launch.delta_launches(view(table), view(log), count.ctypes.data)
    emulator.run(launches)
    expected = np.full((6, 10), -1, np.int32)
    expected.reshape(-1)[cells[:25]] = np.arange(25) + 100
    np.testing.assert_array_equal(table, expected)
    # The same launch, replayed: another step's count and entries.
    log[:3] = [[0, 0, 7, 0], [1, 1, 8, 0], [5, 9, 9, 0]]
    count[0] = 3
    emulator.run(launches, order="reverse")
    expected[0, 0], expected[1, 1], expected[5, 9] = 7, 8, 9
    np.testing.assert_array_equal(table, expected)
