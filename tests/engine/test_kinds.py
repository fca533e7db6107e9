"""A value of the wrong kind is one error of our own, with the value and what is needed, at the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from synthetic import LetterTokenizer, idle

from kvpager.engine import AsyncEngine, Engine, EngineConfig, GenerationParams, NullRunner, SamplingParams
from kvpager.errors import InvalidArgumentError

NAN = float("nan")

WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens is '5', a whole number is needed"),
    ({"max_tokens": True}, "max_tokens is True, a whole number is needed"),
    ({"max_tokens": 5.0}, "max_tokens is 5.0, a whole number is needed"),
    ({"max_tokens": None}, "max_tokens is None, a whole number is needed"),
    ({"min_tokens": "1", "n": 2.5}, "min_tokens is '1', a whole number is needed; n is 2.5, a whole number"),
    ({"beam_width": "3"}, "beam_width is '3', a whole number or None is needed"),
    ({"length_penalty": "long", "beam_width": 2}, "length_penalty is 'long', a number is needed"),
    ({"stop": "END"}, r"stop is 'END', a tuple of texts is needed"),
    ({"stop": (1,)}, r"stop is \(1,\), a tuple of texts is needed"),
    ({"stop_token_ids": 7}, "stop_token_ids is 7, a tuple of token ids is needed"),
    ({"stop_token_ids": (7, "x")}, r"stop_token_ids is \(7, 'x'\), a tuple of token ids is needed"),
    ({"stop_token_ids": (7, -1)}, r"stop_token_ids are \(7, -1\), none is below 0"),
    ({"logprobs": True}, "logprobs is True, a whole number or None is needed"),
    ({"priority": "high"}, "priority is 'high', a whole number is needed"),
    ({"deadline": "soon"}, "deadline is 'soon', a number or None is needed"),
    ({"deadline": NAN}, "deadline is nan, above 0 seconds is needed"),
    ({"reuse": "no"}, "reuse is 'no', True or False is needed"),
    ({"salt": "pepper"}, "salt is 'pepper', a bytes or None is needed"),
    ({"retention": 3.0}, "retention is 3.0, a Retention or None is needed"),
    ({"sampling": {"temperature": 1}}, r"sampling is \{'temperature': 1\}, a SamplingParams is needed"),
    ({"max_tokens": "5" * 200}, r"max_tokens is '5{56}\.\.\., a whole number is needed"),
]


@pytest.mark.parametrize(("params", "message"), WRONG_PARAMS)
def test_params_of_another_kind_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        GenerationParams(**params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', a number is needed"),
        (
            {"top_k": 1.5, "seed": None},
            "top_k is 1.5, a whole number is needed; seed is None, a whole number",
        ),
        ({"top_p": None}, "top_p is None, a number is needed"),
    ],
)
def test_sampling_of_another_kind_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_blocks": "64"}, "num_blocks is '64', a whole number is needed"),
        ({"max_buffered_tokens": NAN}, "max_buffered_tokens is nan, a whole number is needed"),
        ({"max_running": None}, "max_running is None, a whole number is needed"),
        ({"reuse": 1}, "reuse is 1, True or False is needed"),
        ({"policy": 3}, "policy is 3, a text is needed"),
        ({"max_accounts": 0}, "max_accounts is 0, at least 1 is needed"),
        ({"max_model_tokens": 0}, "max_model_tokens is 0, at least 1 is needed"),
        ({"max_failures": 0, "max_buffered_tokens": 0}, "max_buffered_tokens is 0, .*; max_failures is 0, "),
    ],
)
def test_sizes_of_another_kind_or_of_nothing_are_named(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"engine: {message}"):
        EngineConfig(**{"num_blocks": 64, **sizes})


WRONG_CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", r"the prompt is None, a text or \[n\] token ids are needed"),
    ({"prompt": 5}, "prompt", "the prompt is 5, a text or"),
    ({"prompt": [1.5]}, "prompt", r"the prompt is \[1.5\], a text or"),
    ({"prompt": [True, False]}, "prompt", r"the prompt is \[True, False\], a text or"),
    ({"prompt": ["a", "b"]}, "prompt", r"the prompt is \['a', 'b'\], a text or"),
    ({"prompt": [[1, 2], [3, 4]]}, "prompt", r"the prompt is \[\[1, 2\], \[3, 4\]\], a text or"),
    ({"prompt": [[1, 2], [3]]}, "prompt", r"the prompt is \[\[1, 2\], \[3\]\]: "),
    ({"prompt": np.zeros((2, 3))}, "prompt", r"the prompt is float64 \[2, 3\], a text or"),
    ({"prompt": [2**70]}, "prompt", r"the prompt is \[1180591620717411303424\], a text or"),
    ({"prompt": b"hello"}, "prompt", r"the prompt is b'hello', a text or"),
    ({"prompt": []}, "prompt", "the prompt is empty"),
    ({"params": {"max_tokens": 5}}, "params", r"params is \{'max_tokens': 5\}, a GenerationParams is needed"),
    ({"tenant": None}, "tenant", "tenant is None, a name is needed"),
    ({"tenant": ["default"]}, "tenant", r"tenant is \['default'\], a name is needed"),
    ({"session": "mine"}, "session", "session is 'mine', a Session or None is needed"),
    ({"listener": print}, "listener", "listener is <built-in function print>, an object with notify"),
]


@pytest.mark.parametrize(("wanted", "param", "message"), WRONG_CALLS)
def test_a_call_with_another_kind_is_refused_and_changes_nothing(
    engine: Engine, wanted: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        engine.submit(**{"prompt": [1], **wanted})
    assert refused.value.param == param
    assert idle(engine)


OTHER_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("add_tenant", {"name": 5}, "name is 5, a text is needed"),
    ("add_tenant", {"name": "a", "weight": "x"}, "weight is 'x', a number is needed"),
    ("add_tenant", {"name": "a", "isolation": 3}, "isolation is 3, a text is needed"),
    ("add_tenant", {"name": "a", "scope": None}, "scope is None, a text is needed"),
    ("add_tenant", {"name": "a", "limit": "5"}, "limit must be an integer"),
    ("open_session", {"idle_seconds": "x"}, "idle_seconds is 'x', a number or None is needed"),
    ("open_session", {"tenant": 3}, "tenant is 3, a name is needed"),
    ("close_session", {"session": "x"}, "session is 'x', a Session is needed"),
    ("abort", {"generation": 7}, "generation is 7, a Generation is needed"),
]


@pytest.mark.parametrize(("method", "arguments", "message"), OTHER_CALLS)
def test_the_other_calls_say_it_too(
    engine: Engine, method: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        getattr(engine, method)(**arguments)
    assert engine.tenants == ()
    with pytest.raises(InvalidArgumentError, match="unknown tenant 'eve': there are none"):
        engine.counters("eve")


def test_null_runner_of_another_kind_is_refused() -> None:
    for options in ({"vocab_size": "x"}, {"max_model_tokens": None}, {"step_time": "x"}):
        (name,) = options
        with pytest.raises(InvalidArgumentError, match=f"{name} is "):
            NullRunner(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_token_ids_may_be_of_any_integer_dtype(engine: Engine, dtype: str) -> None:
    (generation,) = engine.submit(np.arange(100, dtype=dtype)[::-1][:50], GenerationParams(max_tokens=2))
    engine.run()
    assert (generation.prompt_tokens, len(generation.token_ids)) == (50, 2)


def test_numbers_of_numpy_are_numbers() -> None:
    sampling = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3))  # type: ignore[arg-type]
    params = GenerationParams(max_tokens=np.int64(3), sampling=sampling)  # type: ignore[arg-type]
    engine = Engine(NullRunner(), EngineConfig(num_blocks=np.int32(64)))  # type: ignore[arg-type]
    assert sum(len(output.token_ids) for output in engine.generate([1], params)) == 3


def test_an_engine_of_something_else_is_refused() -> None:
    config = EngineConfig(num_blocks=64)
    with pytest.raises(InvalidArgumentError, match="config is 64, an EngineConfig is needed"):
        Engine(NullRunner(), 64)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="the runner is None, without allocate, gives_logits"):
        Engine(None, config)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="the tokenizer is 'bytes', without decode, new_deco"):
        Engine(NullRunner(), config, tokenizer="bytes")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="engine is 'mine', an Engine is needed"):
        AsyncEngine("mine")  # type: ignore[arg-type]
    Engine(NullRunner(), config, tokenizer=LetterTokenizer())
