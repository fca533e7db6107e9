"""The limits that a plan is made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a plan's batches.

    Attributes:
        block_size: tokens of a block.
        max_batch_tokens: query tokens of the largest batch.
        max_running: sequences of the largest batch.
        max_model_tokens: longest request.
    """

    block_size: int
    max_batch_tokens: int
    max_running: int
    max_model_tokens: int

    @property
    def table_width(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_tokens // self.block_size)

    @property
    def sampled_rows(self) -> int:
        """Rows of logits of the largest batch."""
        return min(self.max_running, self.max_batch_tokens)

    def arguments(self) -> dict[str, int]:
        """The limits by name, as `KvGeometry.batch_arrays` takes them."""
        return asdict(self)
