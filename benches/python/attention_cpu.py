"""Paged decode attention on the CPU beside its yardsticks, in one run, each contender in turn every round.

    python benches/python/attention_cpu.py [--rounds 15] [--threads 1 2] [--clock wall] [--out FILE.md]

Workload: batch 32, context 1,024, 32 query and 8 KV heads of 128, blocks of 16 in shuffled order; KV is
268 MB in float32 and 134 MB in bfloat16. Yardsticks: a read loop over the same caches, a plain loop left to
the compiler (`cpu_loops.cpp`, built here with the system's C++ compiler), and torch if it can be imported:
`enable_gqa`, and its best form of several, on KV that was gathered beforehand (torch is spared the paging).
All arrays begin at a cache line, as torch's do and NumPy's do not. `--clock processor` takes the calling
thread's processor time instead, for one thread on a machine that others use as well.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvpager.attention import instruction_sets, paged_attention, set_num_threads

SEQUENCES, CONTEXT, HEADS, KV_HEADS, DIM, BLOCK = 32, 1024, 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
BARS = {
    ("torch enable_gqa", "float32"): 2.0,
    ("torch enable_gqa", "bfloat16"): 15.0,
    ("torch best", "float32"): 1.4,
    ("torch best", "bfloat16"): 1.8,
    ("read loop", "float32"): 0.50,
    ("read loop", "bfloat16"): 0.65,
    ("plain loop", "float32"): 1.2,
    ("plain loop", "bfloat16"): 1.2,
}
Run = Callable[[], Any]


def build_loops() -> ctypes.CDLL:
    """Compiles the yardsticks for this machine."""
    target = Path(tempfile.mkdtemp()) / "loops.so"
    source = Path(__file__).with_name("cpu_loops.cpp")
    flags = ["-O3", "-march=native", "-ffast-math", "-std=c++17", "-shared", "-fPIC", "-pthread"]
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        flags.append("-mprefer-vector-width=512")
    subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def aligned(array: Any) -> Any:
    """A copy of the array that begins at a page."""
    raw = np.empty(array.nbytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Workload:
    """One dtype's arrays."""

    def __init__(self, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        blocks = SEQUENCES * CONTEXT // BLOCK
        shape = (blocks, BLOCK, KV_HEADS, DIM)
        self.dtype = np.dtype(dtype)
        self.k, self.v = (aligned(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(2))
        self.query = aligned(rng.standard_normal((SEQUENCES, HEADS, DIM), np.float32).astype(dtype))
        self.tables = rng.permutation(blocks).astype(np.int32).reshape(SEQUENCES, -1)
        self.starts = np.arange(SEQUENCES + 1, dtype=np.int32)
        self.contexts = np.full(SEQUENCES, CONTEXT, np.int32)
        self.out = np.empty_like(self.query)
        self.num_bytes = self.k.nbytes + self.v.nbytes

    def kvpager(self) -> Run:
        def run() -> Any:
            return paged_attention(
                self.query,
                self.k,
                self.v,
                block_tables=self.tables,
                query_start=self.starts,
                context_lens=self.contexts,
                out=self.out,
            )

        return run

    def read_loop(self, loops: ctypes.CDLL, threads: int) -> Run:
        def run() -> None:
            for array in (self.k, self.v):
                loops.read_words(pointer(array), ctypes.c_int64(array.nbytes // 4), threads)

        return run

    def plain_loop(self, loops: ctypes.CDLL, threads: int) -> Run:
        decode = loops.decode_f32 if self.dtype == np.float32 else loops.decode_bf16
        query = self.query.astype(np.float32)
        out = np.empty_like(query)

        def run() -> Any:
            sizes = (self.tables.shape[1], SEQUENCES, KV_HEADS, CONTEXT)
            decode(*map(pointer, (query, self.k, self.v, self.tables)), *sizes, pointer(out), threads)
            return out

        return run

    def torch_forms(self, torch: Any) -> dict[str, Run]:
        """Torch's forms on gathered KV, `[sequences, kv heads, context, dim]`."""
        words, kind = (np.uint32, torch.float32) if self.dtype == np.float32 else (np.uint16, torch.bfloat16)

        def tensor(array: Any) -> Any:
            return torch.from_numpy(np.ascontiguousarray(array).view(words).copy()).view(kind)

        def gathered(cache: Any) -> Any:
            rows = cache[self.tables].reshape(SEQUENCES, CONTEXT, KV_HEADS, DIM)
            return tensor(rows.transpose(0, 2, 1, 3))

        k, v = gathered(self.k), gathered(self.v)
        query = tensor(self.query).reshape(SEQUENCES, HEADS, 1, DIM)
        packed = query.reshape(SEQUENCES, KV_HEADS, GROUP, DIM)
        attend = torch.nn.functional.scaled_dot_product_attention

        def matmuls() -> Any:
            scores = (packed @ k.transpose(-1, -2)) * DIM**-0.5
            return torch.softmax(scores, -1) @ v

        return {
            "torch enable_gqa": lambda: attend(query, k, v, enable_gqa=True),
            "torch packed SDPA": lambda: attend(packed, k, v),
            "torch matmuls": matmuls,
        }


def measure(
    contenders: dict[str, Run], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Best seconds of each contender; they take turns, so that a disturbance meets all of them."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


def table(dtype: str, threads: int, seconds: dict[str, float], num_bytes: int) -> list[str]:
    ours = seconds["kvpager"]
    forms = [name for name in seconds if name.startswith("torch")]
    if forms:
        seconds = {**seconds, "torch best": min(seconds[name] for name in forms)}
    lines = [
        f"\n### {dtype}, {threads} thread{'s' if threads > 1 else ''}\n",
        "| contender | ms | GB/s of KV | kvpager against it | wanted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, value in seconds.items():
        bar = BARS.get((name, dtype))
        against = f"{value / ours:.2f}" if name != "kvpager" else ""
        wanted = "" if bar is None else f"{bar:.2f} {'met' if value / ours >= bar else 'MISSED'}"
        lines.append(f"| {name} | {value * 1e3:.2f} | {num_bytes / value / 1e9:.1f} | {against} | {wanted} |")
    return lines


def run_case(
    dtype: Any, threads: int, rounds: int, loops: ctypes.CDLL, torch: Any, clock: Callable[[], float]
) -> list[str]:
    work = Workload(dtype)
    set_num_threads(threads)
    contenders = {
        "kvpager": work.kvpager(),
        "read loop": work.read_loop(loops, threads),
        "plain loop": work.plain_loop(loops, threads),
    }
    ours = contenders["kvpager"]().astype(np.float32)
    plain = contenders["plain loop"]().reshape(ours.shape)
    assert np.abs(ours - plain).max() < 5e-2, "contenders disagree"
    if torch is not None:
        torch.set_num_threads(threads)
        contenders.update(work.torch_forms(torch))
    return table(work.dtype.name, threads, measure(contenders, rounds, clock), work.num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.clock == "processor" and options.threads != [1]:
        parser.error("--clock processor measures the calling thread only: give --threads 1")
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    try:
        import torch
    except ImportError:
        torch = None
    loops = build_loops()
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = model[0].partition(": ")[2] if model else platform.machine()
    lines = [
        "## Paged decode attention on the CPU\n",
        f"Machine: {processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; kernels "
        f"{instruction_sets()[0]}; torch {torch.__version__ if torch else 'not installed'}; best of "
        f"{options.rounds} rounds.\n",
        f"`python benches/python/attention_cpu.py --rounds {options.rounds} --clock {options.clock}`: batch "
        f"{SEQUENCES}, context {CONTEXT}, {HEADS} query and {KV_HEADS} KV heads of {DIM}, blocks of {BLOCK}. "
        "Ratios are times, so above 1 kvpager is faster; against the read loop they are shares of the read "
        "bandwidth.",
    ]
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for threads in options.threads:
            lines += run_case(dtype, threads, options.rounds, loops, torch, clock)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
