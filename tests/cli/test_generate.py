"""`kvpager generate`: what it prints, and one clear line for every bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpager.cli import main
from kvpager.runner import LlamaRunner, find_demo_model

pytestmark = pytest.mark.model


def run_main(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Runs the command line in this process; returns its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["kvpager", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvpager.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_json_has_the_documented_keys_and_the_golden_answer() -> None:
    done = run_process(
        "generate", "--model", "demo", "--prompt", "The capital of France is", "--max-tokens", "6", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    (request,) = values["requests"]
    assert request["token_ids"] == [7042, 30, 198, 198, 504, 2988]
    assert request["text"].startswith(" Paris.")
    expected = {"id": 0, "tenant": "default", "prompt_tokens": 5, "cached_tokens": 0, "steps": 6}
    assert {key: request[key] for key in expected} | {"id": 0} == expected
    assert request["finish_reason"] == "length"
    assert request["queue_wait"] >= 0.0
    assert set(values["pool"]) >= {"blocks", "held", "cached", "free", "reserved", "peak_held"}
    assert values["pool"]["held"] == 0
    assert values["preemptions"] == 0


def test_prompt_ids_tenants_and_chat_in_one_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([[504, 3575, 282, 4649, 314]]))
    prompts = ["--chat", "--system", "Be brief.", "--prompt", "Hello", "--prompt-ids", str(file)]
    tenants = ["--tenants", "alice,bob", "--tenant", "bob", "--tenant", "alice"]
    code, out, err = run_main(
        capsys, monkeypatch, "generate", *prompts, *tenants, "--max-tokens", "2", "--json"
    )
    assert (code, err) == (0, "")
    chat, ids = json.loads(out)["requests"]
    assert (chat["tenant"], ids["tenant"]) == ("bob", "alice")
    assert chat["prompt_tokens"] > 10
    assert ids["token_ids"] == [7042, 30]


def test_tables_and_streamed_text_are_readable_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run_main(
        capsys, monkeypatch, "generate", "--prompt", "The capital of France is", "--max-tokens", "3"
    )
    assert code == 0
    assert out.startswith(" Paris.")
    assert "peak held" in out
    assert "\x1b" not in out


def test_demo_shows_waiting_sharing_and_tables_without_a_terminal() -> None:
    done = run_process("generate", "--demo", "--max-tokens", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[8 bob]" in done.stdout
    assert "queue wait" in done.stdout
    assert "peak held" in done.stdout
    assert "\x1b" not in done.stdout


def test_demo_makes_requests_wait_and_reuses_prefixes() -> None:
    done = run_process("generate", "--demo", "--json")
    values = json.loads(done.stdout)
    assert len(values["requests"]) == 8
    assert {request["tenant"] for request in values["requests"]} == {"alice", "bob"}
    assert sum(request["queue_steps"] > 0 for request in values["requests"]) >= 2
    assert sum(request["cached_tokens"] > 0 for request in values["requests"]) >= 4
    assert values["pool"]["peak_held"] <= values["pool"]["blocks"]


def test_interrupt_prints_the_tables_of_what_there_is() -> None:
    arguments = ["generate", "--prompt", "Count: one, two,", "--max-tokens", "4000"]
    command = [sys.executable, "-u", "-c", "from kvpager.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(3), "the first token was printed"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
    assert "aborted" in out
    assert "peak held" in out


def test_interrupt_prints_the_json_of_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = LlamaRunner.run, iter([None, None, None])

    def interrupted(*arguments: Any) -> Any:
        if next(steps, "over") == "over":
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(LlamaRunner, "run", interrupted)
    prompts = ["--prompt", "Count: one, two,", "--prompt", "The sea is"]
    code, out, err = run_main(capsys, monkeypatch, "generate", *prompts, "--json")
    assert (code, err) == (130, "")
    values = json.loads(out)
    assert [request["finish_reason"] for request in values["requests"]] == ["aborted", "aborted"]
    assert [request["output_tokens"] for request in values["requests"]] == [3, 3]
    assert values["pool"]["held"] == 0


def test_failed_model_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(LlamaRunner, "run", broken)
    code, out, err = run_main(capsys, monkeypatch, "generate", "--prompt", "a", "--json")
    assert code == 1
    assert json.loads(out)["requests"][0]["finish_reason"] == "error"
    assert err == "kvpager: 1 of 1 requests failed: the model failed: RuntimeError: no device\n"


BAD_ARGUMENTS = {
    "no prompt": ([], "no prompt: give --prompt TEXT"),
    "demo with a prompt": (["--demo", "--prompt", "a"], "--demo has its own prompts: leave out --prompt"),
    "system without chat": (["--system", "a", "--prompt", "b"], "give --chat too"),
    "unknown tenant": (["--prompt", "a", "--tenant", "eve"], "unknown tenant 'eve': --tenants names default"),
    "tenant count": (
        ["--prompt", "a", "--tenants", "x,y", "--tenant", "x", "--tenant", "y"],
        "2 --tenant for 1 prompts",
    ),
    "same tenant twice": (["--prompt", "a", "--tenants", "x,x"], "names must differ"),
    "temperature": (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0, at least 0 is needed"),
    "no model": (["--prompt", "a", "--model", "/nowhere"], "no model at /nowhere"),
    "no ids file": (["--prompt-ids", "/nowhere.json"], "cannot read /nowhere.json: No such file"),
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "longer than the pool": (
        ["--prompt", "a b c d", "--blocks", "2", "--max-tokens", "40"],
        "may have 2",
    ),
    "longer than the positions": (["--prompt", "word " * 9000], "8192 positions"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_input_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    code, out, err = run_main(capsys, monkeypatch, "generate", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("kvpager: ")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "a list of lists of token ids is needed"),
        ("[1, 2]", "a list of lists of token ids is needed"),
        ("[[1, -2]]", "prompt 0 has -2, which is no token id"),
        ("[[1], [true]]", "prompt 1 has True, which is no token id"),
        ("[[1", "is no JSON file"),
        ("[[]]", "the prompt is empty"),
        ("[[49152]]", "token id 49152 of the prompt is outside the vocabulary of 49152"),
    ],
)
def test_bad_prompt_ids_are_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    message: str,
) -> None:
    file = tmp_path / "ids.json"
    file.write_text(text)
    code, _, err = run_main(capsys, monkeypatch, "generate", "--prompt-ids", str(file))
    assert code == 2
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("share", [0.00001, 0.01, 0.5])
def test_truncated_model_file_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
) -> None:
    demo = find_demo_model()
    assert demo is not None
    with demo.open("rb") as source:
        (tmp_path / "cut.gguf").write_bytes(source.read(int(demo.stat().st_size * share)))
    code, _, err = run_main(
        capsys, monkeypatch, "generate", "--model", str(tmp_path / "cut.gguf"), "--prompt", "a"
    )
    assert code == 2
    assert err.count("\n") == 1
    assert "truncated, damaged or no GGUF file" in err


def test_wrong_architecture_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    code, _, err = run_main(capsys, monkeypatch, "generate", "--model", str(tmp_path), "--prompt", "a")
    assert code == 2
    assert err == "kvpager: model_type 'mamba' is not supported: the runner computes 'llama' and 'mistral'\n"
