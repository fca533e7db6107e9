"""What `kvpager plan` prints for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpager.cli.sizes import format_bytes
from kvpager.wording import counted

__all__ = ["print_plan"]


def _block_sizes(rows: list[dict[str, Any]]) -> Table:
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
    "left_over": "bright_green",
    "not_offered": "bright_black",
}


def print_plan(result: dict[str, Any]) -> None:
    """Prints a plan: the model, its budget as a table and a bar, and what fits.

    Args:
        result: the object of `kvpager plan --json`.
    """
    console = Console(highlight=False)
    _print_model(console, result)
    console.print(_groups(result["layer_groups"]))
    console.print(_budget(result))
    console.print(_bar(result["budget"], console.width))
    _print_outcome(console, result)
    if "block_sizes" in result:
        console.print(_block_sizes(result["block_sizes"]))
    if "verify" in result:
        _print_verification(console, result["verify"])
    for note in result["notes"]:
        console.print(f"Note: {escape(note)}")


def _print_model(console: Console, result: dict[str, Any]) -> None:
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


def _groups(groups: list[dict[str, Any]]) -> Table:
    table = Table("layer group", "layers", "window", "bytes a token", "padding", box=None)
    for group in groups:
        window = "all" if group["window"] is None else f"{group['window']:,}"
        sizes = (str(group["bytes_per_token"]), str(group["padding_bytes_per_token"]))
        table.add_row(group["span"], str(group["layers"]), window, *sizes)
    return table


def _budget(result: dict[str, Any]) -> Table:
    device = sum(result["budget"].values())
    table = Table("part", "size", "share", "", "note", box=None)
    for name, size in result["budget"].items():
        table.add_row(
            f"[{_COLOURS[name]}]█[/] {name.replace('_', ' ')}",
            format_bytes(size),
            f"{size / device:.1%}",
            result["budget_origin"][name],
            escape(result["budget_note"][name]),
        )
    return table


def _print_outcome(console: Console, result: dict[str, Any]) -> None:
    blocks, size = counted(result["num_blocks"], "block"), counted(result["block_size"], "token")
    console.print(
        f"{blocks} of {size}, room for {counted(result['max_tokens'], 'token')}; "
        f"the longest single request: {_tokens(result['longest_request'])}"
    )
    request = result["full_length_request"]
    if request is not None:
        console.print(
            f"{counted(request['requests_that_fit'], 'request')} of the full "
            f"{counted(request['tokens'], 'token')} ({counted(request['blocks'], 'block')} each)"
        )


def _print_verification(console: Console, found: dict[str, Any]) -> None:
    batch = found["batch"]
    console.print(
        f"Verified on {escape(found['memory'])}: a batch of {counted(batch['tokens'], 'token')} and "
        f"{counted(batch['sequences'], 'sequence')}, every block full"
    )
    table = Table("part", "predicted", "measured", "over", "", box=None)
    for part in found["parts"]:
        table.add_row(
            part["part"].replace("_", " "),
            format_bytes(part["predicted"]),
            format_bytes(part["measured"]),
            f"{part['over']:+.1%}" if part["measured"] else "",
            part["how"],
        )
    console.print(table)
    console.print(f"One block more: {escape(found['refusal']) or 'NOT REFUSED'}")
    console.print(_verdict(found))


def _verdict(found: dict[str, Any]) -> str:
    """Names the parts that are not as predicted."""
    wrong = [
        f"{part['part'].replace('_', ' ')} predicted {part['predicted']:,} bytes, "
        f"measured {part['measured']:,} ({part['over']:+.2%})"
        for part in found["parts"]
        if not part["ok"]
    ]
    if not found["refusal"]:
        wrong.append("one block more than fits was handed out")
    if wrong:
        return f"Not as predicted (never under, at most {found['most_over']:.0%} over): {'; '.join(wrong)}"
    return "Every part fits what was predicted"


def _tokens(count: int | None) -> str:
    return "no bound" if count is None else counted(count, "token")


def _bar(budget: dict[str, int], width: int) -> str:
    """A stacked bar as wide as the terminal; every part that has bytes gets at least one cell."""
    total = max(1, sum(budget.values()))
    width = max(20, min(width, 100) - 1)
    cells = {name: max(1, size * width // total) for name, size in budget.items() if size}
    largest = max(cells, key=lambda name: cells[name])
    cells[largest] += width - sum(cells.values())
    return "".join(f"[{_COLOURS[name]}]{'█' * count}[/]" for name, count in cells.items())
