"""The CUDA backend behind the public front, on an emulated device: same results as the CPU, same refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attention.reference import BOUNDS, attend, error, make_case
from kvpager import attention as front
from kvpager.attention import _cupy as backend
from kvpager.attention._plan import MIN_CHUNK
from kvpager.attention.device_plan import AttentionPlan
from kvpager.errors import InvalidArgumentError

from .device import DeviceArray, install, to_device


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def on_device(case: Any) -> Any:
    """The case with its big arrays on the device; lengths stay on the host, as a scheduler has them."""
    case.query, case.k_cache, case.v_cache = map(to_device, (case.query, case.k_cache, case.v_cache))
    case.block_tables = to_device(case.block_tables)
    return case


def matches(result: Any, case: Any) -> None:
    expected, expected_lse, largest = case.call(attend)
    out, lse = result
    assert isinstance(out, DeviceArray)
    assert isinstance(lse, DeviceArray)
    assert error(np.asarray(out), expected, largest) <= BOUNDS[case.query.dtype.name]
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "heads"), [("float32", 4), ("float16", 4), ("float16", 16)])
@pytest.mark.parametrize("lengths_on_device", [False, True])
def test_the_front_sends_device_arrays_to_the_kernels(
    dtype: str, heads: int, lengths_on_device: bool
) -> None:
    sinks = np.linspace(-1, 2, heads).astype(np.float32)
    pairs = [(1, 700), (4, 30), (0, 0), (50, 90)]
    case = on_device(
        make_case(
            3, pairs, heads=heads, kv_heads=2, query_dtype=dtype, kv_dtype=dtype, sinks=sinks, window=400
        )
    )
    if lengths_on_device:
        case.query_start, case.context_lens = to_device(case.query_start), to_device(case.context_lens)
    matches(case.call(front.paged_attention, return_lse=True), case)


def test_an_empty_batch_is_fine() -> None:
    case = on_device(make_case(1, []))
    assert case.call(front.paged_attention).shape == (0, 4, 64)


def test_output_goes_to_the_callers_array() -> None:
    case = on_device(make_case(1, [(2, 20)]))
    out, lse = to_device(np.zeros_like(case.query)), to_device(np.zeros(case.query.shape[:2], np.float32))
    assert case.call(front.paged_attention, out=out, lse=lse) is out
    np.testing.assert_allclose(np.asarray(lse), case.call(attend)[1], rtol=2e-5, atol=2e-5)
    expected, _, largest = case.call(attend)
    assert error(np.asarray(out), expected, largest) <= BOUNDS["float32"]


def test_one_plan_serves_steps_of_other_lengths_at_the_same_addresses() -> None:
    first = on_device(make_case(3, [(1, 40), (1, 90)], query_dtype="float16", kv_dtype="float16"))
    arrays = (first.query, first.k_cache, first.v_cache)
    call = backend.attention_call(
        *arrays,
        block_tables=first.block_tables,
        query_start=to_device(first.query_start),
        context_lens=to_device(first.context_lens),
        out=to_device(np.zeros_like(first.query)),
    )
    plan = AttentionPlan(*arrays, max_sequences=4, max_tokens=4, max_query_len=1)
    shape = [(launch.grid, launch.instantiation.name) for launch in plan.launches(call)]
    # Longer than a chunk, so that the plan's launches of the short batch must also do for split work.
    for pairs in ([(1, 40), (1, 90)], [(1, 5 * MIN_CHUNK), (0, 0), (1, 3)], [(1, 17)]):
        case = on_device(make_case(7, pairs, query_dtype="float16", kv_dtype="float16"))
        plan.update_from(case)  # a case has the arrays of a batch
        case.query_start, case.context_lens = to_device(case.query_start), to_device(case.context_lens)
        matches(case.call(front.paged_attention, return_lse=True, plan=plan), case)
        assert [(launch.grid, launch.instantiation.name) for launch in plan.launches(call)] == shape


def test_a_batch_larger_than_its_plan_is_refused() -> None:
    case = on_device(make_case(3, [(1, 40)]))
    arrays = (case.query, case.k_cache, case.v_cache)
    plan = AttentionPlan(*arrays, max_sequences=1, max_tokens=1, target_blocks=2)
    big = make_case(3, [(1, 10)] * 9)
    with pytest.raises(InvalidArgumentError, match="room for"):
        plan.update(big.query_start, big.context_lens)
    prompt = make_case(3, [(1, 10), (90, 90)], query_dtype="float16", kv_dtype="float16")
    halves = [to_device(a) for a in (prompt.query, prompt.k_cache, prompt.v_cache)]
    decode = AttentionPlan(*halves, max_sequences=9, max_tokens=99, max_query_len=1)
    with pytest.raises(InvalidArgumentError, match="has 90 query tokens, the plan was made for 2"):
        decode.update_from(prompt)


def test_a_plan_made_for_other_arguments_is_refused() -> None:
    case = on_device(make_case(3, [(1, 40)]))
    plan = AttentionPlan(case.query, case.k_cache, case.v_cache, max_sequences=1, max_tokens=1)
    plan.update_from(case)
    case.call(front.paged_attention, plan=plan)
    with pytest.raises(InvalidArgumentError, match="made for other arguments: window differ"):
        case.call(front.paged_attention, plan=plan, window=8)
    case.query = to_device(np.asarray(case.query)[:, :2].copy())
    with pytest.raises(InvalidArgumentError, match="group"):
        case.call(front.paged_attention, plan=plan)


def test_a_plan_for_host_arrays_is_refused() -> None:
    case = make_case(3, [(1, 40)])
    with pytest.raises(InvalidArgumentError, match="on the host"):
        case.call(front.paged_attention, plan=object())
    with pytest.raises(InvalidArgumentError, match="must be on the device"):
        AttentionPlan(case.query, case.k_cache, case.v_cache, max_sequences=1, max_tokens=1)


def test_groups_found_in_a_batch_give_the_same_result() -> None:
    case, _ = _cascade("float16", 4)
    case.table_rows = np.arange(5, dtype=np.int32)
    groups = front.prefix_groups_of(case, block_size=16, min_tokens=16)
    assert groups["prefix_lens"].tolist() == [48, 16] or groups["prefix_lens"].tolist() == [16, 48]
    matches(case.call(front.cascade_attention, return_lse=True, **groups), case)


def _cascade(dtype: str, heads: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Five sequences, of which 0, 3 and 1, 4 share prefixes of 48 and 16 tokens."""
    pairs = [(1, 90), (3, 40), (1, 33), (2, 70), (1, 20)]
    case = make_case(9, pairs, heads=heads, kv_heads=2, query_dtype=dtype, kv_dtype=dtype, **options)
    case.block_tables[3, :3] = case.block_tables[0, :3]
    case.block_tables[4, :1] = case.block_tables[1, :1]
    groups = {
        "group_start": np.array([0, 2, 4], np.int32),
        "group_sequences": np.array([3, 0, 1, 4], np.int32),
        "prefix_lens": np.array([48, 16], np.int32),
    }
    return on_device(case), groups


@pytest.mark.parametrize(("dtype", "heads"), [("float32", 4), ("float16", 4), ("bfloat16", 16)])
@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}, {"window": 30}])
def test_a_shared_prefix_read_once_gives_the_same_result(
    dtype: str, heads: int, options: dict[str, Any]
) -> None:
    sinks = np.linspace(-1, 2, heads).astype(np.float32)
    case, groups = _cascade(dtype, heads, sinks=sinks, **options)
    matches(case.call(front.cascade_attention, return_lse=True, **groups), case)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prefix_lens": np.array([40, 16], np.int32)}, "multiples of the block size"),
        ({"prefix_lens": np.array([80, 16], np.int32)}, "past the first query row"),
        ({"group_sequences": np.array([3, 0, 3, 4], np.int32)}, "two groups"),
        ({"group_sequences": np.array([3, 0, 1, 5], np.int32)}, "must name sequences"),
        ({"group_start": np.array([0, 2], np.int32)}, "group_start"),
    ],
)
def test_groups_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    case, groups = _cascade("float32", 4)
    with pytest.raises(InvalidArgumentError, match=text):
        case.call(front.cascade_attention, **(groups | change))


def test_a_latent_cache_is_appended_to_and_attended() -> None:
    rng = np.random.default_rng(0)
    latent = to_device(np.full((4, 16, 1, 576), np.nan, np.float16))
    rows = to_device(rng.standard_normal((40, 1, 576)).astype(np.float16))
    tables = to_device(np.array([[2, 0, 3, -1]], np.int32))
    slots = np.array([[2, 0, 3][i // 16] * 16 + i % 16 for i in range(40)], np.int64)
    front.append_kv(rows, None, latent, None, slots)
    query = to_device(rng.standard_normal((1, 8, 576)).astype(np.float16))
    lengths = {"query_start": np.array([0, 1], np.int32), "context_lens": np.array([40], np.int32)}
    out = front.mla_decode(query, latent, kv_lora_rank=512, block_tables=tables, scale=0.06, **lengths)
    expected, _, largest = attend(
        np.asarray(query),
        np.asarray(latent),
        np.asarray(latent[..., :512]),
        block_tables=np.asarray(tables),
        scale=0.06,
        **lengths,
    )
    assert error(np.asarray(out), expected, largest) <= BOUNDS["float16"]


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_bytes_are_taken_for_the_8_bit_floats_that_the_caller_says(kv_dtype: str) -> None:
    rng = np.random.default_rng(1)
    caches = [to_device(np.zeros((3, 16, 2, 64), np.uint8)) for _ in range(2)]
    new = [to_device(rng.standard_normal((20, 2, 64)).astype(np.float16)) for _ in range(2)]
    options = {"k_scale": 0.02, "v_scale": 0.02, "kv_dtype": kv_dtype}
    backend.append_kv(*new, *caches, np.arange(20), **options)
    out = backend.paged_attention(
        to_device(new[0][-1:].repeat(2, axis=1)),
        *caches,
        block_tables=np.array([[0, 1, -1]], np.int32),
        query_start=np.array([0, 1], np.int32),
        context_lens=np.array([20], np.int32),
        **options,
    )
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert np.abs(np.asarray(out, np.float32)).max() > 0.1


def test_blocks_move_and_states_merge_through_the_front() -> None:
    rng = np.random.default_rng(1)
    k, v = (to_device(rng.standard_normal((6, 4, 2, 64)).astype(np.float32)) for _ in range(2))
    before = np.array(k)
    front.copy_blocks(k, v, np.array([[0, 3]], np.int32))
    np.testing.assert_array_equal(np.asarray(k[3]), before[0])
    gathered = front.gather_blocks(k, np.array([5, 1], np.int32))
    np.testing.assert_array_equal(np.asarray(gathered), before[[5, 1]])
    front.zero_blocks(k, np.array([5], np.int32))
    assert not np.asarray(k[5]).any()
    front.scatter_blocks(k, np.array([5, 1], np.int32), gathered)
    np.testing.assert_array_equal(np.asarray(k[5]), before[5])
    scales = to_device(rng.standard_normal((6, 4, 2)).astype(np.float32))
    front.zero_blocks(scales, np.array([2], np.int32))
    assert not np.asarray(scales[2]).any()
    state = to_device(np.zeros((1, 2), np.float32))
    out, lse = front.merge_states(k[:1, 0], state, k[1:2, 0], state)
    np.testing.assert_allclose(np.asarray(out), (np.asarray(k[:1, 0]) + np.asarray(k[1:2, 0])) / 2, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(lse), np.log(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda k: front.zero_blocks(k, np.array([6], np.int32)), r"block_ids\[0\] is 6, must be 0 to 5"),
        (
            lambda k: front.copy_blocks(k, None, np.array([[0, -1]], np.int32)),
            r"block_copies\[0\] is -1, must be 0 to 5",
        ),
        (lambda k: front.copy_blocks(k, None, np.zeros(2, np.int32)), "shape"),
        (lambda k: front.copy_blocks(k, None, np.array([[0, 3], [1, 3]])), "names block 3 twice"),
        (
            lambda k: front.copy_blocks(k, None, np.array([[0, 3], [3, 4]])),
            "block 3 as a source and a destination",
        ),
        (lambda k: front.copy_blocks(k, k[:4], np.array([[0, 5]])), "must be 0 to 3"),
        (lambda k: front.scatter_blocks(k, np.array([1, 1]), k[:2]), "names block 1 twice"),
        (lambda k: front.zero_blocks(k, np.array([2**32])), "block_ids must fit int32, has 4294967296"),
        (lambda k: front.zero_blocks(k, np.array([1.5])), "block_ids must have integers, has float64"),
        (lambda k: front.gather_blocks(k, np.array([0], np.int32), out=k), "out must be"),
        (
            lambda k: front.scatter_blocks(k, np.array([0], np.int32), np.zeros((1, 4, 2, 64))),
            "values is a numpy.ndarray.*must be on the device",
        ),
        (lambda k: front.append_kv(k[0], k[0], k, k, np.full(4, 24)), "slot_mapping must be -1 to 23"),
        (lambda k: front.append_kv(k[0], None, k, k, np.zeros(4)), "both be given"),
    ],
)
def test_wrong_ids_and_shapes_are_refused_at_the_call(call: Any, text: str) -> None:
    k = to_device(np.zeros((6, 4, 2, 64), np.float32))
    with pytest.raises(InvalidArgumentError, match=text):
        call(k)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query_start": np.array([0, 1, 12], np.int32)}, r"query_start\[2\] is 12, must be 1 to 4"),
        ({"query_start": np.array([2, 3, 4], np.int32)}, r"query_start\[0\] is 2, expected 0"),
        ({"context_lens": np.array([20, 2], np.int32)}, r"context_lens\[1\] is 2, but the sequence has 3"),
        ({"context_lens": np.array([2000, 30], np.int32)}, "entries, 2000 tokens need"),
        ({"table_rows": np.array([0, 5], np.int32)}, "sequence 1 has no table row: 5 of"),
        (
            {"block_tables": np.full((2, 8), -1, np.int32)},
            r"block_tables\[0, 0\] is -1 inside the used range, must be 0 to",
        ),
        ({"block_tables": np.full((2, 8), 2**32)}, "block_tables must fit int32"),
        ({"context_lens": [[1], [2, 3]]}, "context_lens is no array of integers"),
    ],
)
def test_lengths_and_tables_on_the_host_are_checked_before_anything_is_written(
    change: dict[str, Any], text: str
) -> None:
    case = make_case(1, [(1, 20), (3, 30)])
    tables = case.block_tables
    case = on_device(case)
    case.block_tables = tables
    for name, value in change.items():
        target = case.__dict__ if hasattr(case, name) else case.options
        target[name] = value
    out = to_device(np.full(case.query.shape, 7, np.float32))
    with pytest.raises(InvalidArgumentError, match=text):
        case.call(front.paged_attention, out=out)
    assert (np.asarray(out) == 7).all()


def test_keys_and_values_of_different_heads_are_both_copied() -> None:
    rng = np.random.default_rng(2)
    shapes = [(6, 4, 2, 64), (6, 4, 3, 32)]
    caches = [to_device(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    before = [np.array(cache) for cache in caches]
    front.copy_blocks(*caches, np.array([[0, 3]], np.int32))
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(np.asarray(cache), old[[0, 1, 2, 0, 4, 5]])


def test_sequences_whose_tables_differ_share_no_prefix() -> None:
    case, groups = _cascade("float32", 4)
    case.block_tables = np.array(case.block_tables)
    case.block_tables[3, 1] = case.block_tables[3, 0]
    with pytest.raises(InvalidArgumentError, match="do not share their first 48 tokens: entry 1"):
        case.call(front.cascade_attention, **groups)


@pytest.mark.parametrize("values", ["far from zero", "nearly equal"])
@pytest.mark.parametrize("seed", range(4))
def test_a_cascade_rounds_its_output_once(values: str, seed: int) -> None:
    case, groups = _cascade("bfloat16", 16)
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(case.v_cache.shape)
    drawn = noise + 3 if values == "far from zero" else 1 + 0.02 * rng.random(case.v_cache.shape)
    case.v_cache[...] = drawn.astype(case.v_cache.dtype)
    matches(case.call(front.cascade_attention, return_lse=True, **groups), case)


def test_a_host_array_among_device_arrays_is_refused() -> None:
    case = make_case(1, [(1, 20)])
    case.query = to_device(case.query)
    with pytest.raises(InvalidArgumentError, match="must be on the device"):
        case.call(front.paged_attention)
