"""A load for a scheduler without a model: what ends is followed by the next, sampled tokens are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvpager import Batch, BlockPool, CommitOutcome, PrefixIndex, Scheduler
from kvpager.errors import InvalidArgumentError

__all__ = ["Load", "LoadDriver", "Request", "requests_of_trace"]

VOCABULARY = 32_000


@dataclass(frozen=True)
class Request:
    """Lengths of one request, in tokens, and the position of its tenant."""

    prompt: int
    output: int
    tenant: int = 0


@dataclass(frozen=True)
class Load:
    """A steady state.

    Attributes:
        running: sequences that run at once; one that ends is followed by the next.
        prompt: prompt tokens of a request.
        output: output tokens of a request.
        prefix_share: part of the prompt, from its start, that all requests of a tenant have in common.
        tenants: how many tenants take turns.
        block_size: token positions of a block.
        policy: admission policy.
        seed: of the tokens that are drawn.
        requests: lengths to take instead of `prompt` and `output`, again from the start when used up.
    """

    running: int
    prompt: int = 256
    output: int = 256
    prefix_share: float = 0.0
    tenants: int = 1
    block_size: int = 16
    policy: Literal["reserve", "watermark", "forecast"] = "reserve"
    seed: int = 0
    requests: tuple[Request, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.prefix_share <= 1.0:
            raise InvalidArgumentError(f"prefix share is {self.prefix_share}, must be from 0 to 1")
        for name in ("running", "prompt", "output", "tenants", "block_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, must be at least 1")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max((r.prompt + r.output for r in self.requests), default=self.prompt + self.output)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all that runs, whatever the mix."""
        return self.running * (-(-self.longest // self.block_size) + 1)

    def lengths(self) -> Iterator[Request]:
        """The requests, without end."""
        if self.requests:
            while True:
                yield from self.requests
        turn = 0
        while True:
            yield Request(self.prompt, self.output, turn % self.tenants)
            turn += 1


class LoadDriver:
    """A scheduler under a `Load`: `plan` and the scheduler's `commit` are timed, the rest is not."""

    def __init__(self, load: Load) -> None:
        """Makes pool, index and scheduler, and submits the first requests."""
        self.load = load
        self.pool = BlockPool(load.num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            PrefixIndex(self.pool, block_size=load.block_size),
            block_size=load.block_size,
            max_batch_tokens=max(8192, 2 * load.running),
            max_running=load.running,
            max_model_tokens=load.longest,
            max_waiting=2 * load.running,
            policy=load.policy,
        )
        self._random = np.random.default_rng(load.seed)
        self._tenants = [self.scheduler.add_tenant(f"tenant-{i}") for i in range(load.tenants)]
        self._prefixes = [self._draw(load.longest) for _ in self._tenants]
        self._lengths = load.lengths()
        self._sampled = self._draw(load.running)
        self._starts = np.arange(load.running + 1, dtype=np.int32)
        for position in range(load.running):
            # The first ones end at different times, as they do after a while.
            self._submit(part=(position + 1) / load.running)

    def plan(self) -> Batch:
        """The timed half of a step."""
        return self.scheduler.step()

    def prepare(self, batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """What `commit` is to be called with: one drawn token for every sequence that samples."""
        samples = len(batch.sample_rows)
        if samples == batch.num_sequences:
            return self._starts[: samples + 1], self._sampled[:samples]
        last_rows = batch.query_start[1:] - 1
        starts = np.zeros(batch.num_sequences + 1, np.int32)
        np.cumsum(np.isin(last_rows, batch.sample_rows), out=starts[1:])
        return starts, self._sampled[:samples]

    def refill(self, outcome: CommitOutcome) -> None:
        """Submits one request for each that ended."""
        for _ in outcome.finished:
            self._submit()

    def warm(self) -> None:
        """Runs steps until every first request has had its prompt computed."""
        while True:
            batch = self.plan()
            starts, tokens = self.prepare(batch)
            steady = batch.num_sequences == self.load.running == len(batch.sample_rows)
            self.refill(self.scheduler.commit(batch.step_id, starts, tokens))
            if steady:
                return

    def _draw(self, count: int) -> NDArray[np.int32]:
        return self._random.integers(3, VOCABULARY, count, dtype=np.int32)

    def _submit(self, part: float = 1.0) -> None:
        request = next(self._lengths)
        tenant = request.tenant % len(self._tenants)
        shared = int(request.prompt * self.load.prefix_share)
        prompt = np.concatenate([self._prefixes[tenant][:shared], self._draw(request.prompt - shared)])
        self.scheduler.submit(self._tenants[tenant], prompt, max_tokens=max(1, round(request.output * part)))


def requests_of_trace(source: str, *, count: int, longest: int) -> tuple[Request, ...]:
    """The lengths of a trace's first requests.

    Args:
        source: what `kvpager replay` accepts.
        count: how many at most.
        longest: most tokens of a request that is taken, prompt and output together.

    Raises:
        InvalidArgumentError: if the trace cannot be read, or no request of it is short enough.
    """
    from kvpager.replay.formats import open_trace

    taken: list[Request] = []
    for columns in open_trace(source, requests=count).requests:
        lengths = zip(columns.prompt_tokens, columns.output_tokens, columns.tenant, strict=True)
        taken += (Request(p, o, t) for p, o, t in lengths if p + o <= longest)
        if len(taken) >= count:
            break
    if not taken:
        raise InvalidArgumentError(f"{source}: no request of its first {count} has at most {longest} tokens")
    return tuple(taken[:count])
