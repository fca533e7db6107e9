"""From a checked request to its answer: submission, streaming, collection, and what ends them early."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import Request
from fastapi.responses import Response

from kvpager.engine import AsyncEngine, GenerationParams, GenerationStream
from kvpager.errors import GenerationError, RefusedError
from kvpager.server import tracing
from kvpager.server.answer import AnswerFormat, Choice, usage_of
from kvpager.server.errors import ApiError, error_body, refusal, too_many
from kvpager.server.event_stream import EventStream, watching_for_disconnect
from kvpager.server.settings import ServerSettings

__all__ = ["Job", "answer"]

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
    """

    tenant: str
    prompts: Sequence[str | list[int]]
    params: GenerationParams
    answer_format: AnswerFormat
    is_streamed: bool
    includes_usage: bool


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
        streams = _submit(engine, job)
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


def _check_limit(engine: AsyncEngine, settings: ServerSettings, job: Job) -> None:
    limit = settings.tenants.tenants[job.tenant].max_requests
    if limit is None:
        return
    counters = engine.engine.counters(job.tenant)
    in_flight = counters.num_running + counters.num_waiting
    wanted = len(job.prompts) * job.params.num_sequences
    if wanted > limit:
        engine.engine.note_refused(job.tenant)
        raise ApiError(400, f"{wanted} samples are asked for, at most {limit} may be in flight", param="n")
    if in_flight + wanted > limit:
        engine.engine.note_refused(job.tenant)
        text = f"{in_flight} requests are in flight and {wanted} more are asked for, the limit is {limit}"
        raise too_many(text, counters)


def _submit(engine: AsyncEngine, job: Job) -> list[GenerationStream]:
    streams: list[GenerationStream] = []
    try:
        for prompt in job.prompts:
            streams.append(engine.generate(prompt, job.params, tenant=job.tenant))
    except BaseException as error:
        _end(streams)
        if isinstance(error, RefusedError):
            raise refusal(error, engine.engine.counters(job.tenant)) from error
        raise
    return streams


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
    offsets = [0] * (len(streams) * num_samples)
    try:
        for index in range(len(offsets)):
            if chunk := answer_format.role_chunk(index):
                yield chunk
        for place, stream in enumerate(streams):
            async for output in stream:
                if output.finish_reason == "aborted":
                    raise GenerationError(_GONE, "aborted")
                index = place * num_samples + output.index
                if output.text or output.finish_reason is not None or output.logprobs:
                    yield answer_format.chunk(index, output, offsets[index])
                    offsets[index] += len(output.text)
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
