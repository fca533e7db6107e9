"""What a client may not do, and that it learns it in the one error shape."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import ALICE, BOB, OPERATOR, Running, running_server, two_tenants

from kvpager import Retention
from kvpager.engine import Engine, EngineConfig, GenerationParams, NullRunner
from kvpager.errors import InvalidArgumentError, RefusedError
from kvpager.server import hash_key, new_key, read_tenants
from waiting import PATIENCE

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


WRONG: dict[str, tuple[str, Any, str | None, str]] = {
    "no json": (CHAT, b"{nope", None, "Invalid JSON"),
    "deep json": (CHAT, b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None, "recursion limit"),
    "not an object": (CHAT, [1], None, "object"),
    "no messages": (CHAT, {"model": "null"}, "messages", "Field required"),
    "empty messages": (CHAT, {"model": "null", "messages": []}, "messages", "at least 1"),
    "unknown role": (
        CHAT,
        {"model": "null", "messages": [{"role": "boss", "content": ""}]},
        "messages",
        "role",
    ),
    "an image": (
        CHAT,
        {"model": "null", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "parts of the type 'image_url' are not supported (images are not)",
    ),
    "n": (CHAT, {"model": "null", "messages": HELLO, "n": 1000}, "n", "less than or equal to 128"),
    "temperature": (CHAT, {"model": "null", "messages": HELLO, "temperature": -1}, "temperature", "0"),
    "not a number": (CHAT, b'{"model":"null","messages":[],"temperature":NaN}', "temperature", ""),
    "tools": (CHAT, {"model": "null", "messages": HELLO, "tools": [{}]}, "tools", "tools are not supported"),
    "format": (
        CHAT,
        {"model": "null", "messages": HELLO, "response_format": {"type": "json_object"}},
        "response_format",
        "response_format 'json_object' is not supported",
    ),
    "penalty": (
        CHAT,
        {"model": "null", "messages": HELLO, "presence_penalty": 1},
        "presence_penalty",
        "presence_penalty",
    ),
    "top logprobs": (
        CHAT,
        {"model": "null", "messages": HELLO, "top_logprobs": 2},
        "top_logprobs",
        "needs logprobs",
    ),
    "logprobs of tokens": (
        CHAT,
        {"model": "null", "messages": HELLO, "logprobs": True},
        "logprobs",
        "no logprobs",
    ),
    "stream options": (
        CHAT,
        {"model": "null", "messages": HELLO, "stream_options": {"include_usage": True}},
        "stream_options",
        "stream_options needs stream",
    ),
    "salt": (CHAT, {"model": "null", "messages": HELLO, "cache_salt": ""}, "cache_salt", "at least 1"),
    "empty stop": (
        CHAT,
        {"model": "null", "messages": HELLO, "stop": [""]},
        "stop",
        "stop has an empty text",
    ),
    "no prompt": ("/v1/completions", {"model": "null", "prompt": []}, "prompt", "prompt is empty"),
    "empty prompt": ("/v1/completions", {"model": "null", "prompt": ""}, "prompt", "empty"),
    "wrong id": ("/v1/completions", {"model": "null", "prompt": [32000]}, "prompt", "outside the vocabulary"),
    "echo": (
        "/v1/completions",
        {"model": "null", "prompt": "a", "echo": True},
        "echo",
        "echo is not supported",
    ),
    "best of": ("/v1/completions", {"model": "null", "prompt": "a", "best_of": 4}, "best_of", "best_of is 4"),
    "empty prompt of a list": (
        "/v1/completions",
        {"model": "null", "prompt": ["a", ""]},
        "prompt",
        "empty",
    ),
    "huge maximum": (CHAT, {"model": "null", "messages": HELLO, "max_tokens": 2**70}, "max_tokens", ""),
    "minimum above maximum": (
        "/v1/completions",
        {"model": "null", "prompt": "a", "max_tokens": 2, "min_tokens": 3},
        "min_tokens",
        "min_tokens is 3",
    ),
    "many stops": ("/v1/completions", {"model": "null", "prompt": "a", "stop": ["x"] * 20}, "stop", "20"),
    "suffix": ("/v1/completions", {"model": "null", "prompt": "a", "suffix": "b"}, "suffix", "suffix is"),
    "logit bias": (CHAT, {"model": "null", "messages": HELLO, "logit_bias": {"1": 1}}, "logit_bias", "bias"),
    "beams": (CHAT, {"model": "null", "messages": HELLO, "use_beam_search": True}, "use_beam_search", "beam"),
    "long prompt": ("/v1/completions", {"model": "null", "prompt": "a" * 40_000}, "prompt", "40000 prompt"),
    "long answer": (CHAT, {"model": "null", "messages": HELLO, "max_tokens": 40_000}, "max_tokens", "40000"),
    "long message": (
        CHAT,
        {"model": "null", "messages": [{"role": "user", "content": "a" * 40_000}]},
        "messages",
        "prompt tokens",
    ),
    "token below 0": (
        "/v1/completions",
        {"model": "null", "prompt": [5, -1]},
        "prompt",
        "prompt.1: Input should be greater than or equal to 0",
    ),
    "stop of numbers": (
        CHAT,
        {"model": "null", "messages": HELLO, "stop": ["a", 1]},
        "stop",
        "stop.1: Input should be a valid string",
    ),
    "functions": (
        CHAT,
        {"model": "null", "messages": HELLO, "functions": [{}]},
        "functions",
        "functions are",
    ),
    "tool choice": (
        CHAT,
        {"model": "null", "messages": HELLO, "tool_choice": "auto"},
        "tool_choice",
        "tool_choice is not supported",
    ),
    "tools that may be called": (
        CHAT,
        {"model": "null", "messages": HELLO, "tools": [{}], "tool_choice": "auto"},
        "tools",
        'say tool_choice: "none"',
    ),
    "flag for a number": (
        CHAT,
        {"model": "null", "messages": HELLO, "max_tokens": True},
        "max_tokens",
        "integer",
    ),
    "text for a number": (CHAT, {"model": "null", "messages": HELLO, "n": "5"}, "n", "valid integer"),
    "fraction of a token": (
        CHAT,
        {"model": "null", "messages": HELLO, "max_tokens": 1.5},
        "max_tokens",
        "integer",
    ),
    "text for a temperature": (
        CHAT,
        {"model": "null", "messages": HELLO, "temperature": "0.5"},
        "temperature",
        "valid number",
    ),
    "number for a flag": (CHAT, {"model": "null", "messages": HELLO, "stream": 1}, "stream", "valid boolean"),
    "flags for tokens": ("/v1/completions", {"model": "null", "prompt": [True]}, "prompt", "prompt.0"),
    "flag for logprobs": (
        "/v1/completions",
        {"model": "null", "prompt": "a", "logprobs": True},
        "logprobs",
        "valid integer",
    ),
    "tool calls": (
        CHAT,
        {"model": "null", "messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]},
        "messages",
        "tool_calls of a message",
    ),
    "tool message": (
        CHAT,
        {"model": "null", "messages": [*HELLO, {"role": "tool", "content": "3"}]},
        "messages",
        "messages of the role 'tool'",
    ),
}


@pytest.mark.parametrize(("path", "body", "param", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_fields_are_400_and_named(
    server: Running, path: str, body: Any, param: str | None, message: str
) -> None:
    error = error_of(server.post(path, body), 400)
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (None, "no Content-Type was given"),
        ("text/plain", "the Content-Type is 'text/plain'"),
        ("application/x-www-form-urlencoded", "the Content-Type is 'application/x-www-form-urlencoded'"),
        ("application/jsonp", "the Content-Type is 'application/jsonp'"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_body_that_does_not_say_that_it_is_json_is_415(
    server: Running, path: str, kind: str | None, text: str
) -> None:
    body = {"model": "null", "messages": HELLO, "prompt": "a", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {ALICE}"} | ({} if kind is None else {"Content-Type": kind})
    answer = httpx.post(server.url + path, content=json.dumps(body), headers=headers, timeout=PATIENCE)
    assert error_of(answer, 415)["message"] == f"{text}: application/json is needed"


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_have_parameters_and_capitals(server: Running, kind: str) -> None:
    headers = {"Authorization": f"Bearer {ALICE}", "Content-Type": kind}
    body = json.dumps({"model": "null", "prompt": "a", "max_tokens": 1})
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200


def test_the_operators_key_is_named_where_a_tenants_is_needed(server: Running) -> None:
    for response in (
        server.get("/v1/models", key=OPERATOR),
        server.post(CHAT, {"model": "null", "messages": HELLO}, key=OPERATOR),
    ):
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key"
        assert error["message"] == (
            "this is the operator's key, for /metrics, /stats and the page: give a tenant's key"
        )


def test_paths_and_methods_that_are_not_there_have_the_shape_too(server: Running) -> None:
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get(CHAT), 405)
    error_of(server.get("/docs"), 404)


@pytest.mark.parametrize("key", [None, "wrong", "key-of-alice ", "key-of-alicf", "ключ", "x" * 10_000])
def test_without_a_known_key_everything_is_401(server: Running, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": b"Bearer " + key.encode()}
    if key == "key-of-alice ":
        headers = {"Authorization": b"Basic key-of-alice"}
    for path in ("/v1/models", "/stats", "/metrics"):
        response = httpx.get(server.url + path, headers=headers, timeout=PATIENCE)
        assert error_of(response, 401)["code"] == "invalid_api_key"
    body = {"model": "null", "messages": HELLO}
    error_of(httpx.post(server.url + CHAT, headers=headers, json=body, timeout=PATIENCE), 401)


def test_anonymous_tenant_may_be_turned_on_and_a_wrong_key_is_not_anonymous() -> None:
    with running_server(table=two_tenants(anonymous=True)) as server:
        assert server.get("/v1/models", key=None).status_code == 200
        assert server.get("/v1/models", key="wrong").status_code == 401
        for header in ("Basic abc", "", "Bearer"):
            headers = {"Authorization": header}
            response = httpx.get(server.url + "/v1/models", headers=headers, timeout=PATIENCE)
            assert error_of(response, 401)["message"] == "no API key was given"
        server.post("/v1/completions", {"model": "null", "prompt": "a"}, key=None)
        assert server.engine.snapshot().tenants["anonymous"].submitted == 1


def test_long_bodies_are_413_whether_their_length_is_told_or_not() -> None:
    with running_server(settings={"max_body_bytes": 10_000}) as server:
        body = {"model": "null", "messages": [{"role": "user", "content": "x" * 20_000}]}
        assert "limit of 10000 bytes" in error_of(server.post(CHAT, body), 413)["message"]

        def chunks() -> Any:
            for _ in range(40):
                yield b"x" * 1000

        headers = {"Authorization": f"Bearer {ALICE}", "Content-Type": "application/json"}
        error_of(httpx.post(server.url + CHAT, headers=headers, content=chunks(), timeout=PATIENCE), 413)
        assert server.get("/v1/models").status_code == 200


def test_client_that_leaves_in_its_body_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(settings={"max_body_bytes": 10_000}) as server:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)  # to where caplog listens
        port = int(server.url.rsplit(":", 1)[1])
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ALICE}\r\n"
        head += "Content-Type: application/json\r\n"
        for rest in ("Content-Length: 100\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
                connection.sendall((head + rest).encode())
        long = head + "Transfer-Encoding: chunked\r\n\r\n4e20\r\n" + "x" * 20_000
        assert raw(server, long.encode()).startswith(b"HTTP/1.1 413")
        assert server.get("/v1/models").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_more_than_the_queue_ever_holds_is_400_on_an_idle_server() -> None:
    with running_server(table=two_tenants(max_waiting=2), max_waiting=3) as server:
        for key, bound in ((ALICE, 2), (BOB, 3)):
            body = {"model": "null", "prompt": "a", "n": bound + 1, "max_tokens": 1}
            error = error_of(server.post("/v1/completions", body, key=key), 400)
            text = f"{bound + 1} samples are asked for, at most {bound} may wait at once"
            assert (error["message"], error["param"]) == (text, "n")
            body = {"model": "null", "prompt": ["a"] * (bound + 1), "max_tokens": 1}
            error = error_of(server.post("/v1/completions", body, key=key), 400)
            assert (error["message"], error["param"]) == (text, "prompt")
            body = {"model": "null", "prompt": "a", "n": bound, "max_tokens": 1}
            assert server.post("/v1/completions", body, key=key).status_code == 200
        server.wait_until_idle()


def test_request_that_never_fits_tells_what_the_tenant_may_have_and_not_the_pool() -> None:
    with running_server(table=two_tenants(limit=10)) as server:
        error = error_of(
            server.post("/v1/completions", {"model": "null", "prompt": "a", "max_tokens": 200}), 400
        )
        assert error["param"] == "max_tokens"
        assert 'need 13 blocks of 16 tokens; tenant "alice" may have 10' in error["message"]
        assert "2048" not in error["message"]


def raw(server: Running, data: bytes) -> bytes:
    port = int(server.url.rsplit(":", 1)[1])
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        try:
            for start in range(0, len(data), 10_000):
                connection.sendall(data[start : start + 10_000])
            while piece := connection.recv(65536):
                received += piece
        except (ConnectionError, BrokenPipeError):
            pass
    return received


@pytest.mark.parametrize("ends", [True, False], ids=["complete", "endless"])
def test_long_headers_are_refused(server: Running, ends: bool) -> None:
    size = 90_000 if ends else 1_000_000
    data = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Long: " + b"x" * size
    received = raw(server, data + b"\r\n\r\n" if ends else data)
    assert received == b"" or received.startswith(b"HTTP/1.1 431")
    assert server.get("/health").status_code == 200


def test_rubbish_instead_of_http_is_400(server: Running) -> None:
    assert raw(server, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_tenant_sees_its_own_numbers_and_nothing_of_others() -> None:
    with running_server() as server:
        before = server.get("/stats").json()
        for _ in range(3):
            server.post("/v1/completions", {"model": "null", "prompt": "b" * 50, "max_tokens": 9}, key=BOB)
        after = server.get("/stats").json()
        assert {**before, "time": 0} == {**after, "time": 0}
        assert after["tenants"] == []
        assert "cached" not in after["blocks"], "others' demand evicts them"
        server.post("/v1/completions", {"model": "null", "prompt": "a" * 50, "max_tokens": 9})
        own = server.get("/stats").json()
        assert (own["view"], own["requests"], own["generation_tokens"]) == ("tenant", 1, 9)
        everything = server.get("/stats", key=OPERATOR).json()
        assert (everything["view"], everything["requests"]) == ("operator", 4)
        assert [tenant["name"] for tenant in everything["tenants"]] == ["alice", "bob"]
        assert error_of(server.get("/metrics"), 401)["message"] == "/metrics needs the operator's key"


def test_answers_carry_no_number_that_counts_others_requests() -> None:
    with running_server() as server:
        answers = [
            server.post("/v1/completions", {"model": "null", "prompt": "a", "max_tokens": 1}).json()["id"]
            for _ in range(2)
        ]
        assert answers[0] != answers[1]
        assert all(len(answer) == len("cmpl-") + 32 for answer in answers)


# --- the tenants file ---------------------------------------------------------------------------------------

FILE = """
[operator]
key_hashes = ["{operator}"]

[anonymous]
limit = 10

[tenants.alice]
key_hashes = ["{alice}"]
guaranteed = 4
limit = 100
weight = 2.0
max_requests = 3
"""


def write(tmp_path: Path, text: str) -> Path:
    hashes = {"operator": hash_key(OPERATOR), "alice": hash_key(ALICE)}
    path = tmp_path / "tenants.toml"
    path.write_text(text.format(**hashes))
    return path


def test_tenants_file_maps_keys_to_quotas_and_holds_no_key(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    table = read_tenants(path)
    assert ALICE not in path.read_text()
    assert (table.tenant_of(ALICE), table.tenant_of("x"), table.tenant_of(None)) == (
        "alice",
        None,
        "anonymous",
    )
    assert table.is_operator(OPERATOR)
    assert not table.is_operator(ALICE)
    alice = table.tenants["alice"]
    assert (alice.guaranteed, alice.limit, alice.weight, alice.max_requests) == (4, 100, 2.0, 3)


def test_options_of_a_tenants_file_reach_the_scheduler(tmp_path: Path) -> None:
    strict = 'isolation = "strict"\nmax_running = 3\nmax_batch_tokens = 40\nmax_waiting_tokens = 90\n'
    kept = "max_kept_blocks = 8\nretention = {{ seconds = 60, num_tokens = 32, priority = -1 }}\n"
    table = read_tenants(write(tmp_path, FILE.replace("guaranteed = 4", "guaranteed = 100") + strict + kept))
    alice = table.tenants["alice"]
    assert alice.retained(GenerationParams()).retention == Retention(seconds=60.0, num_tokens=32, priority=-1)
    assert table.tenants["anonymous"].retained(GenerationParams()).retention is None
    engine = Engine(NullRunner(), EngineConfig(num_blocks=200))
    table.add_to(engine)
    handle = engine._registry.tenant("alice")
    assert (handle.isolation, handle.max_running) == ("strict", 3)
    with pytest.raises(RefusedError, match="the prompt has 100 tokens; at most 90"):
        engine.submit([1] * 100, tenant="alice")
    engine.submit([1] * 40, alice.retained(GenerationParams(max_tokens=1)), tenant="alice")
    engine.step()
    assert engine.snapshot().scheduler.num_kept_blocks == 2
    scoped = read_tenants(write(tmp_path, FILE + "max_running = 3"))
    with pytest.raises(InvalidArgumentError, match="are shares of a strict tenant"):
        scoped.add_to(Engine(NullRunner(), EngineConfig(num_blocks=200)))


BAD_FILES = {
    "unknown field": ("[tenants.a]\nkey_hash = []", "unknown field `key_hash` - at `$.tenants['a']`"),
    "key instead of its hash": ('[tenants.a]\nkey_hashes = ["secret"]', "matching regex"),
    "no key": ("[tenants.a]\nlimit = 3", "tenant 'a' has no key_hashes"),
    "key twice": (
        '[tenants.a]\nkey_hashes=["{alice}"]\n[tenants.b]\nkey_hashes=["{alice}"]',
        "'b' and 'a' have the same key",
    ),
    "operator's key": (
        '[operator]\nkey_hashes=["{alice}"]\n[tenants.b]\nkey_hashes=["{alice}"]',
        "'b' and the operator have the same key",
    ),
    "second of two tenants": (
        '[tenants.a]\nkey_hashes=["{alice}"]\n[tenants."b c"]\nweight = "2"',
        "got `str` - at `$.tenants['b c'].weight`",
    ),
    "scope": (
        '[tenants.a]\nkey_hashes=["{alice}"]\n[publics.x]\n[publics.y]\nlimit = 0',
        "`int` >= 1 - at `$.publics['y'].limit`",
    ),
    "negative": ('[tenants.a]\nkey_hashes=["{alice}"]\nguaranteed = -1', ">= 0"),
    "weight": ('[tenants.a]\nkey_hashes=["{alice}"]\nweight = 0', "> 0"),
    "anonymous by name": ('[tenants.anonymous]\nkey_hashes=["{alice}"]', "has the table [anonymous]"),
    "anonymous with a key": ('[anonymous]\nkey_hashes=["{alice}"]', "it is who brings no key"),
    "nobody": ("", "names no tenant"),
    "unknown group": (
        '[tenants.a]\nkey_hashes=["{alice}"]\ngroup = "x"',
        "'a' names the group 'x', which has no table",
    ),
    "scope named like a tenant": (
        '[tenants.a]\nkey_hashes=["{alice}"]\n[publics.a]',
        "'a' names two things",
    ),
    "level": ('[tenants.a]\nkey_hashes=["{alice}"]\nisolation = "secret"', "isolation"),
    "retention of nothing": (
        '[tenants.a]\nkey_hashes=["{alice}"]\nretention = {{ num_tokens = 0 }}',
        ">= 1",
    ),
    "unknown retention": (
        '[tenants.a]\nkey_hashes=["{alice}"]\nretention = {{ steps = 3 }}',
        "unknown field `steps`",
    ),
    "no toml": ("[tenants", "is no TOML file"),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_tenants_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_tenants(write(tmp_path, text))
    assert message in str(refused.value)
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        read_tenants(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("guaranteed = 90\nlimit = 80", "tenant 'a': "),
        ("limit = 80\nisolation = 'strict'\nguaranteed = 20", "tenant 'a': strict isolation needs"),
    ],
)
def test_quota_that_the_pool_cannot_give_names_the_tenant(tmp_path: Path, options: str, message: str) -> None:
    table = read_tenants(write(tmp_path, '[tenants.a]\nkey_hashes=["{alice}"]\n' + options))
    engine = Engine(NullRunner(), EngineConfig(num_blocks=64 if "90" in options else 100))
    with pytest.raises(InvalidArgumentError) as refused:
        table.add_to(engine)
    assert str(refused.value).startswith(message)


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 40 for key in keys)
    assert json.dumps(hash_key("a"))[1:8] == "sha256:"
