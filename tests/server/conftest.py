"""One server of synthetic tokens for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import Running, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running
        running.wait_until_idle()
