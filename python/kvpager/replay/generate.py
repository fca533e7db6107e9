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

WORKLOADS: dict[str, tuple[tuple[int, ...], tuple[int, ...], float]] = {
    "chat": ((16, 1020, 2734, 4142, 6179, 14050), (7, 129, 424, 601, 954, 1000), 5.53),
    "long-chat": ((891, 6909, 27367, 85400, 121301, 126195), (1, 350, 597, 1119, 2000, 2000), 3.40),
    "reasoning": ((4, 208, 2109, 26101, 35894, 43960), (54, 783, 3222, 12087, 21051, 24760), 1.0),
    "summarisation": ((64, 2730, 3702, 3933, 4012, 4054), (5, 167, 372, 3271, 3844, 4056), 2.0),
}
"""Prompt and output lengths at the shares 0, 0.5, 0.9, 0.99, 0.999 and 1, and requests a second.

From the traces Azure conversation 2023, Mooncake conversation, ServeGen DeepSeek-R1 and arXiv summarisation.
"""

BLOCK = 8192


def generate(name: str, *, requests: int = 10000, seed: int = 0) -> Trace:
    """Draws requests whose lengths follow a published distribution (log-linear between its quantiles).

    Args:
        name: one of `WORKLOADS`.
        requests: how many.
        seed: of the draws.

    Raises:
        InvalidArgumentError: for an unknown name.
    """
    if name not in WORKLOADS:
        raise InvalidArgumentError(f"no generated workload {name!r}: there are {', '.join(WORKLOADS)}")
    prompts, outputs, rate = WORKLOADS[name]
    draw = np.random.default_rng(seed)
    return Trace(
        f"generate:{name}",
        "generated",
        _requests(np.array(prompts), np.array(outputs), rate, requests, draw),
        BadLines(Path(name)),
        max_output_tokens=16384 if name == "reasoning" else 4096,
        count=requests,
        notes=[f"lengths drawn from the published quantiles of {name}, Poisson arrivals, seed {seed}"],
    )


def _requests(
    prompts: npt.NDArray[np.int64],
    outputs: npt.NDArray[np.int64],
    rate: float,
    requests: int,
    draw: np.random.Generator,
) -> Iterator[Columns]:
    now = 0.0
    for start in range(0, requests, BLOCK):
        count = min(BLOCK, requests - start)
        arrival = now + np.cumsum(draw.exponential(1 / rate, count))
        now = float(arrival[-1])
        yield Columns(
            arrival=array("d", arrival.tobytes()),
            prompt_tokens=array("I", _lengths(prompts, draw.random(count)).tobytes()),
            output_tokens=array("I", _lengths(outputs, draw.random(count)).tobytes()),
            tenant=array("I", bytes(4 * count)),
            session=array("Q", bytes(8 * count)),
            think_time=array("d", bytes(8 * count)),
            hash_start=array("Q", bytes(8 * (count + 1))),
        )


def _lengths(quantiles: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.uint32]:
    return np.exp(np.interp(shares, _SHARES, np.log(quantiles))).round().astype(np.uint32)
