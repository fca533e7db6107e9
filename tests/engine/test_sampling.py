"""A request's draws depend on its seed and its position only, and follow the distribution asked for."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager.engine import SamplingParams, sample
from kvpager.errors import InvalidArgumentError

VOCABULARY = 5000


def logits_of(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCABULARY)).astype(np.float32)


def test_temperature_zero_takes_the_most_likely_token_and_the_lowest_id_of_ties() -> None:
    logits = logits_of(0, rows=3)
    logits[1, [7, 11]] = 99.0
    greedy = SamplingParams()
    assert sample(logits, [greedy] * 3, [0, 5, 9]).tolist() == logits.argmax(axis=1).tolist()
    assert sample(logits, [greedy] * 3, [0, 5, 9])[1] == 7


def test_draw_of_a_request_is_the_same_in_any_batch() -> None:
    logits = logits_of(1, rows=6)
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=40) for top_p in (1.0, 0.9, 0.5)] * 2
    together = sample(logits, params, [0, 1, 2, 3, 4, 5])
    alone = [sample(logits[row : row + 1], [params[row]], [row])[0] for row in range(6)]
    assert together.tolist() == alone


def test_draws_differ_by_position_and_by_seed() -> None:
    logits = np.repeat(logits_of(2), 64, axis=0)
    by_position = sample(logits, [SamplingParams(temperature=1.0, seed=1)] * 64, list(range(64)))
    by_seed = sample(logits, [SamplingParams(temperature=1.0, seed=seed) for seed in range(64)], [0] * 64)
    assert len(set(by_position.tolist())) > 30
    assert len(set(by_seed.tolist())) > 30


def test_frequencies_follow_the_distribution_of_the_temperature() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    draws = 4000
    params = [SamplingParams(temperature=0.5, seed=3)] * draws
    counts = np.bincount(sample(np.repeat(logits, draws, axis=0), params, range(draws)), minlength=4)
    expected = np.exp(logits[0].astype(np.float64) / 0.5)
    assert np.abs(counts / draws - expected / expected.sum()).max() < 0.03


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_draws_only_from_the_smallest_sufficient_set(top_p: float) -> None:
    logits = logits_of(4)
    weights = np.exp(logits[0].astype(np.float64))
    weights /= weights.sum()
    order = np.argsort(-weights)
    nucleus = set(order[: int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1].tolist())
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=5)] * 300
    drawn = set(sample(np.repeat(logits, 300, axis=0), params, range(300)).tolist())
    assert drawn <= nucleus
    assert len(nucleus) > 300 or len(drawn) > len(nucleus) // 4


def test_bad_settings_are_named_together() -> None:
    with pytest.raises(InvalidArgumentError, match=r"temperature is -1.*top_p is 0.*seed is -3"):
        SamplingParams(temperature=-1.0, top_p=0.0, seed=-3)
    with pytest.raises(InvalidArgumentError, match="temperature is nan"):
        SamplingParams(temperature=float("nan"))
