"""Steps between their planning and their end.

With one open step, the model runs in the engine's thread. With more, it runs in a thread of its own, and the
engine commits, delivers and plans meanwhile. Tokens that are not sampled yet are -1 in a batch that was
planned ahead; they are filled in here, right before it runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvpager.engine.beams import BeamSearch, BeamStep, take_beams
from kvpager.engine.generation import Generation
from kvpager.engine.model_runner import ModelRunner
from kvpager.engine.rows import choose_tokens

if TYPE_CHECKING:
    from kvpager._core import Batch

__all__ = ["ModelThread", "OpenStep"]

_IntArray = npt.NDArray[np.int32]


class OpenStep:
    """A planned step.

    Attributes:
        batch: as the scheduler planned it.
        sampled: [R] whose tokens it samples.
        token_start: [S+1] as `commit` takes it.
        is_empty: whether there is nothing for the model to do.
        tokens: [R] once it has run.
        broken: generations whose logits were not finite.
        searches: rows of each beam search in it.
        beam_steps: what the step makes of them, once it has run.
        error: what the runner raised, or None.
    """

    def __init__(self, batch: Batch, generations: Sequence[Generation]) -> None:
        """Notes who samples."""
        owners = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
        self.batch = batch
        self.sampled = [generations[owner] for owner in owners.tolist()]
        self.searches = take_beams(self.sampled)
        self.token_start = np.zeros(len(batch.query_start), np.int32)
        self.token_start[1:] = np.cumsum(np.bincount(owners, minlength=batch.num_sequences))
        moves = (batch.swap_out, batch.block_zeros, batch.swap_in, batch.block_copies)
        self.is_empty = batch.num_tokens == 0 and not any(map(len, moves))
        self.tokens: _IntArray = np.zeros(0, np.int32)
        self.broken: list[Generation] = []
        self.beam_steps: dict[BeamSearch, BeamStep] = {}
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def compute(self, runner: ModelRunner, previous: OpenStep | None) -> None:
        """Runs the model and samples; what it raises is kept in `error`.

        Args:
            runner: the model.
            previous: the step before if it is open too: the batch may name its samples.
        """
        try:
            if previous is not None and previous.error is not None:
                raise previous.error
            if not self.is_empty:
                batch = self.batch if previous is None else _filled(self.batch, previous.tokens)
                result = runner.run(batch, self.sampled)
                self.tokens, self.broken = choose_tokens(result, self.sampled, runner.vocab_size)
                if self.searches:
                    self._rank_beams(result)
                for generation in self.sampled:
                    generation.num_sampled += 1
        except BaseException as error:
            self.error = error
        finally:
            self.is_done.set()

    def _rank_beams(self, logits: npt.NDArray[np.float32]) -> None:
        for search, rows in self.searches.items():
            is_broken = any(self.sampled[row] in self.broken for row in rows)
            if not is_broken and len(rows) == len(search.members):
                step = self.beam_steps[search] = search.plan(logits[rows[: search.num_rows]])
                self.tokens[rows] = step.tokens


class ModelThread:
    """A thread that computes steps one behind the other."""

    def __init__(self, runner: ModelRunner) -> None:
        """Starts it."""
        self._runner = runner
        self._steps: queue.SimpleQueue[tuple[OpenStep, OpenStep | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvpager-model", daemon=True)
        self._thread.start()

    def start(self, step: OpenStep, previous: OpenStep | None) -> None:
        """Hands it a step, to be computed after those before."""
        self._steps.put((step, previous))

    def close(self) -> None:
        """Stops it after the steps that it was handed."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._steps.get()) is not None:
            step, previous = item
            step.compute(self._runner, previous)
            del item, step, previous  # do not keep a batch's arrays while there is nothing to do


class _FilledBatch:
    """A batch whose tokens are all known."""

    def __init__(self, batch: Batch, token_ids: _IntArray) -> None:
        self._batch = batch
        self.token_ids = token_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def _filled(batch: Batch, samples: _IntArray) -> Batch:
    """The batch with the previous step's samples in the places that name them."""
    places = np.flatnonzero(batch.token_source >= 0)
    if not len(places):
        return batch
    token_ids = batch.token_ids.copy()
    token_ids[places] = samples[batch.token_source[places]]
    return cast("Batch", _FilledBatch(batch, token_ids))
