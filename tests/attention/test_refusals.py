"""What attention refuses: overlaps, foreign byte orders, numbers that are none, arrays of another kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpager.attention import (
    append_kv,
    copy_blocks,
    gather_blocks,
    merge_states,
    mla_decode,
    paged_attention,
    prefix_groups,
    scatter_blocks,
    zero_blocks,
)
from kvpager.errors import InvalidArgumentError

from .reference import Case, make_case

FOREIGN = ">" if np.little_endian else "<"


@pytest.fixture
def case() -> Case:
    return make_case(6, [(1, 20), (3, 33)])


def foreign(array: Any) -> Any:
    """The same numbers in the other byte order."""
    return array.astype(array.dtype.newbyteorder(FOREIGN))


def refused(text: str, call: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        call()


@pytest.mark.parametrize("name", ["query", "k_cache", "v_cache", "out", "lse"])
def test_attention_refuses_a_foreign_byte_order(case: Case, name: str) -> None:
    extra: dict[str, Any] = {}
    if name in ("out", "lse"):
        shape = case.query.shape if name == "out" else case.query.shape[:2]
        extra[name] = foreign(np.full(shape, 5, np.float32))
    else:
        setattr(case, name, foreign(getattr(case, name)))
    refused(f"{name} has dtype .f4, another byte order", lambda: case.call(paged_attention, **extra))
    assert not extra or (extra[name] == 5).all()


def test_moves_refuse_a_foreign_byte_order() -> None:
    rows, cache = np.ones((2, 2, 64), np.float32), np.zeros((3, 16, 2, 64), np.float32)
    slots = [0, 1]
    refused("key has dtype .f4", lambda: append_kv(foreign(rows), rows, cache, cache.copy(), slots))
    refused("value has dtype .f4", lambda: append_kv(rows, foreign(rows), cache.copy(), cache, slots))
    refused("v_cache has dtype .f4", lambda: append_kv(rows, rows, cache, foreign(cache), slots))
    for call in (
        lambda: zero_blocks(foreign(cache), [0]),
        lambda: gather_blocks(foreign(cache), [0]),
        lambda: copy_blocks(cache, foreign(cache), [[0, 1]]),
        lambda: scatter_blocks(foreign(cache), [0], foreign(cache[:1])),
        lambda: merge_states(foreign(rows), rows[..., 0], rows, rows[..., 0]),
    ):
        refused("another byte order", call)
    assert (cache == 0).all()


def test_integers_in_a_foreign_byte_order_are_read_as_the_numbers_that_they_are(case: Case) -> None:
    expected = case.call(paged_attention)
    case.block_tables, case.query_start = foreign(case.block_tables), foreign(case.query_start)
    assert case.call(paged_attention).tobytes() == expected.tobytes()


def test_blocks_that_overlap_their_target_are_refused() -> None:
    cache = np.arange(8 * 4 * 2 * 8, dtype=np.float32).reshape(8, 4, 2, 8)
    before, rows = cache.copy(), np.ones((4, 2, 8), np.float32)
    refused(
        "out and cache share memory: out, of 512 bytes, begins 256",
        lambda: gather_blocks(cache, [0, 1], out=cache[1:3]),
    )
    refused("cache and values share memory", lambda: scatter_blocks(cache, [3, 4], cache[3:5]))
    refused("k_cache and key share memory", lambda: append_kv(cache[0], None, cache, None, range(4)))
    for values in (cache, cache[:]):
        refused(
            "v_cache and k_cache share memory: v_cache, of 2048 bytes, begins 0 bytes after k_cache",
            lambda values=values: append_kv(rows, rows, cache, values, range(4)),
        )
    assert (cache == before).all()
    # Views that lie in one array without sharing an element are fine.
    both = np.zeros((4, 2, 4, 2, 8), np.float32)
    both[:, 0] = 3
    gather_blocks(both[:, 0], [2, 1], out=both[:2, 1])
    assert (both[:2, 1] == 3).all()
    assert (both[2:, 1] == 0).all()
    append_kv(rows, rows, both[:, 0], both[:, 1], range(4))
    assert (both[0] == 1).all()


def test_an_output_that_lies_in_a_cache_is_refused(case: Case) -> None:
    inside = case.k_cache[:1, :4, :2].reshape(4, 2, 64)
    assert np.shares_memory(inside, case.k_cache)
    case.query = case.query[:, :2]
    refused("out and k_cache share memory", lambda: case.call(paged_attention, out=inside))


def test_outputs_that_overlap_themselves_are_refused(case: Case) -> None:
    tokens, heads, dim = case.query.shape
    one = np.full((1, heads, dim), 5, np.float32)
    spread = np.lib.stride_tricks.as_strided(one, (tokens, heads, dim), (0, dim * 4, 4), writeable=True)
    refused("out is written, but overlaps itself: shape", lambda: case.call(paged_attention, out=spread))
    sliding = np.lib.stride_tricks.as_strided(
        np.zeros(999, np.float32), (tokens, heads), (4, 4), writeable=True
    )
    refused("lse is written, but overlaps itself", lambda: case.call(paged_attention, lse=sliding))
    assert (one == 5).all()
    same = np.lib.stride_tricks.as_strided(
        np.zeros((16, 2, 64), np.float32), (4, 16, 2, 64), (0, 512, 256, 4)
    )
    refused("cache is written, but overlaps itself", lambda: zero_blocks(same, [0]))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_expanded_tensors_are_refused_as_outputs(name: str) -> None:
    torch = pytest.importorskip("torch")
    case = as_tensors(torch, make_case(1, [(1, 5), (1, 9), (1, 3)]))
    target = torch.zeros(1, 4, 64).expand(3, 4, 64)
    target = target if name == "out" else target[..., 0]
    refused(f"{name} is written, but overlaps itself", lambda: case.call(paged_attention, **{name: target}))
    assert (target == 0).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sinks": [0.0, np.nan, 0.0, 0.0]}, r"sinks\[1\] is nan"),
        ({"sinks": [0.0, 0.0, 0.0, np.inf]}, r"sinks\[3\] is inf"),
        ({"alibi_slopes": [np.nan, 0.0, 0.0, 0.0]}, r"alibi_slopes\[0\] is nan"),
        ({"alibi_slopes": [0.0, np.inf, 0.0, 0.0]}, r"alibi_slopes\[1\] is inf"),
        ({"alibi_slopes": [0.0, -np.inf, 0.0, 0.0]}, r"alibi_slopes\[1\] is -inf"),
        ({"alibi_slopes": [0.0, 1e300, 0.0, 0.0]}, r"alibi_slopes\[1\] is 1e\+300, too large for float32"),
        ({"sinks": np.array([0.0, 0.0, -1e39, 0.0])}, r"sinks\[2\] is -1e\+39, too large for float32"),
        ({"sinks": ["a", "b", "c", "d"]}, "sinks has dtype <U1, expected numbers"),
        ({"sinks": [[0.0], [0.0, 1.0]]}, "sinks is no array of numbers"),
        ({"sinks": 1.0}, "sinks has 0 dimensions"),
        ({"scale": "x"}, "scale is 'x', expected a number"),
        ({"scale": True}, "scale is True"),
        ({"scale": 1e300}, r"scale is 1e\+300, too large for float32"),
        ({"scale": 10**400}, "scale is 1000.*expected a number"),
        ({"softcap": [1.0]}, r"softcap is \[1.0\]"),
        ({"softcap": 1e39}, r"softcap is 1e\+39, too large"),
        ({"window": 2.5}, "window is 2.5, expected an integer 1 to 2147483647"),
        ({"window": 2**31}, "window is 2147483648"),
        ({"window": True}, "window is True"),
        ({"causal": 1}, "causal is 1, expected True or False"),
        ({"return_lse": "no"}, "return_lse is 'no'"),
        ({"kv_dtype": 3}, "kv_dtype is 3"),
        ({"k_scale": "x"}, "k_scale is 'x', expected a number"),
        ({"k_scale": [1.0, 1e300]}, r"k_scale\[1\] is 1e\+300, too large for float32"),
        ({"v_scale": {}}, "v_scale is {}, expected a number"),
        ({"table_rows": ["a", "b"]}, "table_rows has dtype <U1, expected integers"),
        ({"out": [1.0]}, "out is a list, expected an array"),
        ({"lse": 3}, "lse is a int, expected an array"),
    ],
)
def test_options_of_a_wrong_kind_are_refused_with_the_number_and_its_place(
    case: Case, options: dict[str, Any], text: str
) -> None:
    refused(text, lambda: case.call(paged_attention, **options))


def test_a_sink_of_minus_infinity_is_no_sink(case: Case) -> None:
    expected = case.call(paged_attention)
    assert case.call(paged_attention, sinks=[-np.inf] * 4).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_tables": [[0, 1], [2]]}, "block_tables is no array of integers: .*inhomogeneous"),
        ({"block_tables": [[0, 2**40], [2, 3]]}, r"block_tables\[0, 1\] is 1099511627776, must be"),
        ({"block_tables": None}, "block_tables has 0 dimensions"),
        ({"context_lens": "ab"}, "context_lens has 0 dimensions"),
        ({"context_lens": [2**70, 1]}, "context_lens has dtype object, expected integers"),
        ({"v_cache": None}, "v_cache is a NoneType, expected an array"),
        ({"v_cache": [[1.0]]}, "v_cache is a list, expected an array"),
        ({"v_cache": np.float32(1)}, "v_cache is a numpy.float32|v_cache has 0 dimensions"),
        ({"query": np.zeros((), np.float32)}, "query has 0 dimensions, expected 3"),
    ],
)
def test_arrays_of_a_wrong_kind_are_refused_by_their_names(
    case: Case, changes: dict[str, Any], text: str
) -> None:
    for name, value in changes.items():
        setattr(case, name, value)
    refused(text, lambda: case.call(paged_attention))


def test_append_names_the_argument_that_does_not_fit() -> None:
    rows, cache = np.ones((2, 2, 64), np.float32), np.zeros((3, 16, 2, 64), np.float32)
    other = cache.copy()
    refused(
        "slot_mapping has 1 entry, but key has 2 tokens", lambda: append_kv(rows, rows, cache, other, [4])
    )
    refused(r"key has shape \[2, 1, 64\]", lambda: append_kv(rows[:, :1], rows, cache, other, [4, 5]))
    refused(r"value has shape \[2, 2, 32\]", lambda: append_kv(rows, rows[..., :32], cache, other, [4, 5]))
    refused("value has dtype int8", lambda: append_kv(rows, rows.astype(np.int8), cache, other, [4, 5]))
    refused("key is a list", lambda: append_kv([1.0], rows, cache, other, [4, 5]))
    refused("block_ids has 0 dimensions", lambda: gather_blocks(cache, 1))
    refused(r"block_copies has shape \(1, 3\)", lambda: copy_blocks(cache, None, [[0, 1, 2]]))
    refused("block_copies is no array of integers", lambda: copy_blocks(cache, None, [[0, 1], [2]]))
    refused("cache has 0 dimensions", lambda: zero_blocks(np.zeros((), np.float32), [0]))
    assert (cache == 0).all()


def test_states_are_refused_by_their_names() -> None:
    out, lse = np.ones((2, 1, 8), np.float32), np.zeros((2, 1), np.float32)
    refused(r"out has shape \[1, 1, 8\]", lambda: merge_states(out, lse, out, lse, out=out[:1].copy()))
    refused("lse_b has shape", lambda: merge_states(out, lse, out, lse[:1]))
    refused("out_b is a list", lambda: merge_states(out, lse, [1.0], lse))


def test_a_latent_decode_needs_a_scale_and_an_integer_rank() -> None:
    query, cache = np.zeros((1, 2, 40), np.float32), np.zeros((1, 16, 1, 40), np.float32)
    batch: dict[str, Any] = {"block_tables": [[0]], "query_start": [0, 1], "context_lens": [1]}
    refused(
        "scale is None, expected a number",
        lambda: mla_decode(query, cache, kv_lora_rank=32, scale=None, **batch),  # type: ignore[arg-type]
    )
    for rank, text in (("x", "kv_lora_rank is 'x'"), (0, "kv_lora_rank is 0"), (41, "kv_lora_rank = 41")):
        refused(text, lambda rank=rank: mla_decode(query, cache, kv_lora_rank=rank, scale=0.1, **batch))
    refused("latent_cache is a list", lambda: mla_decode(query, [0], kv_lora_rank=32, scale=0.1, **batch))
    assert mla_decode(query, cache, kv_lora_rank=32, scale=0.1, **batch).shape == (1, 2, 32)


def as_tensors(torch: Any, case: Case) -> Case:
    arrays = [torch.from_numpy(a) for a in (case.query, case.k_cache, case.v_cache, case.block_tables)]
    return Case(*arrays, torch.from_numpy(case.query_start), torch.from_numpy(case.context_lens))


def test_arrays_of_another_kind_are_refused_by_their_names(case: Case) -> None:
    torch = pytest.importorskip("torch")
    rows, cache = np.ones((1, 2, 64), np.float32), np.zeros((2, 16, 2, 64), np.float32)
    caches = [torch.zeros(2, 16, 2, 64) for _ in range(2)]
    kinds = "key is a numpy.ndarray, but k_cache is a torch.Tensor: all arrays of a call are of one kind"
    refused(kinds, lambda: append_kv(rows, rows, *caches, [0]))
    tensors = as_tensors(torch, case)
    tensors.v_cache = None
    refused("v_cache is a NoneType", lambda: tensors.call(paged_attention))
    half = case.k_cache.astype(np.float32)
    case.k_cache = torch.from_numpy(half).to(torch.bfloat16)
    refused("k_cache is a torch.Tensor, but query is a numpy.ndarray", lambda: case.call(paged_attention))
    refused("block_ids has 0 dimensions", lambda: gather_blocks(caches[0], 1))
    refused("values is a numpy.ndarray", lambda: scatter_blocks(caches[0], [0], cache[:1]))
    refused(
        "query is a tensor of torch.float32 that NumPy cannot read",
        lambda: paged_attention(
            torch.zeros(1, 2, 64).to_sparse(),
            *caches,
            block_tables=[[0]],
            query_start=[0, 1],
            context_lens=[1],
        ),
    )


def test_subclasses_of_tensors_are_tensors() -> None:
    torch = pytest.importorskip("torch")

    class Named(torch.Tensor):
        """A tensor with a name, defined far from torch."""

    case = as_tensors(torch, make_case(2, [(1, 20), (3, 9)]))
    expected = case.call(paged_attention)
    for name in ("query", "k_cache", "v_cache"):
        setattr(case, name, getattr(case, name).as_subclass(Named))
    out = case.call(paged_attention)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out.as_subclass(torch.Tensor), expected)
    sinks = torch.tensor([0.5, -torch.inf, 1.0, 2.0], dtype=torch.float64)
    with_sinks = case.call(paged_attention, sinks=sinks.as_subclass(Named))
    assert not torch.equal(with_sinks.as_subclass(torch.Tensor), expected)


def test_groups_are_found_in_every_table_that_attention_takes(case: Case) -> None:
    torch = pytest.importorskip("torch")
    tables = np.array([[3, 1, 2], [3, 1, 4]], np.int32)
    batch: dict[str, Any] = {"query_start": [0, 1, 2], "context_lens": [40, 40], "block_size": 16}
    found = [
        prefix_groups(kind, min_tokens=1, **batch)
        for kind in (
            tables,
            tables.astype(np.int64),
            foreign(tables),
            torch.from_numpy(tables),
            tables.tolist(),
        )
    ]
    assert [groups["prefix_lens"].tolist() for groups in found] == [[32]] * 5
    refused("block_size is 'x'", lambda: prefix_groups(tables, **(batch | {"block_size": "x"})))
    refused("min_tokens is 2.5", lambda: prefix_groups(tables, min_tokens=2.5, **batch))  # type: ignore[arg-type]
