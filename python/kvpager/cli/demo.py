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
    from collections.abc import Sequence

    from kvpager.engine import Engine, Generation, TextStream
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
) -> int:
    """Runs the demo and prints its tables, or the JSON of `generate`; returns the exit code.

    Args:
        model: as for `generate`.
        blocks: of the pool; a size that is too small for all prompts at once if None.
        block_size: token positions in a block.
        max_tokens: most tokens to generate for each prompt; 48 if None.
        as_json: print one JSON object and nothing else.
    """
    from kvpager.cli.generate import report, report_failures, run_engine
    from kvpager.runner.loading import load_model

    console = Console(file=sys.stdout, highlight=False)
    started = time.perf_counter()
    if not as_json:
        console.print("Loading the model ...")
    loaded = load_model(model)
    load_time = time.perf_counter() - started
    max_tokens = max_tokens or _MAX_TOKENS
    engine = _engine(loaded, blocks or max(1, _DEFAULT_BLOCKS * 16 // block_size), block_size)
    view = _View(engine, loaded, max_tokens)
    generations = [
        engine.submit(ids, view.params, tenant=tenant, listener=None if as_json else view)[0]
        for tenant, ids in _prompts(loaded)
    ]
    view.show(generations)
    if as_json:
        wall_time, code = run_engine(engine)
    else:
        console.print(_introduction(engine, generations, loaded, load_time))
        with view.display(console):
            wall_time, code = run_engine(engine)
    values = report(engine, generations, loaded, load_time=load_time, wall_time=wall_time)
    if as_json:
        print(json.dumps(values))
        return code or report_failures(generations)
    print_requests(generations, file=sys.stdout)
    print_pool(engine, file=sys.stdout)
    console.print(
        f"{sum(len(g.token_ids) for g in generations)} tokens in {wall_time:.1f} s: "
        f"{values['output_tokens_per_second']:.0f} tokens/s"
    )
    return code or report_failures(generations)


def _engine(loaded: LoadedModel, num_blocks: int, block_size: int) -> Engine:
    from kvpager.engine import Engine, EngineConfig
    from kvpager.runner import LlamaRunner

    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_batch_tokens=128)
    engine = Engine(
        LlamaRunner(loaded.model),
        config,
        tokenizer=loaded.tokenizer,
        fingerprint=loaded.fingerprint(block_size=block_size),
    )
    for name in dict.fromkeys(tenant for tenant, _, _ in _PROMPTS):
        engine.add_tenant(name)
    return engine


def _prompts(loaded: LoadedModel) -> Iterator[tuple[str, list[int]]]:
    for tenant, system, question in _PROMPTS:
        head = [{"role": "system", "content": system}] if system else []
        yield tenant, loaded.tokenizer.encode_chat([*head, {"role": "user", "content": question}])


def _introduction(
    engine: Engine, generations: Sequence[Generation], loaded: LoadedModel, load_time: float
) -> str:
    from kvpager.engine import blocks_needed

    block_size = engine.config.block_size
    needs = [blocks_needed(g.prompt_tokens, g.params.max_tokens, block_size) for g in generations]
    capacity = engine.config.num_blocks
    block_bytes = block_size * loaded.model.config.kv_bytes_per_token
    return (
        f"{loaded.name} ({loaded.model.config.num_layers} layers, loaded in {load_time:.1f} s). "
        f"A device with room for {capacity} blocks of {block_size} tokens "
        f"({capacity * block_bytes / 2**20:.0f} MiB of KV).\n"
        f"{len(needs)} prompts of {len(engine.tenants)} tenants need up to "
        f"{sum(needs)} blocks if nothing is shared: not all can run at once.\n"
    )


class _View:
    """The text of every request so far, shown as a live view on a terminal, as lines elsewhere."""

    def __init__(self, engine: Engine, loaded: LoadedModel, max_tokens: int) -> None:
        from kvpager.engine import GenerationParams

        self.params = GenerationParams(max_tokens=max_tokens)
        self._engine = engine
        self._tokenizer = loaded.tokenizer
        self._generations: Sequence[Generation] = ()
        self._streams: dict[int, TextStream] = {}
        self._texts: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._live: Live | None = None

    def show(self, generations: Sequence[Generation]) -> None:
        """Takes the requests."""
        from kvpager.engine import TextStream

        self._generations = generations
        self._streams = {g.request_id: TextStream(self._tokenizer) for g in generations}
        self._texts = {g.request_id: "" for g in generations}
        self._numbers = {g.request_id: number for number, g in enumerate(generations, 1)}

    @contextmanager
    def display(self, console: Console) -> Iterator[None]:
        """Shows the run while it lasts."""
        if not console.is_terminal:
            yield
            print()
            return
        with Live(self._render(), console=console, refresh_per_second=12, transient=False) as self._live:
            yield
        self._live = None

    def notify(self, generation: Generation) -> None:
        """Shows what is new of a request."""
        if generation.num_taken == 0 and generation.token_ids and self._live is None:
            print(f"{self._label(generation)} starts after {generation.queue_wait:.2f} s", flush=True)
        stream = self._streams[generation.request_id]
        for token_id in generation.token_ids[generation.num_taken :]:
            self._texts[generation.request_id] += stream.push(token_id)
        generation.num_taken = len(generation.token_ids)
        if self._live is not None:
            self._live.update(self._render())
        elif generation.has_ended:
            print(f"{self._label(generation)} {self._text(generation)}", flush=True)

    def _label(self, generation: Generation) -> str:
        return f"[{self._numbers[generation.request_id]} {generation.tenant}]"

    def _text(self, generation: Generation) -> str:
        """Returns the text so far, on one line."""
        return " ".join(self._texts[generation.request_id].split())

    def _render(self) -> Any:
        """Returns the view: one row for each request, and the pool below."""
        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("request", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("tokens", justify="right", no_wrap=True)
        table.add_column("answer", ratio=1)
        for generation in self._generations:
            table.add_row(
                self._label(generation).strip("[]"),
                _state(generation),
                f"{len(generation.token_ids)}/{self.params.max_tokens}",
                Text(self._text(generation)),
            )
        return Group(table, self._pool_line())

    def _pool_line(self) -> Text:
        stats, scheduler = self._engine.pool.stats(), self._engine.scheduler
        bar = _bar(((stats.held, "█"), (stats.reserved, "▒"), (stats.cached, "░")), stats.capacity)
        return Text(
            f"\n{scheduler.num_running} running, {scheduler.num_waiting} waiting   blocks {bar} "
            f"{stats.held} held, {stats.reserved} reserved, {stats.cached} cached of {stats.capacity}"
        )


def _state(generation: Generation) -> str:
    if generation.has_ended:
        return "done"
    if generation.started_at is None:
        return "waiting"
    return "decoding" if generation.token_ids else "prefill"


def _bar(parts: tuple[tuple[int, str], ...], capacity: int, width: int = 24) -> str:
    cells = "".join(mark * round(count * width / capacity) for count, mark in parts)
    return cells[:width].ljust(width, "·")
