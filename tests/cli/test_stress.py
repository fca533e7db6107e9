"""`kvpager stress`: a sound pool passes, every planted fault is seen, and Ctrl-C ends with what there is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpager._core import Stress
from waiting import PATIENCE, wait_until

COMMAND = [sys.executable, "-c", "from kvpager.cli import main; main()", "stress"]


def run_stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def run_until_it_worked(operations: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A short run, or a longer one where others have the processors."""
    for seconds in ("0.5", "5", "60"):
        run = run_stress(*arguments, "--seconds", seconds, "--json")
        assert run.returncode == 0, run.stdout + run.stderr
        if found(run)["operations"] > operations:
            break
    return run


def found(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(run.stdout))


@pytest.mark.parametrize("ways", [(), ("--python",)])
def test_json_has_the_documented_keys(ways: tuple[str, ...]) -> None:
    run = run_until_it_worked(100, *ways, "--threads", "3", "--seed", "5")
    report = found(run)
    assert report["ok"] is True
    assert report["seed"] == 5
    assert report["operations"] > 100
    assert report["checks"] > 0
    assert report["violations"] == []
    assert report["wall_time"] > 0.3
    latency = report["latency_ns"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["p999"] <= latency["max"]
    assert "allocate" in report["latency_by_operation_ns"]


@pytest.mark.parametrize("mix", ["alloc", "share", "cow", "quota", "all"])
@pytest.mark.parametrize("ways", [(), ("--python",)])
def test_every_mix_passes(mix: str, ways: tuple[str, ...]) -> None:
    run = run_until_it_worked(0, *ways, "--mix", mix, "--blocks", "100", "--tenants", "3")
    assert found(run)["operations"] > 0


@pytest.mark.parametrize("numbers", [("1", "1", "1"), ("2", "3", "7"), ("20", "2", "250")])
def test_any_size_works(numbers: tuple[str, str, str]) -> None:
    threads, blocks, tenants = numbers
    run = run_stress(
        "--threads", threads, "--blocks", blocks, "--tenants", tenants, "--seconds", "0.3", "--json"
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_table_is_for_people() -> None:
    run = run_stress("--seconds", "0.3")
    assert run.returncode == 0, run.stderr
    assert "p99.9" in run.stdout
    assert "ok: nothing is off" in run.stdout
    assert run.stderr == ""


@pytest.mark.parametrize("fault", Stress.fault_names())
def test_every_planted_fault_is_seen(fault: str) -> None:
    """Some take threads that really meet, so the time is long; most are seen in the first rounds."""
    run = run_stress(
        "--inject", fault, "--seconds", "120", "--shrink-seconds", "0.3", "--seed", "3", "--json"
    )
    assert run.returncode == 1, run.stdout + run.stderr
    report = found(run)
    assert report["ok"] is False
    assert report["seed"] == 3
    assert report["violations"]
    assert report["violations"][0]["text"]
    assert report["history"]["way"] in ("in_order", "at_once", "recorded")


def test_a_failing_history_is_small_and_for_people() -> None:
    # Which history there is to make smaller is a matter of timing: the next seed is the next chance.
    for seed in ("0", "1", "2", "3"):
        run = run_stress("--inject", "double-release", "--seed", seed, "--seconds", "60")
        assert run.returncode == 1
        assert "violation: " in run.stdout
        assert f"seed {seed}" in run.stdout
        if "smallest failing history (one thread, in this order, always):" in run.stdout:
            break
    else:
        pytest.fail(run.stdout)
    for seed in ("0", "1", "2", "3"):
        run = run_stress("--inject", "skip-quarantine", "--seed", seed, "--seconds", "60", "--json")
        history = found(run)["history"]
        if history["way"] == "in_order" and len(history["operations"]) <= 6:
            break
    else:
        pytest.fail(str(history))
    assert "is open" in history["text"]


def test_the_faults_are_listed() -> None:
    run = run_stress("--inject", "list")
    assert run.returncode == 0
    assert run.stdout.split() == Stress.fault_names()
    assert {"double-release", "stale-handle", "early-permit", "skip-quarantine"} <= set(run.stdout.split())


def wait_for_threads(pid: int) -> None:
    """Waits until a run's eight workers are there."""
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: len(list(tasks.iterdir())) >= 9, "eight workers")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at the threads of another process")
@pytest.mark.parametrize("ways", [(), ("--python",)])
def test_ctrl_c_ends_with_what_there_is(ways: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [*COMMAND, *ways, "--seconds", "1000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_threads(process.pid)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    report = json.loads(output)
    assert report["interrupted"] is True
    assert report["ok"] is True
    assert errors == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--threads", "0"], "equal to 1"),
        (["--threads", "257"], "256"),
        (["--blocks", "-1"], "equal to 1"),
        (["--blocks", str(2**40)], str(2**24)),
        (["--tenants", "251"], "250"),
        (["--seconds", "0"], "0.1"),
        (["--seconds", "nan"], "1000000"),
        (["--seed", "-1"], "equal to 0"),
        (["--seed", "9" * 30], str(2**64 - 1)),
        (["--mix", "nonsense"], "nonsense"),
        (["--inject", "nonsense"], "same-generation"),
        (["--inject", "double-release", "--python"], "--python"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], text: str) -> None:
    run = run_stress(*arguments)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    assert text in run.stderr
