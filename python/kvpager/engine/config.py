"""Sizes and policies of an engine, and the settings of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvpager._core import Retention
from kvpager.engine.kinds import FLAG, NUMBER, TEXT, WHOLE, Kind, instance, optional, tuple_of, wrong_kinds
from kvpager.engine.sampling import SamplingParams
from kvpager.errors import InvalidArgumentError

__all__ = ["MAX_LOGPROBS", "MAX_SAMPLES", "EngineConfig", "GenerationParams", "blocks_needed"]

MAX_LOGPROBS = 20
MAX_SAMPLES = 128

_CONFIG_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("num_blocks", "block_size", "max_batch_tokens", "max_running", "max_waiting"), WHOLE),
    **dict.fromkeys(("max_prefill_chunk", "max_model_tokens"), optional(WHOLE)),
    **dict.fromkeys(("policy", "eviction", "overflow"), TEXT),
    **dict.fromkeys(("reuse", "urgent_preempts"), FLAG),
    **dict.fromkeys(("host_blocks", "max_open_steps", "max_accounts"), WHOLE),
    **dict.fromkeys(("max_buffered_tokens", "max_failures"), WHOLE),
}

_PARAMS_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "n", "priority"), WHOLE),
    **dict.fromkeys(("beam_width", "logprobs"), optional(WHOLE)),
    **dict.fromkeys(("early_stopping", "ignore_eos", "reuse"), FLAG),
    "length_penalty": NUMBER,
    "stop": tuple_of(TEXT, "texts"),
    "stop_token_ids": tuple_of(WHOLE, "token ids"),
    "deadline": optional(NUMBER),
    "salt": optional(instance(bytes)),
    "retention": optional(instance(Retention)),
    "sampling": instance(SamplingParams),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and policies.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: token positions in a block.
        max_batch_tokens: tokens in a step, decodes and prefill chunks together.
        max_running: sequences that run at once; at most `max_batch_tokens` are used.
        max_waiting: requests that may wait; further ones are refused (`retryable`).
        max_prefill_chunk: longest prefill chunk of one sequence in a step; None for the whole budget.
        max_model_tokens: longest sequence; None for the runner's.
        reuse: whether there is a prefix index.
        policy: what must be promised before a request runs, see `Scheduler`.
        urgent_preempts: whether a waiting request may preempt running ones of its tenant that were submitted
            with a lower class; not with the policy `reserve`.
        eviction: which cached block goes first, see `PrefixIndex`.
        overflow: what happens when running sequences have outgrown the pool, see `Scheduler`.
        host_blocks: blocks of the host tier, whose memory the runner makes; 0 for none.
        max_open_steps: steps that may be planned before the oldest has ended. With 2, the model runs in a
            thread of its own and planning overlaps it.
        max_accounts: tenants at most; the index's own accounts come on top.
        max_buffered_tokens: tokens that a consumer may leave unread before its request is paused.
        max_failures: failed steps in a row after which the engine stops.

    Raises:
        InvalidArgumentError: values of another kind, or out of a range that the parts below do not check
            themselves.
    """

    num_blocks: int
    block_size: int = 16
    max_batch_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    max_prefill_chunk: int | None = None
    max_model_tokens: int | None = None
    reuse: bool = True
    policy: Literal["reserve", "watermark", "forecast"] = "reserve"
    urgent_preempts: bool = False
    eviction: Literal["lru", "learned", "clock"] = "lru"
    overflow: Literal["auto", "recompute", "swap", "refuse"] = "auto"
    host_blocks: int = 0
    max_open_steps: int = 1
    max_accounts: int = 64
    max_buffered_tokens: int = 8192
    max_failures: int = 3

    def __post_init__(self) -> None:
        problems = wrong_kinds(self, _CONFIG_KINDS)
        if not problems:
            bounded = ("max_accounts", "max_buffered_tokens", "max_failures", "max_model_tokens")
            values = [(name, getattr(self, name)) for name in bounded]
            problems = [
                (name, f"{name} is {value}, at least 1 is needed")
                for name, value in values
                if value is not None and value < 1
            ]
        _raise(problems, "engine: ")


@dataclass(frozen=True, kw_only=True)
class GenerationParams:
    """What is wanted of one request.

    Attributes:
        max_tokens: most tokens to generate.
        min_tokens: tokens to generate before a stop token ends it.
        n: samples of the prompt; each has the seed of `sampling` plus its index. Of a beam search, the
            answers that are wanted, best first.
        beam_width: beams of a beam search, `n` at least; None for none. Its answers come when it is done,
            ranked by their log-probability over (number of tokens) ** `length_penalty`.
        length_penalty: above 0 long answers gain, below 0 short ones do.
        early_stopping: whether a beam search is done once `beam_width` answers have ended; otherwise, when no
            beam can become better than those.
        stop: texts that end it and are not part of the answer.
        stop_token_ids: tokens that end it, besides the tokenizer's own.
        ignore_eos: whether the tokenizer's end tokens are ordinary ones.
        logprobs: alternatives listed for each token; 0 for the chosen one alone, None for none.
        priority: lower runs first, inside the tenant; in `retention` the higher stays longer.
        deadline: seconds from now in which it may run; then it fails. None for no limit.
        reuse: whether it looks prefixes up and leaves its own in the index.
        salt: 1 to 256 bytes that narrow reuse to this tenant's requests with the same ones, and to public
            prefixes; None for no narrowing.
        retention: what of it stays held after its end, of each sample and beam; None for nothing. Needs
            `reuse`, and an engine with it; not for a turn of a session.
        sampling: how tokens are chosen; greedy by default.

    Raises:
        InvalidArgumentError: values of another kind or out of range; every problem is named in one message.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    priority: int = 0
    deadline: float | None = None
    reuse: bool = True
    salt: bytes | None = None
    retention: Retention | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        _raise(wrong_kinds(self, _PARAMS_KINDS) or self._problems())

    def _problems(self) -> list[tuple[str, str]]:
        problems = []
        if self.max_tokens < 1:
            problems.append(("max_tokens", f"max_tokens is {self.max_tokens}, at least 1 is needed"))
        if not 0 <= self.min_tokens <= self.max_tokens:
            text = f"min_tokens is {self.min_tokens}, from 0 to max_tokens {self.max_tokens} is needed"
            problems.append(("min_tokens", text))
        if not 1 <= self.n <= MAX_SAMPLES:
            problems.append(("n", f"n is {self.n}, from 1 to {MAX_SAMPLES} is needed"))
        if "" in self.stop:
            problems.append(("stop", "stop has an empty text"))
        if not all(0 <= token_id < 2**32 for token_id in self.stop_token_ids):
            problems.append(("stop_token_ids", f"stop_token_ids are {self.stop_token_ids}, none is below 0"))
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            text = f"logprobs is {self.logprobs}, from 0 to {MAX_LOGPROBS} is needed"
            problems.append(("logprobs", text))
        if self.deadline is not None and not 0.0 < self.deadline < float("inf"):
            problems.append(("deadline", f"deadline is {self.deadline}, above 0 seconds is needed"))
        if self.retention is not None and not self.reuse:
            problems.append(("retention", "retention needs reuse, which is False"))
        if self.beam_width is not None:
            problems += [("beam_width", text) for text in self._beam_problems(self.beam_width)]
        return problems

    def _beam_problems(self, width: int) -> list[str]:
        problems = []
        if not self.n <= width <= MAX_SAMPLES:
            problems.append(f"beam_width is {width}, from n {self.n} to {MAX_SAMPLES} is needed")
        if not -100.0 <= self.length_penalty <= 100.0:
            problems.append(f"length_penalty is {self.length_penalty}, from -100 to 100 is needed")
        if self.stop:
            problems.append("a beam search has no stop texts: give stop_token_ids")
        if self.sampling.temperature > 0.0:
            problems.append(
                f"a beam search draws nothing, temperature is {self.sampling.temperature}: 0 is needed"
            )
        return problems

    @property
    def num_sequences(self) -> int:
        """Sequences that run for it at once."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def num_waiting(self) -> int:
        """Places in the queue that it takes: one for each sample, one for all beams."""
        return self.n if self.beam_width is None else 1


def _raise(problems: list[tuple[str, str]], whose: str = "") -> None:
    """Raises what names every problem, if there are any. Clients read those of a request as they are."""
    if problems:
        names = {name for name, _ in problems}
        text = whose + "; ".join(text for _, text in problems)
        raise InvalidArgumentError(text, param=names.pop() if len(names) == 1 else None)


def blocks_needed(prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Returns the blocks of a request over its life: its last token is returned, never computed."""
    return -(-(prompt_tokens + max_tokens - 1) // block_size)
