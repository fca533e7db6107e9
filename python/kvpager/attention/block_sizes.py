"""Which block sizes the kernels do: known before there is an array, to refuse others at the start."""

from __future__ import annotations

from kvpager.errors import InvalidArgumentError

__all__ = ["MAX_BLOCK_SIZE", "check_block_size", "is_block_size"]

MAX_BLOCK_SIZE = 256


def is_block_size(block_size: int) -> bool:
    """Whether paged attention does blocks of so many tokens: a power of two from 1 to `MAX_BLOCK_SIZE`."""
    return 1 <= block_size <= MAX_BLOCK_SIZE and block_size & (block_size - 1) == 0


def check_block_size(block_size: int) -> None:
    """Refuses a block size that paged attention does not do.

    Raises:
        InvalidArgumentError: with the size.
    """
    if not is_block_size(block_size):
        raise InvalidArgumentError(
            f"block_size is {block_size}, must be a power of two from 1 to {MAX_BLOCK_SIZE}"
        )
