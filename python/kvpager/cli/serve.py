"""`kvpager serve`: an OpenAI-compatible server over paged KV memory."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvpager._threads import configure_threads
from kvpager.cli.paths import given_path
from kvpager.cli.sizes import parse_bytes
from kvpager.errors import InvalidArgumentError, MissingDependencyError
from kvpager.wording import counted

if TYPE_CHECKING:
    from kvpager.engine import Engine
    from kvpager.server import ServerSettings, TenantTable

__all__ = ["register"]

_NULL_MODEL = "null"
_DEFAULT_MEMORY = "1GiB"
_DEFAULT_NULL_BLOCKS = 65_536


@dataclass(frozen=True, kw_only=True)
class _Options:
    model: str
    name: str | None
    tenants: Path | None
    blocks: int | None
    memory: str | None
    block_size: int
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    policy: Literal["reserve", "watermark", "forecast"]
    urgent_preempts: bool
    eviction: Literal["lru", "learned", "clock"]
    default_max_tokens: int
    max_body: str
    request_timeout: float | None
    overflow: Literal["auto", "recompute", "swap", "refuse"]
    host_blocks: int
    open_steps: int
    step_time: float


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("serve", short_help="Serve the OpenAI endpoints.")(_serve)


def _serve(
    model: Annotated[
        str, typer.Option(help="'demo', a GGUF file, a model directory, or 'null' for synthetic tokens.")
    ] = "demo",
    name: Annotated[str | None, typer.Option(help="Name that clients give; by default the model's.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for clients; 0 takes a free one.")] = 8000,
    operator_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port on 127.0.0.1 for /metrics and the page, without a key."),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(help="Who may ask, with keys and quotas.", metavar="FILE.toml", parser=given_path),
    ] = None,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Print a new API key and its hash for --tenants, and exit.")
    ] = False,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks, instead of --memory.")] = None,
    memory: Annotated[
        str | None, typer.Option(help=f"Bytes of KV memory, {_DEFAULT_MEMORY} by default.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Token positions in a block.")] = 16,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 512,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 1024,
    policy: Annotated[str, typer.Option(help="reserve, watermark or forecast.")] = "reserve",
    urgent_preempts: Annotated[
        bool,
        typer.Option("--urgent-preempts", help="Urgent requests preempt lower classes; not with reserve."),
    ] = False,
    eviction: Annotated[str, typer.Option(help="lru, learned or clock.")] = "lru",
    default_max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a chat answer that names no maximum.")
    ] = 512,
    max_body: Annotated[str, typer.Option(help="Longest request body.")] = "1MiB",
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for running requests after SIGTERM or Ctrl-C.")
    ] = 30.0,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a request that has not ended fails.")
    ] = None,
    overflow: Annotated[str, typer.Option(help="auto, recompute, swap or refuse.")] = "auto",
    host_blocks: Annotated[int, typer.Option(min=0, help="Blocks of the host tier, for swapping.")] = 0,
    open_steps: Annotated[
        int, typer.Option(min=1, max=2, help="2 plans a step while the model computes the one before.")
    ] = 1,
    step_time: Annotated[float, typer.Option(min=0.0, help="Seconds of a step of --model null.")] = 0.01,
) -> None:
    """Serves /v1/completions, /v1/chat/completions, /v1/models, /health, /ready, /metrics and a live page."""
    configure_threads()
    _import_server()
    if new_key:
        _print_new_key()
        return
    _check_choices(policy, eviction, overflow)
    if request_timeout is not None and not 0.0 < request_timeout < float("inf"):
        raise InvalidArgumentError(f"--request-timeout is {request_timeout}, above 0 seconds is needed")
    options = _Options(
        model=model,
        name=name,
        tenants=tenants,
        blocks=blocks,
        memory=memory,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
        policy=policy,  # type: ignore[arg-type]
        urgent_preempts=urgent_preempts,
        eviction=eviction,  # type: ignore[arg-type]
        default_max_tokens=default_max_tokens,
        max_body=max_body,
        request_timeout=request_timeout,
        overflow=overflow,  # type: ignore[arg-type]
        host_blocks=host_blocks,
        open_steps=open_steps,
        step_time=step_time,
    )
    _run(options, host, port, operator_port, drain_timeout)


_CHOICES = {
    "policy": ("reserve", "watermark", "forecast"),
    "eviction": ("lru", "learned", "clock"),
    "overflow": ("auto", "recompute", "swap", "refuse"),
}


def _check_choices(*chosen: str) -> None:
    for (name, choices), value in zip(_CHOICES.items(), chosen, strict=True):
        if value not in choices:
            raise InvalidArgumentError(f"--{name} is {value!r}: one of {', '.join(choices)} is needed")


def _import_server() -> None:
    try:
        import kvpager.server  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"the server needs further packages ({error}): pip install 'kvpager[serve]'"
        ) from error


def _print_new_key() -> None:
    from kvpager.server import hash_key
    from kvpager.server import new_key as make

    key = make()
    print(f"key (give it to its owner, it is not kept): {key}")
    print(f'line for the tenants file: key_hashes = ["{hash_key(key)}"]')


def _run(options: _Options, host: str, port: int, operator_port: int | None, drain_timeout: float) -> None:
    import uvloop

    from kvpager.engine import AsyncEngine
    from kvpager.server.running import Addresses, bind, serve

    table, operator_key = _tenants(options.tenants, operator_port)
    clients = bind(host, port)
    operator = None if operator_port is None else bind("127.0.0.1", operator_port)
    engine, settings = _engine(options, table)
    _announce(settings, engine, clients.getsockname(), operator and operator.getsockname(), operator_key)
    sys.setswitchinterval(0.001)  # a step's thread and the event loop take turns; 5 ms would be heard
    addresses = Addresses(clients, operator)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(AsyncEngine(engine), settings, addresses, drain_timeout=drain_timeout))


def _tenants(path: Path | None, operator_port: int | None) -> tuple[TenantTable, str | None]:
    """Returns who may ask, and the operator's key if one had to be made."""
    from kvpager.server import TenantTable, hash_key, new_key, read_tenants

    if path is not None:
        return read_tenants(path), None
    if operator_port is not None:
        return TenantTable.open(), None
    key = new_key()
    return TenantTable.open(operator_hashes=[hash_key(key)]), key


def _engine(options: _Options, table: TenantTable) -> tuple[Engine, ServerSettings]:
    from kvpager.engine import ByteTokenizer, Engine, EngineConfig, NullRunner
    from kvpager.server import ServerSettings

    fingerprint: Any = None
    runner: Any
    tokenizer: Any
    max_body = parse_bytes(options.max_body, "--max-body")
    memory = parse_bytes(_DEFAULT_MEMORY if options.memory is None else options.memory, "--memory")
    if memory == 0:
        raise InvalidArgumentError(f"--memory is {options.memory!r}, above 0 bytes is needed")
    if options.model == _NULL_MODEL:
        if options.memory is not None:
            raise InvalidArgumentError("--memory is of a model that has KV: give --blocks with --model null")
        runner, tokenizer, name = NullRunner(step_time=options.step_time), ByteTokenizer(), _NULL_MODEL
        num_blocks = options.blocks or _DEFAULT_NULL_BLOCKS
    else:
        from kvpager.attention.block_sizes import check_block_size
        from kvpager.runner import LlamaRunner, load_model

        check_block_size(options.block_size)
        print("Loading the model ...", file=sys.stderr, flush=True)
        loaded = load_model(options.model)
        runner, tokenizer, name = LlamaRunner(loaded.model), loaded.tokenizer, loaded.name
        fingerprint = loaded.fingerprint(block_size=options.block_size)
        block_bytes = loaded.model.config.kv_bytes_per_token * options.block_size
        num_blocks = options.blocks or memory // block_bytes
        if num_blocks == 0:
            raise InvalidArgumentError(f"--memory is {memory} bytes, a block of KV has {block_bytes}")
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        policy=options.policy,
        urgent_preempts=options.urgent_preempts,
        eviction=options.eviction,
        overflow=options.overflow,
        host_blocks=options.host_blocks,
        max_open_steps=options.open_steps,
        max_accounts=max(64, len(table.tenants) + len(table.groups) + len(table.publics)),
    )
    engine = Engine(runner, config, tokenizer=tokenizer, fingerprint=fingerprint)
    table.add_to(engine)
    table.publish(engine, tokenizer)
    settings = ServerSettings(
        model_name=options.name or name,
        tokenizer=tokenizer,
        tenants=table,
        max_body_bytes=max_body,
        default_max_tokens=options.default_max_tokens,
        request_timeout=options.request_timeout,
    )
    return engine, settings


def _announce(
    settings: ServerSettings, engine: Engine, clients: Any, operator: Any, operator_key: str | None
) -> None:
    config = engine.config
    lines = [
        f"Serving {settings.model_name}: {counted(config.num_blocks, 'block')} of "
        f"{counted(config.block_size, 'token')}, {counted(len(engine.tenants), 'tenant')}, "
        f"policy {config.policy}",
        f"API:  {_url(clients)}/v1",
    ]
    if operator is not None:
        lines.append(f"Page: {_url(operator)}/    metrics: {_url(operator)}/metrics")
    elif operator_key is not None:
        lines.append(f"Page: {_url(clients)}/#key={operator_key}")
        lines.append(f"Metrics: {_url(clients)}/metrics with the header Authorization: Bearer {operator_key}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _url(address: Any) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
