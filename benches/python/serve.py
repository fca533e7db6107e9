"""What the engine and the server cost beside a model: writes the tables of benches/results/server.md.

    python benches/python/serve.py [--case CASE ...] [--repeat 5] [--peer-python PATH]

Cases, each a section of the page:
    demo    tokens per second of 32 streams with the demo model: the bare runner, the engine, `AsyncEngine`
            and HTTP streaming, taking turns in one process with equal batch sizes; medians of the rounds.
    null    256 streams of synthetic tokens, one a step of 25 ms: CPU time a token of the bare step loop, of
            `AsyncEngine`, and of the server (client in a process of its own), and the event loop's lag.
    submit  from `generate` to the start of the request's first step, engine idle.
    peer    the demo model in Hugging Face transformers' continuous batching beside this engine: same weights,
            prompts, threads, fp32. Needs --peer-python, an environment with torch, transformers and
            accelerate.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import sections

from kvpager import BlockPool, Scheduler
from kvpager.engine import AsyncEngine, ByteTokenizer, Engine, EngineConfig, GenerationParams, NullRunner
from kvpager.server import ServerSettings, TenantTable
from kvpager.server.running import Addresses, bind, serve

PAGE = Path(__file__).resolve().parents[1] / "results/server.md"
STREAMS = 32
NULL_STREAMS = 256
STEP_TIME = 0.025
VOCABULARY = 120
"""Bytes of ASCII, so that every token has text at once."""


# --- parts --------------------------------------------------------------------------------------------------


def bare_loop(runner: Any, prompts: list[list[int]], max_tokens: int, config: EngineConfig) -> float:
    """Seconds of a plain loop over a scheduler: step, run, argmax, commit. Nothing is delivered."""
    scheduler = Scheduler(
        BlockPool(config.num_blocks),
        block_size=config.block_size,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_model_tokens=runner.max_model_tokens,
    )
    tenant = scheduler.add_tenant("bench")
    for prompt in prompts:
        scheduler.submit(tenant, prompt, max_tokens=max_tokens)
    counts: dict[int, int] = {}

    class Row:
        def __init__(self, request_id: int) -> None:
            self.request_id = request_id
            self.num_sampled = counts.get(request_id, 0)

    start = time.perf_counter()
    while scheduler.has_work():
        batch = scheduler.step()
        owners = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
        starts = np.zeros(batch.num_sequences + 1, np.int32)
        starts[1:] = np.cumsum(np.bincount(owners, minlength=batch.num_sequences))
        if runner.gives_logits:
            tokens = runner.run(batch, ()).argmax(axis=1).astype(np.int32)
        else:
            ids = batch.sequence_ids[owners].tolist()
            tokens = runner.run(batch, [Row(i) for i in ids])
            for i in ids:
                counts[i] = counts.get(i, 0) + 1
        scheduler.commit(batch.step_id, starts, tokens)
    return time.perf_counter() - start


async def consume(engine: AsyncEngine, prompts: list[list[int]], max_tokens: int) -> int:
    """Tokens of all streams, consumed at once."""

    async def one(prompt: list[int]) -> int:
        params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)
        stream = engine.generate(prompt, params, tenant="anonymous")
        return sum([len(output.token_ids) async for output in stream])

    return sum(await asyncio.gather(*map(one, prompts)))


CLIENT = """
import asyncio, json, sys, time
async def one(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Type: application/json\\r\\n"
    head += f"Content-Length: {len(body)}\\r\\n\\r\\n"
    writer.write(head.encode() + body)
    chunks, tail = 0, b""
    while not tail.endswith(b"0\\r\\n\\r\\n"):
        piece = await reader.read(65536)
        assert piece
        chunks += piece.count(b"data: {")
        tail = (tail + piece)[-5:]
    writer.close()
    return chunks
async def main():
    port, bodies = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    chunks = await asyncio.gather(*(one(port, json.dumps(body).encode()) for body in bodies))
    print(json.dumps([time.perf_counter() - start, sum(chunks)]))
asyncio.run(main())
"""


def http_clients(port: int, prompts: list[list[int]], max_tokens: int) -> tuple[float, int]:
    """(seconds, chunks) of as many streaming clients as there are prompts, in a process of their own."""
    body = {"model": "bench", "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    request = json.dumps([port, [{**body, "prompt": prompt} for prompt in prompts]])
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], input=request + "\n", capture_output=True, text=True, check=True
    )
    seconds, chunks = json.loads(done.stdout)
    return seconds, chunks


class HttpServer:
    """A server in a thread, under uvloop as `kvpager serve` runs it, which also measures its loop's lag."""

    def __init__(self, engine: AsyncEngine, tokenizer: Any) -> None:
        import uvloop

        settings = ServerSettings(model_name="bench", tokenizer=tokenizer, tenants=TenantTable.open())
        address = bind("127.0.0.1", 0)
        self.port = address.getsockname()[1]
        self.lags: list[float] = []
        self._stop = asyncio.Event()
        self._loop = uvloop.new_event_loop()

        async def main() -> None:
            lag = asyncio.create_task(measure_lag(self.lags))
            await serve(engine, settings, Addresses(address), drain_timeout=1, stop=self._stop)
            lag.cancel()

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(main()))
        self._thread.start()
        time.sleep(0.5)

    def close(self) -> None:
        """Stops it, and its engine."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def measure_lag(lags: list[float]) -> None:
    """Appends how much later than asked a sleep of 1 ms ends, again and again."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - start - 0.001)


class Timed:
    """A runner that adds up the seconds spent in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Any, sampled: Any, /) -> Any:
        start = time.perf_counter()
        try:
            return self._runner.run(batch, sampled)
        finally:
            self.seconds += time.perf_counter() - start


def new_engine(runner: Any, config: EngineConfig, tokenizer: Any = None) -> Engine:
    engine = Engine(runner, config, tokenizer=tokenizer)
    engine.add_tenant("anonymous")
    return engine


LINES: list[str] = []
"""What the case at hand has written."""


def write(line: str) -> None:
    LINES.append(line)
    print(line, flush=True)


def row(name: str, *values: str) -> None:
    write(sections.row(name, *values))


# --- cases --------------------------------------------------------------------------------------------------


def demo(repeat: int) -> None:
    from kvpager.runner import LlamaRunner, load_model

    loaded = load_model("demo")
    config = EngineConfig(num_blocks=1024, max_batch_tokens=512, max_running=STREAMS, reuse=False)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(100, 40_000, 16).tolist() for _ in range(STREAMS)]
    max_tokens = 24
    runners = {name: Timed(LlamaRunner(loaded.model)) for name in ("bare", "engine", "async", "http")}
    runners["bare"].allocate(num_blocks=config.num_blocks, block_size=config.block_size, host_blocks=0)
    engines = {
        name: new_engine(runners[name], config, loaded.tokenizer) for name in ("engine", "async", "http")
    }
    served = {name: AsyncEngine(engines[name]) for name in ("async", "http")}
    server = HttpServer(served["http"], loaded.tokenizer)
    params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)

    def run_engine() -> float:
        for prompt in prompts:
            engines["engine"].submit(prompt, params, tenant="anonymous")
        start = time.perf_counter()
        engines["engine"].run()
        return time.perf_counter() - start

    def run_async() -> float:
        start = time.perf_counter()
        asyncio.run(consume(served["async"], prompts, max_tokens))
        return time.perf_counter() - start

    ways: dict[str, Callable[[], float]] = {
        "bare runner": lambda: bare_loop(runners["bare"], prompts, max_tokens, config),
        "Engine": run_engine,
        "AsyncEngine": run_async,
        "HTTP streaming": lambda: http_clients(server.port, prompts, max_tokens)[0],
    }
    rates, costs, inside = rounds(ways, repeat, STREAMS * max_tokens, list(runners.values()))
    row(f"{STREAMS} streams, demo model", "tokens/s", "of the bare runner", "range", "by CPU", "in the model")
    row("---", "---:", "---:", "---:", "---:", "---:")
    for name, found in rates.items():
        shares = [rate / bare for rate, bare in zip(found, rates["bare runner"], strict=True)]
        busy = [bare / cost for cost, bare in zip(costs[name], costs["bare runner"], strict=True)]
        row(
            name,
            f"{statistics.median(found):.0f}",
            f"{statistics.median(shares):.3f}",
            f"{min(shares):.3f} to {max(shares):.3f}",
            f"{statistics.median(busy):.3f}",
            f"{statistics.median(inside[name]):.4f}",
        )
    server.close()
    served["async"].close()


def rounds(
    ways: dict[str, Callable[[], float]], repeat: int, tokens: int, runners: list[Timed]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[float]]]:
    """Tokens per second, CPU seconds of this process, and the share of the time in the model, of each round.

    The ways take turns, and another one begins each round, so that noise meets all of them. CPU time stays
    comparable on a busy machine.
    """
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    inside: dict[str, list[float]] = {name: [] for name in ways}
    contenders = list(zip(ways, ways.values(), runners, strict=True))
    for number in range(repeat + 1):
        first = number % len(contenders)
        for name, way, runner in contenders[first:] + contenders[:first]:
            start, runner.seconds = time.process_time(), 0.0
            seconds = way()
            if number:  # the first round warms up
                rates[name].append(tokens / seconds)
                costs[name].append(time.process_time() - start)
                inside[name].append(runner.seconds / seconds)
    return rates, costs, inside


def null_runner() -> NullRunner:
    return NullRunner(step_time=STEP_TIME, vocab_size=VOCABULARY)


def null_bare(config: EngineConfig, prompts: list[list[int]], max_tokens: int, _lags: list[float]) -> float:
    bare_loop(null_runner(), prompts, max_tokens, config)
    return 1.0


def null_async(config: EngineConfig, prompts: list[list[int]], max_tokens: int, lags: list[float]) -> float:
    engine = AsyncEngine(new_engine(null_runner(), config))

    async def main() -> int:
        watch = asyncio.create_task(measure_lag(lags))
        total = await consume(engine, prompts, max_tokens)
        watch.cancel()
        return total

    assert asyncio.run(main()) == len(prompts) * max_tokens
    engine.close()
    return 1.0


def null_http(config: EngineConfig, prompts: list[list[int]], max_tokens: int, lags: list[float]) -> float:
    """Returns the tokens in a chunk: 1 unless the machine falls behind."""
    engine = AsyncEngine(new_engine(null_runner(), config, ByteTokenizer()))
    server = HttpServer(engine, ByteTokenizer())
    _, chunks = http_clients(server.port, prompts, max_tokens)
    lags += server.lags[500:]  # without the start
    server.close()
    return len(prompts) * max_tokens / chunks


def null(repeat: int) -> None:
    config = EngineConfig(num_blocks=16_384, max_batch_tokens=4096, max_running=NULL_STREAMS)
    ahead = replace(config, max_open_steps=2)
    ways = {
        "bare loop": (null_bare, config),
        "AsyncEngine": (null_async, config),
        "AsyncEngine, planning ahead": (null_async, ahead),
        "HTTP streaming": (null_http, config),
        "HTTP streaming, planning ahead": (null_http, ahead),
    }
    prompts, max_tokens = [[3 + i % 100] * (16 + i // 100) for i in range(NULL_STREAMS)], 60
    costs: dict[str, list[float]] = {name: [] for name in ways}
    lags: dict[str, list[float]] = {name: [] for name in ways}
    merged: dict[str, list[float]] = {name: [] for name in ways}
    sys.setswitchinterval(0.001)
    for _ in range(repeat):
        for name, (way, sizes) in ways.items():
            gc.collect()
            start = time.process_time()
            merged[name].append(way(sizes, prompts, max_tokens, lags[name]))
            costs[name].append((time.process_time() - start) / (NULL_STREAMS * max_tokens) * 1e6)
    title = f"{NULL_STREAMS} streams, null runner"
    row(title, "CPU us a token, median", "best", "tokens an output", "lag p50 / p99 / p99.9 ms")
    row("---", "---:", "---:", "---:", "---:")
    for name, found in costs.items():
        lag = np.percentile(lags[name], [50, 99, 99.9]) * 1e3 if lags[name] else ()
        late = " / ".join(f"{value:.1f}" for value in lag)
        together = statistics.median(merged[name])
        row(name, f"{statistics.median(found):.1f}", f"{min(found):.1f}", f"{together:.2f}", late)


def submit(repeat: int) -> None:
    engine = AsyncEngine(new_engine(NullRunner(), EngineConfig(num_blocks=4096)))
    waits = []

    async def main() -> None:
        for number in range(400 * repeat):
            await asyncio.sleep(0.001)
            stream = engine.generate(
                [5 + number % 50] * 20, GenerationParams(max_tokens=1), tenant="anonymous"
            )
            async for _ in stream:
                pass
            waits.append(stream.generations[0].queue_wait)

    asyncio.run(main())
    engine.close()
    p50, p99, p999, most = np.percentile(waits, [50, 99, 99.9, 100]) * 1e6
    row("submit to first step, idle", "p50 us", "p99 us", "p99.9 us", "max us")
    row("---", "---:", "---:", "---:", "---:")
    row(f"{len(waits)} requests", f"{p50:.0f}", f"{p99:.0f}", f"{p999:.0f}", f"{most:.0f}")


def peer(repeat: int, python: str) -> None:
    from kvpager._core import _get_num_threads
    from kvpager.runner import LlamaRunner, load_model

    loaded = load_model("demo")
    generator = np.random.default_rng(0)
    prompts = [generator.integers(100, 40_000, 16).tolist() for _ in range(STREAMS)]
    max_tokens, ours, theirs = 24, [], []
    config = EngineConfig(num_blocks=1024, max_batch_tokens=512, max_running=STREAMS)
    engine = new_engine(LlamaRunner(loaded.model), config)
    params = GenerationParams(max_tokens=max_tokens)
    wanted = {
        "gguf": str(loaded.path),
        "prompts": prompts,
        "max_tokens": max_tokens,
        "repeat": 1,
        "threads": _get_num_threads(),
        "site": sysconfig.get_path("purelib"),
    }
    script = str(Path(__file__).with_name("serve_peer.py"))
    for number in range(repeat + 1):
        start = time.perf_counter()
        generations = [engine.submit(prompt, params, tenant="anonymous")[0] for prompt in prompts]
        engine.run()
        seconds = time.perf_counter() - start
        if number == 0:
            continue
        ours.append(STREAMS * max_tokens / seconds)
        done = subprocess.run(
            [python, script], input=json.dumps(wanted) + "\n", capture_output=True, text=True, timeout=1800
        )
        if done.returncode != 0:
            sys.exit(f"the peer ended with {done.returncode}:\n{done.stderr[-2000:]}")
        answer = json.loads(done.stdout.splitlines()[-1])
        theirs.append(STREAMS * max_tokens / answer["seconds"][0])
    same = sum(g.token_ids == tokens for g, tokens in zip(generations, answer["tokens"], strict=True))
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    row(f"{STREAMS} prompts, demo model, fp32", "tokens/s, median", "ratio, median", "range")
    row("---", "---:", "---:", "---:")
    row("transformers, continuous batching", f"{statistics.median(theirs):.0f}", "1", "")
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    row("this engine", f"{statistics.median(ours):.0f}", f"{statistics.median(ratios):.2f}", spread)
    write(f"\n{same} of {STREAMS} answers have equal tokens.")


CASES: dict[str, Callable[[int], None]] = {"demo": demo, "null": null, "submit": submit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", choices=[*CASES, "peer"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peer-python", help="interpreter of an environment with torch and transformers")
    arguments = parser.parse_args()
    found = {"machine": sections.machine()}
    for case in arguments.case or [*CASES, *(["peer"] if arguments.peer_python else [])]:
        LINES.clear()
        if case == "peer":
            peer(arguments.repeat, arguments.peer_python or sys.executable)
        else:
            CASES[case](arguments.repeat)
        print(flush=True)
        found[case] = "\n".join(LINES)
        PAGE.write_text(sections.rewrite(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
