"""A server of synthetic tokens on a loopback port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from kvpager.engine import AsyncEngine, ByteTokenizer, Engine, EngineConfig, ModelRunner, NullRunner
from kvpager.server import ServerSettings, TenantTable
from kvpager.server.running import Addresses, bind, serve
from kvpager.server.tenants import TenantSpec, hash_key
from waiting import PATIENCE, wait_until

ALICE, BOB, OPERATOR = "key-of-alice", "key-of-bob", "key-of-the-operator"


def two_tenants(*, anonymous: bool = False, **alice: Any) -> TenantTable:
    tenants = {
        "alice": TenantSpec(key_hashes=(hash_key(ALICE),), **alice),
        "bob": TenantSpec(key_hashes=(hash_key(BOB),)),
    }
    if anonymous:
        tenants["anonymous"] = TenantSpec()
    return TenantTable(tenants, (hash_key(OPERATOR),))


@dataclass
class Running:
    """A server that runs.

    Attributes:
        url: of the clients' port.
        operator_url: of the operator's port.
        engine: its engine.
        loop: its event loop.
    """

    url: str
    operator_url: str
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop

    def client(self, key: str = ALICE, **options: Any) -> openai.OpenAI:
        options.setdefault("max_retries", 0)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE, **options)

    def post(self, path: str, body: Any, key: str | None = ALICE, **options: Any) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, headers=headers, timeout=PATIENCE, **content, **options)

    def get(self, path: str, key: str | None = ALICE) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE)

    def get_as_operator(self, path: str) -> httpx.Response:
        """From the operator's port, without a key."""
        return httpx.get(self.operator_url + path, timeout=PATIENCE)

    def wait_until_published(self) -> None:
        """Waits until the public system prompts were computed; their blocks stay held."""
        engine = self.engine.engine
        wait_until(lambda: not engine.num_live and not engine.has_work(), "published prompts")

    def wait_until_idle(self) -> None:
        """Waits until nothing is in flight; then every block must be free or cached."""
        engine = self.engine.engine
        wait_until(lambda: not engine.num_live and not engine.has_work(), "an idle engine")
        stats = engine.pool.stats()
        assert (stats.held, stats.reserved, stats.quarantined) == (0, 0, 0)
        assert stats.cached + stats.free == stats.capacity
        engine.pool.check_invariants()
        assert engine.index is not None
        engine.index.check_invariants()


@contextmanager
def running_server(
    *,
    runner: ModelRunner | None = None,
    table: TenantTable | None = None,
    tokenizer: Any = None,
    drain_timeout: float = 5.0,
    settings: dict[str, Any] | None = None,
    **sizes: Any,
) -> Iterator[Running]:
    """Runs a server for the length of a block."""
    table = table or two_tenants()
    tokenizer = tokenizer or ByteTokenizer()
    config = EngineConfig(**({"num_blocks": 2048} | sizes))
    engine = Engine(runner or NullRunner(step_time=0.001), config, tokenizer=tokenizer)
    table.add_to(engine)
    table.publish(engine, tokenizer)
    served = AsyncEngine(engine)
    told = ServerSettings(model_name="null", tokenizer=tokenizer, tenants=table, **(settings or {}))
    addresses = Addresses(bind("127.0.0.1", 0), bind("127.0.0.1", 0))
    ports = [addresses.clients.getsockname()[1], addresses.operator.getsockname()[1]]  # type: ignore[union-attr]
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    failures: list[BaseException] = []

    def main() -> None:
        try:
            loop.run_until_complete(serve(served, told, addresses, drain_timeout=drain_timeout, stop=stop))
        except BaseException as error:
            failures.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=main)
    thread.start()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    running = Running(urls[0], urls[1], served, loop)
    _wait_for(running, failures)
    try:
        yield running
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
        assert not failures, failures


def _wait_for(running: Running, failures: list[BaseException]) -> None:
    """Returns once the server answers, or its thread has failed."""

    def answers() -> bool:
        try:
            httpx.get(running.url + "/ready", timeout=PATIENCE)
        except httpx.TransportError:
            return bool(failures)
        return True

    wait_until(answers, "the server's first answer")
    assert not failures, failures
