"""The `openai` client against the server: what applications rely on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from http_server import ALICE, BOB, Running, running_server, two_tenants

from kvpager.engine import ByteTokenizer, NullRunner
from kvpager.server.tenants import SharedScope, TenantSpec, TenantTable, hash_key
from waiting import GatedRunner, wait_until

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


class TextRunner(NullRunner):
    """Answers every request with the bytes of one text; probability falls with the distance of ids."""

    gives_logits = True

    def __init__(self, text: str) -> None:
        super().__init__(vocab_size=300, max_model_tokens=4096)
        self.text = text.encode()

    def run(self, _batch: Any, sampled: Any, /) -> Any:
        places = [generation.num_sampled for generation in sampled]
        best = np.array([3 + self.text[place % len(self.text)] for place in places])
        return -np.abs(np.arange(300)[None, :] - best[:, None]).astype(np.float32)


def test_models_are_listed_and_found(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["null"]
    assert client.models.retrieve("null").id == "null"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other/name")


def test_chat_answers_with_text_reason_and_usage(server: Running) -> None:
    done = server.client().chat.completions.create(
        model="null", messages=MESSAGES, max_completion_tokens=7, n=2
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    assert all(choice.message.role == "assistant" for choice in done.choices)
    assert all(len(choice.message.content or "") == 7 for choice in done.choices)
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert done.usage is not None
    prompt = len(ByteTokenizer().encode_chat(MESSAGES))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (prompt, 14)
    assert done.usage.total_tokens == prompt + 14


def test_streamed_chat_adds_up_to_its_usage(server: Running) -> None:
    stream = server.client().chat.completions.create(
        model="null",
        messages=MESSAGES,
        max_tokens=9,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usages = {0: "", 1: ""}, {}, []
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
            assert chunk.choices == []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert [len(text) for text in texts.values()] == [9, 9]
    assert reasons == {0: "length", 1: "length"}
    (usage,) = usages
    assert usage.completion_tokens == 18


def test_completion_takes_texts_ids_and_lists_of_both(server: Running) -> None:
    client = server.client()
    prompts: list[Any] = ["ab", ["ab", "cd"], [5, 6, 7], [[5, 6], [7, 8, 9]]]
    counts = []
    for prompt in prompts:
        done = client.completions.create(model="null", prompt=prompt, max_tokens=3)
        assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
        assert all(len(choice.text) == 3 for choice in done.choices)
        assert done.usage is not None
        counts.append((len(done.choices), done.usage.prompt_tokens))
    assert counts == [(1, 2), (2, 4), (1, 3), (2, 5)]


def test_streamed_completion_of_several_prompts(server: Running) -> None:
    texts: dict[int, str] = {}
    for chunk in server.client().completions.create(
        model="null", prompt=["ab", "cd"], n=2, max_tokens=4, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert {index: len(text) for index, text in texts.items()} == dict.fromkeys(range(4), 4)


def test_cached_tokens_are_the_tenants_own() -> None:
    with running_server() as server:

        def cached(key: str) -> int:
            done = server.client(key).completions.create(model="null", prompt="p" * 100, max_tokens=2)
            assert done.usage is not None
            assert done.usage.prompt_tokens_details is not None
            return done.usage.prompt_tokens_details.cached_tokens or 0

        assert [cached(ALICE), cached(BOB), cached(ALICE), cached(BOB)] == [0, 0, 96, 96]


def test_cache_salt_only_narrows() -> None:
    with running_server() as server:
        salts = [None, "a", "b", "a", None]
        cached = []
        for salt in salts:
            done = server.client().completions.create(
                model="null",
                prompt="p" * 100,
                max_tokens=2,
                extra_body={} if salt is None else {"cache_salt": salt},
            )
            assert done.usage is not None
            assert done.usage.prompt_tokens_details is not None
            cached.append(done.usage.prompt_tokens_details.cached_tokens)
        assert cached == [0, 0, 0, 96, 96], "a salt shares with itself alone"


def test_prompts_of_a_group_and_of_the_public_are_found_by_those_who_may() -> None:
    system = "You are the assistant of a small public library. " * 2
    team = "We are the team that repairs the old bridges of the town. " * 2
    table = TenantTable(
        {
            "alice": TenantSpec(key_hashes=(hash_key(ALICE),), group="team", public="house"),
            "bob": TenantSpec(key_hashes=(hash_key(BOB),), group="team"),
            "eve": TenantSpec(key_hashes=(hash_key("eve"),), public="house"),
        },
        groups={"team": SharedScope(system_prompts=(team,))},
        publics={"house": SharedScope(system_prompts=(system,))},
    )
    with running_server(table=table) as server:
        server.wait_until_published()

        def cached(key: str, messages: Any) -> int:
            done = server.client(key).chat.completions.create(model="null", messages=messages, max_tokens=2)
            assert done.usage is not None
            assert done.usage.prompt_tokens_details is not None
            return done.usage.prompt_tokens_details.cached_tokens or 0

        def greeting(text: str) -> Any:
            return [{"role": "system", "content": text}, {"role": "user", "content": "hello"}]

        keys = (ALICE, BOB, "eve")
        assert [cached(key, greeting(system)) > 90 for key in keys] == [True, False, True]
        assert [cached(key, greeting(team)) > 90 for key in keys] == [True, True, False]
        question: Any = [{"role": "user", "content": "x" * 90}]
        assert [cached(key, question) for key in keys] == [0, 0, 0], "members' own prefixes stay private"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_is_cut_off_and_named_as_the_reason(stream: bool) -> None:
    with running_server(runner=TextRunner("one two END three ")) as server:
        done = server.client().completions.create(
            model="null", prompt="x", max_tokens=100, temperature=0, stop=["END", "three"], stream=stream
        )
        choices = [chunk.choices[0] for chunk in done] if stream else [done.choices[0]]  # type: ignore[union-attr]
        assert "".join(choice.text for choice in choices) == "one two "
        assert choices[-1].finish_reason == "stop"
        server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_name_every_token(stream: bool) -> None:
    with running_server(runner=TextRunner("héllo")) as server:
        done = server.client().chat.completions.create(
            model="null",
            messages=MESSAGES,
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            stream=stream,
        )
        choices = [c for chunk in done for c in chunk.choices] if stream else done.choices  # type: ignore
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        assert [entry.token for entry in entries] == ["h", "\ufffd", "\ufffd", "l", "l", "o"]
        assert all(-0.8 < entry.logprob < -0.7 for entry in entries)
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert entries[0].top_logprobs[0].token == "h"
        assert b"".join(bytes(entry.bytes or ()) for entry in entries) == "héllo".encode()
        assert all(choice.logprobs.content for choice in choices if choice.logprobs)
        text = "".join(
            (choice.delta.content if stream else choice.message.content) or "" for choice in choices
        )
        assert text == "héllo"


def test_completion_logprobs_have_offsets() -> None:
    with running_server(runner=TextRunner("abc")) as server:
        client = server.client()
        done = client.completions.create(model="null", prompt="x", max_tokens=3, temperature=0, logprobs=1)
        logprobs = done.choices[0].logprobs
        assert logprobs is not None
        assert (logprobs.tokens, logprobs.text_offset) == (["a", "b", "c"], [0, 1, 2])
        assert [list(top) for top in logprobs.top_logprobs or ()] == [["a"], ["b"], ["c"]]
        streamed = [
            chunk.choices[0].logprobs
            for chunk in client.completions.create(
                model="null", prompt="x", max_tokens=3, temperature=0, logprobs=1, stream=True
            )
        ]
        assert [offset for each in streamed if each for offset in each.text_offset or ()] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text_whatever_characters_are_made_of(stream: bool) -> None:
    text = "é€\U0001f600ab\U0001f600"  # of 2, 3, 4, 1, 1 and 4 tokens, the last one cut
    with running_server(runner=TextRunner(text)) as server:
        done = server.client().completions.create(
            model="null", prompt="x", max_tokens=14, temperature=0, logprobs=1, stream=stream
        )
        choices = [chunk.choices[0] for chunk in done] if stream else [done.choices[0]]  # type: ignore[union-attr]
        offsets = [place for each in choices if each.logprobs for place in each.logprobs.text_offset or ()]
        assert "".join(choice.text for choice in choices) == text[:-1] + "\ufffd"
        assert offsets == [0] * 2 + [1] * 3 + [2] * 4 + [3, 4] + [5] * 3


def test_sampled_token_is_among_its_alternatives_however_unlikely_it_is() -> None:
    with running_server(runner=TextRunner("a")) as server:
        done = server.client().completions.create(
            model="null", prompt="x", max_tokens=40, temperature=2.0, seed=4, logprobs=1
        )
        logprobs = done.choices[0].logprobs
        assert logprobs is not None
        unlikely = 0
        for name, value, top in zip(
            logprobs.tokens or (), logprobs.token_logprobs or (), logprobs.top_logprobs or (), strict=True
        ):
            assert top is not None
            assert top[name] == value
            assert "a" in top, "the most likely one, which was asked for"
            unlikely += name != "a"
            assert len(top) == (1 if name == "a" else 2)
        assert unlikely > 5


def test_alternatives_that_are_parts_of_characters_keep_names_of_their_own() -> None:
    with running_server(runner=TextRunner("é")) as server:
        done = server.client().completions.create(
            model="null", prompt="x", max_tokens=2, temperature=0, logprobs=3
        )
        logprobs = done.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9"]
        assert [set(top) for top in logprobs.top_logprobs or ()] == [
            {"bytes:\\xc2", "bytes:\\xc3", "bytes:\\xc4"},
            {"bytes:\\xa8", "bytes:\\xa9", "bytes:\\xaa"},
        ]


def test_seed_makes_an_answer_repeatable_and_samples_of_one_request_differ() -> None:
    with running_server(runner=TextRunner("abcdefghijkl")) as server:

        def texts(seed: int) -> list[str]:
            done = server.client().completions.create(
                model="null", prompt="x", max_tokens=12, temperature=1.5, seed=seed, n=3
            )
            return [choice.text for choice in done.choices]

        first = texts(5)
        assert first == texts(5)
        assert first != texts(6)
        assert len(set(first)) == 3


def test_fields_that_nobody_knows_are_ignored_and_nulls_are_not_given(server: Running) -> None:
    done = server.client().chat.completions.create(
        model="null",
        messages=MESSAGES,
        max_tokens=2,
        user="somebody",
        extra_body={
            "use_beam_search": False,
            "seed": None,
            "stop": None,
            "ignore_eos": True,
            "tool_choice": "none",
            "tools": [{"type": "function", "function": {"name": "search", "parameters": {}}}],
            "parallel_tool_calls": False,
        },
    )
    assert done.choices[0].finish_reason == "length"
    body = {"model": "null", "messages": MESSAGES, "max_tokens": 1, "stream": True}
    answer = server.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": None}})
    assert answer.status_code == 200
    assert '"usage"' not in answer.text


def test_answer_without_a_maximum_has_the_servers() -> None:
    with running_server(settings={"default_max_tokens": 11}, num_blocks=8) as server:
        done = server.client().chat.completions.create(model="null", messages=MESSAGES)
        assert done.usage is not None
        assert done.usage.completion_tokens == 11
        long: Any = [{"role": "user", "content": "x" * 116}]
        done = server.client().chat.completions.create(model="null", messages=long)
        assert done.usage is not None
        assert done.usage.prompt_tokens + done.usage.completion_tokens == 128, "as much as fits"


def test_request_that_can_never_fit_is_400_with_the_numbers(server: Running) -> None:
    with pytest.raises(
        openai.BadRequestError, match='need 2063 blocks of 16 tokens; tenant "alice" may have 2048'
    ) as caught:
        server.client().completions.create(model="null", prompt="x", max_tokens=33000)
    assert caught.value.code == "context_length_exceeded"


def test_too_many_requests_are_429_with_a_time_and_the_client_retries() -> None:
    runner = GatedRunner()
    with running_server(table=two_tenants(max_requests=2), runner=runner) as server:
        client, counters = server.client(), server.engine.engine.counters("alice")
        streams = [
            client.completions.create(model="null", prompt="x", max_tokens=40, stream=True) for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError, match="the limit is 2") as caught:
            client.completions.create(model="null", prompt="x", max_tokens=2)
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        with pytest.raises(
            openai.BadRequestError, match="3 samples are asked for, at most 2 may be in flight"
        ):
            client.completions.create(model="null", prompt="x", max_tokens=2, n=3)
        assert counters.refused == 2
        other = server.client(BOB).completions.create(model="null", prompt="x", max_tokens=2, stream=True)
        with ThreadPoolExecutor() as pool:
            patient = server.client(max_retries=60).completions
            answer = pool.submit(patient.create, model="null", prompt="x", max_tokens=2)
            wait_until(lambda: counters.refused == 3, "a refusal of the patient client")
            runner.gate.open()
            assert answer.result().choices[0].text
        for stream, length in ((streams[0], 40), (streams[1], 40), (other, 2)):
            assert sum(len(chunk.choices[0].text) for chunk in stream) == length


def test_full_queue_is_429_and_says_nothing_of_others() -> None:
    runner = GatedRunner()
    with running_server(runner=runner, max_running=1, max_waiting=2) as server:
        client = server.client()
        kept = [client.completions.create(model="null", prompt="x", max_tokens=50, stream=True)]
        wait_until(lambda: runner.gate.is_waiting, "a step")  # it runs: the others wait
        for _ in range(2):
            kept.append(client.completions.create(model="null", prompt="x", max_tokens=50, stream=True))
        with pytest.raises(openai.RateLimitError) as caught:
            server.client(BOB).completions.create(model="null", prompt="x")
        text = "too many requests are waiting, 0 of them yours: try again in 1 s"
        assert caught.value.body["message"] == text  # type: ignore
        for stream in kept:
            stream.close()
        runner.gate.open()
        server.wait_until_idle()


def test_request_beyond_the_time_limit_fails_as_one() -> None:
    with running_server(settings={"request_timeout": 0.1}) as server:
        with pytest.raises(openai.InternalServerError, match="its deadline has passed") as failed:
            server.client().completions.create(model="null", prompt="x", max_tokens=5000)
        assert failed.value.status_code == 504
        server.wait_until_idle()


def test_full_queue_of_a_tenant_is_429_for_that_tenant() -> None:
    runner = GatedRunner()
    table = two_tenants(max_waiting=1)
    with running_server(runner=runner, table=table, max_running=1) as server:
        client = server.client()
        kept = [client.completions.create(model="null", prompt="x", max_tokens=50, stream=True)]
        wait_until(lambda: runner.gate.is_waiting, "a step")  # it runs: the others wait
        kept.append(client.completions.create(model="null", prompt="x", max_tokens=50, stream=True))
        with pytest.raises(openai.RateLimitError, match="1 of them yours: your limit is 1: try again in"):
            client.completions.create(model="null", prompt="x")
        other = server.client(BOB).completions.create(model="null", prompt="x", stream=True)
        for stream in (*kept, other):
            stream.close()
        runner.gate.open()
        server.wait_until_idle()


class FailingRunner(NullRunner):
    """Fails once a request has three tokens."""

    def run(self, batch: Any, sampled: Any, /) -> Any:
        if any(len(generation.token_ids) >= 3 for generation in sampled):
            raise RuntimeError("out of memory")
        return super().run(batch, sampled)


def test_failure_of_the_model_reaches_the_client_as_an_error() -> None:
    with running_server(runner=FailingRunner(), max_failures=100) as server:
        client = server.client()
        with pytest.raises(openai.InternalServerError, match="the model failed: RuntimeError: out of memory"):
            client.completions.create(model="null", prompt="x", max_tokens=9)
        received = 0
        with pytest.raises(openai.APIError, match="out of memory"):  # noqa: PT012
            for chunk in client.completions.create(model="null", prompt="x", max_tokens=9, stream=True):
                received += len(chunk.choices[0].text)
        assert received == 3
        assert client.completions.create(model="null", prompt="x", max_tokens=3).choices[0].text
        server.wait_until_idle()


def test_beam_search_answers_best_first_and_not_in_a_stream() -> None:
    with running_server(runner=TextRunner("beam"), max_running=16) as server:
        client = server.client()
        wanted: Any = {
            "model": "null",
            "max_tokens": 4,
            "n": 3,
            "logprobs": 1,
            "extra_body": {"use_beam_search": True, "best_of": 5},
        }
        done = client.completions.create(prompt="x", **wanted)
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        assert len({choice.text for choice in done.choices}) == 3
        sums = []
        for choice in done.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            assert len(choice.logprobs.token_logprobs) == 4
            sums.append(sum(value or 0.0 for value in choice.logprobs.token_logprobs))
        assert sums == sorted(sums, reverse=True)
        assert done.choices[0].text == "beam"
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1, 12)
        chat = client.chat.completions.create(
            model="null", messages=MESSAGES, max_tokens=4, n=2, extra_body={"use_beam_search": True}
        )
        assert chat.choices[0].message.content == "beam"
        with pytest.raises(openai.BadRequestError, match="use_beam_search does not go with stream"):
            client.completions.create(prompt="x", stream=True, **wanted)
        with pytest.raises(openai.BadRequestError, match="128"):
            client.completions.create(
                model="null", prompt="x", extra_body={"use_beam_search": True, "best_of": 500}
            )
        with pytest.raises(openai.BadRequestError, match="20 samples, and 16 sequences may run at once"):
            client.completions.create(model="null", prompt="x", n=20, extra_body={"use_beam_search": True})
        server.wait_until_idle()
