"""`kvpager generate`: a real model generates from paged memory; `--demo` is the main job of `make run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpager._threads import configure_threads
from kvpager.cli.paths import given_path
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.engine import Engine, Generation
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
    app.command("generate", short_help="Generate text over paged KV memory.")(_generate)


def _generate(
    model: Annotated[str, typer.Option(help="'demo', a GGUF file, or a model directory.")] = "demo",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several.")] = None,
    prompt_ids: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with a list of lists of token ids.", metavar="FILE.json", parser=given_path
        ),
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
) -> int:
    """Generates text with a Llama-family model over paged KV memory.

    Exit code 1 if the model failed, 130 after Ctrl-C, which prints what there is.
    """
    from kvpager.attention.block_sizes import check_block_size

    configure_threads()
    check_block_size(block_size)
    if demo:
        from kvpager.cli.demo import run_demo

        if prompt or prompt_ids or chat or system:
            raise InvalidArgumentError(
                "--demo has its own prompts: leave out --prompt, --prompt-ids, --chat, --system"
            )
        return run_demo(
            model=model, blocks=blocks, block_size=block_size, max_tokens=max_tokens, as_json=as_json
        )
    if system is not None and not chat:
        raise InvalidArgumentError("--system is the system message of the chat template: give --chat too")
    return _run(
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


def _run(options: _Options) -> int:
    from kvpager.engine import GenerationParams, SamplingParams
    from kvpager.runner.loading import load_model

    seed = {} if options.seed is None else {"seed": options.seed}
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p, **seed)
    id_lists = _read_prompt_ids(options.prompt_ids) if options.prompt_ids else []
    senders = _senders(options, len(options.prompts) + len(id_lists))
    started = time.perf_counter()
    loaded = load_model(options.model)
    load_time = time.perf_counter() - started
    prompts = [*_encode(loaded, options), *id_lists]
    engine = _engine(loaded, prompts, options)
    params = GenerationParams(max_tokens=options.max_tokens, sampling=sampling)
    listener = _Printer(loaded) if len(prompts) == 1 and not options.as_json else None
    generations = [
        engine.submit(ids, params, tenant=sender, listener=listener)[0]
        for sender, ids in zip(senders, prompts, strict=True)
    ]
    wall_time, code = run_engine(engine)
    if options.as_json:
        print(json.dumps(report(engine, generations, loaded, load_time=load_time, wall_time=wall_time)))
    else:
        _print_result(engine, generations, loaded)
    return code or report_failures(generations)


def run_engine(engine: Engine) -> tuple[float, int]:
    """Runs everything; Ctrl-C ends what runs and keeps what there is.

    Returns:
        (seconds, exit code): 130 after Ctrl-C.
    """
    started, code = time.perf_counter(), 0
    try:
        engine.run()
    except KeyboardInterrupt:
        engine.close()
        code = 130
    return time.perf_counter() - started, code


def report_failures(generations: Sequence[Generation]) -> int:
    """Prints a line on stderr for the first request that failed; returns the exit code."""
    failed = [generation for generation in generations if generation.error]
    if not failed:
        return 0
    print(f"kvpager: {len(failed)} of {len(generations)} requests failed: {failed[0].error}", file=sys.stderr)
    return 1


def _engine(loaded: LoadedModel, prompts: list[list[int]], options: _Options) -> Engine:
    from kvpager.engine import Engine, EngineConfig
    from kvpager.runner import LlamaRunner

    config = EngineConfig(
        num_blocks=options.blocks or _default_blocks(loaded, prompts, options),
        block_size=options.block_size,
        max_batch_tokens=options.max_batch_tokens,
        reuse=options.reuse,
    )
    engine = Engine(
        LlamaRunner(loaded.model),
        config,
        tokenizer=loaded.tokenizer,
        fingerprint=loaded.fingerprint(block_size=options.block_size),
    )
    for name in options.tenants:
        engine.add_tenant(name)
    return engine


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
    from kvpager.engine import blocks_needed

    needs = [blocks_needed(len(ids), options.max_tokens, options.block_size) for ids in prompts]
    block_bytes = loaded.model.config.kv_bytes_per_token * options.block_size
    longest = blocks_needed(loaded.model.config.max_positions, 1, options.block_size)
    return max(1, min(sum(needs), max(longest, _MAX_DEFAULT_POOL_BYTES // block_bytes)))


class _Printer:
    """Prints the text of a single prompt as it comes."""

    def __init__(self, loaded: LoadedModel) -> None:
        from kvpager.engine import TextStream

        self._stream = TextStream(loaded.tokenizer)

    def notify(self, generation: Generation) -> None:
        """Prints what is new."""
        for token_id in generation.token_ids[generation.num_taken :]:
            print(self._stream.push(token_id), end="", flush=True)
        generation.num_taken = len(generation.token_ids)
        if generation.has_ended:
            print(self._stream.finish())


def _print_result(engine: Engine, generations: Sequence[Generation], loaded: LoadedModel) -> None:
    from kvpager.cli.tables import print_pool, print_requests

    if len(generations) > 1:
        for number, generation in enumerate(generations, 1):
            print(f"[{number}] {loaded.tokenizer.decode(generation.token_ids)}\n")
    print_requests(generations, file=sys.stdout)
    print_pool(engine, file=sys.stdout)


def report(
    engine: Engine,
    generations: Sequence[Generation],
    loaded: LoadedModel,
    *,
    load_time: float,
    wall_time: float,
) -> dict[str, Any]:
    """Returns the JSON object of the command.

    Args:
        engine: after its run.
        generations: what was submitted.
        loaded: for the text.
        load_time: seconds that loading the model took.
        wall_time: seconds of the run.
    """
    stats = engine.pool.stats()
    output_tokens = sum(len(generation.token_ids) for generation in generations)
    return {
        "model": loaded.name,
        "requests": [_report_request(generation, loaded) for generation in generations],
        "pool": {
            "blocks": stats.capacity,
            "held": stats.held,
            "cached": stats.cached,
            "free": stats.free,
            "reserved": stats.reserved,
            "peak_held": stats.peak_held,
        },
        "preemptions": engine.scheduler.stats().num_preemptions,
        "steps": engine.scheduler.stats().steps,
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
