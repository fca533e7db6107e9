"""The demo of `make run`: two tenants send eight chat prompts to a pool that is too small for all at once.

What to see: requests wait until blocks come free (admission), prompts of one tenant that begin with the same
system message find it in the cache (and never the other tenant's), answers grow side by side (continuous
batching).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpager.cli.tables import print_pool, print_requests

if TYPE_CHECKING:
    from kvpager.runner.generate import Generation, GenerationLoop
    from kvpager.runner.loading import LoadedModel

__all__ = ["run_demo"]

_SYSTEM = (
    "You are a careful assistant of a small public library. You answer every question in plain words that a "
    "child understands, in two short sentences at most, you never make anything up, and you stay friendly."
)
_PROMPTS = (
    ("alice", _SYSTEM, "Why is the sky blue?"),
    ("alice", _SYSTEM, "How do bees make honey?"),
    ("bob", _SYSTEM, "What is a volcano?"),
    ("alice", _SYSTEM, "Why do leaves fall in autumn?"),
    ("bob", _SYSTEM, "How does a boat float?"),
    ("alice", _SYSTEM, "What do whales eat?"),
    ("bob", None, "Write one line about the sea."),
    ("bob", _SYSTEM, "Why does the moon change its shape?"),
)
_MAX_TOKENS = 48
_DEFAULT_BLOCKS = 20
"""All eight need 55 blocks of 16 tokens without sharing, one of them 7."""


def run_demo(
    *, model: str, blocks: int | None, block_size: int, max_tokens: int | None, as_json: bool
) -> None:
    """Runs the demo and prints its tables, or the JSON of `generate`.

    Args:
        model: as for `generate`.
        blocks: of the pool; a size that is too small for all prompts at once if None.
        block_size: token positions in a block.
        max_tokens: most tokens to generate for each prompt; 48 if None.
        as_json: print one JSON object and nothing else.
    """
    from kvpager.cli.generate import report
    from kvpager.runner.loading import load_model

    console = Console(file=sys.stdout, highlight=False)
    started = time.perf_counter()
    if not as_json:
        console.print("Loading the model ...")
    loaded = load_model(model)
    load_time = time.perf_counter() - started
    max_tokens = max_tokens or _MAX_TOKENS
    loop = _loop(loaded, blocks or max(1, _DEFAULT_BLOCKS * 16 // block_size), block_size, max_tokens)
    if not as_json:
        console.print(_introduction(loop, loaded, load_time, max_tokens))
    started = time.perf_counter()
    if as_json:
        loop.run()
    else:
        with _display(loop, loaded, console, max_tokens):
            loop.run()
    wall_time = time.perf_counter() - started
    values = report(loop, loaded, load_time=load_time, wall_time=wall_time)
    if as_json:
        print(json.dumps(values))
        return
    print_requests(loop, file=sys.stdout)
    print_pool(loop, file=sys.stdout)
    console.print(
        f"{sum(len(g.token_ids) for g in loop.generations.values())} tokens in {wall_time:.1f} s: "
        f"{values['output_tokens_per_second']:.0f} tokens/s"
    )


def _loop(loaded: LoadedModel, num_blocks: int, block_size: int, max_tokens: int) -> GenerationLoop:
    from kvpager.runner.generate import GenerationLoop, LoopConfig

    config = LoopConfig(num_blocks=num_blocks, block_size=block_size, max_batch_tokens=128)
    loop = GenerationLoop(loaded.model, config, fingerprint=loaded.fingerprint(block_size=block_size))
    for name in dict.fromkeys(tenant for tenant, _, _ in _PROMPTS):
        loop.add_tenant(name)
    for tenant, system, question in _PROMPTS:
        head = [{"role": "system", "content": system}] if system else []
        ids = loaded.tokenizer.encode_chat([*head, {"role": "user", "content": question}])
        loop.submit(tenant, ids, max_tokens=max_tokens, stop_token_ids=loaded.tokenizer.stop_token_ids)
    return loop


def _introduction(loop: GenerationLoop, loaded: LoadedModel, load_time: float, max_tokens: int) -> str:
    from kvpager.runner.generate import blocks_needed

    block_size = loop.scheduler.block_size
    needs = [blocks_needed(g.prompt_tokens, max_tokens, block_size) for g in loop.generations.values()]
    capacity = loop.pool.stats().capacity
    block_bytes = block_size * loaded.model.config.kv_bytes_per_token
    return (
        f"{loaded.name} ({loaded.model.config.num_layers} layers, loaded in {load_time:.1f} s). "
        f"A device with room for {capacity} blocks of {block_size} tokens "
        f"({capacity * block_bytes / 2**20:.0f} MiB of KV).\n"
        f"{len(needs)} prompts of {len({g.tenant for g in loop.generations.values()})} tenants need up to "
        f"{sum(needs)} blocks if nothing is shared: not all can run at once.\n"
    )


@contextmanager
def _display(loop: GenerationLoop, loaded: LoadedModel, console: Console, max_tokens: int) -> Iterator[None]:
    """Shows the run: a live view on a terminal, a line for each start and end elsewhere."""
    view = _View(loop, loaded, max_tokens)
    if not console.is_terminal:
        with _log(loop, view):
            yield
        return
    with Live(view.render(), console=console, refresh_per_second=12, transient=False) as live:

        def on_token(generation: Generation, token_id: int) -> None:
            view.push(generation, token_id)
            live.update(view.render())

        def on_finished(_generation: Generation) -> None:
            live.update(view.render())

        loop.on_token, loop.on_finished = on_token, on_finished
        yield


@contextmanager
def _log(loop: GenerationLoop, view: _View) -> Iterator[None]:
    def on_token(generation: Generation, token_id: int) -> None:
        if not generation.token_ids[1:]:
            print(f"{view.label(generation)} starts after {generation.queue_wait:.2f} s", flush=True)
        view.push(generation, token_id)

    def on_finished(generation: Generation) -> None:
        print(f"{view.label(generation)} {view.text(generation)}", flush=True)

    loop.on_token, loop.on_finished = on_token, on_finished
    yield
    print()


class _View:
    """The text of every request so far, and how to draw all of it."""

    def __init__(self, loop: GenerationLoop, loaded: LoadedModel, max_tokens: int) -> None:
        from kvpager.runner.tokenizer import TextStream

        self._loop = loop
        self._max_tokens = max_tokens
        self._streams = {request_id: TextStream(loaded.tokenizer) for request_id in loop.generations}
        self._texts = dict.fromkeys(loop.generations, "")
        self._numbers = {request_id: number for number, request_id in enumerate(loop.generations, 1)}

    def push(self, generation: Generation, token_id: int) -> None:
        """Adds a token to its request's text."""
        self._texts[generation.request_id] += self._streams[generation.request_id].push(token_id)

    def label(self, generation: Generation) -> str:
        """Returns the request's number and tenant."""
        return f"[{self._numbers[generation.request_id]} {generation.tenant}]"

    def text(self, generation: Generation) -> str:
        """Returns the text so far, on one line."""
        return " ".join(self._texts[generation.request_id].split())

    def render(self) -> Any:
        """Returns the view: one row for each request, and the pool below."""
        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("request", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("answer", ratio=1)
        for generation in self._loop.generations.values():
            table.add_row(
                self.label(generation).strip("[]"),
                _state(generation),
                f"{len(generation.token_ids)}/{self._max_tokens}",
                Text(self.text(generation)),
            )
        return Group(table, self._pool_line())

    def _pool_line(self) -> Text:
        stats, scheduler = self._loop.pool.stats(), self._loop.scheduler
        bar = _bar(((stats.held, "█"), (stats.reserved, "▒"), (stats.cached, "░")), stats.capacity)
        return Text(
            f"\n{scheduler.num_running} running, {scheduler.num_waiting} waiting   blocks {bar} "
            f"{stats.held} held, {stats.reserved} reserved, {stats.cached} cached of {stats.capacity}"
        )


def _state(generation: Generation) -> str:
    if generation.account is not None:
        return "done"
    if generation.started_at is None:
        return "waiting"
    return "decoding" if generation.token_ids else "prefill"


def _bar(parts: tuple[tuple[int, str], ...], capacity: int, width: int = 24) -> str:
    cells = "".join(mark * round(count * width / capacity) for count, mark in parts)
    return cells[:width].ljust(width, "·")
