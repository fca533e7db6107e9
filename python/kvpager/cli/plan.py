"""`kvpager plan`: what a token costs, how many blocks fit, how many requests that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpager.cli.paths import given_path
from kvpager.cli.sizes import parse_bytes
from kvpager.errors import InvalidArgumentError
from kvpager.planning.limits import Limits

if TYPE_CHECKING:
    from kvpager._core import Budget, KvGeometry
    from kvpager.planning.memory import Memory
    from kvpager.planning.model_files import ModelFiles

__all__ = ["plan", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan", short_help="Say what fits on a device, part by part.")(plan)


Size = Annotated[str | None, typer.Option(metavar="BYTES", show_default="estimated")]


def plan(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            parser=given_path,
            help="config.json, a directory that holds one, or a GGUF file",
        ),
    ],
    *,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory of one device, like 80GiB; default: the measured one's."),
    ] = None,
    device_free: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Free at start; default: all.")
    ] = None,
    device_share: Annotated[float, typer.Option(help="Share of the device that may be used.")] = 1.0,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="On one device; default: from the safetensors index, or estimated."
        ),
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp8 or int8.")] = "bf16",
    kv_scales: Annotated[
        str | None, typer.Option(help="per_tensor or per_token_head; default: usual for the dtype.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, max=65536, help="Tokens of a block.")] = 16,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel devices.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel devices.")] = 1,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Tokens of the largest batch.")
    ] = 8192,
    max_running: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Sequences of the largest batch.")
    ] = 256,
    max_model_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 31, help="Longest request that must fit.")
    ] = None,
    activations: Size = None,
    workspace: Size = None,
    communication: Size = None,
    runtime: Size = None,
    graphs: Size = None,
    safety_margin: Size = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="TRACE", help="Compare block sizes on the lengths of a trace.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure on the CUDA device instead of estimating.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Allocate the plan (on the CUDA device, or in host memory), run the worst batch, compare.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what fits on a device, part by part: every number is given, estimated (and marked so) or measured.

    All figures are for one device. Under pipeline parallelism the weights are those of the heaviest stage,
    embedding and head counted, and the KV cache is that of the stage with most of it.
    """
    from kvpager._core import KvGeometry
    from kvpager.attention.block_sizes import MAX_BLOCK_SIZE, is_block_size
    from kvpager.planning.model_files import read_model_files

    def size(text: str | None, name: str) -> int | None:
        return None if text is None else parse_bytes(text, name)

    files = read_model_files(config)
    try:
        KvGeometry.from_config_json(files.config)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{files.path}: {error}") from error
    # The file is whole: what is refused now is how it is deployed.
    geometry = KvGeometry.from_config_json(
        files.config, kv_dtype=kv_dtype, kv_scales=kv_scales, tensor_parallel=tp, pipeline_parallel=pp
    )
    given = {
        "weights": size(weights, "--weights"),
        "activations": size(activations, "--activations"),
        "workspace": size(workspace, "--workspace"),
        "communication": size(communication, "--communication"),
        "runtime": size(runtime, "--runtime"),
        "graphs": size(graphs, "--graphs"),
        "safety_margin": size(safety_margin, "--safety-margin"),
    }
    if max_batch_tokens < max_running:
        raise InvalidArgumentError(
            f"--max-batch-tokens is {max_batch_tokens}, --max-running {max_running}: every running sequence "
            "needs a token of a step"
        )
    limits = Limits(
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_tokens=max_model_tokens or geometry.max_positions or 131072,
    )
    sources = _Sources(given)
    sources.add_files(files, geometry, stages=pp)
    device = sources.add_device(geometry, limits, wanted=measure, useful=verify)
    total = size(device_memory, "--device-memory")
    if total is None and device is None:
        raise InvalidArgumentError("--device-memory is missing: bytes like 80GiB, or --measure on the device")
    total = total or (0 if device is None else device.total)
    free = size(device_free, "--device-free")
    from kvpager.planning.split_plans import split_plan_bytes

    budget = geometry.budget(
        total,
        split_plans=split_plan_bytes(geometry, limits),
        device_free=sources.free_of(total) if free is None else free,
        device_share=device_share,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_tokens=max_model_tokens,
        **sources.sizes,
    )
    result = _result(geometry, budget, block_size=block_size, max_batch_tokens=max_batch_tokens)
    result["budget_origin"] |= sources.origins
    result["budget_note"] |= sources.notes
    if not is_block_size(block_size):
        result["notes"].append(
            f"kvpager's attention does blocks of a power of two from 1 to {MAX_BLOCK_SIZE} tokens, not of "
            f"{block_size}: this plan is for another one"
        )
    if lengths is not None:
        from kvpager.planning.block_sizes import compare_block_sizes

        cache = result["budget"]["cache"] + result["budget"]["left_over"]
        rows = compare_block_sizes(geometry, lengths, cache_bytes=cache, max_running=max_running)
        result["block_sizes"] = rows
    if verify:
        from kvpager.planning.verify import verify as try_plan

        result["verify"] = try_plan(
            geometry, budget, limits, device=device, runtime=result["budget"]["runtime"]
        )
    if as_json:
        typer.echo(json.dumps(result))
    else:
        from kvpager.cli.plan_tables import print_plan

        print_plan(result)
    if verify and not result["verify"]["ok"]:
        raise typer.Exit(1)


class _Sources:
    """Where the parts of a budget come from, if not from an estimate."""

    def __init__(self, given: dict[str, int | None]) -> None:
        self.sizes = given
        self.origins: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.free: int | None = None

    def add_files(self, files: ModelFiles, geometry: KvGeometry, *, stages: int) -> None:
        """Takes the weights from the model's files, unless they are given."""
        if self.sizes["weights"] is None and files.weight_bytes is not None:
            self.sizes["weights"] = geometry.weights_on_device(files.weight_bytes)
            self.notes["weights"] = files.weight_source
            if stages > 1:
                # Files say what the model has; what of it is in a stage follows from the config.
                self.origins["weights"] = "estimated"
                self.notes["weights"] += f", the share of the heaviest of {stages} stages"

    def add_device(
        self, geometry: KvGeometry, limits: Limits, *, wanted: bool, useful: bool
    ) -> Memory | None:
        """Measures what is not given: if it is wanted, or useful and there is a device."""
        from kvpager.planning.measure import measure, require_device
        from kvpager.planning.memory import open_device

        if not (wanted or useful):
            return None
        memory = require_device() if wanted else open_device()[0]
        if memory is None:
            return None
        measured = measure(memory, geometry, limits)
        self.free = measured.free
        for name in ("activations", "workspace", "runtime"):
            if self.sizes[name] is None:
                self.sizes[name] = getattr(measured, name)
                self.origins[name], self.notes[name] = "measured", memory.name
        return memory

    def free_of(self, total: int) -> int | None:
        """Measured free bytes, as far as they count in a device of `total`."""
        return None if self.free is None else min(self.free, total)


def _result(
    geometry: KvGeometry, budget: Budget, *, block_size: int, max_batch_tokens: int
) -> dict[str, Any]:
    """The keys of DESIGN.md section 5, and more."""
    request = None
    if geometry.max_positions is not None:
        blocks = geometry.blocks_for_length(
            geometry.max_positions, block_size=block_size, chunk=max_batch_tokens
        )
        request = {
            "tokens": geometry.max_positions,
            "blocks": blocks,
            "requests_that_fit": budget.num_blocks // blocks,
        }
    return {
        "model_type": geometry.model_type,
        "attention": geometry.attention,
        "num_layers": geometry.num_layers,
        "layers_per_device": geometry.layers_per_device,
        "num_attention_heads": geometry.num_attention_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "kv_dtype": geometry.kv_dtype,
        "kv_bytes_per_token": geometry.bytes_per_token,
        "kv_bytes_per_token_beyond_window": geometry.bytes_per_token_beyond_window,
        "kv_bytes_per_token_all_devices": geometry.bytes_per_token_all_devices,
        "layer_groups": [
            {
                "span": span,
                "window": window,
                "layers": len(layers),
                "layer_ids": layers,
                "bytes_per_token": bytes_per_token,
                "padding_bytes_per_token": padding,
            }
            for span, window, layers, bytes_per_token, padding in geometry.layer_groups
        ],
        "budget": {name: part for name, part, _, _ in budget.parts},
        "budget_origin": {name: origin for name, _, origin, _ in budget.parts},
        "budget_note": {name: note for name, _, _, note in budget.parts},
        "available": budget.available,
        "block_size": block_size,
        "block_bytes": budget.block_bytes,
        "num_blocks": budget.num_blocks,
        "max_tokens": budget.max_tokens,
        "longest_request": budget.longest_request if budget.longest_request < 1 << 63 else None,
        "full_length_request": request,
        "notes": geometry.notes,
    }
