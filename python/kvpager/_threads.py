"""How many threads the matrix products use, and how they wait.

OpenBLAS reads its settings when NumPy is first imported, so they are environment variables, set before that:

- `OPENBLAS_NUM_THREADS` stays as it is (all cores by default).
- `OPENBLAS_THREAD_TIMEOUT=4` lets its idle threads sleep at once. By default they spin for tens of
  milliseconds between two products, which takes cores from attention and from other processes: on two shared
  cores the same decode step took 26 ms either way alone, and a sixth more CPU time with spinning.
- `OMP_WAIT_POLICY=passive` does the same for a BLAS library that is built on OpenMP.

What the user has set is left alone.
"""

from __future__ import annotations

import os
import sys

__all__ = ["configure_threads"]

_DEFAULTS = {"OPENBLAS_THREAD_TIMEOUT": "4", "OMP_WAIT_POLICY": "passive"}


def configure_threads() -> bool:
    """Sets the defaults for the BLAS threads of this process.

    Returns:
        Whether they take effect: false if NumPy was imported before.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return "numpy" not in sys.modules
