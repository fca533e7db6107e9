"""Server-sent events straight to ASGI: one send a chunk, and an abort as soon as the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["EventStream", "watching_for_disconnect"]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """A response whose body comes from an iterator of chunks."""

    def __init__(self, chunks: AsyncIterator[bytes], on_disconnect: Callable[[], None]) -> None:
        """Takes the body.

        Args:
            chunks: ends the body; must close what it reads from.
            on_disconnect: called when the client has gone; makes `chunks` end.
        """
        super().__init__(media_type="text/event-stream")
        self._chunks = chunks
        self._on_disconnect = on_disconnect

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the chunks as they come."""
        try:
            async with watching_for_disconnect(receive, self._on_disconnect):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_disconnect()


@asynccontextmanager
async def watching_for_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_disconnect` if the client goes away before the block ends; its body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
