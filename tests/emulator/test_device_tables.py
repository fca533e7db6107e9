"""The device copy of the block tables follows the scheduler's arena, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager.attention.device_tables import DeviceBlockTables, last_changes
from kvpager.errors import InvalidArgumentError

from .device import install

changes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(-1, 99)), max_size=40)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=st.lists(changes, max_size=5), capacity=st.sampled_from([1, 3, 64]))
def test_the_copy_equals_the_arena_after_every_step(
    steps: list[list[tuple[int, int, int]]], capacity: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, order="random")
        arena = np.full((5, 7), -1, np.int32)
        tables = DeviceBlockTables(arena, max_changes=capacity, num_slots=2)
        address = tables.tables.ctypes.data
        for step in steps:
            log = np.array(step, np.int32).reshape(-1, 3)
            for row, column, value in log:  # an entry may change several times in a step: the last one counts
                arena[row, column] = value
            tables.apply(log)
            np.testing.assert_array_equal(np.asarray(tables.tables), arena)
        assert tables.tables.ctypes.data == address


def test_a_change_outside_the_tables_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    tables = DeviceBlockTables(np.full((2, 3), -1, np.int32))
    for wrong in ([[0, 0, 5], [2, 0, 1]], [[0, 3, 1]], [[-1, 0, 1]]):
        with pytest.raises(InvalidArgumentError, match="2 x 3"):
            tables.apply(np.array(wrong, np.int32))
    with pytest.raises(InvalidArgumentError, match="shape"):
        tables.apply(np.zeros((1, 4), np.int32))
    assert (np.asarray(tables.tables) == -1).all()


def test_an_arena_that_is_no_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(InvalidArgumentError, match="contiguous int32"):
        DeviceBlockTables(np.zeros((2, 3), np.int64))  # type: ignore[arg-type]


def test_the_last_change_of_an_entry_wins() -> None:
    log = np.array([[1, 1, 5], [0, 0, 9], [1, 1, -1], [1, 1, 6]], np.int32)
    assert last_changes(log, 10).tolist() == [[0, 0, 9], [1, 1, 6]]
