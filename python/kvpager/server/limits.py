"""Bounds on what a client may send before anybody looks at it."""

from __future__ import annotations

import json

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvpager.server.errors import error_body

__all__ = ["MAX_HEADER_BYTES", "LimitedHttpProtocol", "RequestLimits"]

MAX_HEADER_BYTES = 64 * 1024


class RequestLimits:
    """ASGI middleware: a body above the limit is answered with 413 and never kept, long headers with 431."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Wraps an application."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body up to the limit, then calls the application with it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._refuse(send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            await _respond(send, 431, _header_error())
            return
        seen = 0
        is_over = False

        async def limited() -> Message:
            nonlocal seen, is_over
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_bytes:
                    is_over = True
                    return {"type": "http.disconnect"}
            return message

        async def guarded(message: Message) -> None:
            if not is_over:
                await send(message)

        try:
            await self._app(scope, limited, guarded)
        except ClientDisconnect:  # there is nobody to answer, and nothing for the log
            pass
        finally:
            if is_over:
                await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        text = f"the request body is longer than the limit of {self._max_bytes} bytes"
        await _respond(send, 413, json.dumps(error_body(413, text)).encode())


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which keeps headers of any size, with a limit: 431, and the connection closes.

    What arrived before is counted at each read, so at most one read more than the limit is kept.
    """

    _is_in_headers = True
    _num_header_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Counts what arrives before the headers are complete."""
        if self._is_in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            body = _header_error()
            self.transport.write(head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            self.transport.close()
            return
        self._num_header_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Starts counting."""
        super().on_message_begin()
        self._is_in_headers = True

    def on_headers_complete(self) -> None:
        """Stops counting."""
        self._is_in_headers = False
        self._num_header_bytes = 0
        super().on_headers_complete()


def _header_error() -> bytes:
    return json.dumps(error_body(400, f"the headers are longer than {MAX_HEADER_BYTES} bytes")).encode()
