"""The engine's thread: plans steps ahead, has them computed, commits in order, gives them up together."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvpager.engine.model_runner import ModelRunner, RunnerLostError
from kvpager.engine.open_steps import ModelThread, OpenStep
from kvpager.errors import describe

if TYPE_CHECKING:
    from kvpager._core import Scheduler
    from kvpager.engine.config import EngineConfig
    from kvpager.engine.delivery import Delivery
    from kvpager.engine.registry import Registry

__all__ = ["Stepping"]


class Stepping:
    """What happens between two calls of the scheduler. One thread calls it.

    Attributes:
        num_failed: steps that the runner failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        config: EngineConfig,
        registry: Registry,
        delivery: Delivery,
    ) -> None:
        """Starts with no step open."""
        self._scheduler, self._runner, self._config = scheduler, runner, config
        self._registry, self._delivery = registry, delivery
        self.num_failed = 0
        self._failures_in_a_row = 0
        self._open: deque[OpenStep] = deque()
        self._model_thread = ModelThread(runner) if config.max_open_steps > 1 else None

    def has_work(self) -> bool:
        """Whether anything waits or runs, or an end has not been delivered yet."""
        return bool(self._open) or self._can_plan()

    def step(self) -> bool:
        """Plans, and ends the oldest step; see `Engine.step`."""
        ended = self._plan_ahead()
        step = self._open[0]
        try:
            step.is_done.wait()
            if step.error is not None and not isinstance(step.error, Exception):
                raise step.error
        except BaseException:
            self._give_up("interrupted")
            raise
        if step.error is not None:
            self._step_failed(step.error)
            return True
        self._failures_in_a_row = 0
        self._open.popleft()
        for generation in step.broken:
            self._delivery.fail(generation, "the model gave logits that are not finite")
        with self._registry.turn:
            outcome = self._scheduler.commit(step.batch.step_id, step.token_start, step.tokens)
        self._delivery.deliver(step.sampled, step.tokens.tolist())
        for search in step.searches:
            self._delivery.advance(search, step.beam_steps.get(search))
        self._delivery.close(outcome.finished)
        return ended or bool(outcome.finished) or not step.is_empty

    def fail(self, reason: str) -> None:
        """Ends everything in flight with the reason; nothing more is accepted."""
        self._registry.leave("failed", reason)
        for generation in list(self._registry.live.values()):
            if not generation.has_ended:
                generation.error = generation.error or reason
        try:
            self._end_all()
        finally:  # should a part be unusable, its consumers must not wait for ever
            for generation in self._registry.live.values():
                generation.has_ended = True
                if generation.listener is not None:
                    generation.listener.notify(generation)
            self._registry.live.clear()
            self._stop_model_thread()

    def close(self) -> None:
        """Ends every request, gives all blocks back and stops the model's thread. Idempotent."""
        self._end_all()
        self._stop_model_thread()

    def _plan_ahead(self) -> bool:
        """Plans steps until as many are open as may be; returns whether requests ended meanwhile.

        Beams are re-ordered between steps, so nothing is planned ahead while there are any.
        """
        ended = False
        while not self._open or (
            len(self._open) < self._config.max_open_steps
            and not self._registry.num_searches
            and not self._open[-1].is_empty
            and self._can_plan()
        ):
            with self._registry.turn:
                batch = self._scheduler.step()
            generations = [self._registry.find(request_id) for request_id in batch.sequence_ids.tolist()]
            self._delivery.note_started(batch, generations)
            previous = self._open[-1] if self._open else None
            step = OpenStep(batch, generations)
            self._open.append(step)
            if self._model_thread is None:
                step.compute(self._runner, previous)
            else:
                self._model_thread.start(step, previous)
            self._delivery.close(batch.finished)
            ended = ended or bool(batch.finished)
        return ended

    def _can_plan(self) -> bool:
        with self._registry.turn:
            return self._scheduler.has_work()

    def _give_up(self, reason: str, *, fail: bool = False) -> None:
        """Abandons every open step once the model is through with them."""
        for step in self._open:
            step.is_done.wait()
        if self._open:
            with self._registry.turn:
                outcome = self._scheduler.abandon(self._open[0].batch.step_id, reason, fail=fail)
            steps = list(self._open)
            self._open.clear()
            self._delivery.close(outcome.finished)
            for generation in {one for step in steps for one in step.sampled}:
                generation.num_sampled = len(generation.token_ids)

    def _step_failed(self, error: Exception) -> None:
        self._failures_in_a_row += 1
        self.num_failed += 1
        text = f"the model failed: {describe(error)}"
        reason = f"{text} ({self._failures_in_a_row} steps in a row)"
        is_over = isinstance(error, RunnerLostError) or self._failures_in_a_row >= self._config.max_failures
        if is_over:  # before anybody is told: who then asks finds the engine failed
            self._registry.leave("failed", reason)
        self._give_up(text, fail=True)
        if is_over:
            self.fail(reason)

    def _stop_model_thread(self) -> None:
        if self._model_thread is not None:
            self._model_thread.close()
            self._model_thread = None

    def _end_all(self) -> None:
        self._give_up("the engine ended")
        self._scheduler.drain()  # what is kept goes
        for generation in list(self._registry.live.values()):
            self._registry.abort(generation)
        while self.has_work():
            with self._registry.turn:
                batch = self._scheduler.step()
                outcome = self._scheduler.abandon(batch.step_id, "the engine ended")
            self._delivery.close([*batch.finished, *outcome.finished])
