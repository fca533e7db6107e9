"""Every combination of features maps to kernels of the manifest, or is refused with the reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvpager.attention import _manifest as manifest
from kvpager.attention._launch import AttentionCall, attention_launches, tail_launches
from kvpager.attention._plan import plan_room, view_of
from kvpager.attention._views import ArrayView
from kvpager.errors import InvalidArgumentError

QUERY_DTYPES = tuple(manifest.DTYPE_CODES)
KV_DTYPES = tuple(manifest.KV_TYPES)
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 33, 64, 128)
SHIPPED = set(manifest.all_instantiations())
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}


def served(**combination: Any) -> tuple[manifest.KernelClass, ...]:
    """The classes of a combination, which must cover every number of rows once with shipped kernels."""
    classes = manifest.choose_attention(**combination)
    assert all(c.kernel.instantiation in SHIPPED for c in classes), combination
    lowest = min(classes[0].rows_above, combination["group"] - 1)
    assert classes[0].rows_above <= lowest
    for before, after in itertools.pairwise(classes):
        assert before.rows_up_to == after.rows_above, combination
    assert classes[-1].rows_up_to == manifest.ANY_ROWS
    return classes


def test_every_supported_combination_is_served_and_every_kernel_serves_one() -> None:
    used = set()
    for kv, query, dim, group in itertools.product(KV_DTYPES, QUERY_DTYPES, manifest.HEAD_DIMS, GROUPS):
        used |= {
            c.kernel.instantiation
            for c in served(kv_dtype=kv, query_dtype=query, head_dim=dim, value_dim=dim, group=group)
        }
    for dtype, group in itertools.product(("float16", "bfloat16"), GROUPS):
        used |= {
            c.kernel.instantiation
            for c in served(kv_dtype=dtype, query_dtype=dtype, head_dim=576, value_dim=512, group=group)
        }
    attention = {i for i in SHIPPED if i.kernel in ("paged_decode", "paged_prefill", "mla_decode")}
    assert used == attention, "kernels that nothing uses"


@pytest.mark.parametrize(
    ("combination", "reason"),
    [
        *[({"head_dim": dim}, f"head_dim {dim}") for dim in (8, 32, 72, 100, 112, 160, 512, 1024)],
        ({"kv_dtype": "float64"}, "a cache of float64"),
        ({"kv_dtype": "uint8"}, "a cache of uint8"),
        ({"query_dtype": "float8_e4m3"}, "queries of float8_e4m3"),
        ({"value_dim": 64}, "value heads of 64"),
        ({"head_dim": 576, "value_dim": 512, "kv_dtype": "float32"}, "a latent cache of float32"),
        ({"head_dim": 576, "value_dim": 512, "query_dtype": "bfloat16"}, "with queries of bfloat16"),
        ({"head_dim": 576, "value_dim": 512, "kv_dtype": "float8_e4m3"}, "a latent cache of float8_e4m3"),
        ({"head_dim": 576}, "head_dim 576"),
    ],
)
def test_what_has_no_kernel_is_refused_with_what_there_is(combination: dict[str, Any], reason: str) -> None:
    plain = {"kv_dtype": "float16", "query_dtype": "float16", "head_dim": 128, "group": 4}
    with pytest.raises(InvalidArgumentError, match=f"no kernel for .*{reason}.*; there are"):
        manifest.choose_attention(**(plain | combination))


def dense(shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A view of memory that is never touched."""
    size = ITEM_BYTES.get(dtype, 4)
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return ArrayView(4096, shape, tuple(strides), dtype, size)


def make_call(kv: str, query: str, dim: int, block_size: int, **options: Any) -> AttentionCall:
    """A batch of three sequences with 8 query and 2 KV heads."""
    caches = [dense((9, block_size, 2, dim), kv) for _ in range(2)]
    if kv == "int8":
        options |= {f"{name}_scale": dense((9, block_size, 2), "float32") for name in "kv"}
    return AttentionCall(
        dense((7, 8, dim), query),
        *caches,
        dense((7, 8, dim), query),
        dense((3, 5), "int32"),
        dense((4,), "int32"),
        dense((3,), "int32"),
        **options,
    )


def test_features_are_run_time_values_of_the_same_kernels() -> None:
    heads = dense((8,), "float32")
    choices: dict[str, tuple[Any, ...]] = {
        "window": (None, 33),
        "softcap": (None, 30.0),
        "alibi_slopes": (None, heads),
        "sinks": (None, heads),
        "causal": (True, False),
        "lse": (None, dense((7, 8), "float32")),
    }
    features = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    blocks = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for number, (kv, query, dim) in enumerate(itertools.product(KV_DTYPES, QUERY_DTYPES, manifest.HEAD_DIMS)):
        names = set()
        for options in features:
            call = make_call(kv, query, dim, blocks[number % len(blocks)], **options)
            names.add(tuple(c.kernel.instantiation.name for c in call.kernels()))
        assert len(names) == 1


def test_launches_of_every_kernel_stay_within_the_devices_limits() -> None:
    for kv, query, dim in itertools.product(KV_DTYPES, QUERY_DTYPES, manifest.HEAD_DIMS):
        call = make_call(kv, query, dim, 16)
        launches = tail_launches(call)
        for item in call.kernels():
            bounds = {"max_sequences": 512, "max_tokens": 8192, "group": 4, "num_kv_heads": 2}
            room = plan_room(item.kernel, target_blocks=264, **bounds)
            launches += attention_launches(call, item.kernel, view_of(4096, 4096, 4096, room, 4096, 4096))
        for launch in launches:
            assert launch.instantiation in SHIPPED
            assert 0 < launch.grid[0] < 2**31
            assert 0 < launch.grid[1] < 2**16
            assert launch.threads in (128, 64)
            assert launch.shared_bytes <= 99 * 1024
