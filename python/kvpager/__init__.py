"""The memory side of an LLM inference server: paged KV cache, prefix reuse with tenants, admission."""

from kvpager import errors
from kvpager._core import (
    BlockPool,
    Fingerprint,
    Match,
    PoolStats,
    PrefixIndex,
    ShareScope,
    __version__,
)

__all__ = [
    "BlockPool",
    "Fingerprint",
    "Match",
    "PoolStats",
    "PrefixIndex",
    "ShareScope",
    "__version__",
    "errors",
]
