"""Prefix index through Python, beside a dictionary of hashes and what is installed of vLLM and SGLang.

    cargo bench -p kvpager-benches --bench prefix_index
    python benches/python/prefix_index.py [--resident 10000,100000,1000000] [--rounds 9]
        [--trace mooncake_conversation_trace.jsonl.gz] [--criterion target/criterion]
        [--out benches/results/prefix-index.md]

The first times native calls and leaves its figures in target/criterion; the second adds them to the page.

Blocks of 16 tokens, sequences of 32 shared and 32 own blocks, uint32 arrays. Every figure is a
median over rounds in which the contenders take turns in one process, so that a busy machine hurts
them alike. The dictionary does what a flat cache in plain Python must: hash each block with its
predecessor's hash, look it up, count a reference. It has no tokens to compare, no tenants and no
eviction order. vLLM's is its `BlockPool` with its SHA-256 chain of block hashes, which an engine
computes once a request; SGLang's is its `RadixCache`, whose nodes keep one index a token.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from sections import head, row

from kvpager import BlockPool, PrefixIndex, ShareScope

BLOCK_SIZE, SHARED, OWN, FAMILY = 16, 32, 32, 32
Prompt = npt.NDArray[np.uint32]


class Contender(Protocol):
    """What is measured: a match that is let go again, and an insertion."""

    def match(self, prompt: Any) -> object: ...
    def insert(self, prompt: Any) -> object: ...


class HashChain:
    """Blocks in a dictionary by the hash of everything up to their end."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}

    @staticmethod
    def hashes(prompt: Prompt) -> list[int]:
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
    """The index. Its calls are bound ahead: a figure is one call across the boundary."""

    def __init__(self, num_blocks: int, eviction: Any = "lru") -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(self.pool, block_size=BLOCK_SIZE, eviction=eviction)
        self.space = self.index.namespace(ShareScope.private("bench"))
        match, insert, space = self.index.match_prefix, self.index.insert_prefix, self.space
        self.match: Callable[[Any], object] = lambda prompt: match(space, prompt, whole=True)
        self.insert: Callable[[Any], object] = lambda prompt: insert(space, prompt)


class OfVllm:
    """vLLM's block pool with its hashes."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool as VllmPool

        kv_cache_utils.init_none_hash(sha256)
        self.chain = lambda parent, tokens: kv_cache_utils.hash_block_tokens(sha256, parent, tokens)
        self.pool = VllmPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)

    def hashes(self, prompt: Prompt) -> list[Any]:
        tokens, parent, out = prompt.tolist(), None, []
        for start in range(0, len(tokens), BLOCK_SIZE):
            parent = self.chain(parent, tokens[start : start + BLOCK_SIZE])
            out.append(parent)
        return out

    def find(self, hashes: list[Any]) -> list[Any]:
        found = []
        for chained in hashes:
            blocks = self.pool.get_cached_block(chained, [0])
            if not blocks:
                break
            found += blocks
        self.pool.touch(found)
        return found

    def match(self, prompt: Prompt) -> None:
        self.pool.free_blocks(reversed(self.find(self.hashes(prompt))))

    def insert(self, prompt: Prompt) -> None:
        hashes = self.hashes(prompt)
        found = self.find(hashes)
        blocks = found + self.pool.get_new_blocks(len(hashes) - len(found))
        request: Any = SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(request, blocks, len(found), len(blocks), BLOCK_SIZE, 0)
        self.pool.free_blocks(reversed(blocks))


class OfSglang:
    """SGLang's radix cache, without a device."""

    def __init__(self, _: int) -> None:
        import torch
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self.torch, self.key = torch, RadixKey
        self.tree = RadixCache.create_simulated(page_size=BLOCK_SIZE)

    def match(self, prompt: Prompt) -> None:
        found = self.tree.match_prefix(self.key(prompt.tolist(), None))
        self.tree.inc_lock_ref(found.last_device_node)
        self.tree.dec_lock_ref(found.last_device_node)

    def insert(self, prompt: Prompt) -> None:
        self.tree.insert(self.key(prompt.tolist(), None), self.torch.arange(len(prompt)))


PEERS: tuple[tuple[str, Callable[[int], Contender]], ...] = (("vLLM", OfVllm), ("SGLang", OfSglang))


def prompts(count: int, seed: int, own: int = OWN) -> list[Prompt]:
    """Sequences that share their first blocks in families of 32."""
    draw = np.random.default_rng(seed)
    heads = [
        draw.integers(0, 2**31, SHARED * BLOCK_SIZE, dtype=np.uint32) for _ in range(1 + count // FAMILY)
    ]
    tails = (draw.integers(0, 2**31, own * BLOCK_SIZE, dtype=np.uint32) for _ in range(count))
    return [np.concatenate([heads[i // FAMILY], tail]) for i, tail in enumerate(tails)]


def sequences(resident: int, own: int = OWN) -> int:
    """How many sequences have so many blocks together."""
    return resident * FAMILY // (FAMILY * own + SHARED)


def seconds(work: Callable[[Prompt], object], batch: list[Prompt]) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for prompt in batch:
        work(prompt)
    return (time.perf_counter() - start) / len(batch)


def contenders(num_blocks: int) -> tuple[dict[str, Contender], list[str]]:
    """Contenders by name, and what is not installed or does not fit."""
    found: dict[str, Contender] = {"kvpager": Ours(num_blocks), "hash chain in a dict": HashChain()}
    missing = []
    for name, make in PEERS:
        try:
            found[name] = make(num_blocks)
        except (ImportError, AttributeError, TypeError) as error:
            missing.append(f"{name} ({type(error).__name__}: {error})")
    return found, missing


def calls(resident: int, rounds: int) -> Iterator[tuple[str, str, float]]:
    """(row, contender, value) of single calls with so many blocks resident."""
    known = prompts(sequences(resident), seed=1)
    found, missing = contenders(2 * resident + 128 * 1024)
    for name in missing:
        print(f"left out: {name}", file=sys.stderr)
    for contender in found.values():
        for prompt in known:
            contender.insert(prompt)
    draw = np.random.default_rng(2)
    matched: dict[str, list[float]] = {name: [] for name in found}
    inserted: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(rounds):
        hits = [known[i] for i in draw.integers(0, len(known), 400)]
        fresh = prompts(128, seed=100 + round_)
        # All but the heads' first sequences find half of their blocks.
        new = len(fresh) * OWN + (1 + len(fresh) // FAMILY) * SHARED
        for name, contender in found.items():
            matched[name].append(1e6 * seconds(contender.match, hits))
            inserted[name].append(1e9 * seconds(contender.insert, fresh) * len(fresh) / new)
    for name in found:
        yield "match + pin + drop of 64 blocks, µs a call", name, statistics.median(matched[name])
    for name in found:
        yield "insert + drop, ns a new block", name, statistics.median(inserted[name])


def evictions(resident: int, rounds: int) -> Iterator[tuple[str, str, float]]:
    """Evictions of 32 blocks in one call, by policy and by blocks of a leaf."""
    for own in (32, 4, 1):
        known = prompts(sequences(resident, own), seed=3, own=own)
        for eviction in ("lru", "learned", "clock"):
            ours = Ours(resident + 64 * 1024, eviction)
            for prompt in known:
                ours.insert(prompt)
            times = []
            # At most half of what is there.
            for _ in range(min(rounds * 64, resident // 64)):
                start = time.perf_counter()
                ours.index.evict(32)
                times.append(1e6 * (time.perf_counter() - start))
            yield f"evict 32 in leaves of {own}, µs a call", f"kvpager, {eviction}", statistics.median(times)


def together(ours: Ours, batches: list[list[Prompt]], *, has_writer: bool) -> float:
    """Seconds in which a thread for each batch matches all of it in one call after another."""
    over = threading.Event()

    def write() -> None:
        for seed in range(10**9):
            if over.is_set():
                return
            (prompt,) = prompts(1, seed=10_000 + seed)
            start = time.perf_counter()
            ours.insert(prompt)
            over.wait(9 * (time.perf_counter() - start))

    def read(batch: list[Prompt]) -> None:
        for start in range(0, len(batch), 64):
            ours.index.match_many(ours.space, batch[start : start + 64], whole=True)

    readers = [threading.Thread(target=read, args=(batch,)) for batch in batches]
    writers = [threading.Thread(target=write)] if has_writer else []
    start = time.perf_counter()
    for thread in readers + writers:
        thread.start()
    for thread in readers:
        thread.join()
    elapsed = time.perf_counter() - start
    over.set()
    for thread in writers:
        thread.join()
    return elapsed


def threads(resident: int, rounds: int) -> Iterator[tuple[str, str, float]]:
    """Throughput of `match_many` on two threads, in that of one."""
    known = prompts(sequences(resident), seed=1)
    for eviction in ("lru", "clock"):
        ours = Ours(2 * resident + 128 * 1024, eviction)
        for prompt in known:
            ours.insert(prompt)
        draw = np.random.default_rng(4)
        for has_writer in (False, True):
            ratios = []
            for _ in range(rounds):
                one, two = ([known[i] for i in draw.integers(0, len(known), 64 * 64)] for _ in range(2))
                alone = together(ours, [one], has_writer=has_writer)
                ratios.append(2 * alone / together(ours, [one, two], has_writer=has_writer))
            beside = ", a writer busy a tenth of the time" if has_writer else ""
            name = f"`match_many` of 64 prompts on two threads{beside}, times one thread"
            yield name, f"kvpager, {eviction}", statistics.median(ratios)


def memory() -> Iterator[tuple[str, str, float]]:
    """Bytes a cached block, tokens included."""
    for own in (32, 4, 1):
        for eviction in ("lru", "learned", "clock"):
            ours = Ours(300_000, eviction)
            for prompt in prompts(sequences(250_000, own), seed=5, own=own):
                ours.insert(prompt)
            a_block = ours.index.memory_bytes / ours.pool.stats().cached + 4 * BLOCK_SIZE
            yield f"memory a cached block in edges of {own}, bytes", f"kvpager, {eviction}", a_block


def conversation(trace: Path) -> list[Prompt]:
    """The first 3,000 prompts as tokens: a block of the trace is 512 of them."""
    out = []
    with gzip.open(trace, "rt") as lines:
        for _, line in zip(range(3_000), lines, strict=False):
            request = json.loads(line)
            ids = np.array(request["hash_ids"], np.uint64)
            mixed = (ids[:, None] * 512 + np.arange(512, dtype=np.uint64)) * np.array(
                0x9E3779B97F4A7C15, np.uint64
            )
            tokens = (mixed // 2**33).astype(np.uint32).ravel()
            out.append(tokens[: request["input_length"] // BLOCK_SIZE * BLOCK_SIZE])
    return out


def replay(trace: Path, rounds: int) -> Iterator[tuple[str, str, float]]:
    """Match, allocate, insert, evict and release of the trace's prompts in a pool of 500,000 blocks."""
    stream = conversation(trace)
    num_blocks = sum(len(prompt) for prompt in stream) // BLOCK_SIZE
    makers: dict[str, Callable[[], Contender]] = {
        f"kvpager, {eviction}": lambda eviction=eviction: Ours(500_000, eviction)  # type: ignore[misc]
        for eviction in ("lru", "learned", "clock")
    }
    makers |= {name: lambda make=make: make(500_000) for name, make in PEERS}  # type: ignore[misc]
    for name, make in makers.items():
        times = []
        for _ in range(min(rounds, 3)):
            try:
                contender = make()
            except (ImportError, AttributeError, TypeError):
                break
            times.append(1e9 * seconds(contender.insert, stream) * len(stream) / num_blocks)
        if times:
            yield "replay of 3,000 conversation prompts, ns a block", name, statistics.median(times)


def page(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the tables."""
    yield f"CPython {platform.python_version()}, {platform.machine()}; median of {options.rounds} rounds.\n"
    yield from head("blocks resident", "what", "contender", "median")
    for resident in map(int, options.resident.split(",")):
        for what, name, value in calls(resident, options.rounds):
            yield row(f"{resident:,}", what, name, f"{value:,.2f}")
        for what, name, value in evictions(resident, options.rounds):
            yield row(f"{resident:,}", what, name, f"{value:,.2f}")
    for what, name, value in threads(100_000, options.rounds):
        yield row("100,000", what, name, f"{value:,.2f}")
    for what, name, value in memory():
        yield row("250,000", what, name, f"{value:,.0f}")
    if options.trace.exists():
        for what, name, value in replay(options.trace, options.rounds):
            yield row("500,000", what, name, f"{value:,.1f}")
    else:
        yield row("500,000", "replay of 3,000 conversation prompts", f"left out: no {options.trace.name}", "")
    if options.criterion.is_dir():
        yield ""
        yield from native(options.criterion)


NATIVE = ("match + pin", "match on threads", "insert + release", "evict 32", "replay of 3,000")
"""How the groups of the native benchmark begin, in the order of the page."""


def native(criterion: Path) -> Iterator[str]:
    """Rows of what `cargo bench -p kvpager-benches --bench prefix_index` left there."""
    groups: dict[str, list[tuple[str, int, float, int]]] = {}
    for file in criterion.glob("*/**/new/benchmark.json"):
        what = json.loads(file.read_text())
        nanoseconds = json.loads((file.parent / "estimates.json").read_text())["median"]["point_estimate"]
        elements = (what["throughput"] or {"Elements": 1})["Elements"]
        case, number = what["function_id"], int(what["value_str"] or 0)
        groups.setdefault(what["group_id"], []).append((case or "", number, nanoseconds, elements))
    yield from head("native", "case", "resident, or threads", "ns a call", "ns a block")
    for start in NATIVE:
        for group in sorted(groups):
            for case, number, nanoseconds, elements in (
                sorted(groups[group]) if group.startswith(start) else ()
            ):
                a_block = f"{nanoseconds / elements:,.1f}" if elements > 1 else ""
                yield row(group, case, f"{number:,}", f"{nanoseconds:,.0f}", a_block)


MARK = "<!-- Below: written by benches/python/prefix_index.py -->"


def main() -> None:
    """Prints the tables, and writes them to the end of a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path(os.environ.get("KVPAGER_SHARED", Path(__file__).parents[2] / "shared"))
    parser.add_argument("--resident", default="10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--trace", type=Path, default=shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    )
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gc.disable()
    lines = []
    for line in page(options):
        print(line, flush=True)
        lines.append(line)
        gc.collect()
    if options.out is not None:
        text = options.out.read_text() if options.out.exists() else f"{MARK}\n"
        body = "\n".join(lines)
        options.out.write_text(f"{text.split(MARK)[0].rstrip()}\n\n{MARK}\n\n{body}\n")


if __name__ == "__main__":
    main()
