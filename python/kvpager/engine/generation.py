"""One sequence that an engine generates, and what has become of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvpager._core import FinishedRequest
    from kvpager.engine.beams import BeamSearch
    from kvpager.engine.config import GenerationParams
    from kvpager.engine.sampling import SamplingParams

__all__ = ["Generation", "Listener", "TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """How likely a generated token was, before temperature and cuts.

    Attributes:
        logprob: natural logarithm of the chosen token's probability.
        top: (token id, logprob) of the most likely tokens, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class Listener(Protocol):
    """Who is told that a generation has new tokens or has ended."""

    def notify(self, generation: Generation) -> None:
        """Called in the engine's thread after a step's commit; must be quick and raise nothing.

        A request with `max_buffered_tokens` unread is paused: call `Engine.note_taken` where tokens are read,
        or set `num_taken` here.
        """


class Generation:
    """One sequence and what has become of it. The engine's thread writes it, anybody may read it.

    Attributes:
        request_id: the scheduler's id.
        tenant: who sent it.
        index: its place among the samples of one prompt, or among the beams of a search.
        prompt_tokens: tokens of its prompt.
        params: what is wanted.
        sampling: how its tokens are chosen; of `params`, with this sample's seed.
        token_ids: its output so far; the end token is part of it. Only grows.
        logprobs: one for each token, if they were asked for. Grows before `token_ids` does.
        cached_tokens: prompt tokens found in the index when it first ran; None before.
        submitted_at, started_at, first_token_at, last_token_at: clock of `time.perf_counter`; None before.
        num_sampled: tokens sampled for it; with several open steps, more than were committed to `token_ids`.
        num_taken: tokens that its consumer has read.
        search: the beam search that it is a sequence of, or None. It gets its tokens when the search is done.
        score: of a beam search's answer: its log-probability over (number of tokens) ** length_penalty.
        has_ended: whether nothing more will come.
        finish_reason: why it ended, in the scheduler's words; None before, and if the engine broke down.
        account: the scheduler's closing account; None before it left the scheduler.
        error: why it failed, if it did.
        is_aborted: whether somebody asked to end it.
        is_paused: whether it waits for its consumer to read.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "cached_tokens",
        "error",
        "finish_reason",
        "first_token_at",
        "has_ended",
        "index",
        "is_aborted",
        "is_paused",
        "last_token_at",
        "listener",
        "logprobs",
        "num_sampled",
        "num_taken",
        "params",
        "prompt_tokens",
        "request_id",
        "sampling",
        "score",
        "search",
        "started_at",
        "submitted_at",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        request_id: int,
        tenant: str,
        *,
        prompt_tokens: int,
        params: GenerationParams,
        sampling: SamplingParams,
        submitted_at: float,
        index: int = 0,
        listener: Listener | None = None,
        search: BeamSearch | None = None,
    ) -> None:
        """Made by `Engine.submit`."""
        self.request_id = request_id
        self.tenant = tenant
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.params = params
        self.sampling = sampling
        self.listener = listener
        self.search = search
        self.score: float | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cached_tokens: int | None = None
        self.submitted_at = submitted_at
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_sampled = 0
        self.num_taken = 0
        self.has_ended = False
        self.finish_reason: str | None = None
        self.account: FinishedRequest | None = None
        self.error: str | None = None
        self.is_aborted = False
        self.is_paused = False

    @property
    def queue_wait(self) -> float:
        """Seconds from submission to the start of the first step that computed some of it."""
        return 0.0 if self.started_at is None else self.started_at - self.submitted_at
