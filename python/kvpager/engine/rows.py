"""From what a runner returned to one token for each sampled row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager.engine.generation import Generation, TokenLogprobs
from kvpager.engine.sampling import log_probabilities, sample
from kvpager.errors import InvalidArgumentError

__all__ = ["choose_tokens"]


def choose_tokens(
    result: npt.NDArray[Any], sampled: Sequence[Generation], vocab_size: int
) -> tuple[npt.NDArray[np.int32], list[Generation]]:
    """Samples from logits, or checks tokens, and notes the logprobs that were asked for.

    Args:
        result: logits [R, vocab_size] fp32, or token ids [R] of an integer dtype.
        sampled: [R] whose they are.
        vocab_size: token ids are below it.

    Returns:
        Tokens [R], and the generations whose logits are not finite (their token is 0).

    Raises:
        InvalidArgumentError: the runner returned no array, another shape or dtype, or ids out of range.
    """
    if not isinstance(result, np.ndarray):
        raise InvalidArgumentError(
            f"the runner returned {_kind(result)}: a NumPy array is needed, float32 "
            f"[{len(sampled)}, {vocab_size}] or integers [{len(sampled)}]"
        )
    if result.ndim == 1 and np.issubdtype(result.dtype, np.integer):
        return _checked_ids(result, len(sampled), vocab_size), []
    if result.shape != (len(sampled), vocab_size) or result.dtype != np.float32:
        raise InvalidArgumentError(
            f"the runner returned {result.dtype} {list(result.shape)}: float32 "
            f"[{len(sampled)}, {vocab_size}] or integers [{len(sampled)}] are needed"
        )
    if not sampled:
        return np.zeros(0, np.int32), []
    tokens = sample(
        result,
        [generation.sampling for generation in sampled],
        [generation.num_sampled for generation in sampled],
    )
    broken = [sampled[row] for row in np.flatnonzero(tokens < 0).tolist()]
    for row, generation in enumerate(sampled):
        num_top = generation.params.logprobs if generation.search is None else None
        if tokens[row] >= 0 and num_top is not None:
            generation.logprobs.append(
                TokenLogprobs(*log_probabilities(result[row], int(tokens[row]), num_top))
            )
    return np.maximum(tokens, 0), broken


def _kind(result: object) -> str:
    return "None" if result is None else f"an object of type {type(result).__name__}"


def _checked_ids(result: npt.NDArray[Any], count: int, vocab_size: int) -> npt.NDArray[np.int32]:
    if len(result) != count:
        raise InvalidArgumentError(f"the runner returned {len(result)} tokens for {count} rows")
    if count and not 0 <= int(result.min()) <= int(result.max()) < vocab_size:
        raise InvalidArgumentError(
            f"the runner returned token ids from {result.min()} to {result.max()}: the vocabulary has "
            f"{vocab_size}"
        )
    return result.astype(np.int32)
