"""Comparisons made from one workload: short devices, other orders, tenants by share, capacity searches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpager.errors import InvalidArgumentError
from kvpager.replay import open_trace
from kvpager.replay.search import parse_objectives
from kvpager.replay.tenants import parse_tenants
from kvpager.replay.transforms import reordered

from .commands import run, runs, write_lines
from .commands import run as run_command

SATURATED = ("--arrivals", "saturate", "--reuse", "off", "--requests", 300)


def test_short_device_waits_where_a_trusting_engine_runs_out_of_memory() -> None:
    options = (*SATURATED, "--policy", "watermark", "--blocks", 6250, "--short-by", "0,10")
    whole, short = runs("generate:reasoning", *options)
    assert (whole["blocks"], short["blocks"]) == (6250, 5625)
    assert whole["out_of_memory_if_short"]["10%"] > 0
    assert set(whole["out_of_memory_if_short"]) == {"1%", "5%", "10%"}
    assert short["finished"] + sum(short["refused"].values()) == whole["requests"] == 300
    assert short["peak_held"] <= 5625
    assert whole["out_of_memory"] == short["out_of_memory"] == 0, "more was never promised than there is"


def test_reordering_keeps_the_requests_and_the_times() -> None:
    plain = next(iter(open_trace("generate:chat", requests=200).requests))
    shuffled = next(iter(reordered(open_trace("generate:chat", requests=200), 3).requests))
    assert plain.arrival == shuffled.arrival
    assert plain.prompt_tokens != shuffled.prompt_tokens
    pairs = (sorted(zip(part.prompt_tokens, part.output_tokens, strict=True)) for part in (plain, shuffled))
    assert next(pairs) == next(pairs)


def test_tenants_by_share_get_their_share_and_their_own_figures() -> None:
    (run,) = runs("generate:chat", "--requests", 400, "--tenants", "chat=3,batch=1")
    counts = {tenant["tenant"]: tenant["finished"] for tenant in run["tenants"]}
    assert sum(counts.values()) == 400
    assert counts["chat"] == pytest.approx(300, abs=40)
    assert run["fairness"] == pytest.approx(16 / 20, abs=0.08), "three to one"
    assert all(tenant["latency"]["time_to_first_token"]["p99"] > 0 for tenant in run["tenants"])


TENANT_RULES = [
    ("prompt:short<=30,mid<=50,long", {"short": 1, "mid": 2, "long": 1}),
    ("output:brief<=10,long", {"brief": 3, "long": 1}),
    ("session:2", {"tenant-1": 3, "tenant-2": 1}),
    ("round-robin:3", {"tenant-1": 2, "tenant-2": 1, "tenant-3": 1}),
    ("field:team", {"red": 3, "other": 1}),
    ("field:user~^(\\w+)-", {"alice": 2, "bob": 1, "other": 1}),
]


@pytest.mark.parametrize(("rule", "finished"), TENANT_RULES)
def test_tenants_by_rule(tmp_path: Path, rule: str, finished: dict[str, int]) -> None:
    fields = ("session_id", "input_length", "output_length", "team", "user")
    rows = [
        ("a", 40, 10, "red", "alice-1"),
        ("b", 60, 10, "red", "bob-1"),
        ("a", 50, 30, "red", "alice-2"),
        ("a", 20, 5, None, "root"),
    ]
    trace = write_lines(tmp_path / "trace.jsonl", [dict(zip(fields, row, strict=True)) for row in rows])
    (run,) = runs(trace, "--arrivals", "saturate", "--tenants", rule)
    assert {tenant["tenant"]: tenant["finished"] for tenant in run["tenants"]} == finished


def test_tenants_by_column_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("prompt_len,output_len,team\n8,1,red\n9,8,blue\n9,8,red\n")
    (run,) = runs(table, "--tenants", "field:team")
    assert {tenant["tenant"]: tenant["finished"] for tenant in run["tenants"]} == {"red": 2, "blue": 1}
    missing = run_command(table, "--tenants", "field:owner")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "lengths.csv: line 1: no column owner" in missing.stderr
    nameless = run_command("generate:chat", "--tenants", "field:owner")
    assert "generated traces have no named fields" in nameless.stderr


def test_tenants_by_client_of_a_servegen_set(shared_dir: Path) -> None:
    path = shared_dir / "traces" / "servegen_deepseek-r1_clients_A.tar.xz"
    (run,) = runs(path, "--requests", 300, "--tenants", "field:client", "--no-oracle", "--reuse", "off")
    finished = {tenant["tenant"]: tenant["finished"] for tenant in run["tenants"]}
    assert (len(finished), sum(finished.values())) == (7, 300)
    assert max(finished, key=lambda name: finished[name]) == "35"
    (together,) = runs(path, "--requests", 300, "--no-oracle", "--reuse", "off")
    assert together["prompt_tokens"] == run["prompt_tokens"], "the same requests, whoever they are of"
    missing = run_command(path, "--tenants", "field:model")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "the only field of servegen traces is client" in missing.stderr


def test_light_tenant_is_not_kept_behind_the_backlog_of_a_heavy_one(tmp_path: Path) -> None:
    """The heavy tenant's thousands wait in its own queue; the light one is served in turn."""
    heavy = [{"input_length": 100, "output_length": 50, "tenant": "heavy"}] * 3000
    light = [{"input_length": 100, "output_length": 50, "tenant": "light"}] * 20
    trace = write_lines(tmp_path / "trace.jsonl", heavy + light)
    options = ("--arrivals", "saturate", "--reuse", "off", "--max-running", 16, "--no-oracle")
    (run,) = runs(trace, *options)
    waits = {tenant["tenant"]: tenant["latency"]["queue_wait"]["max"] for tenant in run["tenants"]}
    assert waits["light"] < waits["heavy"] / 10
    gaps = {tenant["tenant"]: tenant["worst_service_gap"] for tenant in run["tenants"]}
    # A request: 150 tokens, and at most 10 blocks over 51 steps.
    assert 0 < gaps["light"] < 2 * 16 * (150 + 51 * 10), "less than two batches of whole requests"
    services = {tenant["tenant"]: tenant["service"] for tenant in run["tenants"]}
    assert services["heavy"] == pytest.approx(150 * services["light"], rel=0.02), "3,000 requests to 20"


def test_answers_to_overflow_in_the_same_burst() -> None:
    options = ("--requests", 600, "--blocks", 4000, "--policy", "watermark", "--reuse", "off", "--no-oracle")
    answers = ("recompute", "swap", "refuse")
    found = runs("generate:burst", *options, "--overflow", ",".join(answers))
    assert [run["overflow"] for run in found] == list(answers)
    recompute, swap, refuse = found
    ended = [run["finished"] + sum(run["ended_otherwise"].values()) for run in found]
    assert ended == [600] * 3
    assert len({(run["burst"]["from"], run["burst"]["arrivals"]) for run in found}) == 1, "the same burst"
    assert recompute["burst"]["times_mean"] > 3
    assert recompute["lost_tokens"] == recompute["recomputed_tokens"] > 0
    assert (recompute["swapped_tokens"], refuse["swapped_tokens"], refuse["recomputed_tokens"]) == (0, 0, 0)
    assert swap["swapped_tokens"] > 0
    assert swap["lost_tokens"] == swap["recomputed_tokens"] < recompute["lost_tokens"] / 10
    assert refuse["ended_otherwise"]["capacity"] > 0
    assert refuse["lost_tokens"] > 0
    gaps = [run["worst_token_gap"] for run in found]
    assert gaps == sorted(gaps, reverse=True), "an ended request waits for nothing"
    assert 0 < recompute["burst"]["lost_tokens"] <= recompute["lost_tokens"]
    table = run_command("generate:burst", *options, "--overflow", "recompute,refuse").stdout
    for text in ("answer to overflow", "the burst", "ended early", "lost tokens", "watermark, refuse"):
        assert text in table


def test_overflow_answers_are_checked() -> None:
    for options in (("--overflow", "hope"), ("--overflow", "swap", "--host-blocks", 0)):
        done = run_command("generate:chat", "--requests", 5, *options)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "overflow is" in done.stderr


def test_burst_has_the_published_shape_of_the_trace(shared_dir: Path) -> None:
    """Dispersion and peak were found by an independent count of the file's arrivals in windows of 10 s."""
    trace = shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv.gz"
    (run,) = runs(trace, "--no-oracle", "--reuse", "off")
    burst = run["burst"]
    assert (burst["from"], burst["arrivals"]) == (1870, 98)
    assert burst["index_of_dispersion"] == pytest.approx(4.0, abs=0.05)
    assert burst["times_mean"] == pytest.approx(1.8, abs=0.05)
    assert burst["finished"] == burst["latency"]["queue_wait"]["count"] == 98
    slow, usual = (part["latency"]["time_to_first_token"]["p50"] for part in (burst, run))
    assert slow > 2 * usual


def test_search_finds_the_fewest_blocks_that_meet_the_bounds() -> None:
    options = ("--requests", 200, "--arrivals", "rate", "--rate", 4, "--slo", "ttft_p99=2s,gap_max=400ms")
    done = run("generate:chat", *options, "--find", "blocks", "--json")
    assert done.returncode == 0, done.stderr
    search = json.loads(done.stdout)["search"]
    met = {row["blocks"]: row["met"] for row in search["tries"]}
    assert met[search["found"]]
    assert all(blocks >= search["found"] for blocks, ok in met.items() if ok)
    assert any(not ok for blocks, ok in met.items() if blocks < search["found"])


def test_search_finds_the_highest_rate() -> None:
    options = ("--requests", 200, "--arrivals", "rate", "--slo", "ttft_p99=1s", "--find", "rate")
    done = run("generate:chat", *options, "--json")
    assert done.returncode == 0, done.stderr
    search = json.loads(done.stdout)["search"]
    tries = {row["rate"]: row["met"] for row in search["tries"]}
    assert tries[search["found"]]
    assert all(rate <= search["found"] for rate, ok in tries.items() if ok)
    assert "Highest rate" in run("generate:chat", *options).stdout


def test_search_that_nothing_meets_is_a_failed_check() -> None:
    options = ("--requests", 20, "--slo", "tpot_p50=1us", "--find", "rate")
    assert run("generate:chat", *options).returncode == 1


@pytest.mark.parametrize("text", ["", "ttft=1s", "ttft_p99=fast", "ttft_p12=1s", "hope_p99=1s"])
def test_bad_objectives_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--slo"):
        parse_objectives(text)


BAD_TENANTS = [
    *("", "=1", "a=-1", "a=nan", "a=inf", "a=1,,b=2", "a=1,a=2"),
    *("prompt:", "prompt:short<=10", "prompt:a<=10,b<=5,c", "prompt:a<=x,b", "output:a,b"),
    *("session:", "session:0", "session:61", "round-robin:many", "field:", "field:user~("),
]


@pytest.mark.parametrize("text", BAD_TENANTS)
def test_bad_tenant_rules_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--tenants is .*expected chat=3,batch=1"):
        parse_tenants(text)
