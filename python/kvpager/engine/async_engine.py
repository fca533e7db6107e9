"""The engine for asyncio servers: one thread steps, any number of event loops submit and consume.

What crosses threads is small. A request goes to the scheduler's inbox in the caller's thread. Tokens are
appended to a list that only grows; an event loop is woken once per step, whatever the number of its streams.
Text is made in the consumer's thread, so a slow consumer delays nobody; what it has not read is bounded.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpager._core import Session
from kvpager.engine.config import GenerationParams
from kvpager.engine.counters import EngineSnapshot
from kvpager.engine.engine import DEFAULT_TENANT, Engine
from kvpager.engine.generation import Generation
from kvpager.engine.kinds import check, instance
from kvpager.engine.output import GenerationOutput, OutputReader
from kvpager.errors import WrongStateError, describe

__all__ = ["AsyncEngine", "GenerationStream"]

_WOKEN_AT_ONCE = 32
"""Streams that wake up in one turn of an event loop: with HTTP, about a millisecond of work."""

_BLOCKED_WAIT = 0.001
"""Seconds to wait when everything waits for blocks that somebody outside of the engine holds."""


class AsyncEngine:
    """An engine with a thread of its own.

    Example:
        >>> import asyncio
        >>> from kvpager.engine import Engine, EngineConfig, GenerationParams, NullRunner
        >>> async def main():
        ...     async with AsyncEngine(Engine(NullRunner(), EngineConfig(num_blocks=64))) as engine:
        ...         stream = engine.generate([5, 6, 7], GenerationParams(max_tokens=3))
        ...         return [token async for output in stream for token in output.token_ids]
        >>> asyncio.run(main())
        [34, 35, 36]
    """

    def __init__(self, engine: Engine) -> None:
        """Starts the thread. From now on nobody else may step the engine."""
        check("engine", engine, instance(Engine))
        self._engine = engine
        self._wake = threading.Event()
        self._is_stopping = False
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
            weakref.WeakKeyDictionary()
        )
        self._mailboxes_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvpager-engine", daemon=True)
        engine.on_input = self._wake.set
        self._thread.start()
        atexit.register(self.close)

    @property
    def engine(self) -> Engine:
        """The engine; read its statistics, and leave stepping to the thread."""
        return self._engine

    @property
    def state(self) -> str:
        """`running`, `draining` (accepts nothing more), `stopped` or `failed`."""
        return self._engine.state

    def snapshot(self) -> EngineSnapshot:
        """Returns the counts of all parts. From any thread."""
        return self._engine.snapshot()

    def generate(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]],
        params: GenerationParams | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        session: Session | None = None,
    ) -> GenerationStream:
        """Submits a prompt. From any running event loop, which then consumes the stream.

        Args:
            prompt: text, or [n] token ids.
            params: what is wanted; greedy, 64 tokens, by default.
            tenant: who owns it and is charged for it.
            session: the session that it is a turn of, which names the tenant by itself.

        Returns:
            An asynchronous iterator of outputs. Cancelling its consumer, closing or dropping it ends the
            request; its blocks come free at the next step.

        Raises:
            InvalidArgumentError, RefusedError: as for `Engine.submit`; nothing was accepted.
            WrongStateError: the engine is draining, has stopped or failed, or is of another process.
            RuntimeError: there is no running event loop.
        """
        stream = GenerationStream(self, asyncio.get_running_loop())
        stream.start(
            self._engine.submit(prompt, params, tenant=tenant, session=session, listener=stream.listener)
        )
        return stream

    def open_session(
        self,
        tenant: str = DEFAULT_TENANT,
        *,
        idle_seconds: float | None = None,
        idle_steps: int | None = None,
        priority: int = 0,
    ) -> Session:
        """Opens a session whose turns keep their blocks; see `Engine.open_session`. From any thread."""
        return self._engine.open_session(
            tenant, idle_seconds=idle_seconds, idle_steps=idle_steps, priority=priority
        )

    def close_session(self, session: Session) -> bool:
        """Closes a session; False if it was closed before. From any thread."""
        return self._engine.close_session(session)

    async def drain(self, timeout: float | None = None) -> bool:
        """Accepts nothing more, and waits until everything in flight has ended.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            Whether everything has ended.
        """
        self._engine.stop_accepting()
        deadline = None if timeout is None else time.perf_counter() + timeout
        while self._engine.num_live and self._thread.is_alive():
            if deadline is not None and time.perf_counter() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    async def shutdown(self, *, drain: float | None = 0.0) -> None:
        """Drains for so many seconds (None: as long as it takes), ends what is left, and stops the thread."""
        await self.drain(drain)
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """Ends everything in flight and stops the thread; waits for the step that runs. Idempotent.

        From any thread.
        """
        self._engine.stop_accepting()
        self._is_stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown(drain=0.0 if error is not None else None)

    def abort(self, generations: Sequence[Generation]) -> None:
        """Ends requests at the next step. From any thread."""
        for generation in generations:
            self._engine.abort(generation)

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> _Mailbox:
        """The mailbox of an event loop, made by its first stream."""
        with self._mailboxes_lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = _Mailbox(loop)
            return mailbox

    def _run(self) -> None:
        engine = self._engine
        try:
            while not self._is_stopping:
                if not engine.has_work():
                    self._wake.wait()
                    self._wake.clear()
                elif not engine.step():
                    self._wake.wait(_BLOCKED_WAIT)
                    self._wake.clear()
            engine.close()
        except BaseException as error:  # a fault of the engine itself: everybody is told, nobody waits
            engine.fail(f"the engine's thread ended: {describe(error)}")
            raise


class GenerationStream:
    """The outputs of one request, for one consumer in the event loop that submitted it.

    Use `async for`, and `async with` where the consumer may leave early. Several samples arrive mixed; each
    output names its `index`.

    Attributes:
        generations: what was submitted, one for each sample.
        listener: what the engine's thread tells.
    """

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        """Made by `AsyncEngine.generate`."""
        self._engine = engine
        self._loop = loop
        self.listener = _StreamListener(self, engine.mailbox(loop))
        self._readers: list[OutputReader] = []
        self._next = 0
        self._waiter: asyncio.Future[None] | None = None
        self._pid = os.getpid()
        self.generations: list[Generation] = []

    def start(self, generations: list[Generation]) -> None:
        """Takes what was submitted."""
        self.generations = generations
        self._readers = [OutputReader(self._engine.engine, generation) for generation in generations]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.generations[0].prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first sample found in the index; 0 before it runs."""
        return self.generations[0].cached_tokens or 0

    @property
    def output_tokens(self) -> int:
        """Tokens taken so far, over all samples."""
        return sum(reader.num_tokens for reader in self._readers)

    def wake(self) -> None:
        """Called in the event loop when there may be something new."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationOutput:
        """Returns the next output.

        Raises:
            GenerationError: the request failed.
            StopAsyncIteration: every sample has ended.
            WrongStateError: another task waits for the next output; the stream goes on for that one. Or the
                stream is of another process, from before a fork.
        """
        if self._waiter is not None:
            raise WrongStateError("another task waits for this stream's next output: it has one consumer")
        try:
            while True:
                if (output := self._take()) is not None:
                    return output
                if all(reader.has_ended for reader in self._readers):
                    raise StopAsyncIteration
                if os.getpid() != self._pid:
                    raise WrongStateError(f"the stream belongs to process {self._pid}, this is {os.getpid()}")
                self._waiter = self._loop.create_future()
                self.listener.waiting = self
                try:
                    await self._waiter
                finally:
                    self._waiter = self.listener.waiting = None
        except BaseException:
            self.close()
            raise

    def _take(self) -> GenerationOutput | None:
        """Returns what is new of the next sample that has something."""
        readers = self._readers
        for _ in readers:
            reader = readers[self._next]
            self._next = (self._next + 1) % len(readers)
            if (output := reader.take()) is not None:
                return output
        return None

    def close(self) -> None:
        """Ends the request if it has not ended; nothing in a forked child. Idempotent; from any thread."""
        unfinished = [reader.generation for reader in self._readers if not reader.generation.has_ended]
        for reader in self._readers:
            reader.has_ended = True
        self.listener.waiting = None
        if unfinished and os.getpid() == self._pid:
            self._engine.abort(unfinished)

    async def aclose(self) -> None:
        """`close`, under the name that asynchronous generators have."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _StreamListener:
    """What the engine holds of a stream.

    Weakly, so that a stream that nobody consumes ends; strongly while its consumer waits, since an event loop
    alone does not keep a waiting task.
    """

    __slots__ = ("_mailbox", "stream", "waiting")

    def __init__(self, stream: GenerationStream, mailbox: _Mailbox) -> None:
        self.stream = weakref.ref(stream)
        self.waiting: GenerationStream | None = None
        self._mailbox = mailbox

    def notify(self, _generation: Generation) -> None:
        """Called by the engine's thread."""
        self._mailbox.post(self)


class _Mailbox:
    """Wakes the streams of one event loop, once per step.

    `post` appends before it looks at `_is_scheduled`, and `_deliver` clears that only where nothing is left,
    both under the lock: so nothing is left behind. Many streams are woken a few at a time, with turns of the
    loop in between, so that their work does not add up to one long turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._listeners: deque[_StreamListener] = deque()
        self._is_scheduled = False
        self._lock = threading.Lock()

    def post(self, listener: _StreamListener) -> None:
        """Notes that a stream has something new. In the engine's thread."""
        self._listeners.append(listener)
        with self._lock:
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        if is_scheduled:
            return
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
                return
        except RuntimeError:  # the loop was closed
            pass
        self._drop()

    def _deliver(self) -> None:
        listeners = self._listeners
        for _ in range(min(_WOKEN_AT_ONCE, len(listeners))):
            if (stream := listeners.popleft().stream()) is not None:
                stream.wake()
        with self._lock:
            is_left = self._is_scheduled = bool(listeners)
        if is_left and (loop := self._loop()) is not None:
            loop.call_soon(self._deliver)

    def _drop(self) -> None:
        """Ends the streams of a loop that is gone: nobody can consume them."""
        with self._lock:
            self._is_scheduled = False
        while self._listeners:
            if (stream := self._listeners.popleft().stream()) is not None:
                stream.close()
