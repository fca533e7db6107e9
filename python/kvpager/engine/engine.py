"""The synchronous engine: submit, step, run the model, sample, commit, deliver.

`submit` and `abort` may be called from any thread. One thread calls `step` (or `run`, or `generate`, which
step); `AsyncEngine` gives an engine a thread of its own. The order of a step is the order that every caller
of the scheduler follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvpager._core import BlockPool, Fingerprint, PrefixIndex, Scheduler, Session
from kvpager.engine.config import EngineConfig, GenerationParams
from kvpager.engine.counters import EngineSnapshot, TenantCounters
from kvpager.engine.delivery import Delivery
from kvpager.engine.generation import Generation, Listener
from kvpager.engine.kinds import NUMBER, check, check_members, instance, optional
from kvpager.engine.model_runner import ModelRunner
from kvpager.engine.output import GenerationOutput, OutputReader
from kvpager.engine.registry import DEFAULT_TENANT, Registry
from kvpager.engine.stepping import Stepping
from kvpager.engine.text import TextTokenizer

__all__ = ["DEFAULT_TENANT", "Engine"]

_RUNNER = ("vocab_size", "max_model_tokens", "gives_logits", "allocate", "run")
_TOKENIZER = ("stop_token_ids", "encode", "decode", "new_decode_stream")


class Engine:
    """A pool, an index, a scheduler and a model, driven one step at a time.

    Attributes:
        runner: the model.
        config: sizes and policies.
        tokenizer: for prompts and answers as text; None for an engine of token ids.
        max_model_tokens: longest sequence, prompt and output together.
        on_input: called in the caller's thread after every submission, abort and resumption.
        pool, index, scheduler: the parts; read their statistics, and leave `step` and `commit` to the engine.

    Example:
        >>> from kvpager.engine import EngineConfig, GenerationParams, NullRunner
        >>> engine = Engine(NullRunner(), EngineConfig(num_blocks=64))
        >>> [output.token_ids for output in engine.generate([5, 6, 7], GenerationParams(max_tokens=3))]
        [[34], [35], [36]]
        >>> engine.pool.stats().held
        0
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        tokenizer: TextTokenizer | None = None,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """Makes the parts, and has the runner allocate its KV memory.

        Args:
            runner: computes batches.
            config: sizes and policies.
            tokenizer: for prompts and answers as text.
            fingerprint: what must be equal for KV to be reusable; needed if an index outlives a model.

        Raises:
            InvalidArgumentError: sizes out of range; other things than these.
            OutOfMemoryError: more than there is memory for.
        """
        check("config", config, instance(EngineConfig))
        check_members("runner", runner, _RUNNER)
        if tokenizer is not None:
            check_members("tokenizer", tokenizer, _TOKENIZER)
        self.runner, self.config, self.tokenizer = runner, config, tokenizer
        self.pool = BlockPool(config.num_blocks, max_accounts=config.max_accounts + 2)
        self.index = (
            PrefixIndex(self.pool, block_size=config.block_size, eviction=config.eviction)
            if config.reuse
            else None
        )
        self.max_model_tokens = min(
            config.max_model_tokens or runner.max_model_tokens, runner.max_model_tokens
        )
        self.scheduler = Scheduler(
            self.pool,
            self.index,
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=min(config.max_running, config.max_batch_tokens),
            max_waiting=config.max_waiting,
            max_model_tokens=self.max_model_tokens,
            layer_groups=getattr(runner, "layer_groups", None),
            max_prefill_chunk=config.max_prefill_chunk,
            policy=config.policy,
            urgent_preempts=config.urgent_preempts,
            overflow=config.overflow,
            host_blocks=config.host_blocks,
            max_open_steps=config.max_open_steps,
        )
        runner.allocate(
            num_blocks=config.num_blocks, block_size=config.block_size, host_blocks=config.host_blocks
        )
        self._registry = Registry(self.scheduler, runner, config, tokenizer, fingerprint)
        self._delivery = Delivery(self.scheduler, self._registry, max_unread=config.max_buffered_tokens)
        self._stepping = Stepping(self.scheduler, runner, config, self._registry, self._delivery)
        self.on_input: Callable[[], object] = lambda: None

    # --- any thread -------------------------------------------------------------------------------------

    def add_tenant(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        limit: int | None = None,
        weight: float = 1.0,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        max_running: int | None = None,
        max_batch_tokens: int | None = None,
        max_kept_blocks: int | None = None,
        isolation: Literal["open", "scoped", "strict"] = "scoped",
        scope: Literal["private", "group", "public"] = "private",
        group: str | None = None,
        public: str | None = None,
    ) -> None:
        """Adds a tenant, or a scope that tenants share; see `Scheduler.add_tenant`.

        Args:
            name: unique in the engine.
            guaranteed: blocks that it gets whatever others do.
            limit: most blocks that it may have; None for the pool's.
            weight: share of service among tenants that wait.
            max_waiting: requests of it that may wait at once; None for no bound of its own.
            max_waiting_tokens: prompt tokens of it that may wait at once; None for no bound of its own.
            max_running: `strict` only: sequences of it that run at once; None for the part of the engine's
                that its blocks are of the pool.
            max_batch_tokens: `strict` only: tokens of it in a step; None for the same part.
            max_kept_blocks: most blocks of it that sessions and retentions keep after a request's end; None
                for its limit.
            isolation: what it may observe of others.
            scope: who may see what its requests leave in the index.
            group: name of a tenant of group scope whose prefixes it may use.
            public: name of a tenant of public scope whose prefixes it may use.

        Raises:
            InvalidArgumentError: the name is taken, another name is unknown, the pool cannot give the quota,
                or scopes and levels do not go together.
        """
        self._registry.add_tenant(
            name,
            guaranteed=guaranteed,
            limit=limit,
            weight=weight,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            max_kept_blocks=max_kept_blocks,
            isolation=isolation,
            scope=scope,
            group=group,
            public=public,
        )

    def open_session(
        self,
        tenant: str = DEFAULT_TENANT,
        *,
        idle_seconds: float | None = None,
        idle_steps: int | None = None,
        priority: int = 0,
    ) -> Session:
        """Opens a session: its turns (`submit(session=...)`) leave their blocks in place for the next one.

        They are kept until a limit has passed without a turn or a request needs the room, within the tenant's
        `max_kept_blocks`; see `Scheduler.open_session`. From any thread.

        Args:
            tenant: whose it is: a name given to `add_tenant`, of private scope.
            idle_seconds: seconds without a turn after which its blocks become cached; None for no limit.
            idle_steps: the same in steps.
            priority: higher stays longer, see `Retention`.

        Raises:
            InvalidArgumentError: an unknown tenant or one of a shared scope, a limit that is none, or an
                engine without reuse.
            WrongStateError: the engine is draining, has stopped, has failed, or is of another process.
        """
        self._registry.check_open()
        check("idle_seconds", idle_seconds, optional(NUMBER))
        return self.scheduler.open_session(
            self._registry.tenant(tenant), idle_seconds=idle_seconds, idle_steps=idle_steps, priority=priority
        )

    def close_session(self, session: Session) -> bool:
        """Closes a session; its blocks become cached in the next step. False if it was closed before.

        A turn that runs goes on. From any thread.
        """
        check("session", session, instance(Session))
        was_open = self.scheduler.close_session(session)
        self.on_input()
        return was_open

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of the tenants."""
        return tuple(self._registry.tenants)

    @property
    def state(self) -> str:
        """`running`, `draining` (accepts nothing more), `stopped` or `failed`."""
        return self._registry.state

    @property
    def reason(self) -> str | None:
        """Why it failed, or None."""
        return self._registry.reason

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._registry.live)

    def has_work(self) -> bool:
        """Whether anything waits or runs, or an end has not been delivered yet."""
        return self._stepping.has_work()

    def submit(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]],
        params: GenerationParams | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        session: Session | None = None,
        listener: Listener | None = None,
    ) -> list[Generation]:
        """Accepts a request; it runs in later steps. From any thread.

        Args:
            prompt: text, or [n] token ids.
            params: what is wanted; greedy, 64 tokens, by default.
            tenant: a name given to `add_tenant`. Without any tenant, `default` is added by the first request.
            session: the session that it is a turn of, which names the tenant by itself; then one sample, and
                no beams.
            listener: told of new tokens and of the end.

        Returns:
            One generation for each of `params.n`; of a beam search, its answers from the best on.

        Raises:
            InvalidArgumentError: an unknown tenant, a session that is closed or of another one, an empty
                prompt, ids outside the vocabulary, a text without a tokenizer, logprobs that the runner
                cannot give, beams without logits.
            RefusedError: it can never fit the pool, the tenant's limit, the queue or the model's positions;
                or too many wait (`retryable`). Nothing was accepted.
            WrongStateError: the engine is draining, has stopped, has failed, or is of another process.
        """
        try:
            return self._registry.submit(prompt, params, tenant, session, listener)
        finally:
            self.on_input()

    def abort(self, generation: Generation) -> bool:
        """Ends a request at the next step, which frees its blocks; False if it had ended. From any thread.

        The answers of a beam search end together.
        """
        check("generation", generation, instance(Generation))
        is_live = self._registry.abort(generation)
        self.on_input()
        return is_live

    def resume(self, generation: Generation) -> None:
        """Goes on with a request that was paused for its consumer. From any thread."""
        self._delivery.resume(generation)
        self.on_input()

    def note_taken(self, generation: Generation, count: int) -> None:
        """Notes how many tokens a consumer has read, and resumes what was paused for it. From any thread."""
        if self._delivery.note_taken(generation, count):
            self.on_input()

    def snapshot(self) -> EngineSnapshot:
        """Returns the counts of all parts at one moment between two turns of the scheduler. From any thread.

        What the engine itself counts per tenant is read right after, and goes on changing.
        """
        counts = self.scheduler.snapshot()
        return EngineSnapshot(
            state=self.state,
            reason=self.reason,
            pool=counts.pool,
            scheduler=counts.scheduler,
            accounts=counts.accounts,
            tenants=self._registry.counters,
            failed_steps=self._stepping.num_failed,
            is_exact=counts.is_exact,
        )

    def max_waiting(self, tenant: str) -> int:
        """Samples that a tenant may have waiting at once, by its own bound and the engine's.

        Raises:
            InvalidArgumentError: there is no such tenant.
        """
        return self._registry.max_waiting(self._registry.tenant(tenant))

    def counters(self, tenant: str) -> TenantCounters:
        """The counts of one tenant, which go on changing. From any thread."""
        return self._registry.counters_of(tenant)

    def note_refused(self, tenant: str) -> None:
        """Counts a request that the caller refused without asking the engine. From any thread."""
        self._registry.note_refused(tenant)

    def stop_accepting(self) -> None:
        """Refuses further requests; what was accepted goes on. From any thread."""
        if self.state == "running":
            self._registry.leave("draining")

    # --- the engine's thread ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Plans a batch, computes it, commits its tokens, and delivers them.

        With several open steps, it plans ahead while the model computes, and ends the oldest one. A step that
        the runner fails ends its requests with the reason; after `max_failures` in a row, or
        `RunnerLostError`, the engine has failed and ends everything.

        Returns:
            Whether it got anything done; if not, everything waits for blocks that others hold.

        Raises:
            WrongStateError: another thread is in it.
            BaseException: what is no `Exception` (an interrupt) goes on to the caller, after the open steps
                were given up; their sequences continue in a later step.
        """
        return self._stepping.step()

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.has_work():
            if not self.step():
                time.sleep(0.001)

    def generate(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]],
        params: GenerationParams | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        session: Session | None = None,
    ) -> Iterator[GenerationOutput]:
        """Submits a prompt and steps until it has ended; other requests move along.

        Args:
            prompt: text, or [n] token ids.
            params: what is wanted.
            tenant: a name given to `add_tenant`.
            session: the session that it is a turn of.

        Yields:
            New tokens and text as they come; the last output of each sample has its finish reason. Closing
            the iterator ends the request.

        Raises:
            GenerationError: the request failed.
            Exception: as for `submit`.
        """
        generations = self.submit(prompt, params, tenant=tenant, session=session)
        readers = [OutputReader(self, generation) for generation in generations]
        try:
            while not all(reader.has_ended for reader in readers):
                for reader in readers:
                    if (output := reader.take()) is not None:
                        yield output
                if not all(reader.has_ended for reader in readers) and not self.step():
                    time.sleep(0.001)
        finally:
            for reader in readers:
                reader.close()

    def close(self) -> None:
        """Ends every request and gives all blocks back, kept ones too. Idempotent; in the engine's thread."""
        if self.state in ("running", "draining"):
            self._registry.leave("stopped")
        self._stepping.close()

    def fail(self, reason: str) -> None:
        """Ends the engine: everything in flight ends with the reason, nothing more is accepted."""
        self._stepping.fail(reason)
