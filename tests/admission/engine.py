"""What the scheduler's tests share."""

from __future__ import annotations

import numpy as np

import kvpager
from kvpager import BlockPool, PrefixIndex, Scheduler


def make(num_blocks: int = 32, block_size: int = 4, **options: object) -> tuple[BlockPool, Scheduler]:
    pool = BlockPool(num_blocks)
    index = PrefixIndex(pool, block_size=block_size)
    settings_: dict[str, object] = {"max_batch_tokens": 64, "max_running": 8, "max_model_tokens": 128}
    return pool, Scheduler(pool, index, block_size=block_size, **{**settings_, **options})  # type: ignore[arg-type]


def commit_samples(scheduler: Scheduler, batch: kvpager.Batch, token: int = 5) -> kvpager.CommitOutcome:
    ends = batch.query_start[1:] - 1
    samples = np.isin(ends, batch.sample_rows)
    token_start = np.concatenate([[0], np.cumsum(samples)]).astype(np.int32)
    return scheduler.commit(batch.step_id, token_start, np.full(token_start[-1], token, np.int32))


def finish(scheduler: Scheduler) -> dict[int, tuple[str, int]]:
    """Runs everything to its end; returns why each request ended and how many tokens it found."""
    ended = []
    while scheduler.has_work():
        batch = scheduler.step()
        ended += [*batch.finished, *commit_samples(scheduler, batch).finished]
    return {request.request_id: (request.reason, request.cached_tokens) for request in ended}


def token_after(history: tuple[int, ...], branch: int = 0) -> int:
    """The token that the "model" samples after a history."""
    return (hash((history, branch)) >> 7) % 40


class Engine:
    """A "model" whose KV of a position is the history up to it, so that a slot with anything else is seen.

    Attributes:
        histories: tokens of every live sequence, by id; the last one is not computed yet.
        ended: reason by sequence id.
    """

    def __init__(self, pool: BlockPool, scheduler: Scheduler) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.histories: dict[int, tuple[int, ...]] = {}
        self.ended: dict[int, str] = {}
        self.kv: dict[int, tuple[int, ...]] = {}
        self.host: dict[int, tuple[int, ...]] = {}

    def copy_blocks(self, batch: kvpager.Batch) -> None:
        """What a batch moves before its forward pass, in the order of the stream."""
        for pairs, source, target in (
            (batch.swap_out, self.kv, self.host),
            (batch.swap_in, self.host, self.kv),
            (batch.block_copies, self.kv, self.kv),
        ):
            for start, end in pairs.tolist():
                for offset in range(self.scheduler.block_size):
                    content = source.get(start * self.scheduler.block_size + offset)
                    if content is not None:
                        target[end * self.scheduler.block_size + offset] = content

    def run(self, batch: kvpager.Batch) -> list[list[int]]:
        """Checks all that is read, writes, samples; returns the tokens of each row, right drafts included."""
        self.copy_blocks(batch)
        rows = []
        for row, sequence in enumerate(batch.sequence_ids.tolist()):
            start, end = batch.query_start[row : row + 2].tolist()
            history = self.histories[sequence]
            tokens = batch.token_ids[start:end].tolist()
            first = int(batch.positions[start])
            table = batch.block_tables[batch.table_rows[row]]
            size = self.scheduler.block_size
            for position in range(first):
                slot = int(table[position // size]) * size + position % size
                assert self.kv[slot] == history[: position + 1], "a slot holds another sequence's KV"
            known = history[:first]
            samples = []
            for index, token in enumerate(tokens):
                known = (*known, token)
                self.kv[int(batch.slot_mapping[start + index])] = known
                times = int(np.count_nonzero(batch.sample_rows == start + index))
                samples.append([token_after(known, branch) for branch in range(times)])
            assert known[: len(history)] == history[: len(known)], "a batch computes other tokens"
            if len(samples[-1]) > 1:
                rows.append(samples[-1])
                continue
            taken: list[int] = []
            for index, sampled in enumerate(samples):
                # A sample counts if everything before it was right: the drafts that were accepted.
                if sampled and (not taken or tokens[index] == taken[-1]):
                    taken += sampled
                elif taken:
                    break
            rows.append(taken)
        return rows

    def turn(self) -> None:
        """One whole step."""
        batch = self.scheduler.step()
        self.note(batch.finished)
        rows = self.run(batch)
        token_start = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        outcome = self.scheduler.commit(batch.step_id, token_start, [token for row in rows for token in row])
        for sequence, row, count in zip(batch.sequence_ids.tolist(), rows, self.splits(batch), strict=True):
            history = self.histories[sequence]
            if count > 1:
                for branch, token in enumerate(row):
                    self.histories[sequence + branch] = (*history, token)
            else:
                self.histories[sequence] = (*history, *row)
        self.note(outcome.finished)

    @staticmethod
    def splits(batch: kvpager.Batch) -> list[int]:
        """How often the last row of each sequence is sampled."""
        return [int(np.count_nonzero(batch.sample_rows == end - 1)) for end in batch.query_start[1:].tolist()]

    def crash(self, *, ran: bool, fail: bool) -> None:
        """A step whose model dies before or after it wrote."""
        batch = self.scheduler.step()
        self.note(batch.finished)
        if ran:
            self.run(batch)
        self.note(self.scheduler.abandon(batch.step_id, "crash", fail=fail).finished)

    def note(self, finished: list[kvpager.FinishedRequest]) -> None:
        """Takes in who ended; nobody ends twice."""
        for request in finished:
            assert request.sequence_id not in self.ended
            self.ended[request.sequence_id] = request.reason
