"""A small synchronous loop: submit, step, forward, sample, commit.

It shows the order that every engine over kvpager follows, and is what `kvpager generate` runs. One thread
calls it; the model runs between `step` and `commit`, so planning and computing do not overlap here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpager._core import Batch, BlockPool, Fingerprint, FinishedRequest, PrefixIndex, Scheduler, Tenant
from kvpager.errors import InvalidArgumentError
from kvpager.runner.llama import LlamaModel
from kvpager.runner.sampling import SamplingParams, sample

__all__ = ["Generation", "GenerationLoop", "LoopConfig", "blocks_needed"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Sizes of a loop.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: token positions in a block.
        max_batch_tokens: tokens in a step, decodes and prefill chunks together.
        max_running: sequences that run at once; at most `max_batch_tokens` are used.
        max_prefill_chunk: longest prefill chunk of one sequence in a step; None for the whole budget.
        reuse: whether there is a prefix index.
    """

    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 512
    max_running: int = 64
    max_prefill_chunk: int | None = None
    reuse: bool = True


@dataclass
class Generation:
    """One request and what has become of it.

    Attributes:
        request_id: the scheduler's id.
        tenant: who sent it.
        prompt_tokens: tokens of its prompt.
        sampling: how its tokens are chosen.
        token_ids: its output so far; the end token is part of it.
        submitted_at, started_at: clock of `time.perf_counter`; None before the first step with it.
        account: the scheduler's closing account; None while it is unfinished.
    """

    request_id: int
    tenant: str
    prompt_tokens: int
    sampling: SamplingParams
    submitted_at: float
    started_at: float | None = None
    token_ids: list[int] = field(default_factory=list)
    account: FinishedRequest | None = None

    @property
    def queue_wait(self) -> float:
        """Seconds from submission to the start of the first step that computed some of it."""
        return 0.0 if self.started_at is None else self.started_at - self.submitted_at


class GenerationLoop:
    """A pool, an index, a scheduler and a model's KV arrays, driven one step at a time.

    Attributes:
        on_token: called with each generation and its new token, in batch order, after the step's commit.
        on_finished: called with each generation that ended.
        generations: every request of this loop, by id.
    """

    def __init__(
        self, model: LlamaModel, config: LoopConfig, *, fingerprint: Fingerprint | None = None
    ) -> None:
        """Makes the parts.

        Args:
            model: computes batches.
            config: sizes.
            fingerprint: what must be equal for KV to be reusable; needed if an index outlives a model.

        Raises:
            InvalidArgumentError: sizes out of range.
        """
        self._model = model
        self._fingerprint = fingerprint
        self._cache = model.new_cache(num_blocks=config.num_blocks, block_size=config.block_size)
        self.pool = BlockPool(config.num_blocks)
        self.index = PrefixIndex(self.pool, block_size=config.block_size) if config.reuse else None
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=min(config.max_running, config.max_batch_tokens),
            max_model_tokens=model.config.max_positions,
            max_prefill_chunk=config.max_prefill_chunk,
        )
        self.generations: dict[int, Generation] = {}
        self.on_token: Callable[[Generation, int], None] | None = None
        self.on_finished: Callable[[Generation], None] | None = None
        self._tenants: dict[str, Tenant] = {}

    def add_tenant(self, name: str, *, guaranteed: int = 0, limit: int | None = None) -> None:
        """Adds a tenant with its quota in blocks.

        Raises:
            InvalidArgumentError: the name is taken, or the pool cannot give the quota.
        """
        self._tenants[name] = self.scheduler.add_tenant(
            name, guaranteed=guaranteed, limit=limit, fingerprint=self._fingerprint
        )

    def submit(
        self,
        tenant: str,
        prompt_ids: Sequence[int] | npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        sampling: SamplingParams | None = None,
    ) -> Generation:
        """Accepts a request; it runs in a later step.

        Args:
            tenant: a name given to `add_tenant`.
            prompt_ids: [n] token ids.
            max_tokens: most tokens to generate.
            stop_token_ids: ids that end it.
            sampling: how tokens are chosen; greedy if not given.

        Raises:
            InvalidArgumentError: an unknown tenant, an empty prompt, ids outside the vocabulary.
            RefusedError: it can never fit the pool, the tenant's limit or the model's positions.
        """
        if tenant not in self._tenants:
            raise InvalidArgumentError(f"unknown tenant {tenant!r}: there are {', '.join(self._tenants)}")
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int64)
        vocab_size = self._model.config.vocab_size
        if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < vocab_size:
            wrong = int(prompt[(prompt < 0) | (prompt >= vocab_size)][0])
            raise InvalidArgumentError(
                f"token id {wrong} of the prompt is outside the vocabulary of {vocab_size}"
            )
        request_id = self.scheduler.submit(
            self._tenants[tenant],
            prompt.astype(np.uint32),
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
        )
        generation = Generation(
            request_id, tenant, len(prompt), sampling or SamplingParams(), time.perf_counter()
        )
        self.generations[request_id] = generation
        return generation

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.scheduler.has_work():
            self.step()

    def step(self) -> None:
        """Plans a batch, computes it, commits its tokens, and calls back.

        Raises:
            Exception: whatever the model raised; the step is abandoned and its requests have ended then.
        """
        batch = self.scheduler.step()
        self._note_started(batch)
        try:
            token_start, tokens = self._compute(batch)
        except BaseException as error:
            outcome = self.scheduler.abandon(batch.step_id, f"the model failed: {error}", fail=True)
            self._close(outcome.finished)
            raise
        outcome = self.scheduler.commit(batch.step_id, token_start, tokens)
        self._deliver(batch, token_start, tokens)
        self._close([*batch.finished, *outcome.finished])

    def _compute(self, batch: Batch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Runs the model on a batch; returns `token_start` [S+1] and the tokens, as `commit` takes them."""
        token_start = np.zeros(batch.num_sequences + 1, np.int32)
        if batch.num_tokens == 0:
            return token_start, token_start[:0]
        self._cache.prepare(batch)
        logits = self._model.forward(batch, self._cache)
        owners = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
        token_start[1:] = np.cumsum(np.bincount(owners, minlength=batch.num_sequences))
        generations = [self.generations[int(request_id)] for request_id in batch.sequence_ids[owners]]
        tokens = sample(
            self._model.to_host(logits),
            [generation.sampling for generation in generations],
            [len(generation.token_ids) for generation in generations],
        )
        return token_start, tokens

    def _note_started(self, batch: Batch) -> None:
        now = time.perf_counter()
        for request_id in batch.sequence_ids.tolist():
            generation = self.generations[request_id]
            if generation.started_at is None:
                generation.started_at = now

    def _deliver(
        self, batch: Batch, token_start: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
    ) -> None:
        for place, request_id in enumerate(batch.sequence_ids.tolist()):
            generation = self.generations[request_id]
            for token in tokens[token_start[place] : token_start[place + 1]].tolist():
                generation.token_ids.append(token)
                if self.on_token is not None:
                    self.on_token(generation, token)

    def _close(self, finished: Sequence[FinishedRequest]) -> None:
        for account in finished:
            generation = self.generations[account.request_id]
            generation.account = account
            if self.on_finished is not None:
                self.on_finished(generation)


def blocks_needed(prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Returns the blocks of a request over its life: its last token is returned, never computed."""
    return -(-(prompt_tokens + max_tokens - 1) // block_size)
