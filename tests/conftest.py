"""What all tests share: where the real workloads and model facts are, and the closing lines of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvpager._threads import configure_threads

configure_threads()  # before NumPy is imported

# A run in the background of a script ignores SIGINT, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of real traces and model facts: $KVPAGER_SHARED, or `shared` beside the checkout."""
    path = Path(os.environ.get("KVPAGER_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "traces").is_dir():
        pytest.skip(f"no traces and model facts at {path} (set KVPAGER_SHARED)")
    return path
