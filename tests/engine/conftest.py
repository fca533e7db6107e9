"""An engine over synthetic tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from synthetic import idle

from kvpager.engine import Engine, EngineConfig, NullRunner


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(NullRunner(), EngineConfig(num_blocks=256))
    yield made
    assert idle(made)
