"""Choosing the next token from logits: greedy, temperature, top-p, seed.

A draw depends on the request's seed and on how many tokens it has produced, on nothing else: the same request
gives the same tokens alone, in any batch, after a preemption or an abandoned step (up to the rounding of its
logits).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError

__all__ = ["SamplingParams", "sample"]

_NUCLEUS_GUESS = 1024
"""Tokens sorted at first for top-p: nearly every nucleus is smaller, and sorting a vocabulary is slow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen.

    Attributes:
        temperature: divisor of the logits; 0 takes the most likely token.
        top_p: draws from the smallest set of most likely tokens whose probability is at least this.
        seed: 64-bit; a random one if not given.

    Raises:
        InvalidArgumentError: a value is out of range; every problem is named in one message.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: secrets.randbits(64))

    def __post_init__(self) -> None:
        problems = []
        if not 0.0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}, at least 0 is needed")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p is {self.top_p}, above 0 and at most 1 is needed")
        if not 0 <= self.seed < 2**64:
            problems.append(f"seed is {self.seed}, from 0 to 2^64-1 is needed")
        if problems:
            raise InvalidArgumentError("sampling: " + "; ".join(problems))


def sample(
    logits: npt.NDArray[np.float32], params: Sequence[SamplingParams], num_generated: Sequence[int]
) -> npt.NDArray[np.int32]:
    """Chooses one token for each row.

    Args:
        logits: [R, vocab] fp32.
        params: R settings.
        num_generated: R counts of tokens that the request has produced before this one.

    Returns:
        [R] token ids. Ties go to the lowest id.
    """
    chosen: npt.NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
    for row, (settings, position) in enumerate(zip(params, num_generated, strict=True)):
        if settings.temperature > 0.0:
            chosen[row] = _draw(logits[row], settings, _uniform(settings.seed, position))
    return chosen


def _uniform(seed: int, position: int) -> float:
    """Returns the number in [0, 1) that belongs to this position of this seed (a counter-based generator)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits: npt.NDArray[np.float32], params: SamplingParams, uniform: float) -> int:
    """Draws by inverting the cumulative distribution, most likely token first."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= params.temperature
    weights = np.exp(scaled)
    weights /= weights.sum()
    if params.top_p < 1.0:
        ids = _nucleus(weights, params.top_p)
        weights = weights[ids]
    else:
        ids = np.arange(len(weights))
    cumulative = np.cumsum(weights)
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(ids[min(int(place), len(ids) - 1)])


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Returns the ids of the smallest most likely set with at least `top_p` of the probability."""
    candidates: npt.NDArray[np.int64] = np.arange(len(weights))
    if len(weights) > _NUCLEUS_GUESS:
        guess = np.sort(np.argpartition(weights, -_NUCLEUS_GUESS)[-_NUCLEUS_GUESS:])
        if weights[guess].sum() >= top_p:
            candidates = guess
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    kept = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
    return order[:kept]
