"""Products spread over threads are the products."""

from __future__ import annotations

import numpy as np
import pytest

from kvpager.runner import products


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 17])
def test_split_product_equals_the_product(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, num_rows: int
) -> None:
    monkeypatch.setattr(products, "_num_threads", lambda: num_threads)
    monkeypatch.setattr(products, "_SPLIT_ELEMENTS", 1)
    monkeypatch.setattr(products, "_SPLIT_ELEMENTS_OF_ONE_ROW", 1)
    generator = np.random.default_rng(num_rows)
    for shape in [(24, 1), (24, 16), (40, 100), (8, 1000)]:
        rows = generator.normal(size=(num_rows, shape[0])).astype(np.float32)
        weight = generator.normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(products.product(rows, weight), rows @ weight, rtol=1e-4, atol=1e-4)


def test_error_in_any_part_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_num_threads", lambda: 2)
    monkeypatch.setattr(products, "_SPLIT_ELEMENTS", 1)
    with pytest.raises(ValueError, match="mismatch"):
        products.product(np.zeros((4, 5), np.float32), np.zeros((6, 64), np.float32))
