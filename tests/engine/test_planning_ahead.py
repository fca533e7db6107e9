"""With two open steps the engine plans while the model computes, and nobody can tell but by the time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from synthetic import LetterTokenizer, ScriptRunner, idle

from kvpager.engine import Engine, EngineConfig, GenerationParams, NullRunner, SamplingParams
from kvpager.errors import GenerationError


class ChainRunner(NullRunner):
    """Logits that depend on the last token alone, which must be known when the model runs."""

    gives_logits = True

    def __init__(self) -> None:
        super().__init__(vocab_size=64, max_model_tokens=4096)
        self.threads: set[str] = set()
        self.failures: list[int] = []
        self.steps = 0

    def run(self, batch: Any, _sampled: Any, /) -> Any:
        self.threads.add(threading.current_thread().name)
        self.steps += 1
        if self.steps in self.failures:
            raise RuntimeError(f"step {self.steps} failed")
        assert (batch.token_ids >= 0).all(), "every token is known when the model runs"
        rows = np.random.default_rng(3).normal(0, 3, (64, 64)).astype(np.float32)
        return rows[batch.token_ids[batch.sample_rows]]


def new_engine(runner: NullRunner, open_steps: int, **options: Any) -> Engine:
    config = EngineConfig(num_blocks=128, block_size=4, max_open_steps=open_steps)
    return Engine(runner, config, **options)


def answers(open_steps: int) -> list[list[int]]:
    runner = ChainRunner()
    engine = new_engine(runner, open_steps)
    generations = []
    for number in range(12):
        sampling = SamplingParams(temperature=number % 3 * 0.7, seed=number)
        params = GenerationParams(max_tokens=5 + number * 3, stop_token_ids=(7,), sampling=sampling)
        generations += engine.submit([number + 1] * (number * 5 + 1), params)
        engine.step()
    engine.run()
    assert idle(engine)
    assert runner.threads == {"kvpager-model" if open_steps > 1 else "MainThread"}
    engine.close()
    return [generation.token_ids for generation in generations]


def test_answers_are_the_same_as_without_planning_ahead() -> None:
    assert answers(2) == answers(1)


def test_failure_of_a_step_fails_those_planned_after_it_too_and_the_engine_goes_on() -> None:
    runner = ChainRunner()
    runner.failures = [4]
    engine = new_engine(runner, 2)
    with pytest.raises(GenerationError, match="step 4 failed"):
        list(engine.generate([1, 2], GenerationParams(max_tokens=20)))
    assert len(list(engine.generate([1, 2], GenerationParams(max_tokens=20)))) == 20
    assert engine.snapshot().failed_steps == 1
    engine.run()  # ends the step that was planned ahead
    assert idle(engine)
    engine.close()


def test_stop_text_and_leaving_early_free_everything() -> None:
    engine = new_engine(ScriptRunner("one END two"), 2, tokenizer=LetterTokenizer())
    outputs = list(engine.generate("q", GenerationParams(max_tokens=40, stop=("END",))))
    assert "".join(output.text for output in outputs) == "one "
    other = engine.generate("qq", GenerationParams(max_tokens=40))
    next(other)
    other.close()  # type: ignore[attr-defined]
    engine.run()
    assert idle(engine)
    engine.submit("q", GenerationParams(max_tokens=40))
    engine.step()
    engine.close()
    assert idle(engine)
