"""The closing tables of `generate`, for people; they fit a terminal and a log file alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpager.engine import Engine, Generation

__all__ = ["print_pool", "print_requests"]

_COLUMNS = ("request", "tenant", "prompt", "cached", "output", "end", "steps", "queue wait")


def print_requests(generations: Sequence[Generation], *, file: TextIO) -> None:
    """Prints one row for each request: tokens by where they came from, steps, and how long it waited."""
    table = Table(title="Requests", title_justify="left", caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("tenant", "end") else "right")
    for number, generation in enumerate(generations, 1):
        account = generation.account
        if account is None:
            continue
        table.add_row(
            str(number),
            generation.tenant,
            str(account.prompt_tokens),
            str(account.cached_tokens),
            str(account.output_tokens),
            account.reason,
            str(account.steps),
            f"{generation.queue_wait:.2f} s ({account.queue_steps} steps)",
        )
    _console(file).print(table)


def print_pool(engine: Engine, *, file: TextIO) -> None:
    """Prints the pool's blocks by state; a block that several sequences share counts once."""
    pool, scheduler = engine.pool.stats(), engine.scheduler.stats()
    table = Table(
        title="Pool, in blocks (a shared block counts once)", title_justify="left", caption_justify="left"
    )
    values = {
        "blocks": pool.capacity,
        "held": pool.held,
        "cached": pool.cached,
        "free": pool.free,
        "reserved": pool.reserved,
        "peak held": pool.peak_held,
        "preemptions": scheduler.num_preemptions,
        "steps": scheduler.steps,
    }
    for name in values:
        table.add_column(name, justify="right")
    table.add_row(*(str(value) for value in values.values()))
    _console(file).print(table)


def _console(file: TextIO) -> Console:
    """A console on that file, of a fixed width where it is no terminal: logs read the same everywhere."""
    return Console(file=file, width=None if file.isatty() else 100, highlight=False)
