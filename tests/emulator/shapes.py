"""What the emulator tests draw: batches, features, memory layouts, and the units to build ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

DIMS = (64, 80, 128)
"""Head sizes of the quick tests: a power of two, one that leaves lanes idle, the most used one."""

SAME_TYPES = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
MIXED_TYPES = [("float32", "float16"), ("float16", "float32"), ("bfloat16", "float16")]


@st.composite
def lengths(draw: st.DrawFn, longest: int = 120) -> list[tuple[int, int]]:
    """(query rows, context length) of up to four sequences: decodes, verification, prefill, padding."""
    pairs = []
    for _ in range(draw(st.integers(0, 4))):
        context = draw(st.integers(0, longest))
        kind = draw(st.sampled_from(["decode", "verify", "prefill", "chunk", "none"]))
        rows = {
            "decode": 1,
            "verify": min(4, context),
            "prefill": context,
            "chunk": (context + 1) // 2,
            "none": 0,
        }[kind]
        pairs.append((rows, context))
    return pairs


@st.composite
def features(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `paged_attention`; per-head values are made by `with_heads`."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["causal"] = draw(st.booleans())
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, 130))
    if draw(st.booleans()):
        options["softcap"] = draw(st.floats(1.0, 50.0))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.01, 0.15))
    options["alibi"] = draw(st.booleans())
    options["sinks"] = draw(st.booleans())
    return options


def with_heads(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """The options with arrays for the features that are given a head."""
    found = {name: value for name, value in options.items() if name not in ("alibi", "sinks")}
    if options.get("alibi"):
        found["alibi_slopes"] = np.linspace(0.02, 0.4, heads).astype(np.float32)
    if options.get("sinks"):
        found["sinks"] = np.linspace(-2.0, 4.0, heads).astype(np.float32)
    return found


def relaid(array: Any, layout: str) -> Any:
    """The same cache in other memory: heads before slots, or with room between rows."""
    if layout == "heads_first":
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if layout == "padded":
        wide = np.zeros((*array.shape[:3], array.shape[3] + 16), array.dtype)
        wide[..., : array.shape[3]] = array
        return wide[..., : array.shape[3]]
    if layout == "joint":  # keys and values of a block next to each other: the block stride is doubled
        both = np.zeros((array.shape[0], 2, *array.shape[1:]), array.dtype)
        both[:, 1] = array
        return both[:, 1]
    return array
