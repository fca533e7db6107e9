"""The torch backend: lends tensors to the NumPy or the CuPy backend, where their device is, without a copy.

It is imported when a torch tensor arrives. Results are tensors; a caller's `out` is written in place.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvpager.attention import _numpy
from kvpager.attention._dispatch import is_torch
from kvpager.attention._host_arrays import ints
from kvpager.errors import InvalidArgumentError, MissingDependencyError

__all__ = [
    "append_kv",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "scatter_blocks",
    "workspace_bytes",
    "zero_blocks",
]


def _small_float(name: str) -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            f"{name} tensors on the CPU need ml_dtypes: pip install ml_dtypes"
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def _lend(name: str, value: Any) -> Any:
    """A NumPy view of a CPU tensor's memory; other values as they are."""
    if not is_torch(value):
        return value
    if value.device.type != "cpu":
        raise InvalidArgumentError(f"all arrays of a call must be on one device; {name} is on {value.device}")
    import torch

    dtype = str(value.dtype).removeprefix("torch.")
    try:
        tensor = value.detach()
        if dtype == "bfloat16":
            return tensor.view(torch.int16).numpy().view(_small_float(dtype))
        if dtype in ("float8_e4m3fn", "float8_e5m2"):
            return tensor.view(torch.uint8).numpy().view(_small_float(dtype))
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"{name} is a tensor of {value.dtype} that NumPy cannot read: {error}"
        ) from error


def _run(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """Calls the backend's function where the first tensor is."""
    if next(iter(tensors.values())).is_cuda:
        device = importlib.import_module("kvpager.attention._cupy")
        return getattr(device, name)(*tensors.values(), **options)
    arrays = [_lend(key, value) for key, value in tensors.items()]
    return getattr(_numpy, name)(*arrays, **{key: _lend(key, value) for key, value in options.items()})


def append_kv(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, **options: Any) -> None:
    """See `kvpager.attention.append_kv`."""
    tensors = {"key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache}
    _run("append_kv", tensors | {"slot_mapping": slot_mapping}, options)


def _attend(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    query, values = tensors["query"], tensors["v_cache"]
    if query.is_cuda:
        return _run(name, tensors, options)
    import torch

    if options.get("out") is None and query.ndim and values.ndim:
        options = {**options, "out": query.new_empty((*query.shape[:-1], values.shape[-1]))}
    result = _run(name, tensors, options)
    if isinstance(result, tuple):
        given = options.get("lse")
        return options["out"], torch.from_numpy(result[1]) if given is None else given
    return options["out"]


def paged_attention(query: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
    """See `kvpager.attention.paged_attention`."""
    return _attend("paged_attention", {"query": query, "k_cache": k_cache, "v_cache": v_cache}, options)


def cascade_attention(query: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
    """See `kvpager.attention.cascade_attention`."""
    return _attend("cascade_attention", {"query": query, "k_cache": k_cache, "v_cache": v_cache}, options)


def workspace_bytes(query: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
    """See `kvpager.attention.workspace_bytes`."""
    return _run("workspace_bytes", {"query": query, "k_cache": k_cache, "v_cache": v_cache}, options)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """See `kvpager.attention.merge_states`."""
    out = out_a.new_empty(out_a.shape) if out is None else out
    lse = lse_a.new_empty(lse_a.shape) if lse is None else lse
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    _run("merge_states", tensors, {"out": out, "lse": lse})
    return out, lse


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """See `kvpager.attention.copy_blocks`."""
    _run("copy_blocks", {"k_cache": k_cache, "v_cache": v_cache, "block_copies": block_copies}, {})


def zero_blocks(cache: Any, block_ids: Any) -> None:
    """See `kvpager.attention.zero_blocks`."""
    _run("zero_blocks", {"cache": cache, "block_ids": block_ids}, {})


def gather_blocks(cache: Any, block_ids: Any, *, out: Any = None) -> Any:
    """See `kvpager.attention.gather_blocks`."""
    if out is None and not cache.is_cuda:
        block_ids = ints("block_ids", block_ids, np.int32)
        out = cache.new_empty((len(block_ids), *cache.shape[1:]))
    result = _run("gather_blocks", {"cache": cache, "block_ids": block_ids}, {"out": out})
    return result if out is None else out


def scatter_blocks(cache: Any, block_ids: Any, values: Any) -> None:
    """See `kvpager.attention.scatter_blocks`."""
    _run("scatter_blocks", {"cache": cache, "block_ids": block_ids, "values": values}, {})
