"""The demo model and what an independent implementation says about it, loaded once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_items import GoldenItem, read_golden

from kvpager.runner import LoadedModel, find_demo_model, load_model


@pytest.fixture(scope="session")
def golden(shared_dir: Path) -> list[GoldenItem]:
    return read_golden(shared_dir / "models" / "smollm2_golden.json")


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    assert find_demo_model() is not None, "make setup installs the demo model"
    return load_model("demo")
