"""Requests that arrive together do not keep the event loop to themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpager.server.turns import Turns


class Recorded:
    """An ASGI application that notes in which turn of the loop each of its requests began."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[int, int]] = []

    async def __call__(self, scope: Any, _receive: Any, _send: Any) -> None:
        self.begun.append((scope["number"], self.turn))


async def nothing(*_message: Any) -> Any:
    raise AssertionError("nobody reads or writes here")


async def arrive(turns: Turns, recorded: Recorded, count: int, cancelled: frozenset[int]) -> None:
    async def count_turns() -> None:
        while True:
            await asyncio.sleep(0)
            recorded.turn += 1

    counting = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    scopes = [{"type": "http", "number": number} for number in range(count)]
    tasks = [asyncio.create_task(turns(scope, nothing, nothing)) for scope in scopes]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counting.cancel()


@pytest.mark.parametrize("count", [1, 4, 5, 256])
@pytest.mark.parametrize("cancelled", [frozenset(), frozenset({5, 6, 7, 8, 9, 30, 255})])
def test_requests_of_one_moment_begin_four_a_turn_in_their_order(
    count: int, cancelled: frozenset[int]
) -> None:
    recorded = Recorded()
    turns = Turns(recorded)
    gone = frozenset(number for number in cancelled if number < count)
    for _ in range(2):  # the second time nothing of the first is left
        recorded.begun.clear()
        asyncio.run(arrive(turns, recorded, count, gone))
        assert [number for number, _ in recorded.begun] == [n for n in range(count) if n not in gone]
        in_turns = [turn for _, turn in recorded.begun]
        assert max(in_turns.count(turn) for turn in in_turns) <= 4
        assert len(set(in_turns)) <= count / 4 + 2


def test_a_request_alone_begins_at_once() -> None:
    recorded = Recorded()
    turns = Turns(recorded)

    async def one() -> None:
        call = turns({"type": "http", "number": 0}, nothing, nothing)
        with pytest.raises(StopIteration):
            call.send(None)

    asyncio.run(one())
    assert recorded.begun == [(0, 0)]
