"""Arrays of other libraries: torch by pointer, anything with DLPack, nothing imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvpager.attention import (
    append_kv,
    copy_blocks,
    gather_blocks,
    merge_states,
    paged_attention,
    zero_blocks,
)
from kvpager.errors import InvalidArgumentError

from .reference import Case, make_case


def test_torch_and_cupy_are_not_imported_for_numpy_arrays() -> None:
    program = (
        "import sys, numpy as np, kvpager.attention as a\n"
        "c = np.zeros((1, 16, 1, 64), np.float32); q = np.zeros((1, 1, 64), np.float32)\n"
        "a.append_kv(q, q, c, c.copy(), [0])\n"
        "a.paged_attention(q, c, c, block_tables=[[0]], query_start=[0, 1], context_lens=[1])\n"
        "bad = {'torch', 'cupy', 'ml_dtypes', 'kvpager.attention._cupy', 'kvpager.attention._torch'}\n"
        "sys.exit(','.join(bad & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Lender:
    """A producer of DLPack that is no NumPy array."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_arrays_of_any_dlpack_producer_are_used_without_a_copy() -> None:
    case = make_case(1, [(1, 40), (3, 20)])
    expected = case.call(paged_attention)
    lent = Case(
        *map(Lender, (case.query, case.k_cache, case.v_cache)),
        case.block_tables,
        case.query_start,
        case.context_lens,
    )
    assert lent.call(paged_attention).tobytes() == expected.tobytes()
    out = np.zeros_like(expected)
    lent.call(paged_attention, out=Lender(out))
    assert out.tobytes() == expected.tobytes()
    rows = np.ones((1, 2, 64), np.float32)
    append_kv(rows, rows, Lender(case.k_cache), Lender(case.v_cache), [0])
    assert (case.k_cache[0, 0] == 1).all()


def test_what_is_no_array_is_refused() -> None:
    case = make_case(1, [(1, 4)])
    case.k_cache = "cache"
    with pytest.raises(InvalidArgumentError, match="k_cache is a str, expected an array"):
        case.call(paged_attention)


def as_tensors(torch: Any, case: Case, dtype: Any) -> Case:
    arrays = [
        torch.from_numpy(array.astype(np.float32)).to(dtype)
        for array in (case.query, case.k_cache, case.v_cache)
    ]
    integers = [torch.from_numpy(array) for array in (case.block_tables, case.query_start, case.context_lens)]
    return Case(*arrays, *integers, case.options)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_torch_tensors_give_the_bits_of_numpy_arrays(name: str) -> None:
    torch = pytest.importorskip("torch")
    case = make_case(2, [(1, 40), (5, 20), (1, 0)], query_dtype=name, kv_dtype=name)
    tensors = as_tensors(torch, case, getattr(torch, name))
    expected, expected_lse = case.call(paged_attention, return_lse=True)
    out, lse = tensors.call(paged_attention, return_lse=True)
    assert out.dtype == getattr(torch, name)
    assert out.float().numpy().tobytes() == expected.astype(np.float32).tobytes()
    assert lse.numpy().tobytes() == expected_lse.tobytes()
    own = torch.empty_like(out)
    assert tensors.call(paged_attention, out=own) is own
    assert torch.equal(own, out)


def test_torch_caches_are_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        caches = [torch.zeros((4, 16, 2, 64)).to(dtype) for _ in range(2)]
        rows = torch.ones((2, 2, 64))
        append_kv(rows, 2 * rows, *caches, torch.tensor([3, 40]))
        assert (caches[0].float()[0, 3] == 1).all()
        assert (caches[1].float()[2, 8] == 2).all()
        copy_blocks(*caches, torch.tensor([[2, 1]], dtype=torch.int32))
        assert (caches[1].float()[1, 8] == 2).all()
        assert (gather_blocks(caches[0], torch.tensor([0])).float()[0, 3] == 1).all()
        zero_blocks(caches[0], torch.tensor([0]))
        assert (caches[0].float() == 0)[0].all()


def test_torch_states_merge() -> None:
    torch = pytest.importorskip("torch")
    out, lse = torch.ones((2, 1, 8)), torch.zeros((2, 1))
    merged, merged_lse = merge_states(out, lse, 3 * out, lse)
    assert torch.allclose(merged, 2 * out)
    assert torch.allclose(merged_lse, torch.full((2, 1), float(np.log(2.0))))
