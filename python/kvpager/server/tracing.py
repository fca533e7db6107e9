"""OpenTelemetry spans of requests, when the API is installed; else nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpager.engine import GenerationStream

if TYPE_CHECKING:
    from kvpager.server.generate import Job

trace: Any
try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = None

__all__ = ["RequestSpan", "start"]


class RequestSpan:
    """The span of one request, or nothing where the API is not installed. Ends once."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        """Takes an OpenTelemetry span, or None."""
        self._span = span

    def end(self, streams: Sequence[GenerationStream]) -> None:
        """Ends it with what the request took."""
        if self._span is None:
            return
        first = streams[0].generations[0]
        values: dict[str, Any] = {
            "gen_ai.usage.input_tokens": sum(stream.prompt_tokens for stream in streams),
            "gen_ai.usage.output_tokens": sum(stream.output_tokens for stream in streams),
            "kvpager.cached_tokens": sum(stream.cached_tokens for stream in streams),
            "kvpager.queue_time": first.queue_wait,
        }
        if first.first_token_at is not None:
            values["gen_ai.server.time_to_first_token"] = first.first_token_at - first.submitted_at
        self._span.set_attributes(values)
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Ends it as failed."""
        if self._span is not None:
            self._span.record_exception(error)
            self._span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            self._finish()

    def close(self, streams: Sequence[GenerationStream]) -> None:
        """Ends it if nothing did: its client has gone."""
        if self._span is not None:
            self._span.set_attribute("kvpager.aborted", True)
            self.end(streams)

    def _finish(self) -> None:
        self._span.end()
        self._span = None


def start(headers: Mapping[str, str], model: str, job: Job) -> RequestSpan:
    """Starts a request's span under the web framework's, or else under the one that the headers name."""
    if trace is None:
        return RequestSpan(None)
    is_inside = trace.get_current_span().get_span_context().is_valid
    span = trace.get_tracer("kvpager").start_span(
        "llm_request",
        context=None if is_inside else propagate.extract(headers),
        attributes={
            "gen_ai.request.model": model,
            "gen_ai.request.max_tokens": job.params.max_tokens,
            "gen_ai.request.temperature": job.params.sampling.temperature,
            "gen_ai.request.top_p": job.params.sampling.top_p,
            "gen_ai.response.id": job.answer_format.id,
            "kvpager.tenant": job.tenant,
            "kvpager.samples": job.params.n * len(job.prompts),
        },
    )
    return RequestSpan(span)
