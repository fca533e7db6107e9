"""Workloads with no file: lengths from published distributions, arrivals at a rate."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import BadLines, Columns
from kvpager.replay.trace import Trace

__all__ = ["WORKLOADS", "generate"]

_SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)

_Quantiles = tuple[int, ...]

LENGTHS: dict[str, tuple[_Quantiles, _Quantiles, float]] = {
    "chat": ((16, 1020, 2734, 4142, 6179, 14050), (7, 129, 424, 601, 954, 1000), 5.53),
    "long-chat": ((891, 6909, 27367, 85400, 121301, 126195), (1, 350, 597, 1119, 2000, 2000), 3.40),
    "reasoning": ((4, 208, 2109, 26101, 35894, 43960), (54, 783, 3222, 12087, 21051, 24760), 1.0),
    "summarisation": ((64, 2730, 3702, 3933, 4012, 4054), (5, 167, 372, 3271, 3844, 4056), 2.0),
    "short": ((16, 39, 312, 1476, 2924, 4839), (1, 3, 43, 146, 256, 286), 10.0),
    "essays": ((100, 500, 800, 980, 998, 1000), (8000, 12000, 15200, 15920, 15992, 16000), 1.0),
}
"""Prompt and output lengths at the shares 0, 0.5, 0.9, 0.99, 0.999 and 1, and requests a second.

From the traces Azure conversation 2023, Mooncake conversation, ServeGen DeepSeek-R1, arXiv summarisation and
ServeGen m-small; `essays` are made up.
"""

_Phase = tuple[str, float, float]

WORKLOADS: dict[str, tuple[_Phase, ...]] = {
    **{name: ((name, 1.0, 1.0),) for name in LENGTHS},
    "shift": (("chat", 0.5, 1.0), ("reasoning", 0.5, 1.0)),
    "shock": (("short", 2000 / 3060, 1.0), ("essays", 60 / 3060, 1.0), ("short", 1000 / 3060, 1.0)),
    "burst": (("reasoning", 0.4, 0.5), ("reasoning", 0.2, 10.0), ("reasoning", 0.4, 0.5)),
}
"""Phases of each workload: whose lengths, for which share of the requests, at how many times their rate.

`shift` turns from chat to reasoning half way. `shock` teaches short outputs, then sends 60 of 3,060 requests
with 8,000 to 16,000 output tokens, then short ones again. `burst` is reasoning at half its rate, a fifth of
the requests at ten times its rate, and the rest at half of it again.
"""

BLOCK = 8192


def generate(name: str, *, requests: int = 10000, seed: int = 0) -> Trace:
    """Draws requests whose lengths follow published distributions (log-linear between their quantiles).

    Args:
        name: one of `WORKLOADS`.
        requests: how many.
        seed: of the draws.

    Raises:
        InvalidArgumentError: for an unknown name.
    """
    if name not in WORKLOADS:
        raise InvalidArgumentError(f"no generated workload {name!r}: there are {', '.join(WORKLOADS)}")
    phases = WORKLOADS[name]
    return Trace(
        f"generate:{name}",
        "generated",
        _requests(phases, requests, np.random.default_rng(seed)),
        BadLines(Path(name)),
        max_output_tokens=16384 if {"reasoning", "essays"} & {phase for phase, _, _ in phases} else 4096,
        count=requests,
        notes=[f"lengths drawn from published quantiles, Poisson arrivals, seed {seed}"],
    )


def _requests(phases: tuple[_Phase, ...], requests: int, draw: np.random.Generator) -> Iterator[Columns]:
    now = 0.0
    done = 0
    share_done = 0.0
    for name, share, factor in phases:
        share_done += share
        prompts, outputs, rate = LENGTHS[name]
        end = round(requests * share_done)
        while done < end:
            count = min(BLOCK, end - done)
            arrival = now + np.cumsum(draw.exponential(1 / (rate * factor), count))
            now = float(arrival[-1])
            done += count
            yield _columns(
                arrival, _lengths(prompts, draw.random(count)), _lengths(outputs, draw.random(count))
            )


def _columns(
    arrival: npt.NDArray[np.float64], prompts: npt.NDArray[np.uint32], outputs: npt.NDArray[np.uint32]
) -> Columns:
    count = len(arrival)
    return Columns(
        arrival=array("d", arrival.tobytes()),
        prompt_tokens=array("I", prompts.tobytes()),
        output_tokens=array("I", outputs.tobytes()),
        tenant=array("I", bytes(4 * count)),
        session=array("Q", bytes(8 * count)),
        think_time=array("d", bytes(8 * count)),
        hash_start=array("Q", bytes(8 * (count + 1))),
    )


def _lengths(quantiles: _Quantiles, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    return np.exp(np.interp(shares, _SHARES, np.log(quantiles))).round().astype(np.uint32)
