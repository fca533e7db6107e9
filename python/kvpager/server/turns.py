"""Requests that arrive together begin over several turns of the event loop: streams go on in between."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Turns"]

_BEGUN_AT_ONCE = 4
"""Requests that begin in one turn: parsing, checking and submitting one is up to a millisecond."""


class Turns:
    """ASGI middleware: a few requests begin in each turn of the loop, in the order of their arrival."""

    def __init__(self, app: ASGIApp) -> None:
        """Wraps an application that one event loop serves."""
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application in the request's turn."""
        if scope["type"] == "http":
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_begun == 0:
            loop.call_soon(self._next_turn, loop)
        if self._num_begun < _BEGUN_AT_ONCE:
            self._num_begun += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < _BEGUN_AT_ONCE:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._num_begun += 1
        if self._num_begun > 0:
            loop.call_soon(self._next_turn, loop)
