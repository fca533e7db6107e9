"""`kvpager profile`: a table for people, JSON for programs, a trace for a viewer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpager.profile.instructions import count_instructions
from kvpager.profile.load import Load, LoadDriver
from kvpager.profile.measure import measure

COMMAND = [sys.executable, "-c", "from kvpager.cli import main; main()", "profile"]
SMALL = ("--steps", "60", "--prompt", "40", "--output", "30")


def run_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_json_has_the_documented_keys_for_each_case() -> None:
    run = run_profile(*SMALL, "--running", "4,16", "--tenants", "3", "--json")
    assert run.returncode == 0, run.stderr
    cases = json.loads(run.stdout)["cases"]
    assert [case["running"] for case in cases] == [4, 16]
    for case in cases:
        assert set(case["step_us"]) == {"p50", "p99", "p999", "max"}
        assert set(case["phases"]) == {"inbox", "growth", "look_up", "admission", "batch_arrays", "commit"}
        assert 0 < case["step_us"]["p50"] <= case["step_us"]["p99"] <= case["step_us"]["max"]
        assert case["ns_per_sequence"] == pytest.approx(case["step_us"]["p50"] * 1e3 / case["running"])
        assert case["allocations_per_step"] > 0
        assert case["bytes_per_step"] > case["running"] * 50


def test_the_table_is_for_people() -> None:
    run = run_profile(*SMALL, "--running", "4", "--python")
    assert run.returncode == 0, run.stderr
    assert "batch_arrays" in run.stdout
    assert "busy Python threads" in run.stdout


def test_trace_events_are_those_of_the_format_and_cover_every_step(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run = run_profile(*SMALL, "--running", "4", "--trace", str(out), "--json")
    assert run.returncode == 0, run.stderr
    spans = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"inbox", "growth", "batch_arrays", "commit"}
    assert len({event["args"]["step"] for event in spans}) == 60
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["pid"] == 1 for event in spans)


INTERRUPTED = """
import os, signal
from kvpager.profile import measure

timed, calls = measure._timed_step, iter(range(PLACE))
def step(driver):
    if next(calls, "here") == "here":
        os.kill(os.getpid(), signal.SIGINT)
    return timed(driver)
measure._timed_step = step

from kvpager.cli import main
main()
"""


def interrupted_at(place: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run that gets Ctrl-C at one of its steps, at the same one on a machine of any speed."""
    sizes = ("--running", "4,64", "--steps", "10000000", "--prompt", "40", "--output", "30")
    program = INTERRUPTED.replace("PLACE", str(place))
    command = [sys.executable, "-c", program, "profile", *sizes, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("place", [2, 1001])
def test_an_interrupt_prints_what_there_is(place: int, as_json: bool) -> None:
    run = interrupted_at(place, *(["--json"] if as_json else []))
    assert run.returncode == 130, run.stderr
    found = re.search(r"interrupted: (\d+) of 10000000 steps with 4 running, no further cases", run.stderr)
    assert found is not None, run.stderr
    assert int(found[1]) == place // 2, "each step is timed twice, once of them recorded"
    if as_json:
        (case,) = json.loads(run.stdout)["cases"]
        assert (case["running"], case["steps"]) == (4, int(found[1]))
        assert case["step_us"]["p50"] > 0
    else:
        assert "batch_arrays" in run.stdout


def test_an_interrupt_before_anything_was_timed_says_so() -> None:
    run = interrupted_at(0, "--json")
    assert (run.returncode, run.stderr) == (130, "interrupted before anything was timed\n")
    assert json.loads(run.stdout) == {"cases": []}


def test_lengths_come_from_a_trace() -> None:
    run = run_profile("generate:chat", "--running", "8", "--steps", "30", "--json")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--running", "4,x"), "--running"),
        (("--running", "0"), "from 1 to"),
        (("--prefix-share", "1.5"), "1.5"),
        (("--policy", "luck"), "luck"),
        (("LINES",), "line 1: neither JSON nor CSV\n"),
        (("--trace", "/nowhere/x.json", "--running", "2", "--steps", "10"), "/nowhere/x.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("root:x:0:0\n")
    run = run_profile(*(str(lines) if argument == "LINES" else argument for argument in arguments))
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert words in run.stderr


def test_the_load_keeps_as_many_running_as_it_says_and_shares_the_prefix() -> None:
    load = Load(running=8, prompt=64, output=20, prefix_share=0.5, tenants=2)
    driver = LoadDriver(load)
    driver.warm()
    cached = []
    for _ in range(100):
        batch = driver.plan()
        starts, tokens = driver.prepare(batch)
        outcome = driver.scheduler.commit(batch.step_id, starts, tokens)
        cached += [request.cached_tokens for request in outcome.finished]
        driver.refill(outcome)
        assert batch.num_sequences == 8
    assert len(cached) > 20
    assert set(cached[10:]) == {32}


def test_steps_of_a_decoding_batch_allocate_the_same_few_times_whatever_its_size() -> None:
    small = measure(Load(running=2, output=4000), 50)
    large = measure(Load(running=64, output=4000), 50)
    assert min(small.allocations) == min(large.allocations)


def test_instructions_of_a_step_grow_with_the_batch() -> None:
    small = count_instructions(Load(running=2, output=4000), 1000)
    if small is None:
        pytest.skip("neither perf's counters nor valgrind are here")
    large = count_instructions(Load(running=128, output=4000), 1000)
    assert large is not None
    assert 1_000 < small[0] < large[0]
