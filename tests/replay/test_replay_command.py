"""`kvpager replay`: what a run reports, and that it is the same run each time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvpager.replay.generate import WORKLOADS
from kvpager.replay.run import CLOCKS

from .commands import peak_mebibytes, run, runs, write_lines

KEYS = """
trace policy eviction block_size blocks requests finished refused lookup_blocks hit_blocks prompt_tokens
hit_tokens preempted_requests recomputed_tokens swapped_tokens steps virtual_time oracle_time worst_token_gap
peak_held mean_held step_us wall_time
"""

WALL = {"wall_time", "step_us", "scheduler_time", "steps_per_second"}


@pytest.fixture(scope="module")
def mooncake(shared_dir: Path) -> Path:
    return shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"


def test_every_request_of_the_trace_ends_and_the_keys_are_there(mooncake: Path) -> None:
    (run,) = runs(mooncake, "--block-size", 512)
    assert set(KEYS.split()) <= set(run)
    assert (run["requests"], run["finished"], run["refused"]) == (12031, 12031, {})
    assert run["output_tokens"] == 4122048
    assert run["lookup_blocks"] == 276491
    assert 0 < run["hit_blocks"] < 276491
    assert run["hit_tokens"] == run["hit_blocks"] * 512
    assert run["peak_held"] <= run["blocks"]
    assert run["mean_held"] <= run["peak_held"]
    assert run["preempted_requests"] == run["recomputed_tokens"] == 0, "reserve takes nothing back"
    assert set(run["step_us"]) >= {"p50", "p99", "max"}
    assert run["virtual_time"] > 0
    assert run["oracle_time"] > 0


def test_keys_of_the_json_are_those_of_the_note(repository: Path) -> None:
    note = (repository / "docs/notes/replay.md").read_text()
    listed = note.split("**Keys of `--json`**")[1].split("**Results page**")[0]
    top, always, more = (
        set(re.findall(r"`([a-z_]+)`", part)) for part in re.split("Of every run:|Not with", listed)
    )
    options = ("generate:chat", "--requests", 20, "--json")
    whole = json.loads(run(*options).stdout)
    alone = json.loads(run(*options, "--sequential").stdout)
    search = json.loads(run(*options, "--slo", "ttft_p99=10s", "--find", "blocks").stdout)
    omitted = {"policy", "eviction", "overflow", "blocks"}
    assert top == set(whole) | set(search) | set(search["search"]) | omitted
    assert always == set(alone["runs"][0])
    assert always | more == set(whole["runs"][0])


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    def output(seed: int, name: str) -> list[bytes]:
        page = tmp_path / name / "report.html"
        page.parent.mkdir()
        options = ("--requests", 300, "--seed", seed, "--arrivals", "rate", "--rate", 4, "--blocks", 3000)
        choices = ("--policy", "forecast,watermark", "--tenants", "a=2,b=1", "--report", page, "--no-timings")
        printed = [run("generate:chat", *options, *choices, *form).stdout for form in ((), ("--json",))]
        assert all(printed)
        return [*(text.encode() for text in printed), page.read_bytes()]

    first, again, other = output(1, "first"), output(1, "again"), output(2, "other")
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_timings_are_all_that_no_timings_leaves_out() -> None:
    (timed,) = runs("generate:chat", "--requests", 50)
    (bare,) = runs("generate:chat", "--requests", 50, "--no-timings")
    assert {key for key, value in bare.items() if value is None and timed[key] is not None} == WALL
    assert {key: value for key, value in timed.items() if key not in WALL} == {
        key: value for key, value in bare.items() if key not in WALL
    }


def test_policies_and_evictions_are_compared_side_by_side(mooncake: Path) -> None:
    options = (
        "--requests",
        200,
        "--block-size",
        64,
        "--policy",
        "reserve,watermark",
        "--eviction",
        "lru,learned",
    )
    compared = runs(mooncake, *options)
    assert [(run["policy"], run["eviction"]) for run in compared] == [
        ("reserve", "lru"),
        ("reserve", "learned"),
        ("watermark", "lru"),
        ("watermark", "learned"),
    ]
    assert len({run["oracle_time"] for run in compared}) == 1


def test_saturated_reserve_is_slower_than_the_oracle_and_never_preempts() -> None:
    options = ("--arrivals", "saturate", "--reuse", "off", "--requests", 500, "--blocks", 6250)
    reserve, watermark = runs("generate:reasoning", *options, "--policy", "reserve,watermark")
    assert reserve["preempted_requests"] == 0
    assert reserve["virtual_time"] > 1.5 * reserve["oracle_time"]
    assert watermark["virtual_time"] < 1.2 * watermark["oracle_time"]
    assert reserve["hit_blocks"] == reserve["lookup_blocks"] == 0


def test_latency_is_split_by_context_length_and_covers_every_request() -> None:
    (run,) = runs("generate:reasoning", "--requests", 400, "--arrivals", "saturate", "--blocks", 20000)
    counts = [group["latency"]["time_to_first_token"]["count"] for group in run["latency_by_context"]]
    assert sum(counts) == run["finished"] == 400
    assert sum(count > 0 for count in counts) >= 3
    whole = run["latency"]["worst_gap"]["max"]
    assert whole == pytest.approx(run["worst_token_gap"], abs=1e-5)


def test_what_can_never_fit_is_refused_and_counted(tmp_path: Path) -> None:
    rows = [{"input_length": 100 * size, "output_length": 4, "timestamp": 0} for size in (1, 2, 50)]
    trace = write_lines(tmp_path / "trace.jsonl", rows)
    (run,) = runs(trace, "--blocks", 64, "--max-output-tokens", 8)
    assert (run["finished"], run["refused"]) == (2, {"never_fits": 1})


def test_run_in_which_nothing_fits_is_a_failed_check() -> None:
    done = run("generate:reasoning", "--blocks", 10, "--requests", 5, "--json")
    assert done.returncode == 1
    (idle,) = json.loads(done.stdout)["runs"]
    assert (idle["finished"], idle["refused"], idle["virtual_time"]) == (0, {"never_fits": 5}, 0)
    assert "none of 5 requests ran in 10 blocks of 16 tokens (5 never_fits); the first: " in done.stderr
    assert "may have 10" in done.stderr, "the reason is the scheduler's own"
    assert run("generate:reasoning", "--blocks", 10, "--requests", 5).returncode == 1
    short = run("generate:chat", "--requests", 5, "--max-model-tokens", 100, "--max-output-tokens", 90)
    assert short.returncode == 1
    assert "exceed the model's 100 positions" in short.stderr, "more blocks would not help"


@pytest.mark.parametrize("options", [(), ("--overflow", "swap", "--policy", "watermark", "--blocks", 4000)])
def test_memory_states_agree_with_each_other(options: tuple[str | int, ...]) -> None:
    """What is held is never more than its own peak, or than what nothing shared or contiguous would take."""
    (figures,) = runs("generate:burst", "--requests", 800, *options)
    memory = figures["memory"]
    assert memory["held"]["max"] == figures["peak_held"]
    assert figures["hit_blocks"] == 0
    for name in ("p50", "p90", "p99", "max"):
        held = memory["held"][name]
        assert held <= memory["held_if_nothing_were_shared"][name] <= memory["contiguous_reservation"][name]


def test_batch_size_counts_steps() -> None:
    (figures,) = runs("generate:chat", "--requests", 20, "--no-oracle")
    assert figures["batch_size"]["count"] == figures["memory"]["held"]["count"] == figures["steps"]


def test_session_turns_wait_for_the_answer(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 40, "output_length": 10},
        {"session_id": "a", "timestamp": 1, "delay": 5000, "input_length": 60, "output_length": 10},
        {"session_id": "b", "timestamp": 1, "input_length": 40, "output_length": 10, "tenant": "other"},
    ]
    (run,) = runs(write_lines(tmp_path / "trace.jsonl", rows))
    assert run["finished"] == 3
    # Ten tokens, five seconds of thought, ten tokens.
    assert run["virtual_time"] == pytest.approx(5 + 20 * 4.8e-3, rel=0.05)
    assert [tenant["tenant"] for tenant in run["tenants"]] == ["all", "other"]


def test_table_shows_the_formula_and_the_tail() -> None:
    done = run("generate:chat", "--requests", 50)
    assert done.returncode == 0, done.stderr
    for text in ("max(4.8 ms, 0.04 ms x tokens) + 3.9e-05 ms", "first token", "p99.9", "against the oracle"):
        assert text in done.stdout


BAD_OPTIONS = [
    (["--policy", "hope"], 'policy is "hope"'),
    (["--eviction", "mru"], "eviction policy"),
    (["--reuse", "maybe"], "--reuse is 'maybe'"),
    (["--hardware", "abacus"], "--hardware is 'abacus'"),
    (["--arrivals", "never"], "never"),
    (["--arrivals", "rate", "--rate", "0"], "rate is 0"),
    (["--max-running", "9000"], "max_running"),
    (["--policy", "reserve,hope"], 'policy is "hope"'),
    (["--policy", "reserve,,watermark"], "--policy is 'reserve,,watermark': a name is empty"),
    (["--policy", "reserve, reserve"], "reserve is there twice"),
    (["--short-by", "0,200"], "--short-by is 200"),
    (["--seed", "9" * 30], f"seed is {'9' * 30}, must be 0 to 18446744073709551615"),
    (["--max-prefill-chunk", "9" * 12], f"max_prefill_chunk is {'9' * 12}, must be 0 to 4294967295"),
    (["--speed", "1e-308"], "speed is 1e-308, must be 1e-9 to 1e9"),
    (["--speed", "nan"], "speed is NaN"),
    (["--arrivals", "rate", "--rate", "1e300"], "rate is 1e300"),
    (["--rate", "3"], "--rate is for --arrivals rate"),
    (["--arrivals", "saturate", "--speed", "3"], "--speed is for --arrivals recorded"),
    (["--sequential", "--policy", "reserve", "--tenants", "a=1"], "--policy, --tenants would be ignored"),
    (["--hardware", "8b-a100", "--calibrate", "x.csv"], "choose one"),
    (["--reuse", "off", "--eviction", "lru"], "nothing to evict"),
    (["--overflow", "recompute", "--host-blocks", "3"], "--host-blocks is for"),
    (["--format", "mooncake"], "--format is mooncake, but generate:chat is no file"),
    (["--slo", "ttft_p99=1s"], "--slo and --find go together"),
    (["--slo", "ttft_p99=...s", "--find", "rate"], "--slo has 'ttft_p99=...s'"),
    (["--slo", "ttft_p99=0s", "--find", "rate"], "expected a bound above 0"),
    (["--slo", "ttft_p99=1s", "--find", "rate", "--report", "x.html"], "--report would be ignored"),
    (["--report", "/nowhere/x.html"], "--report /nowhere/x.html: /nowhere: there is no such directory"),
    (["--report", "/tmp"], "--report /tmp: is a directory"),
    (["--png", __file__], "is not a directory"),
    (["--png", f"{__file__}/below"], "is not a directory"),
    (["--png", "/nowhere/pictures"], "--png /nowhere/pictures: /nowhere: there is no such directory"),
    (["--png="], "the path is empty"),
    (["--report="], "the path is empty"),
    (["--calibrate="], "the path is empty"),
    (["--arrivals="], "--arrivals is empty"),
    (["--tenants", "a="], "'a=' is not a new name with a share above 0"),
]


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS)
def test_bad_options_are_one_line_and_exit_code_2(options: list[str], text: str) -> None:
    done = run("generate:chat", "--requests", 10, *options)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_output_that_cannot_be_written_is_refused_before_the_run() -> None:
    """Ten million requests would take minutes."""
    for options in (("--report", "/nowhere/x.html"), ("--png", __file__)):
        done = run("generate:chat", "--requests", 10_000_000, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_empty_trace_is_one_line() -> None:
    done = run("")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvpager: the name of the trace is empty\n"


@pytest.mark.parametrize("options", [(), ("--block-size", 65536), ("--sequential",)])
def test_pool_beyond_memory_is_refused_before_it_is_built(options: tuple[str | int, ...]) -> None:
    """The states of so many blocks alone are 8 GiB."""
    code, peak, err = peak_mebibytes("generate:chat", "--requests", 5, "--blocks", 1 << 30, *options)
    assert code == 2
    assert "the token ids of 1073741824 blocks of " in err
    assert peak < 1024


def test_spaces_around_names_do_not_count() -> None:
    compared = runs("generate:chat", "--requests", 20, "--policy", "reserve, watermark ", "--no-oracle")
    assert [run["policy"] for run in compared] == ["reserve", "watermark"]


def test_help_names_every_preset_and_workload() -> None:
    text = " ".join(run("--help").stdout.replace("│", " ").split())
    for name in (*CLOCKS, *WORKLOADS):
        assert name in text
    assert "…" not in text
