"""Reads the golden file: prompts and their greedy continuations by an independent fp32 implementation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GoldenItem:
    """A prompt and its greedy continuation by another implementation, in fp32."""

    kind: str
    text: str
    prompt_ids: list[int]
    greedy_ids: list[int]
    top5: list[tuple[int, float]]


def read_golden(path: Path) -> list[GoldenItem]:
    items: list[dict[str, Any]] = json.loads(path.read_text())["items"]
    return [
        GoldenItem(
            item["kind"],
            item["text"],
            item["prompt_ids"],
            item["greedy_ids"],
            [(token, logit) for token, logit in item["next_token_top5"]],
        )
        for item in items
    ]
