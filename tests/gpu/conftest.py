"""GPU tests: marked `gpu`, skipped with the reason where CUDA cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from kvpager.attention import kernels


def _missing() -> str | None:
    """Why no kernel can run here, or None."""
    status = kernels.cuda_status()
    if status["usable"]:
        return None
    missing: Any = status["missing"]
    return "; ".join(f"{item['what']}: {item['reason']}" for item in missing)


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy, on a machine with a GPU."""
    missing = _missing()
    if missing:
        pytest.skip(f"no GPU: {missing}")
    return kernels.load_cupy()
