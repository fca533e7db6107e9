"""Admission policies against the clairvoyant schedule, eviction curves, and the speed of a replay.

    python benches/python/replay_policies.py [--shared ../shared] [--requests 5000] [--out FILE.md]

Every cell is a run of the real scheduler, index and pool in virtual time (`kvpager replay`). The speed rows
are the wall time of the command itself, readers included.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpager.replay.run import RunSettings
from kvpager.replay.study import Study

POLICIES = ("reserve", "watermark", "forecast")
POOL_TOKENS = (100_000, 300_000, 1_000_000)
MOONCAKE = "mooncake_conversation_trace.jsonl.gz"
FOOTPRINT_BLOCKS = {1: 1708, 2: 3417, 5: 8544, 10: 17089, 20: 34179, 50: 85449}

WORKLOADS = {
    "R1 (ServeGen)": ("servegen_deepseek-r1_clients_A.tar.xz", 16384),
    "R1 lengths": ("generate:reasoning", 16384),
    "Azure conv": ("AzureLLMInferenceTrace_conv.csv.gz", 4096),
    "arXiv": ("arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz", 4096),
    "Mooncake conv": (MOONCAKE, 4096),
    "shift": ("generate:shift", 16384),
    "shock": ("generate:shock", 16384),
}


def source(traces: Path, name: str) -> str:
    return name if name.startswith("generate:") else str(traces / name)


def settings(pool_tokens: int, requests: int, max_output_tokens: int) -> RunSettings:
    return RunSettings(
        blocks=pool_tokens // 16,
        reuse=False,
        arrivals="saturate",
        requests=requests,
        max_output_tokens=max_output_tokens,
        max_model_tokens=1 << 18,
    )


def row(run: dict[str, Any]) -> str:
    finished = max(1, run["finished"])
    prompt = max(1, run["prompt_tokens"])
    return (
        f"{run['policy']} | {run['virtual_time'] / run['oracle_time']:.3f} | "
        f"{run['steps'] / run['oracle']['steps']:.2f} | {run['preempted_requests'] / finished:.2%} | "
        f"{run['recomputed_tokens'] / prompt:.2%} | {run['swapped_tokens'] / prompt:.2%} | "
        f"{run['worst_token_gap']:.2f} | {run['batch_size']['p50']:.0f} / {run['batch_size']['max']:.0f}"
    )


def policy_rows(traces: Path, requests: int) -> Iterator[str]:
    for name, (file, most) in WORKLOADS.items():
        count = 3060 if name == "shock" else requests
        for tokens in POOL_TOKENS if name != "shock" else POOL_TOKENS[:1]:
            if name == "Mooncake conv" and tokens == 100_000:
                continue  # its longest prompts alone exceed the pool
            study = Study(
                source=source(traces, file), settings=settings(tokens, count, most), policies=POLICIES
            )
            for run in study.run():
                yield f"| {name} | {tokens // 1000}k | {row(run)} |"


def reordered_rows(traces: Path, requests: int) -> Iterator[str]:
    for name in ("R1 (ServeGen)", "R1 lengths", "shift"):
        file, most = WORKLOADS[name]
        for tokens in POOL_TOKENS[:2]:
            runs = []
            for seed in range(1, 6):
                study = Study(
                    source=source(traces, file),
                    settings=settings(tokens, requests, most),
                    policies=("forecast",),
                    shuffle=seed,
                )
                runs += study.run()
            worst = max(run["virtual_time"] / run["oracle_time"] for run in runs)
            preempted = max(run["preempted_requests"] / run["finished"] for run in runs)
            recomputed = max(run["recomputed_tokens"] / run["prompt_tokens"] for run in runs)
            gap = max(run["worst_token_gap"] for run in runs)
            figures = f"{worst:.3f} | {preempted:.2%} | {recomputed:.2%} | {gap:.2f}"
            yield f"| {name} | {tokens // 1000}k | {figures} |"


def eviction_rows(traces: Path) -> Iterator[str]:
    for eviction in ("lru", "learned"):
        cells = []
        for blocks in FOOTPRINT_BLOCKS.values():
            study = Study(
                source=str(traces / MOONCAKE),
                settings=RunSettings(blocks=blocks, block_size=512),
                evictions=(eviction,),
                sequential=True,
            )
            (run,) = study.run()
            cells.append(f"{run['hit_blocks'] / run['lookup_blocks']:.2%}")
        yield f"| {eviction} | {' | '.join(cells)} |"


def command_seconds(*arguments: str) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-c", "from kvpager.cli import main; main()", "replay", *arguments, "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def speed_rows(traces: Path) -> Iterator[str]:
    for size in ("512", "16"):
        times = sorted(
            command_seconds(str(traces / MOONCAKE), "--block-size", size, "--no-oracle") for _ in range(5)
        )
        yield f"| {size} | {times[2]:.2f} | {times[0]:.2f} | {times[-1]:.2f} |"


POLICY_HEAD = """
## Admission, against the clairvoyant schedule

| workload | pool | policy | time | steps | preempted | recomputed | swapped | gap, s | batch p50 / max |
|---|---|---|---|---|---|---|---|---|---|"""

REORDERED_HEAD = """
Worst of five other orders, `forecast`:

| workload | pool | time | preempted | recomputed | worst gap, s |
|---|---|---|---|---|---|"""

EVICTION_HEAD = """
## Hit rate by cache size (share of the footprint)

Mooncake conversation, blocks of 512, one request at a time.
"""

SPEED_HEAD = """
## Wall time of `kvpager replay`

{streamed}
The Mooncake trace (12,031 requests, 4.1 M output tokens) under `reserve`, seconds, start of Python included.

| block size | median of 5 | best | worst |
|---|---|---|---|"""


def peak_mebibytes() -> float:
    """Largest resident size of the commands so far."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def streamed(requests: int) -> str:
    options = ("--arrivals", "saturate", "--reuse", "off", "--no-oracle")
    seconds = command_seconds("generate:short", "--requests", str(requests), *options)
    return (
        f"{requests:,} generated requests (`generate:short`) streamed through in {seconds:.1f} s with at "
        f"most {peak_mebibytes():.0f} MiB resident.\n"
    )


def report(traces: Path, requests: int, stream: int) -> Iterator[str]:
    yield "# Replay: policies, eviction, speed\n"
    yield (
        f"`python benches/python/replay_policies.py --requests {requests}`; "
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores (shared with "
        "other work: wall times are upper bounds). Virtual clock: "
        "step = max(4.8 ms, 0.04 ms x tokens) + 3.9e-5 ms x context tokens; blocks of 16, 8,192 tokens and "
        "1,024 sequences a step, all requests waiting at once, no reuse. No host tier: what is taken back is "
        "recomputed."
    )
    yield POLICY_HEAD
    yield from policy_rows(traces, requests)
    yield REORDERED_HEAD
    yield from reordered_rows(traces, requests)
    yield EVICTION_HEAD
    yield "| eviction | " + " | ".join(f"{share} %" for share in FOOTPRINT_BLOCKS) + " |"
    yield "|---|" + "---|" * len(FOOTPRINT_BLOCKS)
    yield from eviction_rows(traces)
    yield SPEED_HEAD.format(streamed=streamed(stream))
    yield from speed_rows(traces)
    yield f"\nLargest resident size of those commands: {peak_mebibytes():.0f} MiB."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("KVPAGER_SHARED", "../shared")))
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--stream", type=int, default=10_000_000, help="requests of the streaming row")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = []
    for line in report(options.shared / "traces", options.requests, options.stream):
        print(line, flush=True)
        lines.append(line)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
