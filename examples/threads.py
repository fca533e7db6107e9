"""Many threads submit to one engine; each waits for its own answers.

python examples/threads.py
"""

from __future__ import annotations

import threading

from kvpager.engine import AsyncEngine, Engine, EngineConfig, Generation, GenerationParams, NullRunner
from kvpager.errors import RefusedError

THREADS, REQUESTS = 8, 25


class Waiter:
    """A listener that a thread can wait for. The engine's thread calls it, so it does next to nothing."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def notify(self, generation: Generation) -> None:
        generation.num_taken = len(generation.token_ids)  # read: a listener that never reads is paused
        if generation.has_ended:
            self._done.set()

    def wait(self, timeout: float) -> bool:
        return self._done.wait(timeout)


def worker(engine: Engine, number: int, totals: list[int], was_full: threading.Event) -> None:
    for i in range(REQUESTS):
        waiter = Waiter()
        while True:
            try:
                (generation,) = engine.submit(
                    [number + 1, i + 1], GenerationParams(max_tokens=8), listener=waiter
                )
                break
            except RefusedError as error:
                if not error.retryable:
                    raise
                was_full.set()
                threading.Event().wait(0.005)  # the queue is full: back off
        assert waiter.wait(60)
        totals[number] += len(generation.token_ids)


def main() -> None:
    engine = Engine(NullRunner(step_time=0.001), EngineConfig(num_blocks=64, max_running=2, max_waiting=2))
    totals, was_full = [0] * THREADS, threading.Event()
    threads = [threading.Thread(target=worker, args=(engine, i, totals, was_full)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    was_full.wait()  # so that some have to try again, on a machine of any speed
    thread_of_the_engine = AsyncEngine(engine)  # only gives it a thread here; no event loop is needed
    for thread in threads:
        thread.join()
    thread_of_the_engine.close()
    print(f"{THREADS} threads got {sum(totals)} tokens of {THREADS * REQUESTS} requests")
    print(f"refused and tried again: {engine.snapshot().tenants['default'].refused > 0}")
    print(f"blocks held at the end: {engine.pool.stats().held}")


if __name__ == "__main__":
    main()
