"""Running the applications under uvicorn: ports, signals, and a shutdown that drains first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Generator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from kvpager.engine import AsyncEngine
from kvpager.errors import InvalidArgumentError
from kvpager.server.app import create_app, create_operator_app
from kvpager.server.limits import LimitedHttpProtocol
from kvpager.server.settings import ServerSettings

__all__ = ["Addresses", "bind", "serve"]

_CLOSE_TIMEOUT = 5

_KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: clients (5 s) and proxies (60 s) keep it for less and close it.

A server that closes first may do so while a request is on its way, which then fails.
"""

_BACKLOG = 2048
"""Connections that may wait while the model loads."""


@dataclass(frozen=True)
class Addresses:
    """Listening sockets: for clients, and for the operator if there is a port for that."""

    clients: socket.socket
    operator: socket.socket | None = None


class _Server(uvicorn.Server):
    """A server that leaves signals to `serve`, which drains before it stops anything."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """Listens on a port; 0 takes a free one. Connections wait until `serve` takes them.

    Raises:
        InvalidArgumentError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # From here on clients may connect, and a second server on the port is refused.
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidArgumentError(f"cannot listen on {host} port {port}: {error}") from error
    return listening


async def serve(
    engine: AsyncEngine,
    settings: ServerSettings,
    addresses: Addresses,
    *,
    drain_timeout: float,
    stop: asyncio.Event | None = None,
) -> None:
    """Serves, then drains: `/ready` says 503, new requests get 503, running ones end.

    Args:
        engine: shut down at the end.
        settings: what the server is told.
        addresses: from `bind`; closed at the end.
        drain_timeout: seconds after which running requests are ended.
        stop: ends it when set. If not given, SIGINT or SIGTERM does, a second one ends what runs with the
            step that the model is in, and a third one the process.
    """
    servers = [_server(create_app(engine, settings))]
    sockets = [addresses.clients]
    if addresses.operator is not None:
        servers.append(_server(create_operator_app(engine, settings)))
        sockets.append(addresses.operator)
    now = asyncio.Event()
    if stop is None:
        stop = _on_signals(now)
    running = [
        asyncio.create_task(server.serve([listening]))
        for server, listening in zip(servers, sockets, strict=True)
    ]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
        await _drain(engine, now, drain_timeout)
    finally:
        stopping.cancel()
        await engine.shutdown()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)


def _on_signals(now: asyncio.Event) -> asyncio.Event:
    """Returns an event that the first SIGINT or SIGTERM sets; the second one sets `now`, the third exits."""
    first = asyncio.Event()

    def note() -> None:
        if now.is_set():
            print("Ended at once.", file=sys.stderr, flush=True)
            os._exit(130)  # the model may hang, and nobody can end its step
        text = "The step that runs is the last" if first.is_set() else "What runs goes on to its end"
        print(
            f"{text}; Ctrl-C again ends {'the process' if first.is_set() else 'it'}.",
            file=sys.stderr,
            flush=True,
        )
        (now if first.is_set() else first).set()

    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is signal.SIG_IGN:
            continue  # who started this process with it ignored means it
        asyncio.get_running_loop().add_signal_handler(each, note)
    return first


async def _drain(engine: AsyncEngine, now: asyncio.Event, timeout: float) -> None:
    drained = asyncio.create_task(engine.drain(timeout))
    impatient = asyncio.create_task(now.wait())
    await asyncio.wait([drained, impatient], return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    impatient.cancel()


def _server(app: FastAPI) -> _Server:
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT,
    )
    return _Server(config)
