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

from kvpager._core import Fingerprint, Scheduler, Session, Tenant
from kvpager.engine.beams import BeamSearch
from kvpager.engine.config import EngineConfig, GenerationParams
from kvpager.engine.counters import TenantCounters
from kvpager.engine.generation import Generation, Listener
from kvpager.engine.kinds import NUMBER, TEXT, Kind, check, instance, optional, shown
from kvpager.engine.model_runner import ModelRunner
from kvpager.engine.text import TextTokenizer
from kvpager.errors import InvalidArgumentError, RefusedError, WrongStateError

__all__ = ["DEFAULT_TENANT", "Registry"]

DEFAULT_TENANT = "default"

_NAME = Kind("a name", TEXT.fits)
_TENANT_KINDS = {"weight": NUMBER, "isolation": TEXT, "scope": TEXT}

_KINDS = {
    "params": instance(GenerationParams),
    "session": optional(instance(Session)),
    "listener": optional(
        Kind("an object with notify(generation)", lambda value: callable(getattr(value, "notify", None)))
    ),
}


class Registry:
    """What an engine knows of tenants and requests.

    Attributes:
        turn: held while the scheduler plans, commits or takes a tenant, which it lets only one thread do.
        live: sequences that have not left the scheduler, by id.
        num_searches: beam searches that have not left it.
        state: `running`, `draining`, `stopped` or `failed`.
        reason: why it failed, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        config: EngineConfig,
        tokenizer: TextTokenizer | None,
        fingerprint: Fingerprint | None,
    ) -> None:
        """Starts without tenants and requests."""
        self._scheduler, self._runner, self._tokenizer = scheduler, runner, tokenizer
        self._config, self._fingerprint = config, fingerprint
        self._lock = threading.Lock()
        self.turn = threading.Lock()
        self._pid = os.getpid()
        self._tenants: dict[str, Tenant] = {}
        self._counters: dict[str, TenantCounters] = {}
        self.live: dict[int, Generation] = {}
        self.num_searches = 0
        self.state = "running"
        self.reason: str | None = None

    def add_tenant(
        self, name: str, *, group: str | None = None, public: str | None = None, **options: Any
    ) -> None:
        """Adds a tenant; see `Engine.add_tenant`."""
        check("name", name, TEXT)
        for option, kind in _TENANT_KINDS.items():
            check(option, options[option], kind)
        scopes = {
            "group": None if group is None else self.tenant(group),
            "public": None if public is None else self.tenant(public),
        }
        with self._lock:
            self._add_tenant(name, **scopes, **options)

    def _add_tenant(self, name: str, **options: Any) -> None:
        with self.turn:
            tenant = self._scheduler.add_tenant(name, fingerprint=self._fingerprint, **options)
        self._counters[name] = TenantCounters()
        self._tenants[name] = tenant  # after its counters: who finds it may count

    @property
    def tenants(self) -> dict[str, Tenant]:
        """The tenants by name, as they are now."""
        return self._tenants.copy()

    @property
    def counters(self) -> dict[str, TenantCounters]:
        """The counters of each, which go on changing."""
        return self._counters.copy()

    def counters_of(self, tenant: str) -> TenantCounters:
        """The counters of one tenant, which go on changing.

        Raises:
            InvalidArgumentError: there is no such tenant.
        """
        if (found := self._counters.get(tenant)) is None:
            raise self._unknown(tenant)
        return found

    def submit(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]],
        params: GenerationParams | None,
        tenant: str,
        session: Session | None,
        listener: Listener | None,
    ) -> list[Generation]:
        """Accepts all samples of a request or none; see `Engine.submit`."""
        self.check_open()
        params = GenerationParams() if params is None else params
        for name, value in (("params", params), ("session", session), ("listener", listener)):
            check(name, value, _KINDS[name])
        self._check_params(params, session)
        if session is not None and tenant == DEFAULT_TENANT:
            tenant = session.tenant.name
        handle = self.tenant(tenant)
        self._check_queue(handle, params)
        ids = self._prompt_ids(prompt)
        end_ids = self._end_token_ids(params)
        generations: list[Generation] = []
        try:
            if params.beam_width is not None:
                search = BeamSearch(params, end_ids)
                return self._accept(handle, ids, params, session, listener, search=search)[: params.n]
            for index in range(params.n):
                generations += self._accept(
                    handle, ids, params, session, listener, index=index, end_ids=end_ids
                )
        except BaseException as error:
            if isinstance(error, RefusedError):
                self.note_refused(tenant)
            for generation in generations:
                self.abort(generation)
            raise
        return generations

    def max_waiting(self, tenant: Tenant) -> int:
        """Requests of a tenant that may wait at once, by its own bound and the engine's."""
        own = tenant.max_waiting
        return self._config.max_waiting if own is None else min(own, self._config.max_waiting)

    def _check_queue(self, tenant: Tenant, params: GenerationParams) -> None:
        """Refuses for good what would not even fit an empty queue."""
        bound = self.max_waiting(tenant)
        if params.num_waiting > bound:
            self.note_refused(tenant.name)
            raise RefusedError(
                f"refused: {params.num_waiting} samples are asked for, {bound} may wait at once"
            )

    def note_refused(self, tenant: str) -> None:
        """Counts a request that was not accepted."""
        with self._lock:
            self._counters[tenant].refused += 1

    def abort(self, generation: Generation) -> bool:
        """Tells the scheduler to end a request, or the whole search it is of; False if it had ended."""
        generation.is_aborted = True
        request_id = generation.request_id
        if generation.search is not None:
            generation.search.is_aborted = True
            request_id = generation.search.request_id
        return not generation.has_ended and self._scheduler.abort(request_id)

    def forget(self, generation: Generation) -> None:
        """Takes one out of what is live: the last thing that happens to it."""
        search = generation.search
        del self.live[generation.request_id]
        if search is not None and not any(member.request_id in self.live for member in search.members):
            with self._lock:
                self.num_searches -= 1

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

    def _check_params(self, params: GenerationParams, session: Session | None) -> None:
        if session is not None and params.num_sequences != 1:
            raise InvalidArgumentError(
                f"a turn of a session has one sequence, {params.num_sequences} are asked for", param="n"
            )
        if params.stop and self._tokenizer is None:
            raise InvalidArgumentError(
                "stop texts need an engine with a tokenizer: give stop_token_ids", param="stop"
            )
        if params.logprobs is not None and not self._runner.gives_logits:
            raise InvalidArgumentError(
                "this model runner returns tokens, not logits: it has no logprobs", param="logprobs"
            )
        if params.beam_width is not None:
            self._check_beams(params.beam_width, len(self._end_token_ids(params)))

    def _check_beams(self, width: int, num_ends: int) -> None:
        if not self._runner.gives_logits:
            raise InvalidArgumentError(
                "this model runner returns tokens, not logits: it has no beam search", param="beam_width"
            )
        if width + num_ends > self._runner.vocab_size:
            raise InvalidArgumentError(
                f"beam_width is {width} and {num_ends} tokens end an answer: more than the vocabulary of "
                f"{self._runner.vocab_size}",
                param="beam_width",
            )

    def tenant(self, name: str) -> Tenant:
        """The scheduler's handle of a tenant; without any tenant, `default` is made.

        Raises:
            InvalidArgumentError: there is no such tenant.
        """
        check("tenant", name, _NAME)
        if not self._tenants and name == DEFAULT_TENANT:
            with self._lock:
                if not self._tenants:
                    self._add_tenant(name)
        if (tenant := self._tenants.get(name)) is None:
            raise self._unknown(name)
        return tenant

    def _unknown(self, name: str) -> InvalidArgumentError:
        text = f"unknown tenant {name!r}: there are {', '.join(self.tenants) or 'none'}"
        return InvalidArgumentError(text, param="tenant")

    def _prompt_ids(
        self, prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.uint32]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidArgumentError(
                    "a text prompt needs an engine with a tokenizer: give token ids", param="prompt"
                )
            prompt = self._tokenizer.encode(prompt)
        ids = _token_ids(prompt)
        vocab_size = self._runner.vocab_size
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            raise InvalidArgumentError(
                f"token id {wrong} of the prompt is outside the vocabulary of {vocab_size}", param="prompt"
            )
        return np.ascontiguousarray(ids, dtype=np.uint32)

    def _end_token_ids(self, params: GenerationParams) -> list[int]:
        own = () if self._tokenizer is None or params.ignore_eos else self._tokenizer.stop_token_ids
        return [*own, *params.stop_token_ids]

    def _accept(
        self,
        tenant: Tenant,
        ids: npt.NDArray[np.uint32],
        params: GenerationParams,
        session: Session | None,
        listener: Listener | None,
        *,
        index: int = 0,
        end_ids: Sequence[int] = (),
        search: BeamSearch | None = None,
    ) -> list[Generation]:
        """Submits one sample, or the beams of a search, which knows itself what ends them."""
        submitted_at = time.perf_counter()
        count = 1 if search is None else params.num_sequences
        with self._lock:  # the engine's thread must not meet an id that is not in `live` yet
            self.check_open()  # again: whoever closes the engine holds the lock and then ends what is live
            request_id = self._scheduler.submit(
                tenant,
                ids,
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=list(end_ids),
                priority=params.priority,
                reuse=params.reuse,
                deadline_seconds=params.deadline,
                salt=params.salt,
                session=session,
                retention=params.retention,
                n=count,
            )
            accepted = [
                Generation(
                    request_id + place,
                    tenant.name,
                    prompt_tokens=len(ids),
                    params=params,
                    sampling=params.sampling.for_sample(index + place),
                    submitted_at=submitted_at,
                    index=index + place,
                    listener=listener if index + place < params.n else None,
                    search=search,
                )
                for place in range(count)
            ]
            self.live.update((generation.request_id, generation) for generation in accepted)
            self._counters[tenant.name].submitted += count
            if search is not None:
                search.members = accepted
                self.num_searches += 1
        return accepted

    def find(self, request_id: int) -> Generation:
        """The generation of an id; waits for a submitter that has not noted it yet."""
        found = self.live.get(request_id)
        if found is None:
            with self._lock:
                found = self.live[request_id]
        return found


def _token_ids(prompt: object) -> npt.NDArray[np.integer[Any]]:
    """[n] token ids as they were given, of any integer dtype.

    Raises:
        InvalidArgumentError: it is empty, of another kind, or of another shape.
    """
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError) as error:  # nested lists of several lengths, and the like
        raise InvalidArgumentError(f"the prompt is {shown(prompt)}: {error}", param="prompt") from error
    if ids.ndim == 1 and not ids.size:
        raise InvalidArgumentError("the prompt is empty: 0 tokens, at least 1 is needed", param="prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = f"{ids.dtype} {list(ids.shape)}" if isinstance(prompt, np.ndarray) else shown(prompt)
        raise InvalidArgumentError(
            f"the prompt is {kind}, a text or [n] token ids are needed", param="prompt"
        )
    return ids
