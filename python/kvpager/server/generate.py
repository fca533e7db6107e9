"""From a checked request to its answer: submission, streaming, collection, and what ends them early."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import Request
from fastapi.responses import Response

from kvpager.engine import AsyncEngine, GenerationParams, GenerationStream
from kvpager.errors import GenerationError, InvalidArgumentError, RefusedError
from kvpager.server import tracing
from kvpager.server.answer import AnswerFormat, Choice, usage_of
from kvpager.server.errors import ApiError, error_body, too_many
from kvpager.server.event_stream import EventStream, watching_for_disconnect
from kvpager.server.settings import ServerSettings

__all__ = ["Job", "answer", "token_room"]

_GONE = "the server is shutting down"


@dataclass(frozen=True)
class Job:
    """One request, ready for the engine.

    Attributes:
        tenant: who asks.
        prompts: texts, or lists of token ids.
        params: for each prompt.
        answer_format: how the answer is written.
        is_streamed: whether the answer comes in chunks.
        includes_usage: whether a stream ends with its usage.
        prompt_field: where the request has its prompts.
    """

    tenant: str
    prompts: Sequence[str | list[int]]
    params: GenerationParams
    answer_format: AnswerFormat
    is_streamed: bool
    includes_usage: bool
    prompt_field: str = "prompt"

    @property
    def count_field(self) -> str:
        """The field that asks for too much where there are too many samples."""
        return self.prompt_field if len(self.prompts) > 1 else "n"


async def answer(engine: AsyncEngine, settings: ServerSettings, request: Request, job: Job) -> Response:
    """Submits a request and answers it.

    Raises:
        ApiError: refused: 400 if it can never fit, 429 with `Retry-After` if it may later.
        GenerationError: it failed before its end (only of answers that are not streamed).
        WrongStateError: the engine accepts nothing.
    """
    span = tracing.start(request.headers, settings.model_name, job)
    try:
        _check_limit(engine, settings, job)
        streams = _submit(engine, settings, job)
    except BaseException as error:
        span.fail(error)
        raise
    end = partial(_end, streams)
    if job.is_streamed:
        return EventStream(_chunks(job, streams, span), end)
    try:
        async with watching_for_disconnect(request.receive, end):
            body = await _collect(job, streams)
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        end()
    span.end(streams)
    return Response(body, media_type="application/json")


def token_room(engine: AsyncEngine, settings: ServerSettings, tenant: str) -> int:
    """Tokens of prompt and answer together that model and tenant have room for."""
    config = engine.engine.config
    limit = settings.tenants.tenants[tenant].limit or config.num_blocks
    return min(engine.engine.max_model_tokens, min(limit, config.num_blocks) * config.block_size)


def _check_limit(engine: AsyncEngine, settings: ServerSettings, job: Job) -> None:
    """Refuses what queue or tenant can never hold, and what is above the tenant's limit now."""
    places, bound = len(job.prompts) * job.params.num_waiting, engine.engine.max_waiting(job.tenant)
    if places > bound:
        engine.engine.note_refused(job.tenant)
        text = f"{places} samples are asked for, at most {bound} may wait at once"
        raise ApiError(400, text, param=job.count_field)
    limit = settings.tenants.tenants[job.tenant].max_requests
    if limit is None:
        return
    counters = engine.engine.counters(job.tenant)
    in_flight = counters.num_running + counters.num_waiting
    wanted = len(job.prompts) * job.params.num_sequences
    if wanted > limit:
        engine.engine.note_refused(job.tenant)
        text = f"{wanted} samples are asked for, at most {limit} may be in flight"
        raise ApiError(400, text, param=job.count_field)
    if in_flight + wanted > limit:
        engine.engine.note_refused(job.tenant)
        text = f"in flight: {in_flight}, asked for: {wanted} more, the limit is {limit}"
        raise too_many(text, counters)


def _submit(engine: AsyncEngine, settings: ServerSettings, job: Job) -> list[GenerationStream]:
    streams: list[GenerationStream] = []
    waiting = engine.engine.counters(job.tenant).num_waiting
    params = settings.tenants.tenants[job.tenant].retained(job.params)
    try:
        for prompt in job.prompts:
            streams.append(engine.generate(prompt, params, tenant=job.tenant))
    except BaseException as error:
        _end(streams)
        if isinstance(error, RefusedError):
            if error.retryable:
                raise _queue_is_full(engine, settings, job, waiting, error) from error
            text = str(error).removeprefix("refused: ")
            param = _too_large_field(engine, settings, job, prompt)
            raise ApiError(400, text, code="context_length_exceeded", param=param) from error
        if isinstance(error, InvalidArgumentError) and error.param == "prompt":
            error.param = job.prompt_field
        raise
    return streams


def _queue_is_full(
    engine: AsyncEngine, settings: ServerSettings, job: Job, waiting: int, error: RefusedError
) -> ApiError:
    """429 with the tenant's own count and limit; the engine's limit would count the others."""
    own = settings.tenants.tenants[job.tenant].max_waiting
    text = f"too many requests are waiting, {waiting} of them yours"
    if own is not None:
        text += f": your limit is {own}"
    return too_many(text, engine.engine.counters(job.tenant), error.retry_after_steps)


def _too_large_field(engine: AsyncEngine, settings: ServerSettings, job: Job, prompt: str | list[int]) -> str:
    """The field to make smaller in a request that never fits."""
    length = len(settings.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    room = token_room(engine, settings, job.tenant)
    if length >= room:
        return job.prompt_field
    return "max_tokens" if length + job.params.max_tokens > room else job.count_field


def _end(streams: Sequence[GenerationStream]) -> None:
    """Ends what has not ended, and its consumer with it."""
    for stream in streams:
        stream.close()
        stream.wake()


async def _collect(job: Job, streams: Sequence[GenerationStream]) -> bytes:
    choices = [Choice() for _ in range(len(streams) * job.params.n)]
    for place, stream in enumerate(streams):
        async for output in stream:
            if output.finish_reason == "aborted":
                raise GenerationError(_GONE, "aborted")
            choices[place * job.params.n + output.index].add(output)
    return job.answer_format.whole(choices, usage_of(streams))


async def _chunks(
    job: Job, streams: Sequence[GenerationStream], span: tracing.RequestSpan
) -> AsyncIterator[bytes]:
    """Yields the events of a stream; a failure is its last one, since the status is long sent."""
    answer_format, num_samples = job.answer_format, job.params.n
    try:
        for index in range(len(streams) * num_samples):
            if chunk := answer_format.role_chunk(index):
                yield chunk
        for place, stream in enumerate(streams):
            async for output in stream:
                if output.finish_reason == "aborted":
                    raise GenerationError(_GONE, "aborted")
                index = place * num_samples + output.index
                if output.text or output.finish_reason is not None or output.logprobs:
                    yield answer_format.chunk(index, output)
        if job.includes_usage:
            yield answer_format.usage_chunk(usage_of(streams))
        yield b"data: [DONE]\n\n"
        span.end(streams)
    except GenerationError as error:
        body = error_body(500, error.detail, code=error.reason)
        yield b"data: " + msgspec.json.encode(body) + b"\n\n"
        span.fail(error)
    finally:
        _end(streams)
        span.close(streams)
