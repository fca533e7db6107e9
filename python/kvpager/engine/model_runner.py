"""What an engine needs from a model: `ModelRunner`, a batch in, logits or tokens out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpager.engine.kinds import NUMBER, WHOLE, check
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager._core import Batch
    from kvpager.engine.generation import Generation

__all__ = ["ModelRunner", "NullRunner", "RunnerLostError"]


class RunnerLostError(Exception):
    """Raised by a runner that cannot compute again (its device is gone): the engine stops at once."""


class ModelRunner(Protocol):
    """A model as an engine drives it, always from the engine's one thread.

    Attributes:
        vocab_size: token ids are below it.
        max_model_tokens: longest sequence, prompt and output together.
        gives_logits: whether `run` returns logits, which the engine samples from; else it returns tokens.
        layer_groups: what its layers see, as `Scheduler` takes it; may be missing if all see everything.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def max_model_tokens(self) -> int: ...  # noqa: D102
    @property
    def gives_logits(self) -> bool: ...  # noqa: D102

    def allocate(self, *, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Makes the KV memory that the batches' block ids index. Called once, before the first batch.

        Args:
            num_blocks: blocks on the device.
            block_size: token positions in a block.
            host_blocks: blocks of the host tier, which `Batch.swap_out` and `Batch.swap_in` name; often 0.
        """

    def run(self, batch: Batch, sampled: Sequence[Generation], /) -> npt.NDArray[Any]:
        """Computes a batch: zeroes, swaps and copies blocks as it says, then the forward pass.

        Args:
            batch: the step. It may have no tokens and only move blocks.
            sampled: [R] what is generated at each of `batch.sample_rows`, for runners that sample themselves
                (`sampling`, `num_sampled`).

        Returns:
            Host memory, in the order of `batch.sample_rows`: logits [R, vocab_size] fp32, or token ids [R]
            of an integer dtype.

        Raises:
            Exception: the step failed; its requests end with the text, the engine goes on with the others.
            RunnerLostError: nothing can be computed any more; the engine stops.
        """


class NullRunner:
    """Computes nothing: synthetic tokens after a fixed time, to measure what surrounds a model.

    A token depends on its request's id and its place only, so what a client gets can be checked.

    Attributes:
        vocab_size: tokens are from 3 up to it; ids below are left to a tokenizer's special tokens.
        max_model_tokens: longest sequence.
        step_time: seconds that each step sleeps, with the interpreter released, as a device would.
    """

    gives_logits = False

    def __init__(
        self, *, vocab_size: int = 32_000, max_model_tokens: int = 131_072, step_time: float = 0.0
    ) -> None:
        """Makes a runner.

        Raises:
            InvalidArgumentError: a number out of range, or none.
        """
        check("vocab_size", vocab_size, WHOLE)
        check("max_model_tokens", max_model_tokens, WHOLE)
        check("step_time", step_time, NUMBER)
        if vocab_size < 4 or max_model_tokens < 2 or not 0.0 <= step_time < 60.0:
            raise InvalidArgumentError(
                f"null runner: vocab_size {vocab_size} (at least 4), max_model_tokens {max_model_tokens} (at "
                f"least 2), step_time {step_time} (at least 0 and below 60 seconds)"
            )
        self.vocab_size = vocab_size
        self.max_model_tokens = max_model_tokens
        self.step_time = step_time

    def allocate(self, *, num_blocks: int, block_size: int, host_blocks: int) -> None:
        """Needs no memory."""

    def run(self, _batch: Batch, sampled: Sequence[Generation], /) -> npt.NDArray[np.int32]:
        """Sleeps, then returns [R] tokens."""
        if self.step_time:
            time.sleep(self.step_time)
        return np.array(
            [self.token(generation.request_id, generation.num_sampled) for generation in sampled], np.int32
        )

    def token(self, request_id: int, place: int) -> int:
        """The token that a request gets at a place of its output."""
        return 3 + (request_id * 31 + place) % (self.vocab_size - 3)
