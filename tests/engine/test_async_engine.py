"""The engine in its thread: streams of many loops, cancellation anywhere, slow consumers, shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from synthetic import LetterTokenizer, ScriptRunner, idle

from kvpager.engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    Generation,
    GenerationParams,
    GenerationStream,
    NullRunner,
)
from kvpager.errors import GenerationError, RefusedError, WrongStateError
from waiting import PATIENCE, GatedRunner, until


@pytest.fixture
def served() -> Iterator[AsyncEngine]:
    runner = NullRunner(step_time=0.0005)
    # The bound keeps a request of 5000 tokens from its end, however long its consumer does not come to read.
    config = EngineConfig(num_blocks=512, max_running=128, max_buffered_tokens=1000)
    engine = AsyncEngine(Engine(runner, config))
    yield engine
    engine.close()
    assert idle(engine.engine)


def gated(**sizes: Any) -> tuple[AsyncEngine, GatedRunner]:
    runner = GatedRunner()
    return AsyncEngine(Engine(runner, EngineConfig(**{"num_blocks": 512, **sizes}))), runner


async def collect(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> tuple[int, list[int]]:
    stream = engine.generate(prompt, GenerationParams(max_tokens=max_tokens))
    tokens = [token async for output in stream for token in output.token_ids]
    return stream.generations[0].request_id, tokens


async def wait_until_idle(engine: AsyncEngine) -> None:
    await until(lambda: not engine.engine.num_live and not engine.engine.has_work(), "an idle engine")


def check_tokens(request_id: int, tokens: list[int], count: int) -> None:
    assert tokens == [NullRunner().token(request_id, place) for place in range(count)]


def test_concurrent_streams_get_their_own_tokens(served: AsyncEngine) -> None:
    async def main() -> None:
        done = await asyncio.gather(*(collect(served, [i + 1] * 20, 20) for i in range(100)))
        for request_id, tokens in done:
            check_tokens(request_id, tokens, 20)

    asyncio.run(main())


def test_many_event_loops_share_one_engine(served: AsyncEngine) -> None:
    failures: list[BaseException] = []

    async def main(place: int) -> None:
        for _ in range(5):
            done = await asyncio.gather(*(collect(served, [place * 10 + i + 1] * 20, 9) for i in range(8)))
            for request_id, tokens in done:
                check_tokens(request_id, tokens, 9)

    def thread(place: int) -> None:
        try:
            asyncio.run(main(place))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(place,)) for place in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures


def test_cancellation_at_any_await_frees_everything() -> None:
    generator = random.Random(5)
    config = EngineConfig(num_blocks=512, max_running=128, max_buffered_tokens=64)
    served = AsyncEngine(Engine(NullRunner(step_time=0.0005), config))

    async def consumer(seed: int) -> None:
        stream = served.generate([seed % 5 + 1] * 30, GenerationParams(max_tokens=200, n=1 + seed % 2))
        if seed % 3 == 0:  # waits for nothing but its next output
            async for _ in stream:
                if stream.output_tokens >= 50:
                    break
            stream.close()
        async with stream:
            async for _ in stream:
                await asyncio.sleep(0)
                if stream.output_tokens >= 50:  # with what may be unread fewer than 200: none ends by itself
                    break
            await asyncio.Event().wait()

    async def main() -> None:
        tasks = []
        for seed in range(200):
            tasks.append(asyncio.create_task(consumer(seed)))
            if generator.random() < 0.6:
                await asyncio.sleep(generator.random() * 0.002)
            if generator.random() < 0.9:
                tasks[generator.randrange(len(tasks))].cancel()
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in done)
        await wait_until_idle(served)
        counters = served.engine.counters("default")
        assert counters.submitted > 100
        assert counters.ended == {"aborted": counters.submitted}

    asyncio.run(main())
    served.close()
    assert idle(served.engine)


def test_second_consumer_of_a_stream_is_told_and_the_first_goes_on() -> None:
    async def main() -> None:
        engine, runner = gated()
        async with engine:
            stream = engine.generate([1], GenerationParams(max_tokens=4))
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(WrongStateError, match="it has one consumer"):
                await anext(stream)
            runner.gate.open()
            tokens = [*(await first).token_ids, *[token async for one in stream for token in one.token_ids]]
            assert len(tokens) == 4

    asyncio.run(main())


def test_dropped_stream_is_aborted(served: AsyncEngine) -> None:
    async def main() -> None:
        stream = served.generate([1] * 30, GenerationParams(max_tokens=5000))
        await anext(stream)
        (generation,) = stream.generations
        del stream
        gc.collect()
        await until(lambda: generation.has_ended, "the end of a stream that nobody has")
        assert generation.account is not None
        assert generation.account.reason == "aborted"
        assert generation.account.output_tokens < 5000

    asyncio.run(main())


def test_waiting_task_that_only_the_loop_knows_survives_a_collection() -> None:
    found: list[int] = []
    engine, runner = gated()

    async def consumer() -> None:
        found.append(len((await collect(engine, [1], 60))[1]))

    async def main() -> None:
        asyncio.create_task(consumer())  # noqa: RUF006
        for _ in range(50):
            await until(lambda: runner.gate.is_waiting, "a step")
            for _ in range(3):  # what was computed is read: the task waits for what is not
                await asyncio.sleep(0)
            gc.collect()
            runner.gate.allow()
        runner.gate.open()
        await until(lambda: found, "the task's end")

    asyncio.run(main())
    engine.close()
    assert found == [60]


def test_leaving_the_with_block_ends_the_request(served: AsyncEngine) -> None:
    async def main() -> None:
        async with served.generate([1] * 30, GenerationParams(max_tokens=5000)) as stream:
            await anext(stream)
        await wait_until_idle(served)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_slow_consumer_delays_nobody_and_gets_everything_at_once() -> None:
    engine, runner = gated()

    async def main() -> None:
        slow = engine.generate([1], GenerationParams(max_tokens=300))
        runner.gate.allow()
        first = await anext(slow)
        runner.gate.open()
        for _ in range(5):
            check_tokens(*await collect(engine, [2], 50), 50)
        await until(lambda: slow.generations[0].has_ended, "the end of what nobody reads")
        outputs = [output async for output in slow]
        assert len(outputs) == 1, "what was unread comes together"
        assert [len(output.token_ids) for output in (first, *outputs)] == [1, 299]

    asyncio.run(main())
    engine.close()


def test_many_streams_are_woken_over_several_turns_of_the_loop() -> None:
    engine, runner = gated(num_blocks=1024, max_running=200)
    outputs_of_turn: Counter[int] = Counter()
    tokens_of: Counter[int] = Counter()

    async def main() -> None:
        turn = 0

        async def count_turns() -> None:
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        async def consume(place: int) -> None:
            async for output in engine.generate([place + 1], GenerationParams(max_tokens=10)):
                outputs_of_turn[turn] += 1
                tokens_of[place] += len(output.token_ids)

        counter = asyncio.create_task(count_turns())
        first = engine.generate([1], GenerationParams(max_tokens=1))  # holds the gate until all are submitted
        await until(lambda: runner.gate.is_waiting)
        consumers = [asyncio.create_task(consume(place)) for place in range(200)]
        await asyncio.sleep(0)
        runner.gate.allow()
        await anext(first)
        for length in range(1, 11):  # one step at a time: a slow loop finds no more than one token of each
            runner.gate.allow()
            await until(lambda length=length: list(tokens_of.values()) == [length] * 200, f"{length} tokens")
        await asyncio.gather(*consumers)
        counter.cancel()

    asyncio.run(main())
    engine.close()
    assert sum(outputs_of_turn.values()) >= 2000
    # Two outputs of each of the 32 that wake up: its last token, and its end.
    assert max(outputs_of_turn.values()) <= 64, "one long turn would make everything else late"


def test_consumer_that_leaves_too_much_unread_is_waited_for_and_loses_nothing() -> None:
    engine = AsyncEngine(Engine(NullRunner(), EngineConfig(num_blocks=64, max_buffered_tokens=20)))

    async def main() -> None:
        stream = engine.generate([1], GenerationParams(max_tokens=500))
        (generation,) = stream.generations
        await until(lambda: generation.is_paused)
        assert len((await collect(engine, [2], 50))[1]) == 50, "others go on"
        assert 20 <= len(generation.token_ids) <= 22
        tokens = [token async for output in stream for token in output.token_ids]
        check_tokens(generation.request_id, tokens, 500)

    async def leave() -> None:
        stream = engine.generate([1], GenerationParams(max_tokens=500))
        await until(lambda: stream.generations[0].is_paused)
        stream.close()
        await wait_until_idle(engine)

    asyncio.run(leave())

    asyncio.run(main())
    engine.close()
    assert idle(engine.engine)


def test_loop_that_was_closed_under_its_streams_ends_them() -> None:
    engine, runner = gated()
    loop = asyncio.new_event_loop()
    kept = []

    async def main() -> None:
        stream = engine.generate([1], GenerationParams(max_tokens=5000))
        kept.append(stream)
        runner.gate.allow()
        await anext(stream)

    loop.run_until_complete(main())
    loop.close()
    runner.gate.open()
    (generation,) = kept[0].generations
    asyncio.run(until(lambda: generation.has_ended, "the end of a stream without a loop"))
    assert generation.account is not None
    assert generation.account.reason == "aborted"
    engine.close()
    assert idle(engine.engine)


def test_stop_text_over_threads() -> None:
    runner = ScriptRunner("answer END and more")
    # The bound keeps the engine from being done with all 400 tokens before this thread reads the tenth.
    config = EngineConfig(num_blocks=64, max_buffered_tokens=64)
    engine = AsyncEngine(Engine(runner, config, tokenizer=LetterTokenizer()))

    async def main() -> None:
        params = GenerationParams(max_tokens=400, stop=("END",), ignore_eos=True)
        stream = engine.generate("question", params)
        outputs = [output async for output in stream]
        assert "".join(output.text for output in outputs) == "answer "
        assert outputs[-1].finish_reason == "stop"
        assert stream.output_tokens == len("answer END")
        await wait_until_idle(engine)
        # The scheduler sees an abort; whoever watches the counts does not.
        assert engine.engine.counters("default").ended == {"stop": 1}

    asyncio.run(main())
    engine.close()
    assert idle(engine.engine)


class FaultyRunner(NullRunner):
    """Fails every step with an odd number."""

    steps = 0

    def run(self, batch, sampled, /):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps % 2:
            raise RuntimeError(f"step {self.steps} failed")
        return super().run(batch, sampled)


def test_crashing_runner_fails_what_it_computed_and_goes_on() -> None:
    engine = AsyncEngine(Engine(FaultyRunner(), EngineConfig(num_blocks=64)))

    async def main() -> None:
        with pytest.raises(GenerationError, match="step 1 failed") as failed:
            await collect(engine, [1], 1)
        assert failed.value.reason == "error"
        check_tokens(*await collect(engine, [1], 1), 1)

    asyncio.run(main())
    assert engine.state == "running"
    engine.close()
    assert idle(engine.engine)


def test_fault_of_the_engine_itself_ends_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = gated(num_blocks=2048)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    async def main() -> None:
        stream = engine.generate([1], GenerationParams(max_tokens=5000))
        runner.gate.allow()
        await anext(stream)
        monkeypatch.setattr(engine.engine._delivery, "deliver", broken)
        runner.gate.open()
        with pytest.raises(GenerationError, match="the engine's thread ended: AssertionError: a bug"):
            async for _ in stream:
                pass
        with pytest.raises(WrongStateError, match="it is failed"):
            engine.generate([1])

    asyncio.run(main())
    engine.close()
    assert idle(engine.engine)


def test_drain_lets_everything_end_and_accepts_nothing_more() -> None:
    async def main() -> None:
        engine, runner = gated()
        async with engine:
            task = asyncio.create_task(collect(engine, [1], 50))
            await until(lambda: runner.gate.is_waiting, "a step")
            assert not await engine.drain(0.005)
            with pytest.raises(WrongStateError, match="it is draining"):
                engine.generate([1])
            runner.gate.open()
            assert await engine.drain()
            check_tokens(*await task, 50)
        assert engine.state == "stopped"
        assert idle(engine.engine)

    asyncio.run(main())


def test_shutdown_without_drain_tells_every_stream() -> None:
    async def main() -> None:
        config = EngineConfig(num_blocks=2048, max_buffered_tokens=64)  # unread, no request comes to its end
        engine = AsyncEngine(Engine(NullRunner(step_time=0.001), config))
        streams = [engine.generate([1], GenerationParams(max_tokens=5000)) for _ in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await engine.shutdown()
        for stream in streams:
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason == "aborted"
        assert idle(engine.engine)

    asyncio.run(main())


def test_refusal_is_raised_at_the_call(served: AsyncEngine) -> None:
    async def main() -> None:
        with pytest.raises(RefusedError, match="need 626 blocks of 16 tokens; tenant"):
            served.generate([1] * 10000, GenerationParams(max_tokens=2))

    asyncio.run(main())


def test_request_that_is_not_done_by_its_deadline_fails_with_the_reason(served: AsyncEngine) -> None:
    async def main() -> None:
        stream = served.generate([1], GenerationParams(max_tokens=5000, deadline=0.05))
        with pytest.raises(GenerationError, match="deadline") as failed:
            async for _ in stream:
                pass
        assert failed.value.reason == "deadline"

    asyncio.run(main())


def test_request_that_races_with_the_end_is_refused_or_ended_never_forgotten() -> None:
    for _ in range(30):
        engine = Engine(NullRunner(), EngineConfig(num_blocks=64))
        served = AsyncEngine(engine)
        accepted: list[Generation] = []

        def submit(engine: Engine = engine, accepted: list[Generation] = accepted) -> None:
            while True:
                try:
                    accepted += engine.submit([1], GenerationParams(max_tokens=2, n=3))
                except RefusedError:
                    time.sleep(0.001)
                except WrongStateError:
                    return

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        served.close()
        for thread in threads:
            thread.join()
        assert all(generation.has_ended for generation in accepted)
        assert idle(engine)


def test_close_is_idempotent_and_may_come_from_any_thread() -> None:
    engine = AsyncEngine(Engine(NullRunner(), EngineConfig(num_blocks=64)))
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.state == "stopped"


def test_child_of_a_fork_is_told_that_a_stream_is_not_its_own_and_may_leave_it() -> None:
    """In the child no engine thread runs: nothing would ever come, and nothing may be given back."""
    engine, runner = gated()

    async def main() -> None:
        async with engine.generate([1, 2], GenerationParams(max_tokens=20)) as stream:
            runner.gate.allow(2)
            (generation,) = stream.generations
            await until(lambda: len(generation.token_ids) == 2 and runner.gate.is_waiting, "two tokens")
            child = os.fork()
            if child == 0:
                os._exit(await in_the_child(stream))
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7
            runner.gate.open()
            assert len([token async for output in stream for token in output.token_ids]) == 20

    async def in_the_child(stream: GenerationStream) -> int:
        signal.alarm(int(PATIENCE))  # a child that waits is killed
        try:
            if len((await anext(stream)).token_ids) != 2:  # what had come before the fork can be read
                return 3
            await anext(stream)
        except WrongStateError as error:
            stream.close()
            return 7 if str(os.getppid()) in str(error) else 1
        except BaseException:
            return 2
        return 4

    asyncio.run(main())
    engine.close()
    assert idle(engine.engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("open_steps", [1, 2])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_runner_that_is_interrupted_leaves_no_thread(error: type[BaseException], open_steps: int) -> None:
    class Interrupted(NullRunner):
        def run(self, _batch: Any, _sampled: Any, /) -> Any:
            raise error

    before = set(threading.enumerate())
    engine = AsyncEngine(Engine(Interrupted(), EngineConfig(num_blocks=64, max_open_steps=open_steps)))

    async def main() -> None:
        with pytest.raises(GenerationError, match="engine's thread ended"):
            await collect(engine, [1, 2, 3], 4)
        await engine.shutdown()

    asyncio.run(main())
    assert {thread for thread in threading.enumerate() if thread.name.startswith("kvpager")} <= before
    assert engine.state == "failed"
