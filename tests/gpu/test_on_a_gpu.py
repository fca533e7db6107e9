"""The kernels on a GPU: the emulator's cases, torch's attention, captured graphs, the memory checker."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention.reference import BOUNDS, attend, error, make_case
from emulator.shapes import DIMS, MIXED_TYPES, SAME_TYPES, features, lengths, with_heads
from kvpager import attention as front
from kvpager.attention import kernels
from kvpager.attention.device_plan import AttentionPlan
from kvpager.attention.device_tables import DeviceBlockTables

pytestmark = pytest.mark.gpu


def _upload(cupy: Any, case: Any) -> Any:
    """The case with its arrays on the GPU, by their bytes: CuPy need not know bf16."""
    case.query, case.k_cache, case.v_cache, case.block_tables = (
        cupy.asarray(array) for array in (case.query, case.k_cache, case.v_cache, case.block_tables)
    )
    return case


def _check(cupy: Any, case: Any) -> None:
    expected, expected_lse, largest = case.call(attend)
    out, lse = _upload(cupy, case).call(front.paged_attention, return_lse=True)
    assert error(out.get(), expected, largest) <= BOUNDS[out.dtype.name]
    seen = np.isfinite(expected_lse)
    np.testing.assert_allclose(lse.get()[seen], expected_lse[seen], rtol=1e-4, atol=1e-4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    pairs=lengths(longest=600),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (8, 1), (3, 1), (14, 2), (6, 2)]),
    dim=st.sampled_from(DIMS),
    block_size=st.sampled_from([1, 8, 16, 64, 256]),
    dtypes=st.sampled_from(SAME_TYPES + MIXED_TYPES),
    style=st.sampled_from(["plain", "peaked", "cancelling", "late"]),
    options=features(),
)
def test_any_batch_matches_the_reference(
    cupy: Any,
    seed: int,
    pairs: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtypes: tuple[str, str],
    style: str,
    options: dict[str, Any],
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
    _check(cupy, case)


def test_every_kernel_compiles_on_this_device(cupy: Any) -> None:
    assert kernels.compile_all() == len(kernels.all_instantiations())


def _graph_case(cupy: Any, lens: list[int], seed: int) -> Any:
    case = make_case(
        seed, [(1, n) for n in lens], heads=8, kv_heads=2, dim=128, query_dtype="float16", kv_dtype="float16"
    )
    return _upload(cupy, case)


def test_a_captured_graph_follows_changing_tables_and_lengths(cupy: Any) -> None:
    longest = _graph_case(cupy, [2000, 900, 40], 1)
    query, starts = longest.query.copy(), cupy.asarray(longest.query_start)
    lens, out = cupy.asarray(longest.context_lens), cupy.zeros_like(query)
    k_cache, v_cache, tables = longest.k_cache.copy(), longest.v_cache.copy(), longest.block_tables.copy()
    arrays = {"block_tables": tables, "query_start": starts, "context_lens": lens, "out": out}
    plan = AttentionPlan(query, k_cache, v_cache, max_sequences=3, max_tokens=3, max_query_len=1)
    plan.update_from(longest)
    front.paged_attention(query, k_cache, v_cache, plan=plan, **arrays)  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        front.paged_attention(query, k_cache, v_cache, plan=plan, **arrays)
        graph = stream.end_capture()
    for seed, contexts in enumerate([[2000, 900, 40], [17, 1, 1999], [100, 100, 100]]):
        step = _graph_case(cupy, contexts, seed + 10)
        for mine, new in ((k_cache, step.k_cache), (v_cache, step.v_cache)):
            mine[: len(new)] = new
        tables[:] = -1
        tables[:, : step.block_tables.shape[1]] = step.block_tables
        query[:] = step.query
        lens.set(step.context_lens)
        plan.update_from(step)
        graph.launch(stream)
        stream.synchronize()
        step.query, step.k_cache, step.v_cache, step.block_tables = (
            a.get() for a in (step.query, step.k_cache, step.v_cache, step.block_tables)
        )
        expected, _, largest = step.call(attend)
        assert error(out.get(), expected, largest) <= BOUNDS["float16"]


@pytest.mark.parametrize("mode", ["resident", "mapped"])
def test_device_tables_follow_the_arena(cupy: Any, mode: Any) -> None:
    arena = np.full((9, 33), -1, np.int32)
    tables = DeviceBlockTables(arena, mode=mode, max_changes=50)
    rng = np.random.default_rng(0)
    for _ in range(20):
        cells = rng.integers(0, arena.size, 70)
        log = np.stack([cells // 33, cells % 33, rng.integers(0, 1000, 70)], axis=1).astype(np.int32)
        for row, column, value in log:
            arena[row, column] = value
        tables.apply(log)
        np.testing.assert_array_equal(tables.tables.get(), arena)


def test_decode_equals_torchs_attention_on_gathered_keys(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    case = make_case(
        2,
        [(1, 777), (1, 512)],
        heads=32,
        kv_heads=8,
        dim=128,
        query_dtype="float16",
        kv_dtype="float16",
        fill=0.0,
    )
    query, k_cache, v_cache = (torch.from_numpy(a).cuda() for a in (case.query, case.k_cache, case.v_cache))
    out = front.paged_attention(
        query,
        k_cache,
        v_cache,
        block_tables=torch.from_numpy(case.block_tables).cuda(),
        query_start=case.query_start,
        context_lens=case.context_lens,
    )
    for row, length in enumerate(case.context_lens):
        blocks = torch.from_numpy(case.block_tables[row, : -(-int(length) // 16)]).long().cuda()
        keys, values = (c[blocks].reshape(-1, 8, 128)[:length].transpose(0, 1) for c in (k_cache, v_cache))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[row].unsqueeze(1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), enable_gqa=True
        )
        torch.testing.assert_close(out[row], expected[0, :, 0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "float8_e4m3fn"])
def test_appends_and_moved_blocks_equal_the_cpus(cupy: Any, kv_dtype: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, 2, 64)).astype(np.float16)
    slots = rng.permutation(6 * 16)[:40].astype(np.int64)
    results = []
    for place in (np.asarray, cupy.asarray):
        cache = place(np.zeros((6, 16, 2, 64), np.uint8 if kv_dtype.startswith("float8") else kv_dtype))
        options: dict[str, Any] = {}
        if kv_dtype == "int8":
            options["k_scale"] = place(np.zeros((6, 16, 2), np.float32))
        elif kv_dtype.startswith("float8"):
            options |= {"k_scale": 0.02, "kv_dtype": kv_dtype}
        front.append_kv(place(rows), None, cache, None, slots, **options)
        front.copy_blocks(cache, None, np.array([[0, 4], [1, 5]], np.int32))
        taken = front.gather_blocks(cache, np.array([4, 2], np.int32))
        front.scatter_blocks(cache, np.array([2, 3], np.int32), taken)
        front.zero_blocks(cache, np.array([1], np.int32))
        results.append((cache if place is np.asarray else cache.get()).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}, {"window": 30}])
def test_a_cascade_over_groups_found_in_a_batch_matches_the_reference(
    cupy: Any, options: dict[str, Any]
) -> None:
    pairs = [(1, 90), (3, 40), (1, 33), (2, 70), (1, 20)]
    case = make_case(9, pairs, heads=16, kv_heads=2, query_dtype="float16", kv_dtype="float16", **options)
    case.block_tables[3, :3] = case.block_tables[0, :3]
    case.block_tables[4, :1] = case.block_tables[1, :1]
    places = {"query_start": case.query_start, "context_lens": case.context_lens}
    groups = front.prefix_groups(case.block_tables, **places, block_size=16, min_tokens=16)
    assert len(groups["prefix_lens"]) == 2
    expected, _, largest = case.call(attend)
    out = _upload(cupy, case).call(front.cascade_attention, **groups)
    assert error(out.get(), expected, largest) <= BOUNDS["float16"]


def test_latent_decode_matches_the_reference(cupy: Any) -> None:
    shape = {"heads": 16, "kv_heads": 1, "dim": 576, "query_dtype": "float16", "kv_dtype": "float16"}
    case = make_case(11, [(1, 90), (2, 33), (0, 0), (1, 700)], **shape)
    query, latent, tables = (cupy.asarray(a) for a in (case.query, case.k_cache, case.block_tables))
    places = {"query_start": case.query_start, "context_lens": case.context_lens}
    out = front.mla_decode(query, latent, kv_lora_rank=512, block_tables=tables, scale=0.07, **places)
    case.v_cache = case.k_cache[..., :512]
    expected, _, largest = case.call(attend, scale=0.07)
    assert error(out.get(), expected, largest) <= BOUNDS["float16"]


def test_large_scores_keep_the_fp32_bound(cupy: Any) -> None:
    for seed, peak in enumerate((3, 8, 30)):
        for style in ("peaked", "peaked+late", "peaked+cancelling"):
            _check(cupy, make_case(seed, [(1, 400), (3, 200)], dim=128, style=style, peak=peak))


def test_compute_sanitizer_finds_nothing(cupy: Any) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    script = Path(__file__).with_name("sanitized_run.py")
    ran = subprocess.run(
        [tool, "--error-exitcode", "1", sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
