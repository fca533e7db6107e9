"""The emulator tests are themselves tested: each planted fault must be caught, and how is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention.reference import BOUNDS, attend, error, make_case

from . import run as emulator
from .build import Patch
from .replay import replay
from .test_attention import far_case, far_reference

BARRIER = "  __syncthreads();\n  const float value_scale"
FAULTS = {
    "missing barrier before the final reduction of decode": (
        1,
        Patch("paged_decode.cu", BARRIER, "  const float value_scale"),
    ),
    "missing barrier before a tile is used": (
        8,
        Patch("paged_prefill.cu", "    __syncthreads();\n    const Tile tile", "    const Tile tile"),
    ),
    "weak wait": (8, Patch("paged_prefill.cu", "copy_async_wait<1>()", "copy_async_wait<2>()")),
    "off by one at a block edge": (
        1,
        Patch("include/kvpager/paging.cuh", "position >> p.block_shift", "(position + 1) >> p.block_shift"),
    ),
    "off by one at the last position": (
        1,
        Patch(
            "include/kvpager/softmax.cuh", "view.position + 1 : context_len", "view.position : context_len"
        ),
    ),
    "wrong head group": (
        8,
        Patch("include/kvpager/softmax.cuh", "kv_head * p.group + (row", "kv_head + (row"),
    ),
    "wrong fragment of the left operand": (
        8,
        Patch(
            "paged_prefill.cu",
            "pack<T>(weights[2 * k][2], weights[2 * k][3])",
            "pack<T>(weights[2 * k][0], weights[2 * k][1])",
        ),
    ),
    "no causal mask": (
        8,
        Patch("paged_prefill.cu", "at >= views[r].begin && at < views[r].end", "at >= views[r].begin"),
    ),
    "maximum not carried on": (
        1,
        Patch("paged_decode.cu", "fmaf(state.sum[r], rescale[r], sum)", "state.sum[r] + sum"),
    ),
}


def _case(heads: int) -> Any:
    dtype = "float16"
    pairs = [(1, 150), (1, 16), (1, 33)] if heads == 1 else [(1, 150), (6, 47), (40, 90)]
    return make_case(
        5, pairs, heads=2 if heads == 1 else heads * 2, kv_heads=2, query_dtype=dtype, kv_dtype=dtype
    )


def _fault_of(case: Any, order: str, patches: tuple[Patch, ...]) -> str | None:
    """What the numeric tests would say: an emulator report, wrong values, or None when all is well."""
    expected, _, largest = case.call(attend)
    try:
        out, _ = case.call(emulator.attend, order=order, seed=3, patches=patches, target_blocks=1)
    except emulator.EmulatorError as fault:
        return str(fault)
    if np.isnan(out.astype(np.float32)).any():
        return "not a number"
    worst = error(out, expected, largest)
    return None if worst <= BOUNDS["float16"] else f"error {worst}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_by_the_numbers(name: str) -> None:
    heads, patch = FAULTS[name]
    case = _case(heads)
    assert [_fault_of(case, order, ()) for order in emulator.ORDERS] == [None] * 3
    assert any(_fault_of(case, order, (patch,)) for order in emulator.ORDERS)


def test_large_scores_left_to_fp32_are_caught() -> None:
    case = make_case(6, [(1, 200), (3, 70)], dim=128, style="peaked+cancelling", peak=30)
    patch = Patch("paged_decode.cu", "p.query_dtype == kFloat32 && ", "false && ")
    expected, _, largest = case.call(attend)
    errors = [error(case.call(emulator.attend, patches=p)[0], expected, largest) for p in ((), (patch,))]
    assert errors[0] <= BOUNDS["float32"] < errors[1]


def test_a_32_bit_offset_is_caught() -> None:
    patch = Patch(
        "include/kvpager/paging.cuh",
        "return block * block_stride",
        "return static_cast<int>(block * block_stride)",
    )
    case = far_case(1)
    expected, _, largest = far_reference(case)
    out, _ = case.call(emulator.attend, patches=(patch,))
    assert error(out, expected, largest) > 100 * BOUNDS["float16"]


def _attention(heads: int, **changes: Any) -> Any:
    case = _case(heads)
    for name, value in changes.items():
        setattr(case, name, value)
    return case.call(emulator.Attention)


def _buffers(attention: Any) -> list[Any]:
    """Every array that the launches point to."""
    found: list[Any] = [attention.out, attention.lse]
    for item in attention.kept:
        if isinstance(item, np.ndarray):
            found.append(item)
        elif hasattr(item, "counts"):
            found += [item.counts, item.work, item.merges]
    return found


def _latent_case() -> Any:
    """One KV head of 576 elements, of which 512 are also the value."""
    case = make_case(
        7, [(1, 40), (1, 17)], heads=16, kv_heads=1, dim=576, query_dtype="float16", kv_dtype="float16"
    )
    case.v_cache = case.k_cache[..., :512]
    return case


MORE_CASES: dict[str, Any] = {
    "latent": _latent_case,
    "8-bit": lambda: make_case(
        8, [(1, 40), (6, 17)], heads=2, kv_heads=2, query_dtype="float16", kv_dtype="float8_e4m3fn"
    ),
    "head size 256": lambda: make_case(
        9, [(1, 40), (6, 17)], heads=2, kv_heads=1, dim=256, query_dtype="float16", kv_dtype="float16"
    ),
}
"""What the case of every fault lacks: other kernels, other widths."""


@pytest.mark.parametrize("name", MORE_CASES)
@pytest.mark.parametrize("flavour", ["address", "undefined", "thread"])
def test_the_sanitizers_find_nothing_in_kernels_of_other_widths(name: str, flavour: str) -> None:
    case = MORE_CASES[name]()
    attention = case.call(emulator.Attention)
    outcome = replay(attention.launches, _buffers(attention), flavour)
    assert outcome.status == 0, outcome.report
    expected, _, largest = case.call(attend)
    assert error(attention.out, expected, largest) <= BOUNDS["float16"]


@pytest.mark.parametrize("flavour", ["address", "undefined", "thread"])
def test_the_sanitizers_find_nothing_in_appending(flavour: str) -> None:
    from kvpager.attention._memory_launch import append_launches

    rng = np.random.default_rng(1)
    new = [rng.standard_normal((5, 2, 64)).astype(np.float16) for _ in range(2)]
    caches = [np.zeros((3, 4, 2, 64), np.int8) for _ in range(2)]
    scales = [np.zeros((3, 4, 2), np.float32) for _ in range(2)]
    slots = np.array([3, -1, 11, 0, 7], np.int64)
    views = [emulator.view(array) for array in (*new, *caches, slots)]
    launches = append_launches(*views, k_scale=emulator.view(scales[0]), v_scale=emulator.view(scales[1]))
    outcome = replay(launches, [*new, *caches, *scales, slots], flavour)
    assert outcome.status == 0, outcome.report
    expected = np.abs(new[1][[0, 2, 3, 4]].astype(np.float32)).max(-1) / np.float32(127)
    np.testing.assert_array_equal(scales[1].reshape(12, 2)[slots[[0, 2, 3, 4]]], expected)


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("flavour", ["address", "undefined"])
def test_the_sanitizers_find_nothing_in_the_kernels(heads: int, flavour: str) -> None:
    attention = _attention(heads)
    outcome = replay(attention.launches, _buffers(attention), flavour)
    assert outcome.status == 0, outcome.report
    expected, _, largest = _case(heads).call(attend)
    assert error(attention.out, expected, largest) <= BOUNDS["float16"]


def test_a_shift_too_far_is_undefined_and_caught() -> None:
    patch = Patch("include/kvpager/paging.cuh", "1 << p.block_shift", "1 << (p.block_shift + 32)")
    attention = _attention(1)
    outcome = replay(attention.launches, _buffers(attention), "undefined", patches=(patch,))
    assert outcome.status != 0
    assert "shift exponent" in outcome.report


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("order", ["forward", pytest.param("reverse", marks=pytest.mark.slow)])
def test_the_race_detector_finds_nothing_in_the_kernels(heads: int, order: str) -> None:
    attention = _attention(heads)
    outcome = replay(attention.launches, _buffers(attention), "thread", order=order)
    assert outcome.status == 0, outcome.report


@pytest.mark.parametrize(
    "name",
    ["missing barrier before the final reduction of decode", "missing barrier before a tile is used"],
)
def test_the_race_detector_names_a_missing_barrier(name: str) -> None:
    heads, patch = FAULTS[name]
    attention = _attention(heads)
    outcome = replay(attention.launches, _buffers(attention), "thread", patches=(patch,))
    assert outcome.status != 0
    assert "data race" in outcome.report


def test_a_missing_barrier_between_an_empty_stage_and_the_results_is_a_race() -> None:
    case = make_case(5, [(1, 0)], heads=16, kv_heads=2, query_dtype="float16", kv_dtype="float16")
    patch = Patch(
        "paged_prefill.cu", "  copy_async_wait<0>();\n  __syncthreads();", "  copy_async_wait<0>();"
    )
    for patches, raced in (((), False), ((patch,), True)):
        attention = case.call(emulator.Attention)
        outcome = replay(attention.launches, _buffers(attention), "thread", patches=patches)
        assert ("data race" in outcome.report) == raced


def test_a_stage_refilled_too_early_is_a_race() -> None:
    patch = Patch(
        "paged_prefill.cu", "    __syncthreads();  // before this stage is fetched into again\n", ""
    )
    attention = _attention(8)
    outcome = replay(attention.launches, _buffers(attention), "thread", patches=(patch,))
    assert "data race" in outcome.report


def _merge_in_place() -> tuple[list[Any], list[Any]]:
    from kvpager.attention._memory_launch import merge_states_launches

    rng = np.random.default_rng(1)
    outs = [rng.standard_normal((3, 2, 64)).astype(np.float32) for _ in range(2)]
    states = [rng.standard_normal((3, 2)).astype(np.float32) for _ in range(2)]
    views = [emulator.view(array) for array in (outs[0], states[0], outs[1], states[1])]
    return merge_states_launches(*views, views[0], views[1]), [*outs, *states]


def test_a_missing_warp_sync_is_a_race() -> None:
    launches, buffers = _merge_in_place()
    assert replay(launches, buffers, "thread").status == 0
    patch = Patch("merge_states.cu", "  __syncwarp();\n", "")
    launches, buffers = _merge_in_place()
    outcome = replay(launches, buffers, "thread", patches=(patch,))
    assert "data race" in outcome.report


@pytest.mark.parametrize("heads", [1, 8])
def test_a_table_one_short_is_out_of_bounds(heads: int) -> None:
    case = _case(heads)
    needed = -(-int(case.context_lens[0]) // 16)
    short = np.ascontiguousarray(case.block_tables[:1, : needed - 1])
    starts, lens = case.query_start[:2].copy(), case.context_lens[:1].copy()
    attention = _attention(
        heads,
        query=case.query[: starts[1]].copy(),
        block_tables=short,
        query_start=starts,
        context_lens=lens,
    )
    outcome = replay(attention.launches, _buffers(attention), "address")
    assert outcome.status != 0
    assert "heap-buffer-overflow" in outcome.report


@pytest.mark.parametrize("heads", [1, 8])
def test_too_little_shared_memory_is_out_of_bounds(heads: int) -> None:
    from dataclasses import replace

    attention = _attention(heads)
    launches = [replace(item, shared_bytes=max(0, item.shared_bytes - 32)) for item in attention.launches]
    outcome = replay(launches, _buffers(attention), "address")
    assert "heap-buffer-overflow" in outcome.report
