"""The torch backend: lends tensors to the NumPy or the CuPy backend, where their device is, without a copy.

It is imported when a torch tensor arrives. Results are tensors; a caller's `out` is written in place.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvpager.attention import _numpy
from kvpager.errors import InvalidArgumentError, MissingDependencyError

__all__ = [
    "append_kv",
    "cascade_attention",
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "scatter_blocks",
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


def _lend(value: Any) -> Any:
    """A NumPy view of a CPU tensor's memory; other values as they are."""
    if not hasattr(value, "data_ptr"):
        return value
    if value.device.type != "cpu":
        raise InvalidArgumentError(f"all arrays of a call must be on one device; one is on {value.device}")
    import torch

    tensor = value.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16":
        return tensor.view(torch.int16).numpy().view(_small_float(name))
    if name.startswith("float8"):
        return tensor.view(torch.uint8).numpy().view(_small_float(name))
    return tensor.numpy()


def _on_device(tensor: Any) -> Any:
    """The CuPy backend if the tensor is on a GPU."""
    if not tensor.is_cuda:
        return None
    return importlib.import_module("kvpager.attention._cupy")


def _run(name: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls the backend's function where the first tensor is."""
    device = _on_device(tensors[0])
    if device is not None:
        return getattr(device, name)(*tensors, **options)
    lent = {key: _lend(value) for key, value in options.items()}
    return getattr(_numpy, name)(*map(_lend, tensors), **lent)


def append_kv(key: Any, value: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, **options: Any) -> None:
    """See `kvpager.attention.append_kv`."""
    device = _on_device(k_cache)
    if device is not None:
        device.append_kv(key, value, k_cache, v_cache, slot_mapping, **options)
        return
    _run("append_kv", (key, value, k_cache, v_cache, slot_mapping), options)


def _attend(name: str, tensors: tuple[Any, ...], value_dim: int, options: dict[str, Any]) -> Any:
    query = tensors[0]
    if query.is_cuda:
        return _run(name, tensors, options)
    import torch

    if options.get("out") is None:
        options = {**options, "out": query.new_empty((*query.shape[:-1], value_dim))}
    result = _run(name, tensors, options)
    if isinstance(result, tuple):
        given = options.get("lse")
        return options["out"], torch.from_numpy(result[1]) if given is None else given
    return options["out"]


def paged_attention(query: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
    """See `kvpager.attention.paged_attention`."""
    return _attend("paged_attention", (query, k_cache, v_cache), v_cache.shape[-1], options)


def cascade_attention(query: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
    """See `kvpager.attention.cascade_attention`."""
    return _attend("cascade_attention", (query, k_cache, v_cache), v_cache.shape[-1], options)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """See `kvpager.attention.merge_states`."""
    out = out_a.new_empty(out_a.shape) if out is None else out
    lse = lse_a.new_empty(lse_a.shape) if lse is None else lse
    _run("merge_states", (out_a, lse_a, out_b, lse_b), {"out": out, "lse": lse})
    return out, lse


def copy_blocks(k_cache: Any, v_cache: Any, block_copies: Any) -> None:
    """See `kvpager.attention.copy_blocks`."""
    _run("copy_blocks", (k_cache, v_cache, block_copies), {})


def zero_blocks(cache: Any, block_ids: Any) -> None:
    """See `kvpager.attention.zero_blocks`."""
    _run("zero_blocks", (cache, block_ids), {})


def gather_blocks(cache: Any, block_ids: Any, *, out: Any = None) -> Any:
    """See `kvpager.attention.gather_blocks`."""
    out = cache.new_empty((len(block_ids), *cache.shape[1:])) if out is None else out
    _run("gather_blocks", (cache, block_ids), {"out": out})
    return out


def scatter_blocks(cache: Any, block_ids: Any, values: Any) -> None:
    """See `kvpager.attention.scatter_blocks`."""
    _run("scatter_blocks", (cache, block_ids, values), {})
