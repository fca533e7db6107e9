"""`kvpager plan`: what a token costs, how many blocks fit, how many requests that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpager.cli.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvpager._core import Budget, KvGeometry

__all__ = ["plan", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan")(plan)


Size = Annotated[str | None, typer.Option(metavar="BYTES", show_default="estimated")]


def plan(
    config: Annotated[Path, typer.Argument(help="config.json, a directory that holds one, or a GGUF file")],
    *,
    device_memory: Annotated[str, typer.Option(metavar="BYTES", help="Memory of one device, like 80GiB.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what fits on a device, part by part: every number is given, estimated (and marked so) or measured.

    All figures are for one device: the one with the most layers, under tensor and pipeline parallelism.
    """
    from kvpager._core import KvGeometry
    from kvpager.model_files import read_model_files

    def size(text: str | None, name: str) -> int | None:
        return None if text is None else parse_bytes(text, name)

    files = read_model_files(config)
    geometry = KvGeometry.from_config_json(
        files.config, kv_dtype=kv_dtype, kv_scales=kv_scales, tensor_parallel=tp, pipeline_parallel=pp
    )
    given = size(weights, "--weights")
    from_files = files.weight_bytes if given is None else None
    budget = geometry.budget(
        parse_bytes(device_memory, "--device-memory"),
        device_free=size(device_free, "--device-free"),
        device_share=device_share,
        weights=given if from_files is None else -(-from_files // (tp * pp)),
        activations=size(activations, "--activations"),
        workspace=size(workspace, "--workspace"),
        communication=size(communication, "--communication"),
        runtime=size(runtime, "--runtime"),
        graphs=size(graphs, "--graphs"),
        safety_margin=size(safety_margin, "--safety-margin"),
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_tokens=max_model_tokens,
    )
    result = _result(geometry, budget, block_size=block_size, max_batch_tokens=max_batch_tokens)
    if from_files is not None:
        result["budget_note"]["weights"] = files.weight_source
    if lengths is not None:
        from kvpager.block_sizes import compare_block_sizes

        cache = result["budget"]["cache"]
        rows = compare_block_sizes(geometry, lengths, cache_bytes=cache, max_running=max_running)
        result["block_sizes"] = rows
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)


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


def _block_sizes(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("block size", "blocks", "unused slots", "entries a request", "tables", box=None)
    for row in rows:
        table.add_row(
            str(row["block_size"]),
            f"{row['num_blocks']:,}",
            f"{row['internal_waste']:.2%}",
            f"{row['table_entries']:,.0f}",
            format_bytes(row["table_bytes"]),
        )
    return table


_COLOURS = {
    "weights": "blue",
    "activations": "magenta",
    "workspace": "bright_magenta",
    "communication": "cyan",
    "runtime": "yellow",
    "graphs": "bright_yellow",
    "safety_margin": "white",
    "cache": "green",
    "not_offered": "bright_black",
}


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    device = sum(result["budget"].values())
    heads = (
        ""
        if result["num_kv_heads"] is None
        else f", {result['num_kv_heads']} KV heads of {result['head_dim']}"
    )
    console.print(
        f"{escape(result['model_type'])}: {result['num_layers']} layers, {result['attention']}{heads}, "
        f"KV in {result['kv_dtype']}"
    )
    console.print(
        f"A token costs {format_bytes(result['kv_bytes_per_token'])}"
        f", beyond every window {format_bytes(result['kv_bytes_per_token_beyond_window'])}"
    )
    groups = Table("layer group", "layers", "window", "bytes a token", "padding", title=None, box=None)
    for group in result["layer_groups"]:
        window = "all" if group["window"] is None else f"{group['window']:,}"
        row = (
            str(group["layers"]),
            window,
            str(group["bytes_per_token"]),
            str(group["padding_bytes_per_token"]),
        )
        groups.add_row(group["span"], *row)
    console.print(groups)
    table = Table("part", "size", "share", "", "note", box=None)
    for name, size in result["budget"].items():
        table.add_row(
            f"[{_COLOURS[name]}]█[/] {name.replace('_', ' ')}",
            format_bytes(size),
            f"{size / device:.1%}",
            result["budget_origin"][name],
            escape(result["budget_note"][name]),
        )
    console.print(table)
    console.print(_bar(result["budget"], console.width))
    console.print(
        f"{result['num_blocks']:,} blocks of {result['block_size']} tokens hold "
        f"{result['max_tokens']:,} tokens; the longest single request: {_tokens(result['longest_request'])}"
    )
    request = result["full_length_request"]
    if request is not None:
        console.print(
            f"{request['requests_that_fit']:,} requests of the full {request['tokens']:,} tokens "
            f"({request['blocks']:,} blocks each)"
        )
    if "block_sizes" in result:
        console.print(_block_sizes(result["block_sizes"]))
    for note in result["notes"]:
        console.print(f"Note: {escape(note)}")


def _tokens(count: int | None) -> str:
    return "no bound" if count is None else f"{count:,} tokens"


def _bar(budget: dict[str, int], width: int) -> str:
    """A stacked bar as wide as the terminal; every part that has bytes gets at least one cell."""
    total = max(1, sum(budget.values()))
    width = max(20, min(width, 100) - 1)
    cells = {name: max(1, size * width // total) for name, size in budget.items() if size}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += width - sum(cells.values())
    return "".join(f"[{_COLOURS[name]}]{'█' * count}[/]" for name, count in cells.items())
