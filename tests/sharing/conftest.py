"""Prefixes of real traces as token arrays, and one sequential replay of them."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from kvpager import BlockPool, PrefixIndex, ShareScope

Prompts = list[npt.NDArray[np.uint32]]
Eviction = Literal["lru", "learned", "clock"]


def conversation_rows(path: Path) -> list[list[tuple[int, int]]]:
    """Full 512-token blocks of each request of the Mooncake trace."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [[(0, block) for block in row["hash_ids"][: row["input_length"] // 512]] for row in rows]


def session_rows(path: Path, seed: int) -> list[list[tuple[int, int]]]:
    """Full 64-token blocks of each request, in order of arrival; session starts are drawn over 8 hours."""
    draw = random.Random(seed)
    arrivals: list[tuple[float, list[tuple[int, int]]]] = []

    def add(session: int, start: float, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            if "requests" in request:
                add(session, start, request["requests"])
            else:
                ids = request["hash_ids"][: request["in"] // 64]
                arrivals.append((start + request["t"], [(session, block) for block in ids]))

    with tarfile.open(path) as archive:
        names = sorted(name for name in archive.getnames() if name.endswith(".json"))
        for session, name in enumerate(names):
            file = archive.extractfile(name)
            assert file is not None
            add(session, draw.uniform(0, 8 * 3600), json.load(file)["requests"])
    return [row for _, row in sorted(arrivals, key=lambda arrival: arrival[0])]


@pytest.fixture(scope="session")
def load_prompts(shared_dir: Path) -> Callable[..., Prompts]:
    """Reads a trace: for each request the numbers of its full prompt blocks, equal for equal prefixes."""

    @cache
    def load(name: str, *, seed: int = 0) -> Prompts:
        path = shared_dir / "traces" / name
        rows = conversation_rows(path) if name.endswith("jsonl.gz") else session_rows(path, seed)
        numbers: dict[tuple[int, tuple[int, int]], int] = {}
        prompts = []
        for row in rows:
            parent, prompt = -1, []
            for block in row:
                parent = numbers.setdefault((parent, block), len(numbers))
                prompt.append(parent)
            prompts.append(np.array(prompt, dtype=np.uint32))
        return prompts

    return load


@pytest.fixture(scope="session")
def replay() -> Callable[..., int]:
    """One request at a time: look up, then insert. Returns the blocks found resident."""

    def run(prompts: Prompts, *, blocks: int, block_size: int, eviction: Eviction) -> int:
        index = PrefixIndex(BlockPool(blocks), block_size=block_size, eviction=eviction)
        namespace = index.namespace(ShareScope.private("tenant"))
        hit_tokens = 0
        for ids in prompts:
            tokens = np.repeat(ids[:blocks], block_size)
            match, found = index.insert_prefix(namespace, tokens)
            match.release()
            hit_tokens += found
        index.check_invariants()
        return hit_tokens // block_size

    return run
