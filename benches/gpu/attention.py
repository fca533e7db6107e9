"""GPU benchmark of the attention kernels, one command:

    .venv/bin/python benches/gpu/attention.py [--json]

Each figure is a ratio to what the same run measures on the same card: copy bandwidth, matmul rate, torch's
attention. The table goes to `benches/results/gpu.md` with the card's name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.attention import kernels, paged_attention
from kvpager.attention.device_plan import AttentionPlan
from kvpager.attention.device_tables import DeviceBlockTables
from kvpager.errors import KvPagerError

RESULTS = Path(__file__).resolve().parent.parent / "results" / "gpu.md"
REPEATS = 20
DIM, Q_HEADS, KV_HEADS = 128, 32, 8


@dataclass
class Row:
    """One line of the table; a ratio of 0 means that the yardstick is not there."""

    case: str
    microseconds: float
    ratio: float
    of: str
    goal: float


def seconds(cupy: Any, run: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return float(np.median(times))


def copy_bandwidth(cupy: Any) -> float:
    """Bytes read and written a second by a copy of 1 GiB."""
    source = cupy.ones(2**28, np.float32)
    target = cupy.empty_like(source)
    return 2 * source.nbytes / seconds(cupy, lambda: cupy.copyto(target, source))


def matmul_rate(cupy: Any) -> float:
    """Operations a second of a float16 product of 8192 x 8192 matrices."""
    a = cupy.ones((8192, 8192), np.float16)
    out = cupy.empty_like(a)
    return 2 * 8192**3 / seconds(cupy, lambda: cupy.matmul(a, a, out=out))


@dataclass
class Batch:
    """Arrays of a batch on the device and its plan."""

    arrays: tuple[Any, Any, Any]
    options: dict[str, Any]
    plan: Any
    kv_bytes: int

    def run(self) -> None:
        """One call."""
        paged_attention(*self.arrays, plan=self.plan, **self.options)


def batch(
    cupy: Any, lens: list[int], *, block_size: int = 16, query_len: int = 1, kv: str = "float16"
) -> Batch:
    """A batch in shuffled blocks; `kv` float16 or float8_e4m3fn."""
    lengths = np.array(lens, np.int32)
    blocks = -(-lengths // block_size)
    order = np.random.default_rng(0).permutation(int(blocks.sum())).astype(np.int32)
    tables = np.full((len(lens), int(blocks.max())), -1, np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum(blocks) - blocks, blocks, strict=True)):
        tables[row, :count] = order[start : start + count]
    shape = (int(blocks.sum()), block_size, KV_HEADS, DIM)
    dtype = np.float16 if kv == "float16" else np.uint8
    caches = [cupy.full(shape, 0.1 if kv == "float16" else 0x30, dtype) for _ in range(2)]
    query = cupy.full((len(lens) * query_len, Q_HEADS, DIM), 0.1, np.float16)
    starts = np.arange(len(lens) + 1, dtype=np.int32) * query_len
    options: dict[str, Any] = {
        "block_tables": cupy.asarray(tables),
        "query_start": cupy.asarray(starts),
        "context_lens": cupy.asarray(lengths),
        "out": cupy.empty_like(query),
    }
    if kv != "float16":
        options |= {"kv_dtype": kv, "k_scale": 1.0, "v_scale": 1.0}
    plan = AttentionPlan(
        query,
        *caches,
        max_sequences=len(lens),
        max_tokens=query.shape[0],
        max_query_len=query_len,
        kv_dtype=options.get("kv_dtype"),
    )
    plan.update(starts, lengths)
    item = np.dtype(dtype).itemsize
    return Batch((query, *caches), options, plan, int(lengths.sum()) * KV_HEADS * DIM * 2 * item)


def decode_rows(cupy: Any, bandwidth: float) -> list[Row]:
    """Decode against the bandwidth of this run's copy."""
    ragged = np.random.default_rng(1).lognormal(8.0, 0.8, 64).astype(int).clip(16, 32768).tolist()
    cases = [
        ("decode 32 x 4k, blocks of 16", batch(cupy, [4096] * 32), 0.80),
        ("decode 32 x 4k, blocks of 256", batch(cupy, [4096] * 32, block_size=256), 0.80),
        ("decode 32 x 4k, blocks of 1", batch(cupy, [4096] * 32, block_size=1), 0.56),
        ("decode ragged, lognormal", batch(cupy, ragged), 0.75),
        ("decode 64 x 4k, fp8", batch(cupy, [4096] * 64, kv="float8_e4m3fn"), 0.70),
        ("decode 1 x 128k", batch(cupy, [131072]), 0.70),
    ]
    rows = []
    for name, item, goal in cases:
        time = seconds(cupy, item.run)
        rows.append(Row(name, time * 1e6, item.kv_bytes / time / bandwidth, "copy bandwidth", goal))
    return rows


def prefill_row(cupy: Any, rate: float) -> Row:
    """A causal prompt of 8k against the matmul rate."""
    item = batch(cupy, [8192], query_len=8192)
    time = seconds(cupy, item.run)
    return Row(
        "prefill 8k, causal", time * 1e6, 2 * Q_HEADS * DIM * 8192**2 / time / rate, "matmul rate", 0.30
    )


def torch_rows(cupy: Any) -> list[Row]:
    """Decode and prefill against torch's attention on dense keys, if torch with CUDA is there."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    rows = []
    for name, lens, query_len, goal in (
        ("decode 32 x 4k", [4096] * 32, 1, 1.0),
        ("prefill 8k", [8192], 8192, 0.8),
    ):
        shape = (len(lens), KV_HEADS, lens[0], DIM)
        k, v = (torch.ones(shape, dtype=torch.float16, device="cuda") for _ in range(2))
        q = torch.ones((len(lens), Q_HEADS, query_len, DIM), dtype=torch.float16, device="cuda")
        causal = query_len > 1

        def dense(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=True
            )

        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
        with stream:
            theirs = seconds(cupy, dense)
        ours = seconds(cupy, batch(cupy, lens, query_len=query_len).run)
        rows.append(Row(f"{name} beside torch SDPA", ours * 1e6, theirs / ours, "torch SDPA's speed", goal))
    return rows


def graph_row(cupy: Any) -> Row:
    """Table update and launch of a decode layer under graph replay: the whole step with almost no work."""
    item = batch(cupy, [16] * 32)
    tables = DeviceBlockTables(np.zeros((64, 256), np.int32))
    changes = np.stack([np.arange(32), np.zeros(32), np.arange(32)], axis=1).astype(np.int32)
    item.run()
    tables.apply(changes)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(32):
            item.run()
        graph = stream.end_capture()
        whole = seconds(cupy, lambda: graph.launch(stream))
    update = seconds(cupy, lambda: tables.apply(changes))
    per_layer = (whole + update) / 32 * 1e6
    return Row(
        "table update and launches of a layer, graph", per_layer, 5.0 / per_layer, "5 us (1 is enough)", 1.0
    )


def table(card: str, bandwidth: float, rate: float, rows: list[Row]) -> str:
    """The results as Markdown."""
    lines = [
        f"# GPU attention on {card}",
        "",
        f"Copy bandwidth of this run {bandwidth / 1e9:.0f} GB/s, float16 matmul {rate / 1e12:.0f} TFLOP/s.",
        f"{Q_HEADS} query heads, {KV_HEADS} KV heads of {DIM}. Command: `python benches/gpu/attention.py`.",
        "",
        "| case | us | ratio | of | goal |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.case} | {r.microseconds:.1f} | {r.ratio:.2f} | {r.of} | {r.goal:.2f} |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures everything and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    status = kernels.cuda_status()
    if not status["usable"]:
        reasons: Any = status["missing"]
        raise SystemExit("no GPU: " + "; ".join(f"{m['what']}: {m['reason']}" for m in reasons))
    cupy = kernels.load_cupy()
    devices: Any = status["devices"]
    bandwidth, rate = copy_bandwidth(cupy), matmul_rate(cupy)
    try:
        rows = [*decode_rows(cupy, bandwidth), prefill_row(cupy, rate), *torch_rows(cupy), graph_row(cupy)]
    except KvPagerError as error:
        raise SystemExit(f"kvpager: {error}") from error
    text = table(devices[0]["name"], bandwidth, rate, rows)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text, encoding="utf-8")
    print(
        json.dumps({"card": devices[0]["name"], "rows": [asdict(r) for r in rows]})
        if arguments.json
        else text
    )


if __name__ == "__main__":
    main()
