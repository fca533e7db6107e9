"""`kvpager plan --verify` and `--measure`: predictions against real allocations, in host memory here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager._core import KvGeometry
from kvpager.errors import InvalidArgumentError, KvPagerError
from kvpager.planning.measure import measure
from kvpager.planning.memory import open_device, open_host
from kvpager.planning.verify import Limits, verify
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
    ],
    ids=["plain", "fp8", "tensor parallel", "logits", "windows"],
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
    assert set(parts) == set(result["budget"]) - {"safety_margin", "not_offered"}
    for part in parts.values():
        assert part["measured"] <= part["predicted"] <= 1.05 * part["measured"], part
        assert part["predicted"] == result["budget"][part["part"]]
    assert parts["cache"]["measured"] >= result["num_blocks"] * result["block_size"]
    assert found["batch"] == {"tokens": 1024, "sequences": 64}
    blocks = result["num_blocks"]
    assert f"{blocks}" in found["refusal"], "one block more is refused with the numbers"


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
    ("config", "dtype"),
    [
        (SMALL, "int8"),
        (SMALL | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v2"}, "bf16"),
    ],
)
def test_caches_that_the_pass_does_not_run_are_refused(config: dict[str, Any], dtype: str) -> None:
    geometry = KvGeometry.from_config_json(json.dumps(config), kv_dtype=dtype)
    budget = geometry.budget(1 << 30, runtime=0, graphs=0, max_batch_tokens=256, max_running=16)
    limits = Limits(block_size=16, max_batch_tokens=256, max_running=16, max_model_tokens=8192)
    with pytest.raises(InvalidArgumentError, match="--verify run K and V of heads"):
        verify(geometry, budget, limits, device=None, runtime=None)


@pytest.mark.parametrize(
    ("blocks", "block_size", "tokens", "running"),
    [(100, 16, 64, 8), (9, 16, 128, 64), (3, 4, 100, 5), (50, 1, 20, 20), (1, 16, 1, 1), (40, 8, 64, 64)],
)
def test_worst_batch_fills_every_block_once_and_uses_its_tokens(
    blocks: int, block_size: int, tokens: int, running: int
) -> None:
    ids = np.random.default_rng(0).permutation(blocks).astype(np.int64)
    limits = {"block_size": block_size, "max_batch_tokens": tokens, "max_running": running}
    batch = worst_batch(ids, table_width=1, **limits)
    tables = batch.block_tables
    assert sorted(tables[tables >= 0]) == list(range(blocks))
    assert int(batch.context_lens.sum()) == blocks * block_size
    assert batch.num_tokens == min(tokens, blocks * block_size)
    assert 1 <= batch.num_sequences <= running
    assert len(set(batch.slot_mapping)) == batch.num_tokens, "no slot is written twice"
    for row, length in enumerate(batch.context_lens):
        positions = np.arange(length)
        slots = tables[row][positions // block_size] * block_size + positions % block_size
        queries = batch.query_start[row + 1] - batch.query_start[row]
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
