"""Every argument of the core that is no integer refuses another kind, with its name and what was given."""

from __future__ import annotations

import numpy as np
import pytest
from every_call import Argument, Calls, arguments

from kvpager import BlockPool, PrefixIndex, Scheduler, errors

OTHERS = [argument for argument in arguments() if argument.annotation not in ("int", "int | None")]
# The replay reads the attributes of what it gets; `layer_groups` and `out` have tests of their own.
APART = {"columns", "settings", "layer_groups", "out"}
CASES = [argument for argument in OTHERS if argument.name not in APART]


class Odd:
    """Of no kind that anything takes."""

    def __repr__(self) -> str:
        return "<something\n odd>"


def bad_values(annotation: str) -> list[object]:
    values: list[object] = [Odd()]
    if "None" not in annotation:
        values.append(None)
    if annotation.startswith("float"):
        values += ["1.5", True, 10**400]
    if annotation.startswith("bool"):
        values += [1, "yes"]
    if annotation.startswith(("str", "Literal")):
        values += [5, b"name", "\ud800"]
    if annotation.startswith("bytes"):
        values += ["salt", [1, 2], 7]
    if "Sequence[int]" in annotation and "ScopeChain" not in annotation:
        values += [b"abc", bytearray(b"abc"), "abc", [True], [1.5], 5, np.ones(2, bool)]
    if "Sequence[tuple" in annotation:
        values += [5, [5], [(1, 2, 3)], [("a", object())]]
    return values


def test_the_stub_has_many_arguments_that_are_no_integers() -> None:
    assert len(CASES) > 90


@pytest.mark.parametrize("argument", CASES, ids=lambda argument: ".".join(argument[:3]))
def test_values_of_another_kind_are_refused_with_the_name_and_the_value(argument: Argument) -> None:
    calls = Calls()
    call, good = calls.get(argument.owner, argument.method)
    before = repr(calls.pool.stats())
    for bad in bad_values(argument.annotation):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            call(**{**good, argument.name: bad})
        text = str(caught.value)
        assert argument.name in text, text
        assert "\n" not in text
        if isinstance(bad, Odd):
            assert "<something odd>" in text, text
    assert repr(calls.pool.stats()) == before


def test_characters_and_flags_are_no_tokens() -> None:
    pool = BlockPool(8)
    index = PrefixIndex(pool, block_size=4)
    scheduler = Scheduler(pool, index, block_size=4)
    tenant = scheduler.add_tenant("alice")
    for prompt in (b"abc", bytearray(b"abc"), "abc", [True], [1, False], np.array([True])):
        with pytest.raises(errors.InvalidArgumentError, match="prompt_ids"):
            scheduler.submit(tenant, prompt)  # type: ignore[arg-type]
    assert scheduler.num_waiting == 0
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
        assert scheduler.submit(tenant, np.arange(3, dtype=dtype), max_tokens=1)
    for prompt in (range(3), (1, 2), [np.int64(7), 2], memoryview(np.arange(3))):
        assert scheduler.submit(tenant, prompt, max_tokens=1)  # type: ignore[arg-type]


def test_a_value_with_an_endless_repr_is_shown_in_part() -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        Scheduler(BlockPool(8)).add_tenant(["x" * 10**6])  # type: ignore[arg-type]
    assert len(str(caught.value)) < 120
