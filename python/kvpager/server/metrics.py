"""Prometheus text of one snapshot, in the names that operators of inference servers know.

Nothing is counted here: a scrape reads what the engine has counted, so it costs nothing between scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpager.engine import EngineSnapshot, Histogram, TenantCounters
from kvpager.server.settings import ServerSettings

__all__ = ["OTHER_TENANTS", "metrics_text"]

OTHER_TENANTS = "_other"
"""Label of the tenants beyond the cap, together."""

_PREFIX = "kvpager:"
_HISTOGRAMS: dict[str, tuple[str, Callable[[TenantCounters], Histogram]]] = {
    "request_queue_time_seconds": ("Submission to the first step.", lambda c: c.queue_time),
    "time_to_first_token_seconds": ("Submission to the first token.", lambda c: c.time_to_first_token),
    "time_per_output_token_seconds": (
        "Mean of a request after its first token.",
        lambda c: c.time_per_output_token,
    ),
    "e2e_request_latency_seconds": ("Submission to the end.", lambda c: c.latency),
    "request_prompt_tokens": ("Prompt tokens of a request.", lambda c: c.prompt_length),
    "request_generation_tokens": ("Tokens generated for a request.", lambda c: c.generation_length),
}
_COUNTERS: dict[str, tuple[str, Callable[[TenantCounters], int]]] = {
    "prompt_tokens": ("Prompt tokens of requests that ran.", lambda c: c.prompt_tokens),
    "generation_tokens": ("Tokens of requests that ended.", lambda c: c.generation_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up, once a request.", lambda c: c.prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens found in the index.", lambda c: c.cached_tokens),
    "requests_refused": ("Requests that were not accepted.", lambda c: c.refused),
}


class _SnapshotCollector(Collector):
    """The metric families of one snapshot."""

    def __init__(self, snapshot: EngineSnapshot, settings: ServerSettings) -> None:
        self._snapshot = snapshot
        self._model = settings.model_name
        self._tenants = _capped(snapshot.tenants, settings.max_metric_tenants)

    def collect(self) -> Iterable[Metric]:
        """Yields the families."""
        yield from self._of_the_engine()
        yield from self._of_tenants()

    def _of_the_engine(self) -> Iterator[Metric]:
        pool, scheduler = self._snapshot.pool, self._snapshot.scheduler
        yield self._gauge("num_requests_running", "Sequences that have blocks.", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Requests that have none yet.", scheduler.num_waiting)
        committed = pool.held + pool.reserved + pool.quarantined
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the blocks that are held, reserved or quarantined; 1 is all. Cached ones do not count.",
            committed / pool.capacity,
        )
        blocks = GaugeMetricFamily(
            _PREFIX + "kv_blocks",
            "Blocks by state. Held, cached, free and quarantined add up to the capacity; reserved ones are "
            "promised out of the free and the cached.",
            labels=["model_name", "state"],
        )
        for state in ("held", "cached", "free", "reserved", "quarantined"):
            blocks.add_metric([self._model, state], getattr(pool, state))
        yield blocks
        yield self._gauge(
            "kv_blocks_kept", "Held blocks that sessions and retentions keep.", scheduler.num_kept_blocks
        )
        yield self._gauge("kv_blocks_capacity", "Blocks of the pool.", pool.capacity)
        yield self._gauge("kv_blocks_peak_held", "Most blocks held at once.", pool.peak_held)
        for name, text, value in (
            (
                "num_preemptions",
                "Times a running sequence's blocks were taken back.",
                scheduler.num_preemptions,
            ),
            ("recomputed_tokens", "Tokens computed again after that.", scheduler.recomputed_tokens),
            ("scheduler_steps", "Steps planned.", scheduler.steps),
            ("failed_steps", "Steps that the model failed.", self._snapshot.failed_steps),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._gauge(
            "engine_up", "1 while requests can be computed.", int(self._snapshot.state != "failed")
        )

    def _of_tenants(self) -> Iterator[Metric]:
        labels = ["model_name", "tenant"]
        ends = CounterMetricFamily(
            _PREFIX + "request_success", "Ended requests by reason.", labels=[*labels, "finished_reason"]
        )
        for tenant, counters in self._tenants.items():
            for reason, count in counters.ended.copy().items():
                ends.add_metric([self._model, tenant, reason], count)
        yield ends
        for name, (text, read) in _COUNTERS.items():
            family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for tenant, counters in self._tenants.items():
                family.add_metric([self._model, tenant], read(counters))
            yield family
        for name, (text, histogram_of) in _HISTOGRAMS.items():
            yield self._histogram(name, text, histogram_of)
        yield from self._tenant_gauges(labels)

    def _tenant_gauges(self, labels: list[str]) -> Iterator[Metric]:
        running = GaugeMetricFamily(_PREFIX + "tenant_requests_running", "Started, not ended.", labels=labels)
        waiting = GaugeMetricFamily(_PREFIX + "tenant_requests_waiting", "Not started.", labels=labels)
        for tenant, counters in self._tenants.items():
            running.add_metric([self._model, tenant], counters.num_running)
            waiting.add_metric([self._model, tenant], counters.num_waiting)
        yield running
        yield waiting
        blocks = GaugeMetricFamily(
            _PREFIX + "tenant_kv_blocks", "Blocks of a tenant by state.", labels=[*labels, "state"]
        )
        for tenant, account in self._snapshot.accounts.items():
            if tenant in self._tenants:
                for state in ("held", "cached", "reserved", "quarantined", "guaranteed", "limit"):
                    blocks.add_metric([self._model, tenant, state], getattr(account, state))
        yield blocks

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge

    def _histogram(self, name: str, text: str, histogram_of: Callable[[TenantCounters], Histogram]) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model_name", "tenant"])
        for tenant, counters in self._tenants.items():
            histogram = histogram_of(counters)
            buckets, total = [], 0
            for bound, count in zip((*histogram.bounds, "+Inf"), list(histogram.counts), strict=True):
                total += count
                buckets.append((str(bound), total))
            family.add_metric([self._model, tenant], buckets, histogram.total)
        return family


def metrics_text(snapshot: EngineSnapshot, settings: ServerSettings) -> bytes:
    """The text that Prometheus scrapes.

    Args:
        snapshot: of the engine.
        settings: for the model's name and the cap on tenants.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot, settings))
    return generate_latest(registry)


def _capped(tenants: Mapping[str, TenantCounters], cap: int) -> dict[str, TenantCounters]:
    """The first tenants under their names, the rest summed."""
    names = list(tenants)
    kept = {name: tenants[name] for name in names[:cap]}
    if len(names) > cap:
        rest = kept[OTHER_TENANTS] = TenantCounters()
        for name in names[cap:]:
            rest.add(tenants[name])
    return kept
