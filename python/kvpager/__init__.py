"""The memory side of an LLM inference server: paged KV cache, prefix reuse with tenants, admission."""

from kvpager import errors
from kvpager._core import (
    AccountStats,
    Batch,
    BlockPool,
    CommitOutcome,
    Fingerprint,
    FinishedRequest,
    Match,
    PhaseTimes,
    PoolStats,
    PrefixIndex,
    Reservation,
    Scheduler,
    SchedulerStats,
    ShareScope,
    Tenant,
    __version__,
)

__all__ = [
    "AccountStats",
    "Batch",
    "BlockPool",
    "CommitOutcome",
    "Fingerprint",
    "FinishedRequest",
    "Match",
    "PhaseTimes",
    "PoolStats",
    "PrefixIndex",
    "Reservation",
    "Scheduler",
    "SchedulerStats",
    "ShareScope",
    "Tenant",
    "__version__",
    "errors",
]
