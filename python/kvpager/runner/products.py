"""Matrix products on the CPU, spread over threads that sleep while they wait.

OpenBLAS's own threads wait in a loop that gives the core away at every turn, which collapses on busy cores
(see `kvpager._threads`). Here each thread multiplies its own columns with a BLAS of one thread, and the
caller sleeps until the others are done. NumPy releases the interpreter lock in a product, so threads of
Python will do.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np

from kvpager import attention
from kvpager.runner.weights import FloatArray

__all__ = ["product"]

_FEW_ROWS = 3
_SPLIT_ELEMENTS = 1 << 19
"""Weights with fewer elements are not worth waking a thread for, which takes about 0.1 ms."""
_SPLIT_ELEMENTS_OF_ONE_ROW = 1 << 22
"""The same for one row, whose product only reads the weight once."""
_COLUMN_STEP = 16


def product(rows: FloatArray, weight: FloatArray) -> FloatArray:
    """Returns `rows @ weight`.

    Args:
        rows: [T, in] fp32, contiguous.
        weight: [in, out] fp32, contiguous.

    Returns:
        [T, out], a new array.
    """
    out = np.empty((len(rows), weight.shape[1]), np.float32)
    worthwhile = _SPLIT_ELEMENTS if len(rows) > 1 else _SPLIT_ELEMENTS_OF_ONE_ROW
    bounds = _column_bounds(weight.shape[1], _num_threads() if weight.size >= worthwhile else 1)
    parts = list(pairwise(bounds))
    others = [
        _threads().submit(_multiply, rows, weight[:, start:end], out[:, start:end])
        for start, end in parts[1:]
    ]
    _multiply(rows, weight[:, : bounds[1]], out[:, : bounds[1]])
    for other in others:
        other.result()
    return out


def _multiply(rows: FloatArray, weight: FloatArray, out: FloatArray) -> None:
    """Writes `rows @ weight` into `out`.

    OpenBLAS packs the whole weight before it multiplies two rows or more; up to three rows are faster as so
    many products of a vector (a decode step of two sequences: 51 ms of CPU time against 76).
    """
    if not 1 < len(rows) <= _FEW_ROWS:
        np.matmul(rows, weight, out=out)
        return
    for row, result in zip(rows, out, strict=True):
        np.matmul(row, weight, out=result)


@cache
def _num_threads() -> int:
    """Threads to use: those of attention, where BLAS was told to use one; else BLAS spreads it itself."""
    return attention.get_num_threads() if os.environ.get("OPENBLAS_NUM_THREADS") == "1" else 1


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _num_threads() - 1), thread_name_prefix="kvpager-product")


@cache
def _column_bounds(num_columns: int, num_parts: int) -> tuple[int, ...]:
    """Returns ascending bounds of at most `num_parts` column ranges of equal width, from 0 to the end."""
    width = -(-num_columns // (num_parts * _COLUMN_STEP)) * _COLUMN_STEP
    return (*range(0, num_columns, width), num_columns)
