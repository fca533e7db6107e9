"""The block pool through Python, beside a locked list and, where it is installed, vLLM's block pool.

    python benches/python/block_pool.py [--rounds 41] [--out benches/results/block-pool-python.md]

A *turn* allocates a batch and releases the oldest of eight that are held, from 65,536 blocks. Contenders take
turns in one process, in an order that changes from round to round; a row's figure is the median over the
rounds, and its ratio the median of the ratios inside the rounds.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvpager import BlockPool, Magazine

NUM_BLOCKS = 65_536
HELD = 8
BATCHES = (1, 16, 256)

Turn = Callable[[], None]


class LockedList:
    """The plainest free list: no checks, no owners, no counts of references."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free = list(range(NUM_BLOCKS))

    def allocate(self, count: int) -> list[int]:
        with self.lock:
            if len(self.free) < count:
                raise RuntimeError("out of blocks")
            blocks = self.free[-count:]
            del self.free[-count:]
            return blocks

    def release(self, blocks: list[int]) -> None:
        with self.lock:
            self.free.extend(blocks)


def turns(allocate: Callable[[], Any], release: Callable[[Any], object]) -> Turn:
    """One turn after another, with eight batches held."""
    held = deque(allocate() for _ in range(HELD))

    def turn() -> None:
        held.append(allocate())
        release(held.popleft())

    return turn


def in_place(pool: BlockPool, account: int, count: int) -> Turn:
    """Buffers in and out: each of the eight batches has its own array."""
    held = deque(pool.allocate(account, count) for _ in range(HELD))

    def turn() -> None:
        out = held.popleft()
        pool.release(out)
        held.append(pool.allocate(account, out=out))

    return turn


def drawn(pool: BlockPool, account: int, count: int) -> Turn:
    """Drawn from a reservation and put back, in place."""
    reservation = pool.reserve(account, count)
    out = np.zeros(count, np.uint64)

    def turn() -> None:
        reservation.allocate(out=out)
        reservation.put_back(out)

    return turn


def of_vllm(count: int) -> Turn | None:
    """A turn of vLLM's `BlockPool`; None without a vLLM that fits."""
    try:
        from vllm.v1.core.block_pool import BlockPool as VllmPool
    except ImportError:
        return None
    try:
        pool = VllmPool(NUM_BLOCKS, enable_caching=False, hash_block_size=16)
    except TypeError:
        pool = VllmPool(NUM_BLOCKS, enable_caching=False)
    return turns(lambda: pool.get_new_blocks(count), pool.free_blocks)


def contenders(count: int) -> dict[str, Turn | None]:
    """Turns by name; None for what is not installed."""
    pool = BlockPool(NUM_BLOCKS)
    account = pool.add_account()
    locked = LockedList()
    found: dict[str, Turn | None] = {}
    if count == 1:
        magazine = Magazine(pool, account)
        found["kvpager, `allocate_one` and `release_one`"] = turns(
            lambda: pool.allocate_one(account), pool.release_one
        )
        found["kvpager, a `Magazine`"] = turns(magazine.allocate_one, magazine.release_one)
    found["kvpager, buffers in and out"] = in_place(pool, account, count)
    found["kvpager, new arrays"] = turns(lambda: pool.allocate(account, count), pool.release)
    found["kvpager, drawn and put back"] = drawn(pool, account, count)
    found["locked list"] = turns(lambda: locked.allocate(count), locked.release)
    found["vLLM `BlockPool`"] = of_vllm(count)
    return found


def time_turns(turn: Turn, times: int) -> float:
    """Nanoseconds a turn."""
    begin = time.perf_counter_ns()
    for _ in range(times):
        turn()
    return (time.perf_counter_ns() - begin) / times


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Nanoseconds a turn by contender, one for each round."""
    present = {name: turn for name, turn in contenders(count).items() if turn is not None}
    times = max(50, 20_000 // (count + 8))
    for turn in present.values():
        time_turns(turn, times)
    samples: dict[str, list[float]] = {name: [] for name in present}
    names = list(present)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            samples[name].append(time_turns(present[name], times))
    return samples


def rows(count: int, rounds: int) -> list[str]:
    """The page's rows for a batch size."""
    samples = measure(count, rounds)
    peer = samples.get("vLLM `BlockPool`")
    lines = []
    for name in contenders(count):
        if name not in samples:
            lines.append(f"| {count} | {name} | not installed | | | |")
            continue
        median = statistics.median(samples[name])
        of_list = statistics.median(a / b for a, b in zip(samples["locked list"], samples[name], strict=True))
        of_vllm_text = (
            f"{statistics.median(a / b for a, b in zip(peer, samples[name], strict=True)):.1f}"
            if peer
            else ""
        )
        lines.append(
            f"| {count} | {name} | {median:,.0f} | {median / count:,.1f} | {of_list:.2f} | {of_vllm_text} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gc.disable()
    lines = [
        "| batch | contender | ns a turn | ns a block | times the locked list's speed | times vLLM's |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for count in BATCHES:
        lines += rows(count, options.rounds)
    machine = f"CPython {platform.python_version()}, {platform.machine()}, {platform.system()}"
    text = f"{machine}; median of {options.rounds} rounds.\n\n" + "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        page = options.out.read_text() if options.out.exists() else f"{MARK}\n"
        options.out.write_text(page.split(MARK)[0] + f"{MARK}\n\n{text}")


MARK = "<!-- Below: written by benches/python/block_pool.py -->"

if __name__ == "__main__":
    main()
