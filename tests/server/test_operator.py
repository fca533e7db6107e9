"""What the operator sees: health, metrics, the live page, spans, and a shutdown that drains."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from http_server import ALICE, BOB, OPERATOR, Running, running_server, two_tenants
from prometheus_client.parser import text_string_to_metric_families

from kvpager.engine import EngineSnapshot, NullRunner
from kvpager.replay.report import find_browser
from kvpager.server import ServerSettings, app, running
from kvpager.server.running import bind
from kvpager.server.tenants import RetentionSpec, TenantSpec, TenantTable, hash_key
from waiting import PATIENCE, wait_until

STATES = ("held", "cached", "free", "reserved", "quarantined")
BODY = {"model": "null", "prompt": "p" * 50, "max_tokens": 4}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(item for item in sample.labels.items() if item[0] != "model_name")
            found[sample.name.removeprefix("kvpager:"), labels] = sample.value
    return found


def of(tenant: str, **labels: str) -> frozenset[tuple[str, str]]:
    return frozenset({"tenant": tenant, **labels}.items())


def test_metrics_have_the_known_names_and_agree_with_the_requests() -> None:
    with running_server() as server:
        for _ in range(3):
            server.post("/v1/completions", BODY)
        server.post("/v1/completions", BODY, key=BOB)
        server.wait_until_idle()
        response = server.get_as_operator("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples(response.text)
        none: frozenset[tuple[str, str]] = frozenset()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert found[name, none] == 0
        assert found["num_preemptions_total", none] == 0
        assert found["prefix_cache_queries_total", of("alice")] == 150
        assert found["prefix_cache_hits_total", of("alice")] == 96
        assert found["prefix_cache_hits_total", of("bob")] == 0
        assert found["generation_tokens_total", of("alice")] == 12
        assert found["request_success_total", of("alice", finished_reason="length")] == 3
        for name in ("request_queue_time", "time_to_first_token", "time_per_output_token"):
            assert found[f"{name}_seconds_count", of("alice")] == 3
            assert found[f"{name}_seconds_bucket", of("alice", le="+Inf")] == 3
            assert found[f"{name}_seconds_sum", of("alice")] > 0
        blocks = {s: found["kv_blocks", frozenset({("state", s)})] for s in ("held", "cached", "free")}
        assert blocks == {"held": 0, "cached": 6, "free": 2042}
        assert found["tenant_kv_blocks", of("alice", state="cached")] == 3


def test_tenants_beyond_the_cap_are_one_label() -> None:
    tenants = {f"t{i}": TenantSpec(key_hashes=(hash_key(f"key {i}"),)) for i in range(5)}
    with running_server(table=TenantTable(tenants), settings={"max_metric_tenants": 2}) as server:
        for i in range(5):
            server.post("/v1/completions", BODY, key=f"key {i}")
        server.wait_until_idle()
        found = samples(server.get_as_operator("/metrics").text)
        counts = {name: found["prompt_tokens_total", of(name)] for name in ("t0", "t1", "_other")}
        assert counts == {"t0": 50, "t1": 50, "_other": 150}
        assert not [labels for _, labels in found if ("tenant", "t2") in labels]


def test_every_metric_of_the_dashboard_exists(repository: Path, server: Running) -> None:
    server.post("/v1/completions", BODY)
    server.wait_until_idle()
    known = {name for name, _ in samples(server.get_as_operator("/metrics").text)}
    dashboard = json.loads((repository / "docs/dashboards/grafana.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    used = {name for text in expressions for name in re.findall(r"kvpager:([a-z0-9_]+)", text)}
    assert len(used) > 12
    assert used <= known


def test_operators_key_opens_metrics_on_the_clients_port(server: Running) -> None:
    assert server.get("/metrics", key=OPERATOR).status_code == 200
    assert server.get("/metrics", key=ALICE).status_code == 401
    assert server.get_as_operator("/stats").json()["view"] == "operator"
    posted = httpx.post(server.operator_url + "/v1/completions", json=BODY, timeout=PATIENCE)
    assert posted.status_code == 404


def test_probes_may_ask_for_the_head_alone(server: Running) -> None:
    for url in (server.url, server.operator_url):
        for path in ("/health", "/ready", "/"):
            answer = httpx.head(url + path, timeout=PATIENCE)
            assert (answer.status_code, answer.content) == (200, b"")


def test_drain_refuses_with_503_and_lets_running_streams_end() -> None:
    with running_server(runner=NullRunner(step_time=0.02), drain_timeout=20) as server:
        assert (server.get("/ready").status_code, server.get("/health").status_code) == (200, 200)
        stream = server.client().completions.create(model="null", prompt="x", max_tokens=60, stream=True)
        text = next(iter(stream)).choices[0].text
        server.engine.engine.stop_accepting()
        assert (server.get("/ready").status_code, server.get("/health").status_code) == (503, 200)
        refused = server.post("/v1/completions", BODY)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert len(text + "".join(chunk.choices[0].text for chunk in stream)) == 60


def test_scrapes_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def on_a_loop() -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    for name in ("metrics_text", "operator_stats"):
        write = getattr(app, name)

        def noted(*arguments: Any, write: Any = write) -> Any:
            threads.append(on_a_loop())
            return write(*arguments)

        monkeypatch.setattr(app, name, noted)
    with running_server() as server:
        assert server.get("/metrics", key=OPERATOR).status_code == 200
        assert server.get("/stats", key=OPERATOR).status_code == 200
    assert threads == [False, False]


def test_health_says_503_once_the_model_is_lost() -> None:
    class Lost(NullRunner):
        def run(self, _batch: Any, _sampled: Any, /) -> Any:
            raise RuntimeError("the device is gone")

    with running_server(runner=Lost(), max_failures=1) as server:
        assert server.post("/v1/completions", BODY).status_code == 500
        assert server.get("/health").status_code == 503
        refused = server.post("/v1/completions", BODY)
        assert refused.status_code == 503
        assert "the device is gone" in refused.json()["error"]["message"]


def test_spans_carry_tokens_and_waits() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with running_server() as server:
        headers = {"Authorization": f"Bearer {ALICE}", "traceparent": parent}
        url = server.url + "/v1/completions"
        httpx.post(url, json=BODY, headers=headers, timeout=PATIENCE)
        with httpx.stream("POST", url, json={**BODY, "stream": True}, headers=headers, timeout=PATIENCE):
            pass
        httpx.post(url, json={**BODY, "max_tokens": 10**6}, headers=headers, timeout=PATIENCE)
        server.wait_until_idle()
    # In the order of their beginnings: when the end of the left stream is noted is the server's affair.
    found = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    whole, streamed, refused = sorted(found, key=lambda span: span.start_time or 0)
    assert whole.context.trace_id == int(parent.split("-")[1], 16)
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.input_tokens"] == 50
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["kvpager.tenant"] == "alice"
    assert streamed.end_time is not None
    assert not refused.status.is_ok


# --- the live page ------------------------------------------------------------------------------------------


def test_what_an_operator_retains_of_a_tenant_is_kept_and_no_client_can_ask_for_it() -> None:
    table = two_tenants(retention=RetentionSpec(num_tokens=16), max_kept_blocks=1)
    with running_server(table=table) as server:
        none: frozenset[tuple[str, str]] = frozenset()
        for key, kept in ((BOB, 0), (ALICE, 1)):
            asked = {**BODY, "retention": {"seconds": 60}, "reuse": False}
            assert server.post("/v1/completions", asked, key=key).status_code == 200
            found = samples(server.get_as_operator("/metrics").text)
            assert found["kv_blocks_kept", none] == kept
            assert found["kv_blocks", frozenset({("state", "held")})] == kept


def browser(*arguments: str, profile: Path) -> subprocess.CompletedProcess[str]:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium: install the distribution's package to open the page in a browser")
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    return subprocess.run(
        [found, *fixed, f"--user-data-dir={profile}", *arguments],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )


def keep_busy(server: Running, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        key = ALICE if number % 3 else BOB
        body = {**BODY, "prompt": "p" * (40 + number % 5 * 30), "max_tokens": 10 + number % 7 * 10, "n": 4}
        server.post("/v1/completions", body, key=key)


@pytest.fixture
def busy() -> Any:
    with running_server(
        table=two_tenants(limit=200), runner=NullRunner(step_time=0.01), num_blocks=256, max_running=12
    ) as server:
        stop = threading.Event()
        threads = [threading.Thread(target=keep_busy, args=(server, stop)) for _ in range(4)]
        for thread in threads:
            thread.start()
        counters = [server.engine.engine.counters(name) for name in ("alice", "bob")]
        wait_until(lambda: all(each.num_ended > 4 for each in counters), "something to draw")
        yield server
        stop.set()
        for thread in threads:
            thread.join()


def test_the_numbers_of_one_scrape_add_up_under_load(busy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    write, is_exact = app.metrics_text, []

    def noted(snapshot: EngineSnapshot, settings: ServerSettings) -> bytes:
        is_exact.append(snapshot.is_exact)
        return write(snapshot, settings)

    monkeypatch.setattr(app, "metrics_text", noted)
    seen, num_exact = set(), 0
    deadline = time.perf_counter() + PATIENCE
    while (num_exact < 30 or len(seen) <= 3) and time.perf_counter() < deadline:
        found = samples(busy.get("/metrics", key=OPERATOR).text)
        if not is_exact[
            -1
        ]:  # the engine's thread stood still in a turn, on a machine that gave it no processor
            continue
        num_exact += 1
        pool = {state: found["kv_blocks", frozenset({("state", state)})] for state in STATES}
        capacity = found["kv_blocks_capacity", frozenset()]
        assert pool["held"] + pool["cached"] + pool["free"] + pool["quarantined"] == capacity
        for state in ("held", "reserved", "quarantined"):
            parts = [found["tenant_kv_blocks", of(name, state=state)] for name in ("alice", "bob")]
            assert sum(parts) == pool[state], (state, parts)
        seen.add(tuple(pool.values()))
    assert num_exact >= 30
    assert len(seen) > 3, "the server worked meanwhile"


def test_page_is_one_file_that_asks_for_nothing_else(server: Running) -> None:
    response = server.get("/", key=None)
    assert response.status_code == 200
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)\s*=|@import|https?://(?!www\.w3\.org)", response.text)
    assert re.findall(r"fetch\(\"(\w+)\"", response.text) == ["stats"]
    assert "prefers-color-scheme: dark" in response.text


def test_page_draws_what_the_operator_may_see(busy: Running, tmp_path: Path) -> None:
    url = f"{busy.url}/#key={OPERATOR}"
    done = browser("--virtual-time-budget=9000", "--dump-dom", url, profile=tmp_path)
    assert done.returncode == 0
    assert 'data-ready="yes"' in done.stdout, "several samples were drawn"
    assert not re.search(r"CONSOLE.*(Error|Uncaught|Refused)", done.stderr), done.stderr
    for figure in ("memory", "requests", "hits", "first", "each"):
        part = re.search(rf'<figure id="{figure}".*?</figure>', done.stdout, re.S)
        assert part is not None
        assert re.search(r"<path [^>]*d=\"M[\d.,L]+", part[0]), figure
    page = done.stdout.split("<script")[0]
    assert "NaN" not in page
    assert "undefined" not in page
    assert "<td>alice</td>" in page
    assert "engine running" in page


def test_page_shows_a_tenant_its_own_and_no_tenants(busy: Running, tmp_path: Path) -> None:
    url = f"{busy.url}/#key={ALICE}"
    page = browser("--virtual-time-budget=9000", "--dump-dom", url, profile=tmp_path).stdout.split("<script")[
        0
    ]
    assert "your own requests" in page
    assert "<td>bob</td>" not in page
    assert "preemptions" not in page


def test_page_without_a_key_asks_for_one(server: Running, tmp_path: Path) -> None:
    page = browser("--virtual-time-budget=3000", "--dump-dom", server.url, profile=tmp_path).stdout
    assert '<form id="login">' in page
    assert "data-ready" not in page.split("<script")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshot_of_the_page_has_ink_in_both_schemes(busy: Running, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / f"page-{scheme}.png"
    options = [f"--screenshot={picture}", "--window-size=1100,1300", "--virtual-time-budget=9000"]
    if scheme == "dark":
        options.append("--blink-settings=preferredColorScheme=0")
    url = f"{busy.url}/#key={OPERATOR}"
    assert browser(*options, url, profile=tmp_path / "profile").returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 30_000, "an empty page compresses to a few kilobytes"


# --- the command --------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from kvpager.cli import main; main()", "serve", *arguments]


def test_command_serves_prints_its_addresses_and_ends_on_a_signal() -> None:
    arguments = ["--model", "null", "--port", "0", "--operator-port", "0", "--step-time", "0.001"]
    arguments += ["--open-steps", "2"]
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        assert lines[0].startswith("Serving null: 65,536 blocks of 16 tokens, 1 tenant, policy reserve")
        url = lines[1].split()[1].removesuffix("/v1")
        operator = lines[2].split()[1]
        # Whoever reads the line may connect.
        answer = httpx.post(url + "/v1/completions", json=BODY, timeout=PATIENCE)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert httpx.get(operator + "stats", timeout=PATIENCE).json()["requests"] == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0


def test_idle_connections_are_kept_longer_than_clients_and_proxies_keep_them() -> None:
    """Who closes first may do so while a request is on its way."""
    config = running._server(FastAPI()).config
    assert config.timeout_keep_alive > 60 > (httpx.Limits().keepalive_expiry or 0.0)


def test_second_server_on_a_port_is_refused_its_own_operators_port_too() -> None:
    first = bind("127.0.0.1", 0)
    port = str(first.getsockname()[1])
    for arguments in (["--port", port], ["--port", "0", "--operator-port", port]):
        done = subprocess.run(
            command("--model", "null", *arguments),
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE,
            check=False,
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    first.close()


def test_third_ctrl_c_ends_a_server_whose_model_hangs() -> None:
    arguments = ["--model", "null", "--port", "0", "--operator-port", "0", "--step-time", "50"]
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        port, operator = int(lines[1].split()[1].removesuffix("/v1").rsplit(":", 1)[1]), lines[2].split()[1]
        body = json.dumps(BODY)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            # The step that it is in never ends.
            wait_until(
                lambda: httpx.get(operator + "stats", timeout=PATIENCE).json()["running"] == 1, "a step"
            )
            said = []
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                said.append(process.stderr.readline())
        assert "again ends it" in said[0]
        assert "again ends the process" in said[1]
        assert process.wait(timeout=PATIENCE) == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tenants", "/nowhere.toml"], "cannot read /nowhere.toml"),
        (["--policy", "best"], "--policy is 'best': one of reserve, watermark, forecast is needed"),
        (
            ["--model", "null", "--port", "0", "--urgent-preempts"],
            "urgent_preempts is true and the policy reserve",
        ),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1 port 8000"),
        (["--model", "null", "--port", "0", "--max-body", "much"], "--max-body is 'much'"),
        (["--model", "null", "--port", "0", "--max-body", "0"], "max_body_bytes is 0, at least 1 is needed"),
        (["--port", "0", "--request-timeout", "nan"], "--request-timeout is nan, above 0 seconds is needed"),
        (["--model", "null", "--port", "0", "--memory", "1GiB"], "give --blocks with --model null"),
        (["--port", "0", "--memory", "much"], "--memory is 'much'"),
        (["--port", "0", "--memory", "0"], "--memory is '0', above 0 bytes is needed"),
        (["--port", "0", "--memory", ""], "--memory is '', expected bytes"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=5 * PATIENCE, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_memory_that_holds_no_block_is_refused_with_what_one_takes() -> None:
    arguments = command("--port", "0", "--memory", "1KiB")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=5 * PATIENCE, check=False)
    assert done.returncode == 2
    assert re.search(r"--memory is 1024 bytes, a block of KV has \d+\n$", done.stderr), done.stderr


def test_new_key_prints_a_key_and_its_hash() -> None:
    done = subprocess.run(
        command("--new-key"), capture_output=True, text=True, timeout=5 * PATIENCE, check=True
    )
    key = re.search(r"kvp-\S+", done.stdout)
    assert key is not None
    assert hash_key(key[0]) in done.stdout
