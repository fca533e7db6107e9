"""`kvpager plan --verify` and `--measure`: predictions against real allocations, in host memory here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager._core import KvGeometry
from kvpager.errors import InvalidArgumentError, KvPagerError
from kvpager.planning.limits import Limits
from kvpager.planning.measure import measure
from kvpager.planning.memory import open_device, open_host
from kvpager.planning.split_plans import split_plan_bytes
from kvpager.planning.verify import verify
from kvpager.planning.worst_batch import worst_batch

from .test_plan_command import plan

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
WINDOWED = SMALL | {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 256,
}
LATENT = SMALL | {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
MIXED_HEADS = WINDOWED | {"head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1}
LOGITS = {"vocab_size": 50_000, "intermediate_size": 512}
OPTIONS = ("--runtime", "8MiB", "--graphs", "4MiB", "--max-batch-tokens", "1024", "--max-running", "64")
on_host = pytest.mark.skipif(open_device()[0] is not None, reason="there is a device")


def write(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


@on_host
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SMALL, ()),
        (SMALL, ("--kv-dtype", "fp8", "--block-size", "32")),
        (SMALL, ("--kv-dtype", "fp32", "--tp", "2", "--safety-margin", "0")),
        (SMALL | LOGITS, ()),
        (WINDOWED, ()),
        (LATENT, ()),
        (LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ("--block-size", "64")),
        (SMALL, ("--kv-dtype", "int8")),
        (MIXED_HEADS, ("--kv-dtype", "int8")),
        (SMALL | {"head_dim": 48}, ("--kv-dtype", "fp16", "--block-size", "1")),
        (SMALL | {"num_key_value_heads": 8}, ("--max-model-tokens", "512")),
    ],
    ids=[
        "plain",
        "fp8",
        "tensor parallel",
        "logits",
        "windows",
        "latent",
        "latent with a kernel",
        "int8",
        "heads of two sizes",
        "no kernel",
        "more blocks than sequences reach",
    ],
)
def test_every_part_is_predicted_never_under_and_at_most_5_percent_over(
    tmp_path: Path, config: dict[str, Any], options: tuple[str, ...]
) -> None:
    memory = "1GiB" if "--tp" in options else "384MiB"
    done = plan(write(tmp_path, config), "--device-memory", memory, *OPTIONS, *options, "--verify", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    found = result["verify"]
    assert found["ok"]
    parts = {part["part"]: part for part in found["parts"]}
    assert set(parts) == set(result["budget"]) - {"safety_margin", "left_over", "not_offered"}
    for part in parts.values():
        assert part["measured"] <= part["predicted"] <= 1.05 * part["measured"], part
        assert part["predicted"] == result["budget"][part["part"]]
    assert parts["cache"]["measured"] == result["num_blocks"] * result["block_bytes"]
    assert found["batch"] == {"tokens": 1024, "sequences": 64}
    blocks = result["num_blocks"]
    refusal = f"1 block needed, account 0 has all of its limit of {blocks}"
    assert found["refusal"] == refusal, "one block more is refused with the numbers"


@on_host
@pytest.mark.parametrize("batch", ["1", "3", "16", "64"])
@pytest.mark.parametrize("config", [SMALL, WINDOWED, LATENT], ids=["plain", "windows", "latent"])
def test_small_batches_are_predicted_too(tmp_path: Path, config: dict[str, Any], batch: str) -> None:
    """Python's own objects are larger than the arrays of one token, and are not the model's."""
    options = ("--runtime", "1MiB", "--graphs", "0", "--max-batch-tokens", batch)
    options += ("--max-running", str(min(16, int(batch))))
    done = plan(write(tmp_path, config), "--device-memory", "256MiB", *options, "--verify", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    assert all(0 <= part["over"] <= 0.05 for part in json.loads(done.stdout)["verify"]["parts"])


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], Limits, int]:
    """A config, how it is deployed, the limits of its batches and blocks that its device has room for."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    config = {
        "model_type": "llama",
        "num_hidden_layers": draw(st.integers(1, 6)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= heads])),
        "head_dim": draw(st.sampled_from([8, 40, 64, 128])),
        "hidden_size": draw(st.sampled_from([64, 192, 512])),
        "intermediate_size": draw(st.sampled_from([32, 500, 2048])),
        "vocab_size": draw(st.sampled_from([16, 3000, 40_000])),
        "max_position_embeddings": draw(st.sampled_from([64, 500, 4096])),
    }
    if draw(st.booleans()):
        config["sliding_window"] = draw(st.sampled_from([8, 100, 1024]))
        kinds = ["sliding_attention", "full_attention"]
        config["layer_types"] = [draw(st.sampled_from(kinds)) for _ in range(config["num_hidden_layers"])]
    if draw(st.booleans()):
        config |= {"kv_lora_rank": draw(st.sampled_from([32, 512])), "qk_rope_head_dim": 64}
    deployed = {
        "kv_dtype": draw(st.sampled_from(["bf16", "fp16", "fp32", "fp8", "int8"])),
        "tensor_parallel": draw(st.sampled_from([1, heads])),
    }
    limits = Limits(
        block_size=draw(st.sampled_from([1, 8, 16, 64, 256])),
        max_batch_tokens=draw(st.integers(1, 300)),
        max_running=draw(st.integers(1, 80)),
        max_model_tokens=config["max_position_embeddings"],
    )
    return config, deployed, limits, draw(st.integers(1, 60))


@on_host
@settings(max_examples=60, deadline=None)
@given(drawn=plans())
def test_drawn_plans_are_never_under_and_at_most_5_percent_over(
    drawn: tuple[dict[str, Any], dict[str, Any], Limits, int],
) -> None:
    config, deployed, limits, blocks = drawn
    geometry = KvGeometry.from_config_json(json.dumps(config), **deployed)
    blocks = max(blocks, len(geometry.layer_groups))
    arguments = limits.arguments() | {"max_model_tokens": None}
    sizes = {"weights": 1 << 20, "runtime": 1 << 16, "graphs": 0, "safety_margin": 0}
    sizes["split_plans"] = split_plan_bytes(geometry, limits)
    with pytest.raises(InvalidArgumentError) as error:
        geometry.budget(1, **sizes, **arguments)
    (used,) = re.findall(r"available bytes are left after (\d+)", str(error.value))
    memory = int(used) + blocks * geometry.block_bytes_per_token * limits.block_size
    budget = geometry.budget(memory, **sizes, **arguments)
    assert budget.num_blocks == blocks
    found = verify(geometry, budget, limits, device=None, runtime=None)
    assert [part for part in found["parts"] if not 0 <= part["over"] <= 0.05] == []
    assert found["ok"]


@on_host
def test_table_compares_and_says_what_only_a_device_has(tmp_path: Path) -> None:
    done = plan(write(tmp_path, SMALL), "--device-memory", "256MiB", *OPTIONS, "--verify")
    assert done.returncode == 0, done.stderr
    for text in ("Verified on host memory", "predicted", "measured", "a device's only", "One block more: "):
        assert text in done.stdout


@on_host
def test_part_that_was_given_too_small_fails_the_check(tmp_path: Path) -> None:
    """A wrong figure is found by running the batch, not believed."""
    options = ("--device-memory", "256MiB", *OPTIONS, "--activations", "1MiB", "--verify", "--json")
    done = plan(write(tmp_path, SMALL), *options)
    assert done.returncode == 1
    result = json.loads(done.stdout)["verify"]
    assert not result["ok"]
    (under,) = [part["part"] for part in result["parts"] if part["over"] < 0]
    assert under == "activations"
    last = plan(write(tmp_path, SMALL), *options[:-1]).stdout.replace("\n", " ")
    assert "Not as predicted (never under, at most 5% over): activations predicted 1,048,576 bytes" in last


@on_host
def test_plan_beyond_the_host_s_memory_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    done = plan(write(tmp_path, SMALL), "--device-memory", "900TiB", "--verify")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "are free" in done.stderr


@on_host
def test_measuring_without_a_device_is_one_line(tmp_path: Path) -> None:
    done = plan(write(tmp_path, SMALL), "--measure")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--measure needs a CUDA device with CuPy or torch: " in done.stderr


@pytest.mark.gpu
def test_plan_holds_on_a_device(tmp_path: Path) -> None:
    """Parts are measured there, so that nothing is estimated and every part must be as predicted."""
    if open_device()[0] is None:
        pytest.skip(f"no CUDA device: {open_device()[1]}")
    options = (
        "--device-share",
        "0.2",
        "--graphs",
        "0",
        "--max-batch-tokens",
        "2048",
        "--measure",
        "--verify",
    )
    done = plan(write(tmp_path, SMALL | {"head_dim": 64}), *options, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    for part in ("activations", "workspace", "runtime"):
        assert result["budget_origin"][part] == "measured"


@on_host
def test_device_s_way_through_a_plan_with_host_memory_in_its_place() -> None:
    """What a device does differently: products read the weights, workspace is apart, runtime is not held."""
    memory = open_host()
    memory.on_device = True
    geometry = KvGeometry.from_config_json(json.dumps(SMALL))
    limits = Limits(block_size=16, max_batch_tokens=512, max_running=32, max_model_tokens=8192)
    sizes = {"runtime": 1 << 20, "graphs": 1 << 20, "max_batch_tokens": 512, "max_running": 32}
    try:
        with pytest.raises(KvPagerError, match="the process that measures the runtime ended with"):
            measure(memory, geometry, limits)
        budget = geometry.budget(256 << 20, workspace=1 << 20, **sizes)
        found = verify(geometry, budget, limits, device=memory, runtime=1 << 20)
    finally:
        memory.close()
    parts = {part["part"]: part for part in found["parts"]}
    for name in ("weights", "activations", "cache", "graphs", "runtime"):
        assert parts[name]["measured"] <= parts[name]["predicted"] * 1.001
        assert parts[name]["predicted"] <= 1.05 * parts[name]["measured"], name
    assert "process of its own" in parts["runtime"]["how"]
    assert 0 < parts["workspace"]["measured"] < 1 << 20, "tables and what attention allocates"
    assert not found["ok"], "the workspace that was given is far too large"


def test_memory_must_be_said_or_measured(tmp_path: Path) -> None:
    done = plan(write(tmp_path, SMALL))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--device-memory is missing" in done.stderr


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (SMALL, ("--kv-dtype", "int8", "--kv-scales", "per_tensor"), "run int8 with a scale for each token"),
        (SMALL, ("--kv-dtype", "fp8", "--kv-scales", "per_token_head"), "keeps fp8 with --kv-scales"),
        (SMALL, ("--block-size", "48"), "blocks of a power of two up to 256 tokens"),
        (SMALL | {"head_dim": 2048}, (), "heads of up to 1024 elements"),
    ],
)
def test_caches_that_the_pass_does_not_run_are_refused(
    tmp_path: Path, config: dict[str, Any], options: tuple[str, ...], reason: str
) -> None:
    done = plan(write(tmp_path, config), "--device-memory", "8GiB", *options, "--verify")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("blocks", "block_size", "tokens", "running", "width"),
    [
        (100, 16, 64, 8, 100),
        (9, 16, 128, 64, 1),
        (3, 4, 100, 5, 3),
        (50, 1, 20, 20, 4),
        (1, 16, 1, 1, 1),
        (40, 8, 64, 64, 2),
        (40, 8, 64, 4, 2),
    ],
)
def test_worst_batch_fills_every_block_once_and_uses_its_tokens(
    blocks: int, block_size: int, tokens: int, running: int, width: int
) -> None:
    ids = np.random.default_rng(0).permutation(blocks).astype(np.int64)
    limits = Limits(
        block_size=block_size,
        max_batch_tokens=tokens,
        max_running=running,
        max_model_tokens=width * block_size,
    )
    batch = worst_batch(ids, limits)
    tables = batch.block_tables
    assert tables.shape == (running, width)
    used = tables[tables >= 0]
    assert len(set(used)) == len(used) == min(blocks, batch.num_sequences * width)
    assert set(used) <= set(range(blocks))
    assert batch.num_sequences == min(tokens, running, blocks)
    assert int(batch.context_lens.sum()) == len(used) * block_size
    assert len(batch.slot_mapping) == tokens
    assert batch.num_tokens == min(tokens, len(used) * block_size) == int(batch.query_start[-1])
    assert set(batch.slot_mapping[batch.num_tokens :]) <= {-1}
    assert len(set(batch.slot_mapping[: batch.num_tokens])) == batch.num_tokens, "no slot is written twice"
    for row, length in enumerate(batch.context_lens):
        positions = np.arange(length)
        slots = tables[row][positions // block_size] * block_size + positions % block_size
        queries = batch.query_start[row + 1] - batch.query_start[row]
        assert (queries > 0) == (row < batch.num_sequences)
        written = batch.slot_mapping[batch.query_start[row] : batch.query_start[row + 1]]
        assert list(slots[length - queries :]) == list(written)


def test_host_memory_counts_arrays_and_temporaries() -> None:
    memory = open_host()
    try:
        before = memory.live_bytes()
        array = memory.empty((1 << 20,), "uint8")
        assert 0 <= memory.live_bytes() - before - (1 << 20) < 4096
        memory.reset_peak()
        total = int((array.astype(np.int64) + 1).sum())
        assert total == 1 << 20
        assert memory.peak_bytes() - memory.live_bytes() >= 8 << 20
    finally:
        memory.close()
