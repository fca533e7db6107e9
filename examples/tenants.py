"""Tenants: quotas, shares of service, and prefixes that nobody else can find.

python examples/tenants.py
"""

from __future__ import annotations

from kvpager.engine import Engine, EngineConfig, GenerationParams, NullRunner
from kvpager.errors import RefusedError

SECRET = list(range(100, 180))


def cached_tokens(engine: Engine, tenant: str) -> int:
    """Sends the same prompt for a tenant; says how much of it was found."""
    (generation,) = engine.submit(SECRET, GenerationParams(max_tokens=4), tenant=tenant)
    engine.run()
    return generation.cached_tokens or 0


def main() -> None:
    engine = Engine(NullRunner(), EngineConfig(num_blocks=64, max_running=8))
    engine.add_tenant("alice", guaranteed=16, weight=3.0)
    engine.add_tenant("bob", limit=12, max_waiting=20)
    cached_tokens(engine, "alice")
    print(f"alice's second request finds {cached_tokens(engine, 'alice')} of 80 tokens")
    print(f"bob's first request, the same prompt, finds {cached_tokens(engine, 'bob')}")

    try:
        engine.submit(SECRET * 4, tenant="bob")
    except RefusedError as error:
        print(f"bob, over his limit: {error}")

    params = GenerationParams(max_tokens=16)
    for place in range(20):
        for tenant in ("bob", "alice"):
            engine.submit([place * 7 + 1] * 32, params, tenant=tenant)
    most = {"alice": 0, "bob": 0}
    while engine.has_work():
        engine.step()
        for name, account in engine.snapshot().accounts.items():
            most[name] = max(most[name], account.committed)
    print(f"blocks of bob at most: {most['bob']} (limit 12)")
    for name, counters in engine.snapshot().tenants.items():
        done, waited = counters.ended["length"], counters.queue_time.quantile(0.5) or 0.0
        print(f"{name}: {done} requests done, half of them waited at most {waited * 1000:.0f} ms")


if __name__ == "__main__":
    main()
