"""Retention: a system prompt stays for an hour, a conversation until its next turn; nobody waits for either.

python examples/retention.py
"""

from __future__ import annotations

from kvpager import Retention
from kvpager.engine import Engine, EngineConfig, GenerationParams, NullRunner

SYSTEM = [5] * 64
QUESTION = list(range(200, 232))


def show(engine: Engine, what: str) -> None:
    scheduler = engine.snapshot().scheduler
    print(f"{what}: {scheduler.num_kept_blocks} blocks kept, {scheduler.num_preemptions} preemptions")


def main() -> None:
    engine = Engine(NullRunner(), EngineConfig(num_blocks=16))
    engine.add_tenant("alice", max_kept_blocks=12)
    hour = Retention(seconds=3600, num_tokens=len(SYSTEM), priority=1)
    list(engine.generate(SYSTEM + QUESTION, GenerationParams(max_tokens=4, retention=hour), tenant="alice"))
    show(engine, "the system prompt of a request that ended")

    session = engine.open_session("alice", idle_seconds=600)
    conversation = [*QUESTION, *QUESTION]
    for output in engine.generate(conversation, GenerationParams(max_tokens=16), session=session):
        conversation += output.token_ids
    show(engine, "and a conversation between its turns")
    (turn,) = engine.submit([*conversation, *QUESTION], GenerationParams(max_tokens=4), session=session)
    engine.run()
    print(f"its next turn finds {turn.cached_tokens} tokens")

    # A request that needs 11 of the 16 blocks: the conversation yields, which has the lower priority.
    list(engine.generate([9] * 160, GenerationParams(max_tokens=16), tenant="alice"))
    show(engine, "after a large request")
    engine.close()
    print(f"{engine.pool.stats().held} blocks held at the end")


if __name__ == "__main__":
    main()
