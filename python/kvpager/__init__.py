"""The memory side of an LLM inference server: paged KV cache, prefix reuse with tenants, admission."""

from kvpager import errors
from kvpager._core import (
    Batch,
    BlockPool,
    CommitOutcome,
    Fingerprint,
    FinishedRequest,
    Match,
    PoolStats,
    PrefixIndex,
    Scheduler,
    SchedulerStats,
    ShareScope,
    Tenant,
    __version__,
)

__all__ = [
    "Batch",
    "BlockPool",
    "CommitOutcome",
    "Fingerprint",
    "FinishedRequest",
    "Match",
    "PoolStats",
    "PrefixIndex",
    "Scheduler",
    "SchedulerStats",
    "ShareScope",
    "Tenant",
    "__version__",
    "errors",
]
