"""What a step means for its requests: tokens to their consumers, beams onwards, ends with their reasons."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from kvpager.errors import WrongStateError

if TYPE_CHECKING:
    from kvpager._core import Batch, FinishedRequest, Scheduler
    from kvpager.engine.beams import BeamSearch, BeamStep
    from kvpager.engine.generation import Generation
    from kvpager.engine.registry import Registry

__all__ = ["Delivery"]


class Delivery:
    """Hands the outcome of steps over, in the engine's thread; consumers tell it what they have read."""

    def __init__(self, scheduler: Scheduler, registry: Registry, *, max_unread: int) -> None:
        """Starts with nothing delivered.

        Args:
            scheduler: told of pauses, aborts and the beams' order.
            registry: who is who.
            max_unread: tokens that a consumer may leave unread before its request is paused.
        """
        self._scheduler, self._registry, self._max_unread = scheduler, registry, max_unread
        self._pause_lock = threading.Lock()

    def resume(self, generation: Generation) -> None:
        """Goes on with a request that was paused for its consumer. From any thread."""
        generation.is_paused = False
        if not generation.has_ended:
            self._scheduler.resume(generation.request_id)

    def note_taken(self, generation: Generation, count: int) -> bool:
        """Notes how many tokens a consumer has read; returns whether that resumed it. From any thread."""
        with self._pause_lock:
            generation.num_taken = count
            is_paused = generation.is_paused
        if is_paused:
            self.resume(generation)
        return is_paused

    def note_started(self, batch: Batch, generations: list[Generation]) -> None:
        """Notes which of a batch's sequences are in their first step."""
        now = time.perf_counter()
        for place, generation in enumerate(generations):
            if generation.started_at is None:
                cached_tokens = int(batch.positions[batch.query_start[place]])
                search = generation.search
                for started in [generation] if search is None else search.members:
                    started.started_at, started.cached_tokens = now, cached_tokens
                    self._registry.counters_of(started.tenant).note_started(started)

    def deliver(self, sampled: list[Generation], tokens: list[int]) -> None:
        """Gives each its committed token; who does not read is paused."""
        now = time.perf_counter()
        limit = self._max_unread
        for generation, token in zip(sampled, tokens, strict=True):
            if generation.is_aborted or generation.has_ended or generation.search is not None:
                continue
            generation.token_ids.append(token)
            generation.last_token_at = now
            if generation.first_token_at is None:
                generation.first_token_at = now
            listener = generation.listener
            if listener is not None:
                listener.notify(generation)
                if len(generation.token_ids) - generation.num_taken >= limit:
                    self._pause(generation)

    def advance(self, search: BeamSearch, step: BeamStep | None) -> None:
        """Takes a search's step, which was committed: its beams go on, or its answers are known."""
        first = search.members[0]
        if search.is_aborted or first.has_ended:
            return
        assert step is not None, "the beams of a search are sampled together"
        search.apply(step)
        first.last_token_at = time.perf_counter()
        if first.first_token_at is None:
            first.first_token_at = first.last_token_at
        if search.is_done:
            self._answer(search)
            return
        ids = [member.request_id for member in search.members]
        try:
            with self._registry.turn:
                self._scheduler.reorder(ids, [ids[parent] for parent in step.parents], step.tokens)
        except WrongStateError as error:
            self.fail(first, f"the beams cannot go on: {error}")

    def _answer(self, search: BeamSearch) -> None:
        """Hands a search's answers over; its sequences leave at the next step."""
        answers = search.answers()
        self._scheduler.abort(search.request_id)
        for member, answer in zip_longest(search.members, answers):
            if answer is None:
                member.finish_reason = answers[0].finish_reason
            else:
                member.finish_reason, member.score = answer.finish_reason, answer.score
                if member.params.logprobs is not None:
                    member.logprobs += answer.logprobs
                member.token_ids += answer.token_ids
            member.has_ended = True
            if member.listener is not None:
                member.listener.notify(member)

    def fail(self, generation: Generation, text: str) -> None:
        """Ends one request with a reason of its own; a search as a whole."""
        search = generation.search
        for each in [generation] if search is None else search.members:
            each.error = text
        self._registry.abort(generation)

    def _pause(self, generation: Generation) -> None:
        """Pauses a request until its consumer has read.

        Either this sees what the reader has taken meanwhile, or the reader sees that it is paused.
        """
        self._scheduler.pause(generation.request_id)
        with self._pause_lock:
            unread = len(generation.token_ids) - generation.num_taken
            generation.is_paused = unread >= self._max_unread
        if not generation.is_paused:
            self.resume(generation)

    def close(self, finished: Sequence[FinishedRequest]) -> None:
        """Ends what the scheduler has closed the accounts of.

        Other threads look on, so the order counts: who sees that a request has ended finds it counted (but
        for a search, whose answers are handed over before its sequences leave), who sees that nothing is live
        finds everybody told.
        """
        now = time.perf_counter()
        for account in finished:
            generation = self._registry.find(account.sequence_id)
            generation.account = account
            if generation.finish_reason is None:
                generation.finish_reason = account.reason
                if generation.error is None and account.reason == "error":
                    generation.error = account.detail
            self._registry.counters_of(generation.tenant).note_ended(generation, account, now)
            generation.has_ended = True
            if generation.listener is not None:
                generation.listener.notify(generation)
            self._registry.forget(generation)
