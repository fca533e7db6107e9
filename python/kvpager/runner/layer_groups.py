"""Which layers share a block table, and which memory of a block each of them has: `RunnerGroups`.

Layers that see the same tokens are one group, and a block has the same bytes in every group (`KvGeometry`
splits them). All groups take blocks of one pool, so the memory of a block is that of its group's layers: the
first layer of every group has the first array, the second one the second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpager._core import KvGeometry

if TYPE_CHECKING:
    from kvpager.runner.config import LlamaConfig

__all__ = ["RunnerGroups"]


@dataclass(frozen=True)
class RunnerGroups:
    """The layer groups of a model.

    Attributes:
        spans: what each group sees, as `Scheduler` takes it.
        group_of: of each layer, its group.
        place_of: of each layer, its place in the group: which array of the cache has its K and V.
    """

    spans: tuple[tuple[str, int | None], ...]
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]

    @property
    def num_places(self) -> int:
        """Layers that a block has memory for."""
        return max(self.place_of) + 1

    @classmethod
    def of(cls, config: LlamaConfig) -> RunnerGroups:
        """Splits the layers of a model."""
        layers = range(config.num_layers)
        if not any(config.layer_windows):
            return cls((("full", None),), (0,) * config.num_layers, tuple(layers))
        windows = {window for window in config.layer_windows if window is not None}
        group_of, place_of = [0] * config.num_layers, [0] * config.num_layers
        spans: list[tuple[str, int | None]] = []
        for span, window, members, *_ in _geometry(config, max(windows)).layer_groups:
            for place, layer in enumerate(members):
                group_of[layer], place_of[layer] = len(spans), place
            spans.append((span, window))
        return cls(tuple(spans), tuple(group_of), tuple(place_of))


def _geometry(config: LlamaConfig, window: int) -> KvGeometry:
    kinds = ["full_attention" if size is None else "sliding_attention" for size in config.layer_windows]
    description = {
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_positions,
        "layer_types": kinds,
        "sliding_window": window,
    }
    return KvGeometry.from_config_json(json.dumps(description))
