"""Tables of admission, overflow and tenants: virtual time, so the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from sections import head, row

from kvpager.replay.run import RunSettings, served_tokens
from kvpager.replay.study import Study

__all__ = ["MOONCAKE", "WORKLOADS", "admission", "lengths", "overflow", "reordered", "tenants"]

MOONCAKE = "mooncake_conversation_trace.jsonl.gz"
AZURE = "AzureLLMInferenceTrace_conv.csv.gz"
POLICIES = ("reserve", "watermark", "forecast")
POOL_TOKENS = (100_000, 300_000, 1_000_000)
HOST_TIER = 4
"""Blocks of the host tier, in pools."""
OVERFLOW_POOL_TOKENS = 100_000

WORKLOADS = {
    "R1 (ServeGen)": ("servegen_deepseek-r1_clients_A.tar.xz", 16384),
    "R1 lengths": ("generate:reasoning", 16384),
    "Azure conv": (AZURE, 4096),
    "arXiv": ("arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz", 4096),
    "Mooncake conv": (MOONCAKE, 4096),
    "shift": ("generate:shift", 16384),
    "shock": ("generate:shock", 16384),
}


def _study(traces: Path, name: str, pool_tokens: int, requests: int, **more: Any) -> Study:
    file, most = WORKLOADS[name]
    settings = RunSettings(
        blocks=pool_tokens // 16,
        reuse=False,
        arrivals="saturate",
        requests=requests,
        max_output_tokens=most,
        max_model_tokens=1 << 18,
    )
    source = file if file.startswith("generate:") else str(traces / file)
    return Study(source=source, settings=settings, **more)


def _with_host_tier(study: Study) -> Study:
    return replace(study, settings=replace(study.settings, host_blocks=HOST_TIER * study.settings.blocks))


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    finished = max(1, run["finished"])
    prompt = max(1, run["prompt_tokens"])
    return (
        f"{run['policy']}{', host tier' if run['host_blocks'] else ''}",
        f"{run['virtual_time'] / run['oracle_time']:.3f}",
        f"{run['steps'] / run['oracle']['steps']:.2f}",
        f"{run['preempted_requests'] / finished:.2%}",
        f"{run['recomputed_tokens'] / prompt:.2%}",
        f"{run['swapped_tokens'] / prompt:.2%}",
        f"{run['worst_token_gap']:.2f}",
        f"{run['batch_size']['p50']:.0f} / {run['batch_size']['max']:.0f}",
    )


def admission(traces: Path, requests: int) -> Iterator[str]:
    """Every policy on every workload and pool, against the clairvoyant schedule."""
    shares = ("preempted", "recomputed", "swapped")
    yield from head("workload", "pool", "policy", "time", "steps", *shares, "gap, s", "batch p50 / max")
    for name in WORKLOADS:
        count = min(3060, requests) if name == "shock" else requests
        for tokens in POOL_TOKENS if name != "shock" else POOL_TOKENS[:1]:
            if name == "Mooncake conv" and tokens == 100_000:
                continue  # its longest prompts alone exceed the pool
            study = _study(traces, name, tokens, count, policies=POLICIES)
            runs = study.run()
            (hosted,) = _with_host_tier(replace(study, policies=("forecast",))).run_policies()
            oracle = {key: runs[0][key] for key in ("oracle", "oracle_time")}
            for run in [*runs, hosted | oracle]:
                yield row(name, f"{tokens // 1000}k", *_cells(run))


def reordered(traces: Path, requests: int) -> Iterator[str]:
    """The worst of five other orders, `forecast` with the host tier."""
    yield from head("workload", "pool", "time", "preempted", "recomputed", "swapped", "worst gap, s")
    for name in ("R1 (ServeGen)", "R1 lengths", "shift"):
        for tokens in POOL_TOKENS[:2]:
            study = _with_host_tier(_study(traces, name, tokens, requests, policies=("forecast",)))
            runs = [run for seed in range(1, 6) for run in replace(study, shuffle=seed).run()]
            yield row(
                name,
                f"{tokens // 1000}k",
                f"{max(run['virtual_time'] / run['oracle_time'] for run in runs):.3f}",
                f"{max(run['preempted_requests'] / run['finished'] for run in runs):.2%}",
                f"{max(run['recomputed_tokens'] / run['prompt_tokens'] for run in runs):.2%}",
                f"{max(run['swapped_tokens'] / run['prompt_tokens'] for run in runs):.2%}",
                f"{max(run['worst_token_gap'] for run in runs):.2f}",
            )


def lengths(traces: Path, requests: int) -> Iterator[str]:
    """`forecast` on one workload whose requests are of one tenant, or of several that it tells apart."""
    shares = ("preempted", "recomputed", "swapped")
    yield from head("tenants", "pool", "policy", "time", *shares, "gap, s", "batch p50 / max")
    for rule in (None, "field:client", "heavy=9,light=1"):
        for tokens in POOL_TOKENS[:2]:
            study = _study(traces, "R1 (ServeGen)", tokens, requests, policies=("forecast",), tenants=rule)
            runs = [run for answer in (study, _with_host_tier(study)) for run in answer.run()]
            for run in runs:
                policy, time, _, *rest = _cells(run)
                yield row(f"`{rule}`" if rule else "one", f"{tokens // 1000}k", policy, time, *rest)


def _quantiles(latency: dict[str, float]) -> str:
    return " / ".join(f"{latency[key]:.3g}" for key in ("p50", "p99", "max"))


def overflow(_traces: Path, requests: int) -> Iterator[str]:
    """The same burst with each answer to overflow; latencies are those of the busiest ten seconds."""
    latencies = ("first token p50 / p99 / max, s", "worst gap p50 / p99 / max, s")
    yield from head(
        "policy", "answer", *latencies, "taken back", "ended early", "lost tokens", "swapped tokens"
    )
    blocks = OVERFLOW_POOL_TOKENS // 16
    study = Study(
        source="generate:burst",
        settings=RunSettings(
            blocks=blocks,
            host_blocks=HOST_TIER * blocks,
            reuse=False,
            requests=requests,
            max_output_tokens=16384,
        ),
        policies=("watermark", "forecast"),
        overflows=("recompute", "swap", "refuse"),
        oracle=False,
    )
    for run in study.run():
        latency = run["burst"]["latency"]
        yield row(
            run["policy"],
            run["overflow"],
            _quantiles(latency["time_to_first_token"]),
            _quantiles(latency["worst_gap"]),
            f"{run['preempted_requests']:,}",
            f"{sum(run['ended_otherwise'].values()):,}",
            f"{run['lost_tokens']:,}",
            f"{run['swapped_tokens']:,}",
        )


def tenants(traces: Path, requests: int) -> Iterator[str]:
    """What tenants of different sizes get while all of them wait."""
    yield from head(
        *("tenants", "Jain's index", "tenant", "requests", "served tokens", "service", "most behind"),
        "first token p50 / p99 / max, s",
    )
    for rule in ("heavy=9,light=1", "prompt:short<=512,mid<=2048,long", "round-robin:4"):
        more = {"policies": ("forecast",), "tenants": rule, "oracle": False}
        (run,) = _study(traces, "Azure conv", 300_000, requests, **more).run()
        for tenant in run["tenants"]:
            yield row(
                f"`{rule}`",
                f"{run['fairness']:.3f}",
                tenant["tenant"],
                f"{tenant['finished']:,}",
                f"{served_tokens(tenant):,}",
                f"{tenant['service']:,}",
                f"{tenant['worst_service_gap']:,}",
                _quantiles(tenant["latency"]["time_to_first_token"]),
            )
