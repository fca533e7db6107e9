"""The stream that device work of plans and tables goes to, as a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvpager.attention import kernels
from kvpager.attention._device_arrays import stream_of
from kvpager.errors import InvalidArgumentError

__all__ = ["stream_context"]


@contextlib.contextmanager
def stream_context(stream: Any, like: Any = None) -> Iterator[None]:
    """A stream made CuPy's current one.

    Args:
        stream: CuPy's or torch's; None: the current one of the library of `like`.
        like: an array of that library, whose device is made the current one too; None: CuPy's.

    Yields:
        Nothing.

    Raises:
        InvalidArgumentError: what is given is no stream.
    """
    with contextlib.nullcontext() if like is None else stream_of(like), _as_cupy(stream):
        yield


def _as_cupy(stream: Any) -> Any:
    if stream is None:
        return contextlib.nullcontext()
    if hasattr(stream, "cuda_stream"):  # torch's
        return kernels.load_cupy().cuda.Stream.from_external(stream)
    if hasattr(stream, "__enter__") and hasattr(stream, "ptr"):
        return stream
    raise InvalidArgumentError(f"stream is a {type(stream).__name__}, expected a stream of CuPy or torch")
