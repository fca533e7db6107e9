"""Choosing the next token from logits: greedy, temperature, top-k, top-p, seed; and how likely it was.

A draw depends on the request's seed and on how many tokens it has produced, on nothing else: the same request
gives the same tokens alone, in any batch, after a preemption or an abandoned step (up to the rounding of its
logits).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvpager.engine.kinds import NUMBER, WHOLE, Kind, wrong_kinds
from kvpager.errors import InvalidArgumentError

__all__ = ["SamplingParams", "log_probabilities", "log_softmax", "most_likely", "sample"]

_NUCLEUS_GUESS = 1024
"""Tokens sorted at first for top-p: nearly every nucleus is smaller, and sorting a vocabulary is slow."""

_KINDS: dict[str, Kind] = {"temperature": NUMBER, "top_k": WHOLE, "top_p": NUMBER, "seed": WHOLE}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen.

    Attributes:
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: draws from so many most likely tokens; 0 for all.
        top_p: of those, draws from the smallest set of most likely ones whose probability is at least this.
        seed: 64-bit; a random one if not given.

    Raises:
        InvalidArgumentError: a value is of another kind or out of range; every problem is named at once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: secrets.randbits(64))

    def __post_init__(self) -> None:
        problems = [text for _, text in wrong_kinds(self, _KINDS)] or self._problems()
        if problems:
            raise InvalidArgumentError("; ".join(problems))

    def _problems(self) -> list[str]:
        problems = []
        if not 0.0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}, at least 0 is needed")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}, at least 0 is needed")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p is {self.top_p}, above 0 and at most 1 is needed")
        if not 0 <= self.seed < 2**64:
            problems.append(f"seed is {self.seed}, from 0 to 2^64-1 is needed")
        return problems

    def for_sample(self, index: int) -> SamplingParams:
        """The settings of one of several samples: the first has this seed, the others seeds that follow."""
        return self if index == 0 else replace(self, seed=(self.seed + index) % 2**64)


def sample(
    logits: npt.NDArray[np.float32], params: Sequence[SamplingParams], num_generated: Sequence[int]
) -> npt.NDArray[np.int32]:
    """Chooses one token for each row.

    Args:
        logits: [R, vocab] fp32.
        params: R settings.
        num_generated: R counts of tokens that the request has produced before this one.

    Returns:
        [R] token ids; ties go to the lowest id. -1 where the logits are not finite.
    """
    chosen: npt.NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
    chosen[~np.isfinite(logits[np.arange(len(chosen)), chosen])] = -1
    for row, (settings, position) in enumerate(zip(params, num_generated, strict=True)):
        if settings.temperature > 0.0 and chosen[row] >= 0:
            chosen[row] = _draw(logits[row], settings, _uniform(settings.seed, position))
    return chosen


def log_probabilities(
    logits: npt.NDArray[np.float32], chosen: int, num_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Returns how likely a token was, before temperature and cuts.

    Args:
        logits: [vocab] fp32 of one row.
        chosen: the token.
        num_top: most likely tokens to list.

    Returns:
        (logprob of `chosen`, ((token id, logprob), ...) of the most likely ones, most likely first).
    """
    row = log_softmax(logits)
    top = most_likely(row, min(num_top, len(row))) if num_top else ()
    return float(row[chosen]), tuple((int(token), float(row[token])) for token in top)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Natural logarithms of the probabilities that [vocab] logits stand for."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    return row


def most_likely(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Returns the ids of the `count` largest, largest first, ties by the lowest id."""
    smallest = np.partition(weights, -count)[-count]
    candidates = np.flatnonzero(weights >= smallest)
    return candidates[np.argsort(-weights[candidates], kind="stable")][:count]


def _uniform(seed: int, position: int) -> float:
    """Returns the number in [0, 1) that belongs to this position of this seed (a counter-based generator)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits: npt.NDArray[np.float32], params: SamplingParams, uniform: float) -> int:
    """Draws by inverting the cumulative distribution, most likely token first."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    scaled /= params.temperature
    weights = np.exp(scaled)
    ids: npt.NDArray[np.int64] = np.arange(len(weights))
    if 0 < params.top_k < len(weights):
        ids = most_likely(weights, params.top_k)
        weights = weights[ids]
    weights /= weights.sum()
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
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
