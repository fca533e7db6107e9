"""Beam search: the answers of a naive search, in the blocks that the beams really need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_letters import PagedRunner, logits_of
from synthetic import idle

from kvpager.engine import AsyncEngine, Engine, EngineConfig, GenerationParams, NullRunner, SamplingParams
from kvpager.errors import GenerationError, InvalidArgumentError, RefusedError
from waiting import PATIENCE, Gate, until

VOCABULARY = 16

Answer = tuple[float, list[int], str]


def naive_search(
    logits: Callable[[list[int]], npt.NDArray[np.float32]],
    prompt: Sequence[int],
    params: GenerationParams,
) -> list[Answer]:
    """Ranks every continuation of every beam in each step, and computes each beam's whole text anew."""
    width, penalty = params.beam_width or 1, params.length_penalty
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[Answer] = []
    for length in range(1, params.max_tokens + 1):
        candidates = []
        for beam, (score, tokens) in enumerate(beams):
            row = logits([*prompt, *tokens]).astype(np.float64)
            row -= row.max()
            row -= np.log(np.exp(row).sum())
            candidates += [(-(score + row[token]), beam, token) for token in range(len(row))]
        going_on: list[tuple[float, list[int]]] = []
        for score, beam, token in sorted(candidates):
            tokens = [*beams[beam][1], token]
            if token in params.stop_token_ids and length >= params.min_tokens:
                ended.append((-score / length**penalty, tokens, "stop"))
            else:
                going_on.append((-score, tokens))
            if len(going_on) == width:
                break
        beams = going_on
        ended = sorted(ended, key=lambda answer: -answer[0])[:width]
        if params.early_stopping and len(ended) == width and length < params.max_tokens:
            break
    else:
        ended += [(score / length**penalty, tokens, "length") for score, tokens in beams]
    return sorted(ended, key=lambda answer: -answer[0])[: params.n]


def new_engine(**sizes: Any) -> Engine:
    config = {"num_blocks": 256, "block_size": 4, "max_running": 16, "max_batch_tokens": 64, **sizes}
    return Engine(PagedRunner(VOCABULARY), EngineConfig(**config))


def answers_of(engine: Engine, prompt: list[int], params: GenerationParams) -> list[Answer]:
    answers = []
    for output in engine.generate(prompt, params):
        assert output.score is not None
        assert output.finish_reason is not None, "an answer comes whole"
        answers.append((output.index, (output.score, output.token_ids, output.finish_reason)))
    engine.run()
    assert idle(engine)
    assert [index for index, _ in answers] == list(range(params.n))
    return [answer for _, answer in answers]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], GenerationParams, dict[str, Any]]:
    width = draw(st.integers(1, 5))
    max_tokens = draw(st.integers(1, 12))
    params = GenerationParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        beam_width=width,
        n=draw(st.integers(1, width)),
        length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0, 0.5, -1.0])),
        early_stopping=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=4))),
    )
    prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
    sizes = {
        "block_size": draw(st.integers(1, 6)),
        "max_open_steps": draw(st.integers(1, 2)),
        "max_prefill_chunk": draw(st.sampled_from([None, 3])),
        "reuse": draw(st.booleans()),
    }
    return prompt, params, sizes


@given(cases())
@settings(max_examples=150, deadline=None)
def test_answers_are_those_of_a_naive_search_without_cache(
    case: tuple[list[int], GenerationParams, dict[str, Any]],
) -> None:
    prompt, params, sizes = case
    engine = new_engine(**sizes)
    try:
        expected = naive_search(lambda context: logits_of(context, VOCABULARY), prompt, params)
        for _ in range(2):  # the second time from the cache
            assert answers_of(engine, prompt, params) == expected
    finally:
        engine.close()


def test_searches_beside_each_other_and_beside_samples_are_right() -> None:
    engine = new_engine(max_open_steps=2, max_running=24)
    wanted = GenerationParams(max_tokens=14, beam_width=4, n=2, stop_token_ids=(3,))
    prompts = [[place, 1, 2, 7, 5] * (place % 3 + 1) for place in range(8)]
    found = [engine.submit(prompt, wanted) for prompt in prompts]
    greedy = [engine.submit(prompt, GenerationParams(max_tokens=30))[0] for prompt in prompts]
    engine.run()
    for prompt, generations, one in zip(prompts, found, greedy, strict=True):
        expected = naive_search(lambda context: logits_of(context, VOCABULARY), prompt, wanted)
        assert [(g.score, g.token_ids, g.finish_reason) for g in generations] == expected
        tokens = list(prompt)
        for _ in range(30):
            tokens.append(int(logits_of(tokens, VOCABULARY).argmax()))
        assert one.token_ids == tokens[len(prompt) :]
    assert idle(engine)
    engine.close()


def test_logprobs_of_an_answer_add_up_to_its_score() -> None:
    params = GenerationParams(max_tokens=9, beam_width=3, n=3, logprobs=2, stop_token_ids=(1,))
    for output in new_engine().generate([5, 6], params):
        assert output.logprobs is not None
        assert output.score is not None
        assert len(output.logprobs) == len(output.token_ids)
        total = sum(each.logprob for each in output.logprobs)
        assert output.score == pytest.approx(total / len(output.token_ids))
        for each in output.logprobs:
            assert len(each.top) == 2
            assert each.logprob <= each.top[0][1]


def test_beams_hold_the_prompt_once_and_little_besides() -> None:
    engine = new_engine()
    width, prompt_blocks, max_tokens = 8, 40, 24
    engine.submit([1, 2, 3, 4] * prompt_blocks, GenerationParams(max_tokens=max_tokens, beam_width=width))
    most = 0
    while engine.has_work():
        engine.step()
        most = max(most, engine.pool.stats().held)
    own = max_tokens // engine.config.block_size + 1
    assert most <= prompt_blocks + width * own
    assert most < prompt_blocks + width * own // 2, "beams have most of their past in common"
    assert isinstance(engine.runner, PagedRunner)
    assert engine.runner.num_copies > 0
    assert idle(engine)


@pytest.mark.parametrize("open_steps", [1, 2])
@pytest.mark.parametrize("step", range(12))
def test_abort_in_the_middle_frees_everything(step: int, open_steps: int) -> None:
    engine = new_engine(max_prefill_chunk=6, max_open_steps=open_steps)
    params = GenerationParams(max_tokens=30, beam_width=5, n=2, stop_token_ids=(3,))
    generations = engine.submit([7] * 21, params)
    other = engine.submit([9] * 5, GenerationParams(max_tokens=20))[0]
    for _ in range(step):
        engine.step()
    assert engine.abort(generations[1])
    for _ in range(open_steps):  # what is planned already has to end first
        engine.step()
    assert [(g.has_ended, g.finish_reason) for g in generations] == [(True, "aborted")] * 2
    assert engine.num_live == 1
    engine.run()
    assert len(other.token_ids) == 20
    assert idle(engine)
    counters = engine.snapshot().tenants["default"]
    assert (counters.num_running, counters.num_waiting) == (0, 0)
    engine.close()


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_leaving_the_stream_frees_the_beams(steps: int) -> None:
    config = EngineConfig(num_blocks=256, block_size=4, max_running=16, max_batch_tokens=64)
    runner, gate = PagedRunner(VOCABULARY), Gate()
    runner.before_run = gate.pass_through

    async def main() -> None:
        async with AsyncEngine(Engine(runner, config)) as engine:
            params = GenerationParams(max_tokens=100, beam_width=8, n=2)
            stream = engine.generate([3] * 30, params)
            gate.allow(steps)
            await until(lambda: gate.is_waiting and runner.num_runs == steps + 1, "a step")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
            await stream.aclose()
            gate.open()
            assert await engine.drain(PATIENCE)
            assert idle(engine.engine)

    asyncio.run(main())


def test_async_engine_streams_the_answers() -> None:
    params = GenerationParams(max_tokens=8, beam_width=4, n=3, stop_token_ids=(2,))

    async def main() -> list[Answer]:
        async with AsyncEngine(new_engine()) as engine:
            stream = engine.generate([1, 2, 3], params)
            found = [(o.score or 0.0, o.token_ids, str(o.finish_reason)) async for o in stream]
            assert stream.output_tokens == sum(len(tokens) for _, tokens, _ in found)
            return found

    assert asyncio.run(main()) == naive_search(lambda c: logits_of(c, VOCABULARY), [1, 2, 3], params)


def test_failed_step_fails_the_search_as_a_whole() -> None:
    engine = new_engine()
    assert isinstance(engine.runner, PagedRunner)
    runner = engine.runner

    def fail() -> None:
        if runner.num_runs == 4:
            raise RuntimeError("out of memory")

    runner.before_run = fail
    with pytest.raises(GenerationError, match="out of memory"):
        list(engine.generate([1, 2], GenerationParams(max_tokens=20, beam_width=3, n=3)))
    engine.run()
    assert idle(engine)


def test_interrupted_step_goes_on() -> None:
    params = GenerationParams(max_tokens=12, beam_width=3, n=3)
    expected = naive_search(lambda context: logits_of(context, VOCABULARY), [1, 2], params)
    for place in range(1, 12):
        engine = new_engine()
        assert isinstance(engine.runner, PagedRunner)
        runner = engine.runner

        def interrupt(runner: PagedRunner = runner, place: int = place) -> None:
            if runner.num_runs == place:
                raise KeyboardInterrupt

        runner.before_run = interrupt
        generations = engine.submit([1, 2], params)
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        engine.run()
        assert generations[0].error is None
        assert [(g.score, g.token_ids, g.finish_reason) for g in generations] == expected
        assert idle(engine)


@pytest.mark.parametrize("host_blocks", [0, 64])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("policy", ["watermark", "forecast"])
def test_searches_that_are_preempted_find_the_same(policy: str, reuse: bool, host_blocks: int) -> None:
    overflow = "swap" if host_blocks else "auto"
    sizes = {"num_blocks": 40, "block_size": 2, "host_blocks": host_blocks, "overflow": overflow}
    engine = new_engine(policy=policy, reuse=reuse, **sizes)
    wanted = GenerationParams(max_tokens=14, beam_width=4, n=2, stop_token_ids=(3,))
    prompts = [[place, 1, 2, 7, 5] * (place % 2 + 1) for place in range(6)]
    found = [engine.submit(prompt, wanted) for prompt in prompts]
    engine.run()
    for prompt, generations in zip(prompts, found, strict=True):
        expected = naive_search(lambda context: logits_of(context, VOCABULARY), prompt, wanted)
        assert [(g.score, g.token_ids, g.finish_reason) for g in generations] == expected
    if policy == "watermark":
        assert engine.scheduler.stats().num_preemptions > 0
    assert idle(engine)
    engine.close()


def test_deadline_ends_a_search() -> None:
    engine = new_engine()
    with pytest.raises(GenerationError, match="deadline"):
        list(engine.generate([1, 2], GenerationParams(max_tokens=200, beam_width=3, n=2, deadline=1e-4)))
    engine.run()
    assert idle(engine)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "narrower than n": ({"beam_width": 2, "n": 3}, "beam_width is 2, from n 3 to 128"),
    "too wide": ({"beam_width": 129}, "beam_width is 129, from n 1 to 128"),
    "stop text": ({"beam_width": 2, "stop": ("x",)}, "a beam search has no stop texts"),
    "temperature": (
        {"beam_width": 2, "sampling": SamplingParams(temperature=0.5)},
        "temperature is 0.5: 0 is needed",
    ),
    "penalty": ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
    "vocabulary": (
        {"beam_width": 14, "stop_token_ids": (1, 2, 3)},
        "beam_width is 14 and 3 tokens end an answer: more than the vocabulary of 16",
    ),
}


@pytest.mark.parametrize(("wanted", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_searches_are_refused_at_the_call(wanted: dict[str, Any], message: str) -> None:
    engine = new_engine()
    with pytest.raises(InvalidArgumentError, match=message):
        engine.submit([1], GenerationParams(max_tokens=5, **wanted))
    assert idle(engine)


def test_engines_that_cannot_search_say_why() -> None:
    params = GenerationParams(max_tokens=5, beam_width=2)
    with pytest.raises(InvalidArgumentError, match="it has no beam search"):
        Engine(NullRunner(), EngineConfig(num_blocks=64)).submit([1], params)
    with pytest.raises(RefusedError, match="8 samples, and 4 sequences may run at once"):
        new_engine(max_running=4).submit([1], GenerationParams(max_tokens=5, beam_width=8))
    with pytest.raises(RefusedError, match=r"need \d+ blocks") as refused:
        new_engine(num_blocks=8).submit([1] * 20, GenerationParams(max_tokens=20, beam_width=3))
    assert not refused.value.retryable


def test_counts_of_a_search_come_back_to_zero_and_the_prompt_counts_once() -> None:
    engine = new_engine()
    outputs = list(engine.generate([1] * 10, GenerationParams(max_tokens=6, beam_width=4, n=2)))
    engine.run()
    counters = engine.snapshot().tenants["default"]
    assert (counters.submitted, counters.started, counters.num_ended) == (4, 4, 4)
    assert (counters.num_running, counters.num_waiting) == (0, 0)
    assert counters.prompt_tokens == 10
    assert counters.generation_tokens == sum(len(output.token_ids) for output in outputs)
    assert set(counters.ended) == {"length"}


def test_answers_with_the_demo_model_are_those_of_a_naive_search() -> None:
    from kvpager.runner import LlamaRunner, load_model

    loaded = load_model("demo")
    ends = tuple(loaded.tokenizer.stop_token_ids)
    params = GenerationParams(max_tokens=6, beam_width=3, n=3, stop_token_ids=ends)
    prompt = loaded.tokenizer.encode("The capital of France is")
    config = EngineConfig(num_blocks=64, block_size=4, max_running=8)
    alone = Engine(LlamaRunner(loaded.model), EngineConfig(num_blocks=16, reuse=False))
    logits: list[npt.NDArray[np.float32]] = []
    run = alone.runner.run
    alone.runner.run = lambda *batch: (logits.append(run(*batch)), logits[-1])[1]  # type: ignore[method-assign]

    def whole(context: list[int]) -> npt.NDArray[np.float32]:
        logits.clear()
        list(alone.generate(context, GenerationParams(max_tokens=1)))
        return logits[0][0]

    expected = naive_search(whole, prompt, params)
    found = answers_of(Engine(LlamaRunner(loaded.model), config), prompt, params)
    assert [(tokens, reason) for _, tokens, reason in found] == [(t, r) for _, t, r in expected]
    assert [score for score, _, _ in found] == pytest.approx([score for score, _, _ in expected], abs=1e-4)
