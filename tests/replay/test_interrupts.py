"""Ctrl-C: a run ends with what there is, and says what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpager.replay.report import eviction_curves
from kvpager.replay.run import RunSettings
from kvpager.replay.search import find, parse_objectives
from kvpager.replay.study import Study
from kvpager.replay.watch import Watch, asked_to_stop
from waiting import PATIENCE

LONG = ("generate:reasoning", "--requests", "10000000", "--arrivals", "saturate")


INTERRUPTED = """
import os, signal
from kvpager.replay import watch

past, tries, is_sent = 0, 0, False
def report(ended, steps, now):
    global past, tries, is_sent
    tries, past = tries + (steps < past), steps
    if ended and tries == TRIES and not is_sent:
        is_sent = True
        os.kill(os.getpid(), signal.SIGINT)
watch.UNWATCHED = watch.Watch(report)

from kvpager.cli import main
main()
"""


def interrupted(*arguments: str | Path, tries: int = 0) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets Ctrl-C once some requests of a run have ended.

    Which run, `tries` says. Ctrl-C comes by what was done, so the machine's speed does not count.
    """
    program = INTERRUPTED.replace("TRIES", str(tries))
    command = [sys.executable, "-c", program, "replay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def study(**changes: Any) -> Study:
    settings = RunSettings(blocks=4000, requests=400, arrivals="saturate", max_output_tokens=16384)
    return Study(source="generate:reasoning", settings=settings, **changes)


def stop_after(calls: int) -> Callable[[], bool]:
    """Says yes from the given call on."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_json_marks_what_was_cut_and_names_what_was_not_run() -> None:
    code, out, err = interrupted(*LONG, "--json", "--policy", "reserve,watermark", "--short-by", "0,5")
    assert (code, err) == (130, "")
    found = json.loads(out)
    (cut,) = found["runs"]
    assert found["interrupted"]
    assert cut["interrupted"]
    assert cut["finished"] > 0
    assert [(run["policy"], run["blocks"]) for run in found["omitted"]] == [
        ("watermark", 62500),
        ("reserve", 59375),
        ("watermark", 59375),
    ]


def test_table_says_so_too() -> None:
    code, out, err = interrupted(*LONG, "--policy", "reserve,watermark")
    assert (code, err) == (130, "")
    text = " ".join(out.split())
    assert "Interrupted: the figures are of what had run. Not run: watermark, lru in 62,500 blocks." in text


def test_search_ends_with_its_tries() -> None:
    options = ("--find", "rate", "--slo", "ttft_p99=100s", "--no-oracle")
    code, out, err = interrupted("generate:chat", "--requests", "20000", *options, "--json", tries=1)
    assert (code, err) == (130, ""), err
    found = json.loads(out)["search"]
    assert found["interrupted"]
    assert len(found["tries"]) == 1
    met = [row["rate"] for row in found["tries"] if row["met"]]
    assert found["found"] == max(met, default=None)


@pytest.mark.parametrize("calls", range(0, 30, 3))
def test_whenever_a_study_stops_what_is_missing_is_marked(calls: int) -> None:
    """An oracle that is missing is missing from every run of its device."""
    part = study(policies=("reserve", "watermark"), short_by=(0.0, 5.0))
    runs = part.run(Watch(stop=stop_after(calls)))
    planned = part.planned()
    assert len(planned) == 4
    assert [run["policy"] for run in runs] == [row["policy"] for row in planned[: len(runs)]]
    for run in runs:
        assert run["interrupted"] or (run["finished"] == 400 and run["oracle_time"])


@pytest.mark.parametrize("calls", range(1, 40, 4))
def test_whenever_a_search_stops_the_best_so_far_is_kept(calls: int) -> None:
    part = study(oracle=False)
    found = find(part, parse_objectives("gap_p99=1s"), what="blocks", watch=Watch(stop=stop_after(calls)))
    met = [row["blocks"] for row in found["tries"] if row["met"]]
    assert found["interrupted"] or found["run"] is not None
    assert found["found"] == (min(met) if met else None)


def test_eviction_curves_that_were_stopped_are_none_not_short(shared_dir: Path) -> None:
    path = shared_dir / "traces" / "mooncake_conversation_trace.jsonl.gz"
    part = Study(source=str(path), settings=RunSettings(blocks=400, block_size=512, requests=300))
    assert eviction_curves(part, Watch(stop=stop_after(5))) is None
    assert eviction_curves(part)


def test_ctrl_c_that_was_ignored_at_the_start_stays_ignored() -> None:
    """As `nohup` and `trap '' INT` start commands: the run goes on, and ends as any other."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with asked_to_stop() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        done = interrupted("generate:reasoning", "--requests", "200", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    code, out, err = done
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert not found["interrupted"]
    assert found["runs"][0]["finished"] == 200


def test_first_ctrl_c_asks_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with asked_to_stop() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def ended(process: subprocess.Popen[str]) -> str:
    """Standard error of a process that is to end by itself; one that does not is killed."""
    try:
        return process.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


HEARD = """
import os, signal
from kvpager import __main__

set_handler = signal.signal
def told(number, handler):
    before = set_handler(number, handler)
    if handler is __main__._end_or_raise:
        WHAT
    return before
signal.signal = told
__main__.main()
"""


@pytest.mark.parametrize("arguments", [["replay", *LONG], ["doctor"]], ids=["replay", "doctor"])
@pytest.mark.parametrize("after", [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_early_ctrl_c_leaves_no_traceback(after: float, arguments: list[str]) -> None:
    """While modules load; before Python has read this package nobody can listen."""
    command = [sys.executable, "-c", HEARD.replace("WHAT", "print(flush=True)"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        err = ended(process)
    assert "Traceback" not in err
    # While the machine was asleep a short command may have come to its end, or to the interpreter's.
    assert process.returncode == 130 or (arguments == ["doctor"] and process.returncode in (0, -2))


def test_ctrl_c_at_the_first_moment_leaves_no_traceback() -> None:
    command = [sys.executable, "-c", HEARD.replace("WHAT", "os.kill(os.getpid(), signal.SIGINT)"), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


SWALLOWED_IN = """
import os, signal, sys
from kvpager.__main__ import main

class Finder:
    # What Python does with an exception in a callback of an import's lock: it goes no further.
    def find_spec(self, name, path=None, target=None):
        if name == "MODULE":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.parametrize("module", ["typer", "kvpager.replay.study"])
def test_ctrl_c_that_an_import_would_swallow_ends_the_command(module: str) -> None:
    command = [sys.executable, "-c", SWALLOWED_IN.replace("MODULE", module), "replay", *LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert ended(process) == ""
    assert process.returncode == 130
