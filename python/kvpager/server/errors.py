"""Errors as OpenAI's clients read them, and nothing of other tenants in them."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvpager.engine import TenantCounters
from kvpager.errors import GenerationError, InvalidArgumentError, WrongStateError

__all__ = ["ApiError", "add_error_handlers", "error_body", "retry_after"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_FIELDS = {"beam_width": "use_beam_search"}
"""Fields of a request that the engine has another name for."""


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        text: for people.
        code: for programs, or None.
        param: the field that is wrong, or None.
        headers: besides the usual ones.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.code, self.param, self.headers = status, text, code, param, headers


def error_body(
    status: int, text: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


_STEP_TIME = 0.05
"""Seconds of a step, for a tenant that has seen none."""


def retry_after(counters: TenantCounters, steps: int | None = None) -> int:
    """Whole seconds after which a tenant's request may find a place, from its own history alone.

    Args:
        counters: of the tenant.
        steps: the scheduler's estimate, from the tenant's own queue. Without it, the mean time between ends
            of the tenant's requests, as long as as many run as now.

    Returns:
        1 to 60.
    """
    if steps is not None:
        per_token = counters.time_per_output_token
        seconds = steps * (per_token.total / per_token.count if per_token.count else _STEP_TIME)
    else:
        latency = counters.latency
        mean = latency.total / latency.count if latency.count else 1.0
        seconds = mean / max(1, counters.num_running)
    return min(60, max(1, math.ceil(seconds)))


def add_error_handlers(app: FastAPI) -> None:
    """Gives every error of an application the one shape."""

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> JSONResponse:
        body = error_body(error.status, error.text, code=error.code, param=error.param)
        return JSONResponse(body, error.status, headers=error.headers)

    @app.exception_handler(InvalidArgumentError)
    async def invalid(_request: Request, error: InvalidArgumentError) -> JSONResponse:
        param = None if error.param is None else _FIELDS.get(error.param, error.param)
        return JSONResponse(error_body(400, str(error), param=param), 400)

    @app.exception_handler(WrongStateError)
    async def unavailable(_request: Request, error: WrongStateError) -> JSONResponse:
        return JSONResponse(error_body(503, str(error)), 503, headers={"Retry-After": "10"})

    @app.exception_handler(GenerationError)
    async def failed(_request: Request, error: GenerationError) -> JSONResponse:
        status = 504 if error.reason == "deadline" else 500
        return JSONResponse(error_body(status, error.detail, code=error.reason), status)

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            error_body(error.status_code, str(error.detail)), error.status_code, error.headers
        )


def too_many(text: str, counters: TenantCounters, steps: int | None = None) -> ApiError:
    """429 with the time after which to try again."""
    seconds = retry_after(counters, steps)
    return ApiError(
        429,
        f"{text}: try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )
