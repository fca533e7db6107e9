"""Runs of a workload: one a policy, driven in bounded pieces so that progress shows and Ctrl-C works."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvpager._core import Oracle, Replay, SequentialReplay
from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import Columns
from kvpager.replay.trace import Trace
from kvpager.replay.transforms import limited
from kvpager.replay.watch import UNWATCHED, Watch

__all__ = [
    "CLOCKS",
    "RunSettings",
    "run_oracle",
    "run_replay",
    "run_sequential",
    "served_tokens",
    "without_timings",
]

Clock = tuple[float, float, float]
"""Seconds: shortest step, a batch token, a context token."""

CLOCKS: dict[str, Clock] = {
    "8b-hbm3": (4.8e-3, 4e-5, 3.9e-8),
    "8b-a100": (8.2e-3, 1.0e-4, 6.4e-8),
    "70b-hbm3x4": (10.5e-3, 8.8e-5, 2.4e-8),
}
"""Coefficients of the step time by model class and hardware, from public bandwidth and arithmetic figures.

The first is the one that the published tables use; all are illustrations, none is a measurement.
"""

SWAP_BYTES_PER_TOKEN = 131072
SWAP_BYTES_PER_SECOND = 25e9

PIECE_SECONDS = 0.1
"""About how long the interpreter stays out of the loop."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all runs of a comparison have in common.

    Attributes:
        blocks: blocks of the pool.
        block_size: tokens of a block.
        reuse: whether prefixes are looked up and kept.
        arrivals: `recorded`, `rate` or `saturate`.
        speed: of recorded arrivals.
        rate: requests a second of `rate`.
        seed: of everything that is drawn.
        requests: how many of the trace, or None for all.
        max_batch_tokens: tokens of a step.
        max_running: sequences of a step.
        max_model_tokens: longest request.
        max_prefill_chunk: longest prefill chunk; 0 for the whole budget.
        max_output_tokens: most tokens that a request asks for.
        clock: coefficients of the step time.
        overflow: what happens when running sequences have outgrown the pool.
        host_blocks: blocks of the host tier; 0 for none.
    """

    blocks: int
    block_size: int = 16
    reuse: bool = True
    arrivals: str = "recorded"
    speed: float = 1.0
    rate: float = 1.0
    seed: int = 0
    requests: int | None = None
    max_batch_tokens: int = 8192
    max_running: int = 1024
    max_model_tokens: int = 131072
    max_prefill_chunk: int = 0
    max_output_tokens: int = 4096
    clock: Clock = CLOCKS["8b-hbm3"]
    overflow: str = "auto"
    host_blocks: int = 0

    @property
    def step_time(self) -> tuple[float, float, float, float]:
        """The clock and the seconds of a swapped block."""
        return *self.clock, self.block_size * SWAP_BYTES_PER_TOKEN / SWAP_BYTES_PER_SECOND


def _drive(run: Replay | Oracle, requests: Iterator[Columns], watch: Watch) -> bool:
    """Feeds and advances a run to its end; False if it was asked to stop before."""
    steps = 256
    while True:
        began = time.perf_counter()
        state = run.advance(steps)
        if state == "done":
            return True
        if watch.stop():
            return False
        if state == "needs_input":
            columns = next(requests, None)
            if columns is None:
                run.close()
            else:
                run.push(columns)
            continue
        elapsed = time.perf_counter() - began
        steps = max(16, min(1 << 20, int(steps * PIECE_SECONDS / max(elapsed, 1e-6)), steps * 4))
        if isinstance(run, Replay):
            watch.report(run.num_ended, run.num_steps, run.now)


def _first(trace: Trace, requests: Iterator[Columns]) -> Columns:
    """The first block of requests; a workload without any is an error."""
    first = next(requests, None)
    if first is not None:
        return first
    bad = trace.bad
    raise InvalidArgumentError(f"{bad.path}: no requests in it{bad.skipped()}")


def run_replay(
    trace: Trace, settings: RunSettings, *, policy: str, eviction: str, watch: Watch = UNWATCHED
) -> dict[str, Any]:
    """Runs a workload through scheduler, index and pool.

    Args:
        trace: the workload; its requests are used up.
        settings: the run.
        policy: admission policy.
        eviction: eviction policy.
        watch: looks at it now and then.

    Returns:
        The run's object of `kvpager replay --json`; `interrupted` says if it was stopped early.

    Raises:
        InvalidArgumentError: for bad input or settings.
    """
    began = time.perf_counter()
    requests = limited(trace.requests, settings.requests)
    first = _first(trace, requests)
    replay = Replay(
        settings,
        policy=policy,
        eviction=eviction,
        hash_block=trace.hash_block or 512,
        tenants=trace.tenants or ["all"],
    )
    replay.push(first)
    finished = _drive(replay, requests, watch)
    result: dict[str, Any] = json.loads(replay.report_json())
    result |= {
        "trace": trace.name,
        "format": trace.format,
        "eviction": eviction if settings.reuse else None,
        "overflow": settings.overflow,
        "host_blocks": settings.host_blocks,
        "arrivals": settings.arrivals,
        "skipped_lines": trace.bad.count,
        "first_skipped_line": trace.bad.first,
        "interrupted": not finished,
        "oracle_time": None,
        "fairness": _jain([served_tokens(tenant) for tenant in result["tenants"]]),
        "wall_time": time.perf_counter() - began,
    }
    return result


TIMINGS = ("wall_time", "step_us", "scheduler_time", "steps_per_second")
"""Keys of a run that this machine decides; all others are the same wherever and whenever it runs."""


def without_timings(run: dict[str, Any]) -> dict[str, Any]:
    """A run with None for what the machine took: the same bytes each time.

    Args:
        run: the run's object.
    """
    return {key: None if key in TIMINGS else value for key, value in run.items()}


def served_tokens(tenant: dict[str, Any]) -> int:
    """Tokens that were computed for a tenant's finished requests."""
    return int(tenant["prompt_tokens"] - tenant["hit_tokens"] + tenant["output_tokens"])


def _jain(shares: list[int]) -> float:
    """Jain's index: 1 when all are equal, 1 / n when one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def run_sequential(
    trace: Trace, settings: RunSettings, *, eviction: str, watch: Watch = UNWATCHED
) -> dict[str, Any]:
    """Runs a workload through index and pool alone, one request at a time in file order.

    Each request is looked up, then its full prompt blocks are inserted; outputs are not.

    Args:
        trace: the workload; its requests are used up.
        settings: the run; only blocks, block size and requests matter.
        eviction: eviction policy.
        watch: looks at it now and then.
    """
    began = time.perf_counter()
    requests = limited(trace.requests, settings.requests)
    first = _first(trace, requests)
    replay = SequentialReplay(
        settings.blocks,
        settings.block_size,
        eviction=eviction,
        hash_block=trace.hash_block or 512,
        tenants=trace.tenants or ["all"],
    )
    columns: Columns | None = first
    while columns is not None and not watch.stop():
        replay.push(columns)
        watch.report(dict(replay.counts())["requests"], 0, 0.0)
        columns = next(requests, None)
    finished = columns is None
    counts = dict(replay.counts())
    hit_tokens = counts["hit_blocks"] * settings.block_size
    unused = dict.fromkeys(
        (
            "preempted_requests",
            "recomputed_tokens",
            "swapped_tokens",
            "lost_tokens",
            "steps",
            "output_tokens",
        ),
        0,
    )
    return unused | {
        "trace": trace.name,
        "format": trace.format,
        "policy": "sequential",
        "eviction": eviction,
        "block_size": settings.block_size,
        "blocks": settings.blocks,
        "requests": counts["requests"],
        "finished": counts["requests"] - counts["too_long"],
        "refused": {"never_fits": counts["too_long"]} if counts["too_long"] else {},
        "first_refusal": "its blocks are more than the pool's" if counts["too_long"] else None,
        "lookup_blocks": counts["lookup_blocks"],
        "hit_blocks": counts["hit_blocks"],
        "prompt_tokens": counts["prompt_tokens"],
        "hit_tokens": hit_tokens,
        "virtual_time": 0.0,
        "oracle_time": None,
        "worst_token_gap": 0.0,
        "peak_held": counts["peak_held"],
        "mean_held": None,
        "step_us": None,
        "skipped_lines": trace.bad.count,
        "first_skipped_line": trace.bad.first,
        "interrupted": not finished,
        "wall_time": time.perf_counter() - began,
    }


def run_oracle(trace: Trace, settings: RunSettings, watch: Watch = UNWATCHED) -> dict[str, Any]:
    """Runs the clairvoyant schedule of a workload.

    Args:
        trace: the workload; its requests are used up.
        settings: the run that it is compared with.
        watch: looks at it now and then.

    Returns:
        `time`, `steps`, `finished`, `refused`, `mean_batch`, `peak_blocks`, and `interrupted`.
    """
    oracle = Oracle(settings)
    finished = _drive(oracle, limited(trace.requests, settings.requests), watch)
    seconds, steps, done, refused, mean_batch, peak_blocks = oracle.outcome()
    return {
        "time": seconds,
        "steps": steps,
        "finished": done,
        "refused": refused,
        "mean_batch": mean_batch,
        "peak_blocks": peak_blocks,
        "interrupted": not finished,
    }
