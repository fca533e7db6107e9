"""The memory side of an LLM inference server: paged KV cache, prefix reuse with tenants, admission."""

from kvpager import errors
from kvpager._core import BlockPool, PoolStats, __version__

__all__ = ["BlockPool", "PoolStats", "__version__", "errors"]
