"""Clients that go away at random moments leave nothing behind.

`KVPAGER_ABORTED_STREAMS` sets how many (10,000 for the full size; by default 1,000), `KVPAGER_ABORTED_DEMO`
how many with the demo model (300 for the full size; by default 12).
"""

from __future__ import annotations

import asyncio
import json
import os
import random

import pytest
from http_server import ALICE, Running, running_server

from kvpager.engine import NullRunner
from kvpager.runner import LlamaRunner, load_model

NUM_STREAMS = int(os.environ.get("KVPAGER_ABORTED_STREAMS", "1000"))
NUM_DEMO_STREAMS = int(os.environ.get("KVPAGER_ABORTED_DEMO", "12"))


def request_bytes(generator: random.Random, *, with_beams: bool) -> bytes:
    n, length = generator.choice((1, 1, 1, 3)), generator.randrange(1, 400)
    is_streamed = generator.random() < 0.8
    body = json.dumps(
        {
            "model": "null",
            "prompt": generator.choice("abcd") * length,
            "max_tokens": 200,
            "n": n,
            "stream": is_streamed,
            "use_beam_search": with_beams and not is_streamed,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ALICE}\r\n"
    head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def abandon(port: int, generator: random.Random, slowest: float, *, with_beams: bool) -> str:
    """Sends a request and closes the connection at a random moment; returns what it had seen."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request_bytes(generator, with_beams=with_beams)
    how = generator.random()
    seen = b""
    try:
        if how < 0.1:  # in the middle of the request
            writer.write(data[: generator.randrange(len(data))])
            await writer.drain()
            return "cut"
        writer.write(data)
        await writer.drain()
        if how < 0.3:  # before or while it is planned
            await asyncio.sleep(generator.random() * 0.01)
            return "early"
        async with asyncio.timeout(generator.random() * slowest):
            while piece := await reader.read(generator.choice((1, 100, 65536))):
                seen = (seen + piece)[-40:]
    except TimeoutError:
        return "midway"
    finally:
        if how > 0.6:
            writer.transport.abort()  # a reset instead of a normal close
        writer.close()
    return "end" if b"[DONE]" in seen or b"}" in seen else "closed"


def abandon_many(server: Running, count: int, slowest: float, *, with_beams: bool = False) -> dict[str, int]:
    port = int(server.url.rsplit(":", 1)[1])
    ends: dict[str, int] = {}

    async def worker(number: int) -> None:
        own = random.Random(number)
        for _ in range(number, count, 50):
            end = await abandon(port, own, slowest, with_beams=with_beams)
            ends[end] = ends.get(end, 0) + 1

    async def main() -> None:
        await asyncio.gather(*(worker(i) for i in range(min(50, count))))

    asyncio.run(main())
    return ends


@pytest.mark.parametrize("open_steps", [1, 2])
def test_aborted_streams_leave_nothing_held_reserved_or_quarantined(open_steps: int) -> None:
    runner = NullRunner(step_time=0.001, vocab_size=259)
    count = NUM_STREAMS // open_steps
    # The bound keeps requests from their end while the server has no processor to see that a client has gone.
    sizes = {"num_blocks": 512, "max_running": 32, "max_buffered_tokens": 50}
    with running_server(runner=runner, max_open_steps=open_steps, **sizes) as server:
        ends = abandon_many(server, count, slowest=0.3)
        assert sum(ends.values()) == count
        assert ends["early"] > count // 20
        assert ends["midway"] > count // 20
        server.wait_until_idle()
        counters = server.engine.snapshot().tenants["alice"]
        assert counters.submitted == sum(counters.ended.values())
        assert counters.ended["aborted"] > count // 20
        assert (counters.num_running, counters.num_waiting) == (0, 0)
        done = server.client().completions.create(model="null", prompt="still here", max_tokens=5)
        assert len(done.choices[0].text) == 5


@pytest.mark.model
def test_aborted_streams_of_the_demo_model() -> None:
    loaded = load_model("demo")
    with running_server(
        runner=LlamaRunner(loaded.model), tokenizer=loaded.tokenizer, num_blocks=128, max_running=16
    ) as server:
        ends = abandon_many(server, NUM_DEMO_STREAMS, slowest=3.0, with_beams=True)
        assert sum(ends.values()) == NUM_DEMO_STREAMS
        server.wait_until_idle()
        answer = server.client().completions.create(
            model="null", prompt="The capital of France is", max_tokens=2, temperature=0
        )
        assert answer.choices[0].text == " Paris."
