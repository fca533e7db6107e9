"""The applications: one for clients, one for the operator.

The operator's paths (`/metrics`, `/stats`, the page at `/`) are on the clients' port under the operator's
key, and on a port of their own without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvpager.engine import AsyncEngine
from kvpager.server.answer import AnswerFormat
from kvpager.server.errors import ApiError, add_error_handlers
from kvpager.server.generate import Job, answer, token_room
from kvpager.server.limits import RequestLimits
from kvpager.server.metrics import metrics_text
from kvpager.server.page import page_html
from kvpager.server.protocol import ChatRequest, CompletionRequest, parse_request
from kvpager.server.settings import ServerSettings
from kvpager.server.stats import operator_stats, tenant_stats
from kvpager.server.turns import Turns

__all__ = ["create_app", "create_operator_app"]

_PAGE_POLICY = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application that clients talk to.

    Args:
        engine: its tenants must be those of `settings.tenants`.
        settings: what the server is told.
    """
    app = _new_app(settings)
    _add_health(app, engine)
    _add_models(app, settings)
    _add_generation(app, engine, settings)
    _add_operator(app, engine, settings, needs_key=True)
    return app


def create_operator_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The application of the operator's own port, which asks for no key."""
    app = _new_app(settings)
    _add_health(app, engine)
    _add_operator(app, engine, settings, needs_key=False)
    return app


def _new_app(settings: ServerSettings) -> FastAPI:
    app = FastAPI(
        title="kvpager", docs_url=None, redoc_url=None
    )  # the documentation pages fetch from elsewhere
    add_error_handlers(app)
    app.add_middleware(RequestLimits, max_bytes=settings.max_body_bytes)
    app.add_middleware(Turns)  # the outermost: added last
    return app


def _add_health(app: FastAPI, engine: AsyncEngine) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine works, draining included; 503 once it cannot."""
        return Response(status_code=200 if engine.state in ("running", "draining") else 503)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are accepted; 503 before a shutdown, so that load goes elsewhere."""
        return Response(status_code=200 if engine.state == "running" else 503)


def _add_models(app: FastAPI, settings: ServerSettings) -> None:
    card = {"id": settings.model_name, "object": "model", "created": 0, "owned_by": "kvpager"}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _tenant_of(request, settings)
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        _tenant_of(request, settings)
        _check_model(name, settings)
        return card


def _add_generation(app: FastAPI, engine: AsyncEngine, settings: ServerSettings) -> None:
    def body_of(kind: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
        content = {"application/json": {"schema": kind.model_json_schema()}}
        return {"requestBody": {"required": True, "content": content}}

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        tenant = _tenant_of(request, settings)
        wanted = parse_request(CompletionRequest, await _json_of(request))
        _check_model(wanted.model, settings)
        params = wanted.to_params(wanted.max_tokens, wanted.logprobs, settings.request_timeout)
        answer_format = AnswerFormat(settings.tokenizer, settings.model_name, is_chat=False)
        job = Job(tenant, wanted.prompts, params, answer_format, wanted.stream, wanted.includes_usage)
        return await answer(engine, settings, request, job)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat(request: Request) -> Response:
        tenant = _tenant_of(request, settings)
        wanted = parse_request(ChatRequest, await _json_of(request))
        _check_model(wanted.model, settings)
        ids = settings.tokenizer.encode_chat([message.to_dict() for message in wanted.messages])
        limit = wanted.max_completion_tokens or wanted.max_tokens
        params = wanted.to_params(
            limit or _default_max_tokens(engine, settings, tenant, len(ids), wanted.min_tokens),
            wanted.top_logprobs if wanted.logprobs else None,
            settings.request_timeout,
        )
        answer_format = AnswerFormat(settings.tokenizer, settings.model_name, is_chat=True)
        job = Job(tenant, [ids], params, answer_format, wanted.stream, wanted.includes_usage, "messages")
        return await answer(engine, settings, request, job)


def _add_operator(app: FastAPI, engine: AsyncEngine, settings: ServerSettings, *, needs_key: bool) -> None:
    def is_operator(request: Request) -> bool:
        return not needs_key or settings.tenants.is_operator(_key_of(request.headers))

    # No coroutines: they run in threads beside the event loop, since many tenants take milliseconds.
    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        """Prometheus text, of one snapshot."""
        if not is_operator(request):
            raise ApiError(401, "/metrics needs the operator's key", code="invalid_api_key")
        return Response(
            metrics_text(engine.snapshot(), settings),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    @app.get("/stats")
    def stats(request: Request) -> JSONResponse:
        """What the page draws: everything for the operator, a tenant's own for a tenant."""
        if is_operator(request):
            return JSONResponse(operator_stats(engine.snapshot(), settings))
        return JSONResponse(tenant_stats(engine.snapshot(), settings, _tenant_of(request, settings)))

    @app.head("/", include_in_schema=False)
    @app.get("/")
    async def page() -> Response:
        """The live page. It holds no numbers: its script asks `/stats` with the reader's key."""
        headers = {"Content-Security-Policy": _PAGE_POLICY}
        return Response(page_html(), media_type="text/html; charset=utf-8", headers=headers)


def _key_of(headers: Mapping[str, str]) -> str | None:
    """The key that was given; None without the header, and "" if that holds no key: nobody's."""
    if (header := headers.get("authorization")) is None:
        return None
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _tenant_of(request: Request, settings: ServerSettings) -> str:
    key = _key_of(request.headers)
    if (tenant := settings.tenants.tenant_of(key)) is None:
        text = "the API key is not known" if key else "no API key was given"
        if settings.tenants.is_operator(key):
            text = "this is the operator's key, for /metrics, /stats and the page: give a tenant's key"
        raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return tenant


async def _json_of(request: Request) -> bytes:
    """The body of a request that says that it is JSON.

    A page of another site can make a browser send any other kind without asking, where no key is needed.
    """
    given = request.headers.get("content-type")
    if given is None or given.partition(";")[0].strip().lower() != "application/json":
        text = "no Content-Type was given" if given is None else f"the Content-Type is {given[:100]!r}"
        raise ApiError(415, f"{text}: application/json is needed", code="unsupported_media_type")
    return await request.body()


def _check_model(name: str, settings: ServerSettings) -> None:
    if name != settings.model_name:
        text = f"the model {name[:100]!r} does not exist: this server has {settings.model_name!r}"
        raise ApiError(404, text, code="model_not_found", param="model")


def _default_max_tokens(
    engine: AsyncEngine, settings: ServerSettings, tenant: str, prompt_tokens: int, min_tokens: int
) -> int:
    """Tokens of an answer that names no maximum: the setting, or what model and tenant have room for."""
    room = token_room(engine, settings, tenant)
    return max(1, min_tokens, min(settings.default_max_tokens, room - prompt_tokens))
