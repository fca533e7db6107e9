"""Prefix index through Python, beside a dictionary of chained block hashes.

    python benches/python/prefix_index.py [--resident 10000,100000] [--repeats 5]

Blocks of 16 tokens, sequences of 32 shared and 32 own blocks, uint32 arrays. Every row is a median over
rounds in which the contestants take turns, so that a busy machine hurts them alike. The dictionary does what
a flat cache in plain Python must: hash each block with its predecessor's hash, look it up, count a reference.
It has no tokens to compare, no tenants and no eviction order, so its times are a lower bound for that design.
Engines' own indexes are not driven from here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvpager import BlockPool, PrefixIndex, ShareScope

BLOCK_SIZE, SHARED, OWN = 16, 32, 32
Prompt = npt.NDArray[np.uint32]


class HashChain:
    """Blocks in a dictionary by the hash of everything up to their end."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}

    def hashes(self, prompt: Prompt) -> list[int]:
        chained, out = 0, []
        data, step = prompt.tobytes(), 4 * BLOCK_SIZE
        for start in range(0, len(data), step):
            chained = hash((chained, data[start : start + step]))
            out.append(chained)
        return out

    def match(self, prompt: Prompt) -> int:
        found = []
        for chained in self.hashes(prompt):
            block = self.blocks.get(chained)
            if block is None:
                break
            block[1] += 1
            found.append(block)
        for block in found:
            block[1] -= 1
        return len(found)

    def insert(self, prompt: Prompt) -> None:
        for chained in self.hashes(prompt):
            self.blocks.setdefault(chained, [len(self.blocks), 0])


class Ours:
    def __init__(self, num_blocks: int) -> None:
        self.index = PrefixIndex(BlockPool(num_blocks), block_size=BLOCK_SIZE)
        self.space = self.index.namespace(ShareScope.private("bench"))

    def match(self, prompt: Prompt) -> int:
        return self.index.match_prefix(self.space, prompt, whole=True).num_blocks

    def insert(self, prompt: Prompt) -> None:
        self.index.insert_prefix(self.space, prompt)


def prompts(count: int, seed: int) -> list[Prompt]:
    """Sequences that share their first half in families of 32."""
    draw = np.random.default_rng(seed)
    heads = [draw.integers(0, 2**31, SHARED * BLOCK_SIZE, dtype=np.uint32) for _ in range(1 + count // 32)]
    tails = (draw.integers(0, 2**31, OWN * BLOCK_SIZE, dtype=np.uint32) for _ in range(count))
    return [np.concatenate([heads[i // 32], tail]) for i, tail in enumerate(tails)]


def seconds(work: Callable[[Prompt], object], batch: list[Prompt]) -> float:
    start = time.perf_counter()
    for prompt in batch:
        work(prompt)
    return (time.perf_counter() - start) / len(batch)


def rows(resident: int, repeats: int) -> list[tuple[str, str, float]]:
    """(row, contestant, value) with `resident` blocks in each contestant."""
    count = resident // OWN
    known = prompts(count, seed=1)
    ours, plain = Ours(4 * resident + 64 * 1024), HashChain()
    for prompt in known:
        ours.insert(prompt)
        plain.insert(prompt)
    contestants: list[tuple[str, Ours | HashChain]] = [("kvpager", ours), ("hash chain in a dict", plain)]
    draw = np.random.default_rng(2)
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(repeats):
        hits = [known[i] for i in draw.integers(0, count, 400)]
        fresh = prompts(128, seed=100 + round_)
        for name, contestant in contestants:
            times.setdefault(("match + pin + drop, 64 blocks, µs a call", name), []).append(
                1e6 * seconds(contestant.match, hits)
            )
            # All but the heads' first sequences find half of their blocks.
            new = len(fresh) * OWN + (len(fresh) // 32) * SHARED
            times.setdefault(("insert, ns a new block", name), []).append(
                1e9 * seconds(contestant.insert, fresh) * len(fresh) / new
            )
        for limit in (1, 32):
            start = time.perf_counter()
            for _ in range(64):
                ours.index.evict(limit)
            times.setdefault((f"evict {limit}, µs a call", "kvpager"), []).append(
                1e6 * (time.perf_counter() - start) / 64
            )
    return [(row, name, statistics.median(values)) for (row, name), values in times.items()]


def main() -> None:
    """Prints one table for each number of resident blocks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resident", default="10000,100000")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for resident in map(int, options.resident.split(",")):
        print(f"\n{resident:,} resident blocks\n\n| | contestant | median |\n|---|---|---|")
        for row, name, value in rows(resident, options.repeats):
            print(f"| {row} | {name} | {value:,.2f} |")


if __name__ == "__main__":
    main()
