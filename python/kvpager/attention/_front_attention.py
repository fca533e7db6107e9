"""The public functions that compute attention: what each call means, for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from kvpager.attention._arguments import attention_options, integer, number
from kvpager.attention._dispatch import Array, backend_of, on_a_device
from kvpager.attention._host_arrays import array_of
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from types import ModuleType

    from kvpager.attention.device_plan import AttentionPlan

__all__ = [
    "AttentionOptions",
    "merge_states",
    "mla_decode",
    "paged_attention",
    "prepared",
    "workspace_bytes",
]


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `paged_attention`, which has what they mean; the first three are required."""

    block_tables: Array
    query_start: Array
    context_lens: Array
    table_rows: Array | None
    scale: float | None
    window: int | None
    softcap: float | None
    alibi_slopes: Array | None
    sinks: Array | None
    k_scale: Array | float | None
    v_scale: Array | float | None
    kv_dtype: str | None
    out: Array | None
    lse: Array | None
    return_lse: bool
    causal: bool
    workspace: Array | None


class LatentOptions(TypedDict, total=False):
    """The keyword arguments of `paged_attention` that a latent cache has; the first three are required."""

    block_tables: Array
    query_start: Array
    context_lens: Array
    table_rows: Array | None
    out: Array | None
    lse: Array | None
    return_lse: bool
    causal: bool
    plan: AttentionPlan | None
    workspace: Array | None


def paged_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_tables: Array,
    table_rows: Array | None = None,
    query_start: Array,
    context_lens: Array,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_dtype: str | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    causal: bool = True,
    plan: AttentionPlan | None = None,
    workspace: Array | None = None,
) -> Any:
    """Attention of a ragged batch over paged keys and values: decodes, prefill chunks, verification.

    Query row `j` of a sequence with `q_len` rows stands at position `context_len - q_len + j` and sees the
    positions up to its own (`causal`), of those the last `window`. Slots that no query sees are not read.

    Args:
        query: `[num_tokens, num_query_heads, head_dim]`, float32, float16 or bfloat16. Head `h` uses KV head
            `h // (num_query_heads // num_kv_heads)`. `head_dim` 1 to 1024.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; block sizes are powers of two up to 256.
        v_cache: `[num_blocks, block_size, num_kv_heads, value_dim]`, the dtype of `k_cache`.
        block_tables: `[rows, max_blocks]`, int32. Entries outside a sequence's visible range may hold
            anything. On the CPU int32 is read in place and must lie at multiples of 4 bytes (anything
            else is refused); other integer types are converted, the whole table at each call.
        table_rows: `[num_sequences]`, int32: each sequence's row; its own index if None.
        query_start: `[num_sequences + 1]`, int32: ranges of query rows. Rows past the last range give zeros.
        context_lens: `[num_sequences]`, int32: tokens in the cache, the query's included. With 0 the
            sequence's rows give zeros and its table row is not read.
        scale: factor of the products; `head_dim ** -0.5` if None.
        window: positions that a query sees at most, its own included.
        softcap: `softcap * tanh(score / softcap)`.
        alibi_slopes: `[num_query_heads]`, finite, read as float32: adds `slope * (key position - query
            position)`.
        sinks: `[num_query_heads]`, read as float32: the logit of one more key without a value; -inf is none.
        k_scale: scale of a quantised cache, as for `append_kv`.
        v_scale: the same for values.
        kv_dtype: as for `append_kv`.
        out: `[num_tokens, num_query_heads, value_dim]`, written and returned; a new array of the query's
            dtype if None. Shares no memory with the caches.
        lse: `[num_tokens, num_query_heads]`, float32, written: the natural logarithm of the sum of
            `exp(score)` over the keys that the row sees, by the final scores (scaled, capped, ALiBi
            added). With `sinks` the sum has `exp(sink)` of the head too. So a row that sees no key has
            -inf, and with `sinks` the sink itself; its output is zeros either way. Of parts that
            `merge_states` is to merge, one gets the sinks.
        return_lse: also return `lse`; a new array if None was given.
        causal: whether a query sees nothing past its own position.
        plan: for arrays on a device: an `AttentionPlan` that the caller keeps up to date. Without one a plan
            is made for this call, which waits for the device if the lengths are there; with one nothing
            waits, so that the call can be captured in a graph.
        workspace: memory for the partial results of work that is split, for arrays on the host: contiguous,
            of any dtype, with at least `workspace_bytes` bytes, used by no other call meanwhile. None: the
            call makes it. On a device it belongs to the plan (`AttentionPlan(workspace=...)`).

    Returns:
        The output, or (output, log-sum-exp).

    Raises:
        InvalidArgumentError: anything that does not fit, with the numbers. Nothing is written then.
    """
    options: AttentionOptions = {
        "block_tables": block_tables,
        "table_rows": table_rows,
        "query_start": query_start,
        "context_lens": context_lens,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "kv_dtype": kv_dtype,
        "out": out,
        "lse": lse,
        "return_lse": return_lse,
        "causal": causal,
    }
    backend, checked = prepared(query, k_cache, v_cache, options, workspace)
    return backend.paged_attention(query, k_cache, v_cache, plan=plan, **checked)


def prepared(
    query: Array, k_cache: Array, v_cache: Array, options: Any, workspace: Array | None
) -> tuple[ModuleType, dict[str, Any]]:
    """The backend of a call, and its options checked."""
    arrays = {"query": query, "k_cache": k_cache, "v_cache": v_cache}
    optional = {"out": options.get("out"), "lse": options.get("lse"), "workspace": workspace}
    backend = backend_of(arrays, optional)
    checked = attention_options(options)
    if workspace is not None:
        if on_a_device(query):
            raise InvalidArgumentError(
                "workspace is given, but the arrays are on a device, where it belongs to the plan: "
                "AttentionPlan(workspace=...)"
            )
        checked["workspace"] = workspace
    return backend, checked


def workspace_bytes(query: Array, k_cache: Array, v_cache: Array, **options: Unpack[AttentionOptions]) -> int:
    """Bytes of `workspace` that `paged_attention` needs for these arguments on the host.

    Splitting follows lengths and `get_num_threads()`: ask again when either has changed. A cascade is
    asked for with its groups.

    Args:
        query: as for `paged_attention`.
        k_cache: as there.
        v_cache: as there.
        **options: the keyword arguments of `paged_attention`, or of `cascade_attention`.

    Returns:
        The bytes; 0 where no work is split.

    Raises:
        InvalidArgumentError: as `paged_attention`, or arrays on a device (`AttentionPlan.workspace_bytes`).
    """
    found: dict[str, Any] = dict(options)
    names = ("group_start", "group_sequences", "prefix_lens")
    groups = [found.pop(name, None) for name in names]
    found.pop("workspace", None)
    backend, checked = prepared(query, k_cache, v_cache, found, None)
    if on_a_device(query):
        raise InvalidArgumentError(
            "query is on a device, where the workspace is the plan's: AttentionPlan.workspace_bytes"
        )
    if any(array is not None for array in groups):
        checked |= dict(zip(names, groups, strict=True))
    size: int = backend.workspace_bytes(query, k_cache, v_cache, **checked)
    return size


def mla_decode(
    query: Array,
    latent_cache: Array,
    *,
    kv_lora_rank: int,
    scale: float,
    **options: Unpack[LatentOptions],
) -> Any:
    """Attention over a latent cache (MLA with absorbed projections): each key's head is its value.

    Args:
        query: `[num_tokens, num_query_heads, kv_lora_rank + rope_dim]`, already multiplied by the key
            projection.
        latent_cache: `[num_blocks, block_size, 1, kv_lora_rank + rope_dim]`.
        kv_lora_rank: elements of a row that are also its value.
        scale: factor of the products. It follows from the head size before absorption, so there is no
            default, and None is refused.
        **options: `block_tables`, `query_start`, `context_lens`, `table_rows`, `out` (of value heads of
            `kv_lora_rank`), `lse`, `return_lse`, `causal`, `plan` and `workspace` of `paged_attention`.

    Returns:
        The output (still to be multiplied by the value projection), or (output, log-sum-exp).

    Raises:
        InvalidArgumentError: anything that does not fit, with the numbers. Nothing is written then.
    """
    backend_of({"query": query, "latent_cache": latent_cache})
    scale = number("scale", scale)
    kv_lora_rank = integer("kv_lora_rank", kv_lora_rank, 1)
    if not hasattr(latent_cache, "__getitem__"):
        latent_cache = array_of("latent_cache", latent_cache)
    shape = tuple(latent_cache.shape)
    if len(shape) != 4 or shape[2] != 1 or kv_lora_rank > shape[3]:
        raise InvalidArgumentError(
            f"latent_cache has shape {shape}, expected [num_blocks, block_size, 1, dim] with dim at least "
            f"kv_lora_rank = {kv_lora_rank}"
        )
    unknown = set(options) - set(LatentOptions.__annotations__)
    if unknown:
        raise TypeError(f"mla_decode() got an unexpected keyword argument {min(unknown)!r}")
    values = latent_cache[..., :kv_lora_rank]
    return paged_attention(query, latent_cache, values, scale=scale, **options)


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Args:
        out_a: `[num_tokens, num_heads, value_dim]`, float32, float16 or bfloat16.
        lse_a: `[num_tokens, num_heads]`, float32; -inf where `a` saw no key (its output is not read there).
            Sinks that are in both count twice: `paged_attention` of one part gets them.
        out_b: as `out_a`.
        lse_b: as `lse_a`.
        out: written and returned; may be one of the sources; a new array of the dtype of `out_a` if None.
        lse: the same for the log-sum-exp.

    Returns:
        (output, log-sum-exp).

    Raises:
        InvalidArgumentError: shapes or dtypes that do not fit. Nothing is written then.
    """
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    backend = backend_of(arrays, {"out": out, "lse": lse})
    result: tuple[Any, Any] = backend.merge_states(**arrays, out=out, lse=lse)
    return result
