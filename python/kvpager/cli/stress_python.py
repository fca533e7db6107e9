"""The stress of the bindings: the same kinds of work as the core's run, from Python threads.

The owner map is kept under a lock of its own; calls of the pool are made outside of it. The index has its own
bindings and is left out here. Failing histories are not made smaller: what Python threads do together cannot
be repeated, so the last operations of each thread are reported as they were recorded.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpager import BlockPool, Magazine, Reservation, errors
from kvpager._core import StressLatencies

__all__ = ["PythonStress"]

NUM_SHOWN = 12
SWITCH_INTERVAL = 1e-5
_ID = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Blocks = NDArray[np.uint64]
REFUSALS = (errors.OutOfBlocksError, errors.OverQuotaError)


class Violation(Exception):  # noqa: N818 - a finding, not an error of the program
    """Something that must not be."""


class Shadow:
    """Who holds what, told by the threads and not by the pool."""

    def __init__(self, num_blocks: int) -> None:
        self.lock = threading.Lock()
        self.references = np.zeros(num_blocks, np.int64)
        self.generations = np.full(num_blocks, -1, np.int64)
        self.was_shared = np.zeros(num_blocks, bool)
        self.waits = np.zeros(num_blocks, np.int64)
        self.open_steps: set[int] = set()

    def hand_out(self, blocks: Blocks) -> None:
        """Notes new blocks; raises if somebody has one or a step may still read it."""
        ids, generations = (blocks & _ID).astype(np.int64), (blocks >> _SHIFT).astype(np.int64)
        with self.lock:
            if self.references[ids].any():
                raise Violation(f"blocks {ids[self.references[ids] > 0].tolist()} were handed out while held")
            if (generations <= self.generations[ids]).any():
                raise Violation(f"blocks {ids.tolist()} were handed out in an old generation")
            early = [int(i) for i in ids if int(self.waits[i]) in self.open_steps]
            if early:
                raise Violation(f"blocks {early} were handed out although their step is open")
            self.references[ids], self.generations[ids] = 1, generations
            self.was_shared[ids], self.waits[ids] = False, 0

    def retained(self, blocks: Blocks) -> None:
        """Notes new references of a thread that holds the blocks."""
        ids = (blocks & _ID).astype(np.int64)
        with self.lock:
            self.references[ids] += 1
            self.was_shared[ids] = True

    def giving_up(self, blocks: Blocks, epoch: int) -> bool:
        """Notes references that are about to go; whether the thread is known to be the only holder."""
        ids = (blocks & _ID).astype(np.int64)
        with self.lock:
            self.references[ids] -= 1
            self.waits[ids] = np.maximum(self.waits[ids], epoch)
            return not self.was_shared[ids].any()


class Worker:
    """One thread's objects, and what it does with them."""

    def __init__(self, run: PythonStress, pool: BlockPool, shadow: Shadow, me: int) -> None:
        self.run, self.pool, self.shadow, self.me = run, pool, shadow, me
        self.chance = random.Random(f"{run.seed} {run.num_rounds} {me}")
        self.held: list[tuple[Blocks, int]] = []
        self.reservations: list[tuple[Reservation, int]] = []
        self.steps: list[int] = []
        self.magazine: tuple[Magazine, int] | None = None
        self.last: deque[str] = deque(maxlen=NUM_SHOWN)
        self.num_operations = 0
        self.most = max(1, min(64, pool.num_blocks // 2))
        works = {
            "allocate": (6, self.allocate),
            "release": (5, self.release),
            "reserve": (4, self.reserve),
            "magazine": (3, self.use_magazine),
            "step": (2, self.step),
            "probe": (1, self.probe),
        }
        if run.mix in ("share", "cow", "all"):
            works["retain"] = (5, self.share)
        if run.mix in ("cow", "all"):
            works["copy_on_write"] = (3, self.copy_on_write)
        if run.mix in ("quota", "all"):
            works["quota"] = (2, self.change_quota)
        self.names = list(works)
        self.weights = [weight for weight, _ in works.values()]
        self.works: dict[str, Callable[[], str]] = {name: work for name, (_, work) in works.items()}

    def work(self, until: float) -> None:
        """Works until the time is up or something is wrong, then gives everything back."""
        try:
            while not self.run.stop.is_set() and time.monotonic() < until:
                name = self.chance.choices(self.names, self.weights)[0]
                self.last.append(name)
                self.last[-1] = self.works[name]()
                self.num_operations += 1
            self.give_back()
        except Violation as violation:
            self.run.report(self, str(violation))
        except Exception as error:  # whatever a call raises that is not expected is a finding
            self.run.report(self, f"{self.last[-1] if self.last else 'start'} raised {error!r}")

    def timed(self, family: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls the pool and records how long it took."""
        begin = time.perf_counter_ns()
        try:
            return call(*arguments, **options)
        finally:
            self.run.latencies.record(family, time.perf_counter_ns() - begin)

    def count(self) -> int:
        return self.chance.choice((1, 1, 1, self.chance.randint(1, self.most), self.most))

    def tenant(self) -> int:
        return self.chance.randrange(self.run.tenants)

    def take(self) -> tuple[Blocks, int] | None:
        return self.held.pop(self.chance.randrange(len(self.held))) if self.held else None

    def hold(self, blocks: Blocks, tenant: int) -> None:
        self.shadow.hand_out(blocks)
        self.held.append((blocks, tenant))

    def allocate(self) -> str:
        tenant, count = self.tenant(), self.count()
        text = f"allocate {count} for tenant {tenant}"
        try:
            if count == 1:
                blocks = np.array([self.timed("allocate", self.pool.allocate_one, tenant)], np.uint64)
            else:
                blocks = np.zeros(count, np.uint64)
                self.timed("allocate", self.pool.allocate, tenant, out=blocks)
        except REFUSALS:
            return f"{text}: refused"
        self.hold(blocks, tenant)
        return text

    def release(self) -> str:
        taken = self.take()
        if taken is None:
            return "nothing to release"
        blocks, _ = taken
        self.shadow.giving_up(blocks, max(self.steps, default=0))
        if len(blocks) == 1:
            self.timed("release", self.pool.release_one, int(blocks[0]))
        else:
            self.timed("release", self.pool.release, blocks)
        return f"release {len(blocks)}"

    def share(self) -> str:
        mailbox = self.run.mailboxes[self.chance.randrange(self.run.threads)]
        if self.chance.random() < 0.5 or len(mailbox) > 8:
            received = self.run.mailboxes[self.me]
            if not received:
                return "no mail"
            self.held.append(received.popleft())
            return "receive"
        taken = self.take()
        if taken is None:
            return "nothing to share"
        self.held.append(taken)
        self.timed("retain", self.pool.retain, taken[0])
        self.shadow.retained(taken[0])
        mailbox.append((taken[0].copy(), taken[1]))
        return f"share {len(taken[0])}"

    def copy_on_write(self) -> str:
        if not self.held:
            return "nothing to copy"
        blocks, tenant = self.chance.choice(self.held)
        first = blocks[:1]
        if self.timed("copy_on_write", self.pool.is_exclusive, int(first[0])):
            return "exclusive"
        try:
            copy = np.array([self.pool.allocate_one(tenant)], np.uint64)
        except REFUSALS:
            return "copy: refused"
        self.shadow.hand_out(copy)
        self.shadow.giving_up(first, max(self.steps, default=0))
        self.pool.release_one(int(first[0]))
        blocks[0] = copy[0]
        return "copy one block"

    def reserve(self) -> str:
        if len(self.reservations) < 3:
            tenant, count = self.tenant(), self.count()
            try:
                reservation = self.timed("reserve", self.pool.reserve, tenant, count)
            except REFUSALS:
                return f"reserve {count} for tenant {tenant}: refused"
            self.reservations.append((reservation, tenant))
            return f"reserve {count} for tenant {tenant}"
        reservation, tenant = self.chance.choice(self.reservations)
        if reservation.num_blocks == 0 or self.chance.random() < 0.2:
            self.reservations.remove((reservation, tenant))
            self.timed("reserve", reservation.close)
            return "close a reservation"
        count = self.chance.randint(1, reservation.num_blocks)
        self.hold(self.timed("reserve", reservation.allocate, count), tenant)
        return f"draw {count}"

    def use_magazine(self) -> str:
        if self.magazine is None:
            tenant = self.tenant()
            self.magazine = (self.timed("magazine", Magazine, self.pool, tenant), tenant)
            return f"make a magazine for tenant {tenant}"
        magazine, tenant = self.magazine
        draw = self.chance.random()
        if draw < 0.05:
            self.magazine = None
            self.timed("magazine", magazine.close)
            return "close the magazine"
        if draw < 0.5:
            taken = self.take()
            if taken is None:
                return "nothing to release"
            self.shadow.giving_up(taken[0], max(self.steps, default=0))
            for block in taken[0]:
                self.timed("magazine", magazine.release_one, int(block))
            return f"release {len(taken[0])} into the magazine"
        try:
            block = np.array([self.timed("magazine", magazine.allocate_one)], np.uint64)
        except REFUSALS:
            return "allocate from the magazine: refused"
        self.hold(block, tenant)
        return "allocate from the magazine"

    def step(self) -> str:
        if self.steps and self.chance.random() < 0.6:
            epoch = self.steps.pop(0)
            with self.shadow.lock:
                self.shadow.open_steps.discard(epoch)
            self.timed("step", self.pool.close_step, epoch)
            return f"close step {epoch}"
        try:
            epoch = self.timed("step", self.pool.open_step)
        except errors.WrongStateError:
            return "open a step: refused"
        with self.shadow.lock:
            self.shadow.open_steps.add(epoch)
        self.steps.append(epoch)
        return f"open step {epoch}"

    def change_quota(self) -> str:
        tenant, limit = self.tenant(), self.chance.randint(1, self.pool.num_blocks)
        guaranteed = self.chance.randint(0, min(limit, self.pool.num_blocks // self.run.tenants))
        text = f"quota of tenant {tenant}: {guaranteed} to {limit}"
        try:
            self.timed("quota", self.pool.set_quota, tenant, guaranteed=guaranteed, limit=limit)
        except errors.InvalidArgumentError:
            return f"{text}: refused"
        return text

    def probe(self) -> str:
        taken = self.take()
        if taken is None:
            return "nothing to probe"
        blocks, _ = taken
        is_sole = self.shadow.giving_up(blocks, max(self.steps, default=0))
        self.pool.release(blocks)
        if is_sole:
            for call in (self.pool.release, self.pool.retain):
                try:
                    call(blocks)
                except errors.InvalidHandleError:
                    continue
                raise Violation(f"{call.__name__} of blocks that were released was accepted")
        return f"use {len(blocks)} stale handles"

    def give_back(self) -> None:
        """Gives everything back."""
        while self.steps:
            epoch = self.steps.pop()
            with self.shadow.lock:
                self.shadow.open_steps.discard(epoch)
            self.pool.close_step(epoch)
        for reservation, _ in self.reservations:
            reservation.close()
        if self.magazine is not None:
            self.magazine[0].close()
        while self.held:
            self.release()


class PythonStress:
    """A run in rounds, each with a fresh pool and fresh threads."""

    def __init__(self, *, threads: int, blocks: int, tenants: int, mix: str, seed: int) -> None:
        self.threads, self.blocks, self.tenants, self.mix, self.seed = threads, blocks, tenants, mix, seed
        self.num_rounds = 0
        self.num_operations = 0
        self.wall_time = 0.0
        self.latencies = StressLatencies()
        self.stop = threading.Event()
        self.mailboxes: list[deque[tuple[Blocks, int]]] = []
        self.violations: list[dict[str, Any]] = []
        self.history: dict[str, Any] | None = None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong so far."""
        return not self.violations

    def report(self, worker: Worker | None, text: str) -> None:
        """Notes something that must not be, and ends the round."""
        self.stop.set()
        self.violations.append({"text": text, "thread": None if worker is None else worker.me})

    def advance(self, seconds: float) -> None:
        """Runs a round of at most so many seconds."""
        chance = random.Random(f"{self.seed} {self.num_rounds}")
        num_blocks = min(self.blocks, chance.choice((25, 100, 300, self.blocks, self.blocks)))
        pool = BlockPool(num_blocks, max_accounts=self.tenants, max_open_steps=64)
        for _ in range(self.tenants):
            pool.add_account(guaranteed=num_blocks // 2 // self.tenants)
        self.mailboxes = [deque() for _ in range(self.threads)]
        shadow = Shadow(num_blocks)
        workers = [Worker(self, pool, shadow, me) for me in range(self.threads)]
        begin, interval = time.monotonic(), sys.getswitchinterval()
        threads = [threading.Thread(target=worker.work, args=(begin + seconds,)) for worker in workers]
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        finally:
            sys.setswitchinterval(interval)
            self.wall_time += time.monotonic() - begin
            self.num_operations += sum(worker.num_operations for worker in workers)
        self._check(pool)
        self.num_rounds += 1
        if self.violations:
            self.history = self._history(workers, pool)

    def _check(self, pool: BlockPool) -> None:
        """Checks that everything came back, once nothing moves."""
        if self.violations:
            return
        for mailbox in self.mailboxes:
            for blocks, _ in mailbox:
                pool.release(blocks)
        try:
            pool.check_invariants()
        except AssertionError as error:
            self.report(None, f"at a standstill: {error}")
        stats = pool.stats()
        if stats.free != pool.num_blocks or stats.stranded:
            self.report(None, f"all was given back, and the pool has {stats}")

    def _history(self, workers: list[Worker], pool: BlockPool) -> dict[str, Any]:
        operations = [
            {"thread": worker.me, "operation": text} for worker in workers for text in list(worker.last)
        ]
        quotas = [pool.quota(account) for account in range(self.tenants)]
        return {
            "way": "recorded",
            "text": self.violations[0]["text"],
            "blocks": pool.num_blocks,
            "tenants": [{"guaranteed": guaranteed, "limit": limit} for guaranteed, limit in quotas],
            "max_open_steps": 64,
            "runs": 0,
            "failures": 0,
            "operations": operations,
        }

    def report_json(self) -> str:
        """What was found so far, with the keys of the core's run."""
        all_latencies, by_operation = map(json.loads, self.latencies.report_json())
        return json.dumps(
            {
                "ok": self.is_sound,
                "seed": self.seed,
                "operations": self.num_operations,
                "rounds": self.num_rounds,
                "wall_time": self.wall_time,
                "latency_ns": all_latencies,
                "latency_by_operation_ns": by_operation,
                "checks": self.num_rounds,
                "violations": self.violations,
                "history": self.history,
            }
        )
