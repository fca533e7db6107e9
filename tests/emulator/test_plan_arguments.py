"""What plans and tables on a device take from their caller: memory for partial results, bounds, streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attention.reference import make_case
from kvpager import attention as front
from kvpager.attention import tuning
from kvpager.attention._plan import MIN_CHUNK
from kvpager.attention.device_plan import AttentionPlan
from kvpager.attention.device_tables import DeviceBlockTables
from kvpager.errors import InvalidArgumentError

from .device import install, to_device


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def case() -> Any:
    made = make_case(7, [(1, 5 * MIN_CHUNK), (1, 3)], query_dtype="float16", kv_dtype="float16")
    for name in ("query", "k_cache", "v_cache", "block_tables"):
        setattr(made, name, to_device(getattr(made, name)))
    return made


class Stream:
    """What a plan uses of a CuPy stream."""

    ptr = 7
    entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        return None


def test_partial_results_of_a_plan_go_to_the_callers_workspace(case: Any) -> None:
    arrays = (case.query, case.k_cache, case.v_cache)
    bounds: dict[str, Any] = {"max_sequences": 4, "max_tokens": 4, "max_query_len": 1}
    size = AttentionPlan.workspace_bytes(*arrays, **bounds)
    results = []
    memory = to_device(np.full(size, 0xFF, np.uint8))
    for own in ({}, {"workspace": memory}):
        plan = AttentionPlan(*arrays, **bounds, **own)
        plan.update_from(case)
        results.append(np.asarray(case.call(front.paged_attention, plan=plan)).tobytes())
    assert results[0] == results[1]
    assert (np.asarray(memory) != 0xFF).any()
    with pytest.raises(
        InvalidArgumentError, match=f"workspace has {size - 16} bytes, this plan needs {size}"
    ):
        AttentionPlan(*arrays, **bounds, workspace=memory[16:])
    with pytest.raises(InvalidArgumentError, match="must be contiguous"):
        AttentionPlan(*arrays, **bounds, workspace=to_device(np.zeros((size, 2), np.uint8))[:, 0])
    with pytest.raises(InvalidArgumentError, match="belongs to the plan"):
        case.call(front.paged_attention, workspace=memory)
    with pytest.raises(InvalidArgumentError, match=r"AttentionPlan\.workspace_bytes"):
        case.call(front.workspace_bytes)


@pytest.mark.parametrize(
    "name", ["max_sequences", "max_tokens", "max_query_len", "target_blocks", "min_chunk"]
)
@pytest.mark.parametrize("value", [-1, 0, 1.5, "x"])
def test_bounds_that_are_not_positive_are_refused(case: Any, name: str, value: Any) -> None:
    bounds: dict[str, Any] = {"max_sequences": 2, "max_tokens": 2, name: value}
    with pytest.raises(InvalidArgumentError, match=f"{name} is {value!r}, expected an integer 1 to"):
        AttentionPlan(case.query, case.k_cache, case.v_cache, **bounds)


def test_updates_go_to_the_stream_that_is_given(case: Any) -> None:
    plan = AttentionPlan(case.query, case.k_cache, case.v_cache, max_sequences=2, max_tokens=2)
    stream = Stream()
    plan.update_from(case, stream=stream)
    assert stream.entered == 1
    arena = np.full((2, 4), -1, np.int32)
    tables = DeviceBlockTables(arena)
    tables.apply(np.array([[1, 2, 5]], np.int32), stream=stream)
    assert stream.entered == 2
    assert np.asarray(tables.tables)[1, 2] == 5
    with pytest.raises(InvalidArgumentError, match="stream is a int, expected a stream"):
        tables.apply(np.array([[1, 2, 6]], np.int32), stream=3)
    with pytest.raises(InvalidArgumentError, match="stream is a str"):
        plan.update_from(case, stream="0")
    assert np.asarray(tables.tables)[1, 2] == 5


def test_tables_of_an_unknown_mode_are_refused() -> None:
    arena = np.zeros((2, 4), np.int32)
    with pytest.raises(InvalidArgumentError, match="mode is 'Mapped', expected 'resident' or 'mapped'"):
        DeviceBlockTables(arena, mode="Mapped")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="num_slots is 0"):
        DeviceBlockTables(arena, num_slots=0)


def test_a_table_of_launch_shapes_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    table = tmp_path / "launch_shapes.json"
    table.write_text("{}\n")
    tuning.check_writable(table)
    assert table.read_text() == "{}\n"
    with pytest.raises(InvalidArgumentError, match=r"launch shapes cannot be written: .*missing"):
        tuning.check_writable(tmp_path / "missing" / "launch_shapes.json")
