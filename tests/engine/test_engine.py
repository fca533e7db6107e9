"""The synchronous engine: what is promised of a request from submission to its end."""

from __future__ import annotations

import doctest
import itertools
import multiprocessing
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from synthetic import LetterTokenizer, ScriptRunner, idle

from kvpager.engine import (
    Engine,
    EngineConfig,
    Generation,
    GenerationParams,
    NullRunner,
    RunnerLostError,
    SamplingParams,
    async_engine,
    text,
)
from kvpager.engine import engine as engine_module
from kvpager.errors import GenerationError, InvalidArgumentError, RefusedError, WrongStateError
from waiting import PATIENCE


def text_engine(text: str, **sizes: Any) -> Engine:
    return Engine(ScriptRunner(text), EngineConfig(num_blocks=64, **sizes), tokenizer=LetterTokenizer())


def test_every_sample_arrives_with_its_own_tokens_and_reason(engine: Engine) -> None:
    outputs: dict[int, list[int]] = {}
    reasons = {}
    for output in engine.generate([1, 2, 3], GenerationParams(max_tokens=5, n=3)):
        outputs.setdefault(output.index, []).extend(output.token_ids)
        reasons[output.index] = output.finish_reason
    runner, first_id = NullRunner(), 1
    expected = {i: [runner.token(first_id + i, place) for place in range(5)] for i in range(3)}
    assert outputs == expected
    assert reasons == dict.fromkeys(range(3), "length")


def test_stop_text_ends_the_answer_before_it_wherever_tokens_split_it() -> None:
    engine = text_engine("one two END three")
    outputs = list(engine.generate("q", GenerationParams(max_tokens=40, stop=("END", "never"))))
    assert "".join(output.text for output in outputs) == "one two "
    assert (outputs[-1].finish_reason, outputs[-1].stop_text) == ("stop", "END")
    engine.run()
    assert idle(engine)


def test_held_back_text_comes_when_no_stop_text_follows() -> None:
    engine = text_engine("one EN")
    outputs = list(engine.generate("q", GenerationParams(max_tokens=40, stop=("END",))))
    assert "".join(output.text for output in outputs) == "one EN"
    assert (outputs[-1].finish_reason, outputs[-1].stop_text) == ("stop", None)


def test_end_token_stops_unless_it_is_ignored() -> None:
    engine = text_engine("ab")
    *_, last = engine.generate("q", GenerationParams(max_tokens=6))
    assert last.finish_reason == "stop"
    outputs = list(engine.generate("q", GenerationParams(max_tokens=6, ignore_eos=True)))
    assert sum(len(output.token_ids) for output in outputs) == 6
    assert outputs[-1].finish_reason == "length"


class LogitsRunner(NullRunner):
    """Logits whose best token is `best`, which `wrong` may replace per call."""

    gives_logits = True

    def __init__(self) -> None:
        super().__init__(vocab_size=16, max_model_tokens=256)
        self.row = np.log(np.arange(1, 17, dtype=np.float32))
        self.result: Any = None

    def run(self, _batch: Any, sampled: Any, /) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return np.tile(self.row, (len(sampled), 1)) if self.result is None else self.result


def logits_engine(**sizes: Any) -> tuple[Engine, LogitsRunner]:
    runner = LogitsRunner()
    return Engine(runner, EngineConfig(num_blocks=64, **sizes)), runner


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    engine, _ = logits_engine()
    sampling = SamplingParams(temperature=2.0, top_k=3, seed=1)
    params = GenerationParams(max_tokens=20, logprobs=3, sampling=sampling)
    total = sum(range(1, 17))
    for output in engine.generate([1], params):
        assert output.logprobs is not None
        for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
            assert token in (13, 14, 15)
            assert logprobs.logprob == pytest.approx(np.log((token + 1) / total), abs=1e-6)
            assert [top for top, _ in logprobs.top] == [15, 14, 13]
            assert logprobs.top[0][1] == pytest.approx(np.log(16 / total), abs=1e-6)


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    engine, runner = logits_engine()
    good, bad = (engine.submit([1], GenerationParams(max_tokens=4))[0] for _ in range(2))
    runner.result = np.tile(runner.row, (2, 1))
    runner.result[1] = np.nan
    engine.step()
    runner.result = None
    engine.run()
    assert (good.error, len(good.token_ids)) == (None, 4)
    assert (bad.error, bad.token_ids) == ("the model gave logits that are not finite", [])
    assert idle(engine)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("out of memory"), "the model failed: RuntimeError: out of memory"),
        (np.zeros((1, 3), np.float32), r"float32 \[1, 3\]: float32 \[1, 16\] or integers \[1\] are needed"),
        (np.zeros((1, 16), np.float64), r"float64 \[1, 16\]"),
        ([5], r"returned an object of type list: a NumPy array is needed, float32 \[1, 16\]"),
        (np.array([3, 4]), "2 tokens for 1 rows"),
        (np.array([16]), "token ids from 16 to 16: the vocabulary has 16"),
    ],
)
def test_failed_step_fails_its_requests_and_the_engine_goes_on(result: Any, message: str) -> None:
    engine, runner = logits_engine()
    runner.result = result
    with pytest.raises(GenerationError, match=message):
        list(engine.generate([1], GenerationParams(max_tokens=4)))
    assert engine.state == "running"
    runner.result = None
    assert len(list(engine.generate([1], GenerationParams(max_tokens=4)))) == 4
    assert idle(engine)
    assert engine.snapshot().failed_steps == 1


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad \ud800"), "ValueError: bad \\ud800"),
        (SilentError(), "SilentError: (its text cannot be had: str() raises RuntimeError)"),
    ],
)
def test_step_fails_with_its_reason_whatever_text_the_error_has(error: Exception, text: str) -> None:
    engine, runner = logits_engine()
    runner.result = error
    (failed,) = engine.submit([1], GenerationParams(max_tokens=2))
    engine.run()
    assert failed.error == f"the model failed: {text}"
    runner.result = None
    (good,) = engine.submit([1], GenerationParams(max_tokens=2))
    engine.run()
    assert (good.error, len(good.token_ids), engine.state) == (None, 2, "running")
    assert idle(engine)


def test_runner_that_returns_nothing_is_told_so() -> None:
    class Forgetful(NullRunner):
        def run(self, _batch: Any, _sampled: Any, /) -> Any:
            return None

    engine = Engine(Forgetful(), EngineConfig(num_blocks=64))
    with pytest.raises(GenerationError, match="the runner returned None: a NumPy array is needed"):
        list(engine.generate([1]))


def test_more_samples_than_the_queue_holds_are_refused_for_good() -> None:
    small = Engine(NullRunner(), EngineConfig(num_blocks=64, max_waiting=3))
    small.add_tenant("alice", max_waiting=2)
    small.add_tenant("strict", isolation="strict", guaranteed=22, limit=22)
    for tenant, bound in (("alice", 2), ("strict", 1)):
        assert small.max_waiting(tenant) == bound
        with pytest.raises(RefusedError, match=f"3 samples are asked for, {bound} may wait") as refused:
            small.submit([1], GenerationParams(n=3), tenant=tenant)
        assert not refused.value.retryable
        small.submit([1], GenerationParams(n=bound), tenant=tenant)
    small.run()
    assert small.counters("alice").refused == 1


def test_engine_that_keeps_failing_says_why_and_ends_what_waits() -> None:
    engine, runner = logits_engine(max_running=1, max_failures=2)
    waiting = [engine.submit([1], GenerationParams(max_tokens=4))[0] for _ in range(4)]
    runner.result = RuntimeError("bad device")
    engine.run()
    assert engine.state == "failed"
    assert all(generation.has_ended for generation in waiting)
    assert all("bad device" in str(generation.error) for generation in waiting)
    with pytest.raises(WrongStateError, match="it is failed: the model failed: RuntimeError: bad device"):
        engine.submit([1])
    assert idle(engine)


def test_lost_runner_ends_the_engine_at_once() -> None:
    engine, runner = logits_engine()
    runner.result = RunnerLostError("the device fell off")
    with pytest.raises(GenerationError, match="fell off"):
        list(engine.generate([1]))
    assert engine.state == "failed"


class Witness:
    """A listener that notes what anybody could see at the moment when it is told of an end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[tuple[str, int, int]] = []

    def notify(self, generation: Generation) -> None:
        if generation.has_ended:
            ended = self.engine.counters("default").num_ended
            self.seen.append((self.engine.state, ended, self.engine.num_live))


def test_who_is_told_of_an_end_finds_it_counted_and_nothing_is_idle_before_all_are_told(
    engine: Engine,
) -> None:
    witness = Witness(engine)
    for length in (2, 2, 3):
        engine.submit([1], GenerationParams(max_tokens=length), listener=witness)
    engine.run()
    assert witness.seen == [("running", 1, 3), ("running", 2, 2), ("running", 3, 1)]


def test_who_is_told_of_the_failure_that_ends_the_engine_finds_it_failed() -> None:
    engine, runner = logits_engine(max_failures=1)
    runner.result = RuntimeError("bad device")
    witness = Witness(engine)
    engine.submit([1], listener=witness)
    engine.run()
    assert witness.seen == [("failed", 1, 1)]
    assert idle(engine)


def test_interrupted_step_continues_later() -> None:
    engine, runner = logits_engine()
    (generation,) = engine.submit([1], GenerationParams(max_tokens=4))
    runner.result = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    runner.result = None
    engine.run()
    assert (generation.error, len(generation.token_ids)) == (None, 4)
    assert idle(engine)


def test_close_in_the_middle_ends_everything_and_frees_the_pool(engine: Engine) -> None:
    generations = [engine.submit([7] * 40, GenerationParams(max_tokens=30))[0] for _ in range(20)]
    for _ in range(5):
        engine.step()
    engine.close()
    engine.close()
    assert all(g.has_ended and g.account is not None and g.account.reason == "aborted" for g in generations)
    with pytest.raises(WrongStateError, match="it is stopped"):
        engine.submit([1])


def test_leaving_the_iterator_frees_the_blocks_at_the_next_step(engine: Engine) -> None:
    outputs = engine.generate([7] * 100, GenerationParams(max_tokens=50, n=2))
    next(outputs)
    assert engine.pool.stats().held > 0
    outputs.close()  # type: ignore[attr-defined]
    engine.run()
    assert engine.pool.stats().held == 0


def test_refusal_of_the_last_sample_takes_the_others_back(engine: Engine) -> None:
    small = Engine(NullRunner(), EngineConfig(num_blocks=64, max_waiting=3))
    small.submit([1], GenerationParams(n=2))
    with pytest.raises(RefusedError, match="3 requests waiting, the limit is 3") as refused:
        small.submit([1], GenerationParams(n=3))
    assert refused.value.retryable
    small.run()
    assert idle(small)
    counters = small.snapshot().tenants["default"]
    assert (counters.refused, counters.num_waiting, counters.num_running) == (1, 0, 0)
    small.submit([1], GenerationParams(n=3))
    small.run()


WRONG: dict[str, tuple[Any, Any, str]] = {
    "id above the vocabulary": ([16], {}, "token id 16 of the prompt is outside the vocabulary of 16"),
    "negative id": ([1, -5], {}, "token id -5"),
    "empty": ([], {}, "the prompt is empty"),
    "text": ("hello", {}, "a text prompt needs an engine with a tokenizer"),
    "stop text": ([1], {"stop": ("x",)}, "stop texts need an engine with a tokenizer"),
}


@pytest.mark.parametrize(("prompt", "params", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_at_the_call(prompt: Any, params: Any, message: str) -> None:
    engine, _ = logits_engine()
    with pytest.raises(InvalidArgumentError, match=message):
        engine.submit(prompt, GenerationParams(**params))
    assert idle(engine)


def test_tokens_without_logits_have_no_logprobs(engine: Engine) -> None:
    with pytest.raises(InvalidArgumentError, match="it has no logprobs"):
        engine.submit([1], GenerationParams(logprobs=1))


def test_params_name_every_problem_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_tokens is 0.*n is 0.*empty text.*logprobs is 21"):
        GenerationParams(max_tokens=0, n=0, stop=("",), logprobs=21)


def test_unknown_tenant_is_named_and_tenants_have_their_own_cache(engine: Engine) -> None:
    for name in ("alice", "bob"):
        engine.add_tenant(name)
    with pytest.raises(InvalidArgumentError, match="unknown tenant 'eve': there are alice, bob"):
        engine.submit([1], tenant="eve")
    cached = []
    for name in ("alice", "bob", "alice"):
        (generation,) = engine.submit([5] * 40, GenerationParams(max_tokens=2), tenant=name)
        engine.run()
        cached.append(generation.cached_tokens)
    assert cached == [0, 0, 32]
    counters = engine.snapshot().tenants
    assert (counters["alice"].prompt_tokens, counters["alice"].cached_tokens) == (80, 32)
    assert (counters["bob"].prompt_tokens, counters["bob"].cached_tokens) == (40, 0)


def test_counts_agree_with_what_happened(engine: Engine) -> None:
    generations = [engine.submit([3] * 10, GenerationParams(max_tokens=1 + i))[0] for i in range(6)]
    engine.step()
    engine.abort(generations[5])
    engine.run()
    counters = engine.snapshot().tenants["default"]
    assert counters.ended == {"length": 5, "aborted": 1}
    assert counters.time_to_first_token.count == 6
    assert counters.time_per_output_token.count == 4, "two had a single token"
    assert counters.generation_tokens == sum(len(g.token_ids) for g in generations)
    assert (counters.num_running, counters.num_waiting) == (0, 0)


def test_threads_submit_while_one_runs(engine: Engine) -> None:
    found: list[list[Generation]] = [[] for _ in range(8)]
    params = GenerationParams(max_tokens=6)

    def submit(place: int) -> None:
        for _ in range(50):
            found[place] += engine.submit([place + 1] * 20, params)

    threads = [threading.Thread(target=submit, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.run()
    engine.run()
    runner = NullRunner()
    for generation in itertools.chain(*found):
        assert generation.token_ids == [runner.token(generation.request_id, place) for place in range(6)]


def _use_after_fork(engine: Engine, answers: Any) -> None:
    try:
        engine.submit([1])
    except WrongStateError as error:
        answers.put(str(error))
    else:
        answers.put("accepted")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_child_of_a_fork_is_told_and_the_parent_goes_on(engine: Engine) -> None:
    engine.submit([1])
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_use_after_fork, args=(engine, answers))
    child.start()
    assert f"belongs to process {os.getpid()}" in answers.get(timeout=PATIENCE)
    child.join(PATIENCE)
    engine.run()


@pytest.mark.parametrize("module", [async_engine, engine_module, text], ids=lambda module: module.__name__)
def test_examples_in_the_docstrings_are_true(module: ModuleType) -> None:
    done = doctest.testmod(module)
    assert done.attempted > 0
    assert done.failed == 0


def test_snapshot_is_of_one_moment_while_the_engine_steps(engine: Engine) -> None:
    for name in ("alice", "bob"):
        engine.add_tenant(name)
    is_over = threading.Event()
    wrong: list[object] = []
    taken = 0

    def scrape() -> None:
        nonlocal taken
        while not is_over.is_set():
            counts = engine.scheduler.snapshot()
            pool, accounts = counts.pool, counts.accounts
            blocks = pool.held + pool.cached + pool.free + pool.quarantined
            committed = sum(account.committed for account in accounts.values())
            together = pool.held + pool.reserved + pool.quarantined
            if counts.is_exact and (blocks, committed) != (pool.capacity, together):
                wrong.append((pool, accounts))
            taken += counts.is_exact

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        deadline = time.perf_counter() + PATIENCE
        for place in itertools.count():
            if (place >= 300 and taken > 10) or time.perf_counter() > deadline:
                break
            tenant = ("alice", "bob")[place % 2]
            engine.submit([place % 7 + 1] * 40, GenerationParams(max_tokens=8), tenant=tenant)
            engine.step()
        engine.run()
    finally:
        is_over.set()
        scraper.join()
        sys.setswitchinterval(interval)
    assert taken > 10
    assert wrong == []


def test_tenants_are_added_while_the_engine_steps() -> None:
    engine = Engine(NullRunner(), EngineConfig(num_blocks=64, max_accounts=64))
    engine.add_tenant("first")
    added = threading.Thread(target=lambda: [engine.add_tenant(f"tenant-{place}") for place in range(40)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        added.start()
        while added.is_alive():
            engine.submit([1] * 20, GenerationParams(max_tokens=4), tenant="first")
            engine.run()
            engine.snapshot()
    finally:
        added.join()
        sys.setswitchinterval(interval)
    assert len(engine.tenants) == 41
    assert idle(engine)
