"""How many threads the matrix products use, and how they wait.

A BLAS library reads its settings when NumPy is first imported, so they are environment variables, set before
that. What the user has set is left alone.

`OPENBLAS_NUM_THREADS=1`: OpenBLAS waits for its slowest thread in a loop that gives its core away at every
turn. Where other processes want the cores, each of the 150 products of a step then takes milliseconds: the
demo took 323 s with two threads and 25 s with one, on two cores that compilers kept busy. The runner spreads
products over threads of its own instead (`kvpager.runner.products`); set another number and it leaves them to
OpenBLAS.
"""

from __future__ import annotations

import os
import sys

__all__ = ["configure_threads"]

_DEFAULTS = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def configure_threads() -> bool:
    """Sets the defaults for the BLAS threads of this process.

    Returns:
        Whether they take effect: false if NumPy was imported before.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return "numpy" not in sys.modules
