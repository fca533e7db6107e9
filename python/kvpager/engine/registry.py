"""Tenants and requests of an engine: callers' threads register them, its own thread looks them up.

One lock orders a registration with the engine's look-up and with its end: the engine never meets an id that
it does not know, and no request is accepted that nobody will end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpager._core import Fingerprint, Scheduler, Tenant
from kvpager.engine.config import GenerationParams
from kvpager.engine.counters import TenantCounters
from kvpager.engine.generation import Generation, Listener
from kvpager.engine.model_runner import ModelRunner
from kvpager.engine.text import TextTokenizer
from kvpager.errors import InvalidArgumentError, RefusedError, WrongStateError

__all__ = ["DEFAULT_TENANT", "Registry"]

DEFAULT_TENANT = "default"


class Registry:
    """What an engine knows of tenants and requests.

    Attributes:
        tenants, counters: by name.
        live: requests that have not ended, by id.
        state: `running`, `draining`, `stopped` or `failed`.
        reason: why it failed, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        tokenizer: TextTokenizer | None,
        fingerprint: Fingerprint | None,
    ) -> None:
        """Starts without tenants and requests."""
        self._scheduler, self._runner, self._tokenizer = scheduler, runner, tokenizer
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.tenants: dict[str, Tenant] = {}
        self.counters: dict[str, TenantCounters] = {}
        self.live: dict[int, Generation] = {}
        self.state = "running"
        self.reason: str | None = None

    def add_tenant(
        self, name: str, *, group: str | None = None, public: str | None = None, **options: Any
    ) -> None:
        """Adds a tenant; see `Engine.add_tenant`."""
        self.tenants[name] = self._scheduler.add_tenant(
            name,
            fingerprint=self._fingerprint,
            group=None if group is None else self.tenant(group),
            public=None if public is None else self.tenant(public),
            **options,
        )
        self.counters[name] = TenantCounters()

    def submit(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]],
        params: GenerationParams,
        tenant: str,
        listener: Listener | None,
    ) -> list[Generation]:
        """Accepts all samples of a request or none; see `Engine.submit`."""
        self.check_open()
        self._check_params(params)
        handle = self.tenant(tenant)
        ids = self._prompt_ids(prompt)
        stop_ids = self._stop_token_ids(params)
        generations: list[Generation] = []
        try:
            for index in range(params.n):
                generations.append(self._submit_one(handle, ids, params, stop_ids, index, listener))
        except BaseException as error:
            if isinstance(error, RefusedError):
                self.counters[tenant].refused += 1
            for generation in generations:
                self.abort(generation)
            raise
        return generations

    def abort(self, generation: Generation) -> bool:
        """Tells the scheduler to end a request; False if it had ended."""
        generation.is_aborted = True
        return not generation.has_ended and self._scheduler.abort(generation.request_id)

    def leave(self, state: str, reason: str | None = None) -> None:
        """Accepts nothing from now on, with the state that says why. What was accepted is in `live`."""
        with self._lock:
            self.state, self.reason = state, reason

    def check_open(self) -> None:
        """Raises unless requests are accepted.

        Raises:
            WrongStateError: the engine is draining, has stopped, has failed, or is of another process.
        """
        if self.state != "running":
            because = f": {self.reason}" if self.reason else ""
            raise WrongStateError(f"the engine accepts no requests: it is {self.state}{because}")
        if os.getpid() != self._pid:
            raise WrongStateError(
                f"the engine belongs to process {self._pid}, this is {os.getpid()}: make one after a fork"
            )

    def _check_params(self, params: GenerationParams) -> None:
        if params.stop and self._tokenizer is None:
            raise InvalidArgumentError("stop texts need an engine with a tokenizer: give stop_token_ids")
        if params.logprobs is not None and not self._runner.gives_logits:
            raise InvalidArgumentError("this model runner returns tokens, not logits: it has no logprobs")

    def tenant(self, name: str) -> Tenant:
        """The scheduler's handle of a tenant; without any tenant, `default` is made.

        Raises:
            InvalidArgumentError: there is no such tenant.
        """
        if not self.tenants and name == DEFAULT_TENANT:
            with self._lock:
                if not self.tenants:
                    self.add_tenant(name)
        if (tenant := self.tenants.get(name)) is None:
            raise InvalidArgumentError(
                f"unknown tenant {name!r}: there are {', '.join(self.tenants) or 'none'}"
            )
        return tenant

    def _prompt_ids(
        self, prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.uint32]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidArgumentError("a text prompt needs an engine with a tokenizer: give token ids")
            prompt = self._tokenizer.encode(prompt)
        ids = np.ascontiguousarray(prompt, dtype=np.int64)
        vocab_size = self._runner.vocab_size
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            raise InvalidArgumentError(
                f"token id {wrong} of the prompt is outside the vocabulary of {vocab_size}"
            )
        return ids.astype(np.uint32)

    def _stop_token_ids(self, params: GenerationParams) -> list[int]:
        own = () if self._tokenizer is None or params.ignore_eos else self._tokenizer.stop_token_ids
        return [*own, *params.stop_token_ids]

    def _submit_one(
        self,
        tenant: Tenant,
        ids: npt.NDArray[np.uint32],
        params: GenerationParams,
        stop_token_ids: list[int],
        index: int,
        listener: Listener | None,
    ) -> Generation:
        submitted_at = time.perf_counter()
        with self._lock:  # the engine's thread must not meet an id that is not in `live` yet
            self.check_open()  # again: whoever closes the engine holds the lock and then ends what is live
            request_id = self._scheduler.submit(
                tenant,
                ids,
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_token_ids,
                priority=params.priority,
                reuse=params.reuse,
                deadline_seconds=params.deadline,
                salt=params.salt,
            )
            generation = Generation(
                request_id,
                tenant.name,
                prompt_tokens=len(ids),
                params=params,
                sampling=params.sampling.for_sample(index),
                submitted_at=submitted_at,
                index=index,
                listener=listener,
            )
            self.live[request_id] = generation
            self.counters[tenant.name].submitted += 1
        return generation

    def find(self, request_id: int) -> Generation:
        """The generation of an id; waits for a submitter that has not noted it yet."""
        found = self.live.get(request_id)
        if found is None:
            with self._lock:
                found = self.live[request_id]
        return found
