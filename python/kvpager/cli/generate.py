"""`kvpager generate`: a real model generates from paged memory; `--demo` is the main job of `make run`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpager._threads import configure_threads
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.runner.generate import Generation, GenerationLoop
    from kvpager.runner.loading import LoadedModel

__all__ = ["register"]

_MAX_TOKENS = 64
_MAX_DEFAULT_POOL_BYTES = 2 << 30
"""The default pool holds all requests at once, up to this much memory."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The command's options, as given."""

    model: str
    prompts: list[str]
    prompt_ids: Path | None
    chat: bool
    system: str | None
    max_tokens: int
    block_size: int
    blocks: int | None
    max_batch_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    reuse: bool
    tenants: list[str]
    senders: list[str]
    as_json: bool


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("generate")(_generate)


def _generate(
    model: Annotated[str, typer.Option(help="'demo', a GGUF file, or a model directory.")] = "demo",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several.")] = None,
    prompt_ids: Annotated[
        Path | None, typer.Option(help="JSON file with a list of lists of token ids.", metavar="FILE.json")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of --chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate for each prompt: 64, in the demo 48.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Token positions in a block.")] = 16,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks of the pool; by default room for all prompts at once.")
    ] = None,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of every prompt's draws.")] = None,
    no_reuse: Annotated[bool, typer.Option("--no-reuse", help="Reuse no prefixes.")] = False,
    tenants: Annotated[
        str, typer.Option(help="Names of the tenants, comma-separated; each has its own prefixes.")
    ] = "default",
    tenant: Annotated[
        list[str] | None, typer.Option(help="Who sends the prompts: one for all, or one for each prompt.")
    ] = None,
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Two tenants, eight chat prompts, a pool too small for all at once."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generates text with a Llama-family model over paged KV memory."""
    configure_threads()
    if demo:
        from kvpager.cli.demo import run_demo

        run_demo(model=model, blocks=blocks, block_size=block_size, max_tokens=max_tokens, as_json=as_json)
        return
    _run(
        _Options(
            model=model,
            prompts=prompt or [],
            prompt_ids=prompt_ids,
            chat=chat,
            system=system,
            max_tokens=max_tokens or _MAX_TOKENS,
            block_size=block_size,
            blocks=blocks,
            max_batch_tokens=max_batch_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            reuse=not no_reuse,
            tenants=[name.strip() for name in tenants.split(",")],
            senders=tenant or [],
            as_json=as_json,
        )
    )


def _run(options: _Options) -> None:
    from kvpager.runner.generate import GenerationLoop, LoopConfig
    from kvpager.runner.loading import load_model
    from kvpager.runner.sampling import SamplingParams

    seed = {} if options.seed is None else {"seed": options.seed}
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p, **seed)
    id_lists = _read_prompt_ids(options.prompt_ids) if options.prompt_ids else []
    senders = _senders(options, len(options.prompts) + len(id_lists))
    started = time.perf_counter()
    loaded = load_model(options.model)
    load_time = time.perf_counter() - started
    prompts = [*_encode(loaded, options), *id_lists]
    config = LoopConfig(
        num_blocks=options.blocks or _default_blocks(loaded, prompts, options),
        block_size=options.block_size,
        max_batch_tokens=options.max_batch_tokens,
        reuse=options.reuse,
    )
    loop = GenerationLoop(loaded.model, config, fingerprint=loaded.fingerprint(block_size=options.block_size))
    for name in options.tenants:
        loop.add_tenant(name)
    for sender, ids in zip(senders, prompts, strict=True):
        loop.submit(
            sender,
            ids,
            max_tokens=options.max_tokens,
            stop_token_ids=loaded.tokenizer.stop_token_ids,
            sampling=sampling,
        )
    _stream_if_alone(loop, loaded, options)
    started = time.perf_counter()
    loop.run()
    wall_time = time.perf_counter() - started
    if options.as_json:
        print(json.dumps(report(loop, loaded, load_time=load_time, wall_time=wall_time)))
    else:
        _print_result(loop, loaded)


def _senders(options: _Options, num_prompts: int) -> list[str]:
    """Returns who sends each prompt; checks what can be checked before a model is loaded."""
    if num_prompts == 0:
        raise InvalidArgumentError("no prompt: give --prompt TEXT, --prompt-ids FILE.json, or --demo")
    if "" in options.tenants or len(set(options.tenants)) != len(options.tenants):
        raise InvalidArgumentError(
            f"--tenants {','.join(options.tenants)!r}: names must differ and not be empty"
        )
    senders = options.senders or options.tenants[:1]
    if unknown := [name for name in senders if name not in options.tenants]:
        raise InvalidArgumentError(
            f"unknown tenant {unknown[0]!r}: --tenants names {', '.join(options.tenants)}"
        )
    if len(senders) == 1:
        return senders * num_prompts
    if len(senders) != num_prompts:
        raise InvalidArgumentError(
            f"{len(senders)} --tenant for {num_prompts} prompts: give one, or one for each"
        )
    return senders


def _read_prompt_ids(path: Path) -> list[list[int]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no JSON file ({error})") from error
    if not isinstance(value, list) or not all(isinstance(ids, list) for ids in value):
        raise InvalidArgumentError(f"{path}: a list of lists of token ids is needed")
    for place, ids in enumerate(value):
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
                raise InvalidArgumentError(f"{path}: prompt {place} has {token_id!r}, which is no token id")
    return value


def _encode(loaded: LoadedModel, options: _Options) -> list[list[int]]:
    if not options.chat:
        return [loaded.tokenizer.encode(text) for text in options.prompts]
    head = [{"role": "system", "content": options.system}] if options.system else []
    return [
        loaded.tokenizer.encode_chat([*head, {"role": "user", "content": text}]) for text in options.prompts
    ]


def _default_blocks(loaded: LoadedModel, prompts: list[list[int]], options: _Options) -> int:
    from kvpager.runner.generate import blocks_needed

    needs = [blocks_needed(len(ids), options.max_tokens, options.block_size) for ids in prompts]
    block_bytes = loaded.model.config.kv_bytes_per_token * options.block_size
    longest = blocks_needed(loaded.model.config.max_positions, 1, options.block_size)
    return max(1, min(sum(needs), max(longest, _MAX_DEFAULT_POOL_BYTES // block_bytes)))


def _stream_if_alone(loop: GenerationLoop, loaded: LoadedModel, options: _Options) -> None:
    """Prints the text of a single prompt as it comes."""
    if options.as_json or len(loop.generations) != 1:
        return
    from kvpager.runner.tokenizer import TextStream

    stream = TextStream(loaded.tokenizer)

    def show(_generation: Generation, token_id: int) -> None:
        print(stream.push(token_id), end="", flush=True)

    def end(_generation: Generation) -> None:
        print(stream.finish())

    loop.on_token, loop.on_finished = show, end


def _print_result(loop: GenerationLoop, loaded: LoadedModel) -> None:
    from kvpager.cli.tables import print_pool, print_requests

    if len(loop.generations) > 1:
        for number, generation in enumerate(loop.generations.values(), 1):
            print(f"[{number}] {loaded.tokenizer.decode(generation.token_ids)}\n")
    print_requests(loop, file=sys.stdout)
    print_pool(loop, file=sys.stdout)


def report(
    loop: GenerationLoop, loaded: LoadedModel, *, load_time: float, wall_time: float
) -> dict[str, Any]:
    """Returns the JSON object of the command.

    Args:
        loop: after its run.
        loaded: for the text.
        load_time: seconds that loading the model took.
        wall_time: seconds of the run.
    """
    stats = loop.pool.stats()
    output_tokens = sum(len(generation.token_ids) for generation in loop.generations.values())
    return {
        "model": loaded.name,
        "requests": [_report_request(generation, loaded) for generation in loop.generations.values()],
        "pool": {
            "blocks": stats.capacity,
            "held": stats.held,
            "cached": stats.cached,
            "free": stats.free,
            "reserved": stats.reserved,
            "peak_held": stats.peak_held,
        },
        "preemptions": loop.scheduler.stats().num_preemptions,
        "steps": loop.scheduler.stats().steps,
        "load_time": load_time,
        "wall_time": wall_time,
        "output_tokens_per_second": output_tokens / wall_time if wall_time else 0.0,
    }


def _report_request(generation: Generation, loaded: LoadedModel) -> dict[str, Any]:
    account = generation.account
    return {
        "id": generation.request_id,
        "tenant": generation.tenant,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": account.cached_tokens if account else 0,
        "output_tokens": len(generation.token_ids),
        "token_ids": generation.token_ids,
        "text": loaded.tokenizer.decode(generation.token_ids),
        "finish_reason": account.reason if account else None,
        "steps": account.steps if account else 0,
        "queue_wait": generation.queue_wait,
        "queue_steps": account.queue_steps if account else 0,
        "preemptions": account.preemptions if account else 0,
    }
