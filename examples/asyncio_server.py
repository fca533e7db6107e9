r"""An asyncio server that embeds the engine: one prompt a line in, the answer's text out as it comes.

    python examples/asyncio_server.py --port 7000 --model demo
    printf 'The capital of France is\n' | nc 127.0.0.1 7000

Without `--port` it talks to itself once, with synthetic tokens.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from kvpager.engine import AsyncEngine, ByteTokenizer, Engine, EngineConfig, GenerationParams, NullRunner
from kvpager.errors import GenerationError, InvalidArgumentError, RefusedError


def make_engine(model: str) -> AsyncEngine:
    config = EngineConfig(num_blocks=512, block_size=16, max_running=32)
    if model == "null":
        return AsyncEngine(Engine(NullRunner(step_time=0.005), config, tokenizer=ByteTokenizer()))
    from kvpager.runner import LlamaRunner, load_model

    loaded = load_model(model)
    fingerprint = loaded.fingerprint(block_size=config.block_size)
    engine = Engine(LlamaRunner(loaded.model), config, tokenizer=loaded.tokenizer, fingerprint=fingerprint)
    return AsyncEngine(engine)


async def answer(engine: AsyncEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves one connection. If it breaks, leaving the `async with` ends the request and frees its blocks."""
    try:
        while line := (await reader.readline()).decode().rstrip("\n"):
            try:
                async with engine.generate(line, GenerationParams(max_tokens=40, stop=("\n",))) as stream:
                    async for output in stream:
                        writer.write(output.text.encode())
                        await writer.drain()  # a slow client slows its own request, nobody else's
            except RefusedError as error:
                writer.write(f"refused, {'try again' if error.retryable else 'never fits'}: {error}".encode())
            except (GenerationError, InvalidArgumentError) as error:
                writer.write(f"failed: {error}".encode())
            writer.write(b"\n")
    except ConnectionError:
        pass
    finally:
        writer.close()


async def ask(port: int, prompt: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(prompt.encode() + b"\n")
    text = (await reader.readline()).decode().rstrip("\n")
    writer.close()
    return text


async def main(port: int | None, model: str) -> None:
    async with make_engine(model) as engine:  # leaving it drains, then stops the engine's thread
        server = await asyncio.start_server(partial(answer, engine), "127.0.0.1", port or 0)
        if port is not None:
            await server.serve_forever()
        number = server.sockets[0].getsockname()[1]
        texts = await asyncio.gather(*(ask(number, f"client {i} says hello") for i in range(8)))
        server.close()
        print(f"{len(texts)} clients got {sum(map(len, texts))} characters, {len(set(texts))} answers differ")
        print(f"blocks held at the end: {engine.snapshot().pool.held}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--model", default="null")
    asyncio.run(main(**vars(parser.parse_args())))
