"""Comparisons made from one workload: short devices, other orders, tenants by share, capacity searches."""

from __future__ import annotations

import json

import pytest

from kvpager.errors import InvalidArgumentError
from kvpager.replay import open_trace
from kvpager.replay.search import parse_objectives
from kvpager.replay.transforms import parse_shares, reordered

from .commands import run, runs

SATURATED = ("--arrivals", "saturate", "--reuse", "off", "--requests", 300)


def test_short_device_waits_where_a_trusting_engine_runs_out_of_memory() -> None:
    options = (*SATURATED, "--policy", "watermark", "--blocks", 6250, "--short-by", "0,10")
    whole, short = runs("generate:reasoning", *options)
    assert (whole["blocks"], short["blocks"]) == (6250, 5625)
    assert whole["out_of_memory_if_short"]["10%"] > 0
    assert set(whole["out_of_memory_if_short"]) == {"1%", "5%", "10%"}
    assert short["finished"] + sum(short["refused"].values()) == whole["requests"] == 300
    assert short["peak_held"] <= 5625


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


@pytest.mark.parametrize("text", ["", "a=", "=1", "a=-1", "a=nan", "a=inf", "a=1,,b=2"])
def test_bad_shares_are_refused(text: str) -> None:
    if text == "a=":
        assert parse_shares(text) == {"a": 1.0}
        return
    with pytest.raises(InvalidArgumentError, match="--tenants"):
        parse_shares(text)


def test_ten_million_requests_stream_in_bounded_memory() -> None:
    """Sampled down: the columns of a generated workload are made as they are asked for."""
    trace = open_trace("generate:short", requests=10_000_000)
    total = 0
    for columns in trace.requests:
        assert len(columns) <= 8192
        total += len(columns)
        if total > 200_000:
            break
    assert trace.count == 10_000_000
