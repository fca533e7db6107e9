"""What the live page draws, as JSON: everything for the operator, its own for a tenant."""

from __future__ import annotations

import time
from typing import Any

from kvpager.engine import EngineSnapshot, Histogram, TenantCounters
from kvpager.server.settings import ServerSettings

__all__ = ["operator_stats", "tenant_stats"]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_STATES = ("held", "cached", "reserved", "quarantined")


def operator_stats(snapshot: EngineSnapshot, settings: ServerSettings) -> dict[str, Any]:
    """The whole engine, and each tenant under the cap."""
    pool, scheduler = snapshot.pool, snapshot.scheduler
    total = TenantCounters()
    for counters in snapshot.tenants.values():
        total.add(counters)
    names = list(snapshot.tenants)[: settings.max_metric_tenants]
    return {
        "view": "operator",
        "model": settings.model_name,
        "time": time.time(),
        "state": snapshot.state,
        "reason": snapshot.reason,
        "blocks": {state: getattr(pool, state) for state in (*_STATES, "free", "capacity")},
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "preemptions": scheduler.num_preemptions,
        "steps": scheduler.steps,
        **_counts(total),
        "tenants": [_tenant(name, snapshot) for name in names],
    }


def tenant_stats(snapshot: EngineSnapshot, settings: ServerSettings, name: str) -> dict[str, Any]:
    """One tenant's own requests and blocks, against its own limit; nothing that others change.

    Cached blocks are left out: others' demand evicts them.
    """
    counters, account = snapshot.tenants[name], snapshot.accounts[name]
    blocks = {state: getattr(account, state) for state in ("held", "reserved", "quarantined")}
    capacity = account.limit
    return {
        "view": "tenant",
        "model": settings.model_name,
        "time": time.time(),
        "state": "running",
        "reason": None,
        "blocks": {
            **blocks,
            "free": max(0, capacity - sum(blocks.values())),
            "capacity": capacity,
        },
        "running": counters.num_running,
        "waiting": counters.num_waiting,
        **_counts(counters),
        "tenants": [],
    }


def _tenant(name: str, snapshot: EngineSnapshot) -> dict[str, Any]:
    counters, account = snapshot.tenants[name], snapshot.accounts[name]
    return {
        "name": name,
        "running": counters.num_running,
        "waiting": counters.num_waiting,
        "blocks": {state: getattr(account, state) for state in (*_STATES, "guaranteed", "limit")},
        **_counts(counters),
    }


def _counts(counters: TenantCounters) -> dict[str, Any]:
    return {
        "requests": counters.submitted,
        "ended": dict(counters.ended),
        "refused": counters.refused,
        "prompt_tokens": counters.prompt_tokens,
        "cached_tokens": counters.cached_tokens,
        "generation_tokens": counters.generation_tokens,
        "queue_time": _quantiles(counters.queue_time),
        "time_to_first_token": _quantiles(counters.time_to_first_token),
        "time_per_output_token": _quantiles(counters.time_per_output_token),
    }


def _quantiles(histogram: Histogram) -> dict[str, Any]:
    """Upper bounds since the start, and the buckets: their growth gives the page those of a minute."""
    quantiles = {name: histogram.quantile(share) for name, share in _QUANTILES.items()}
    return {**quantiles, "bounds": histogram.bounds, "counts": list(histogram.counts)}
