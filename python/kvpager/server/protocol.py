"""Requests as OpenAI's clients write them. Unknown fields are ignored, wrong ones are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvpager.engine import GenerationParams, SamplingParams
from kvpager.engine.config import MAX_LOGPROBS, MAX_SAMPLES
from kvpager.errors import InvalidArgumentError
from kvpager.identity import text_digest
from kvpager.server.errors import ApiError

__all__ = ["ChatRequest", "CompletionRequest", "StreamOptions", "parse_request"]

_AS_WRITTEN = ConfigDict(extra="ignore", strict=True)
"""Unknown fields are ignored; `"5"` and `true` are no numbers, and 1 is not true."""

_MAX_STOPS = 16
_R = TypeVar("_R", bound="_Request")
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_NumTokens = Annotated[int, Field(ge=1, lt=2**32)]


def _wrong(param: str, text: str) -> PydanticCustomError:
    """What a validator raises that looks at several fields and knows which one is wrong."""
    return PydanticCustomError("wrong_field", "{text}", {"param": param, "text": text})


def _refuse(unsupported: Mapping[str, bool]) -> None:
    """Refuses fields by name that would change the answer if they were known."""
    for name, is_used in unsupported.items():
        if is_used:
            raise _wrong(name, f"{name} is not supported: leave it out")


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    model_config = _AS_WRITTEN
    include_usage: bool | None = None


class _Request(BaseModel):
    """What completions and chat have in common.

    `top_k`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `priority`, `cache_salt`, `use_beam_search` and
    `length_penalty` are not OpenAI's; other servers read them under these names.
    """

    model_config = _AS_WRITTEN

    model: str
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**32)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-100.0, le=100.0)
    early_stopping: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Takes null as not given, as clients mean it."""
        if isinstance(values, dict):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        _refuse(
            {
                "presence_penalty": self.presence_penalty != 0.0,
                "frequency_penalty": self.frequency_penalty != 0.0,
                "repetition_penalty": self.repetition_penalty != 1.0,
                "logit_bias": bool(self.logit_bias),
            }
        )
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "stream_options needs stream: true")
        self._check_best_of()
        if isinstance(self.stop, list) and len(self.stop) > _MAX_STOPS:
            raise _wrong("stop", f"stop has {len(self.stop)} texts, at most {_MAX_STOPS} are allowed")
        return self

    def _check_best_of(self) -> None:
        if self.use_beam_search:
            if self.stream:
                raise _wrong(
                    "stream", "use_beam_search does not go with stream: answers are known at the end"
                )
            if self.stop:
                raise _wrong("stop", "use_beam_search does not go with stop: give stop_token_ids")
            if self.best_of is not None and self.best_of < self.n:
                raise _wrong("best_of", f"best_of is {self.best_of}, at least n {self.n} is needed")
        elif self.best_of is not None and self.best_of != self.n:
            text = f"best_of is {self.best_of} and n is {self.n}: other than n needs use_beam_search"
            raise _wrong("best_of", text)

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_params(self, max_tokens: int, logprobs: int | None, deadline: float | None) -> GenerationParams:
        """The engine's settings. A beam search ranks and draws nothing, so it leaves those of drawing out.

        Raises:
            InvalidArgumentError: values that do not go together.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = {} if self.seed is None else {"seed": self.seed % 2**64}
        sampling = SamplingParams(
            temperature=self.temperature, top_k=max(0, self.top_k), top_p=self.top_p, **seed
        )
        return GenerationParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            n=self.n,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            priority=self.priority,
            deadline=deadline,
            salt=None if self.cache_salt is None else text_digest(self.cache_salt).encode(),
            beam_width=(self.best_of or self.n) if self.use_beam_search else None,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            sampling=SamplingParams() if self.use_beam_search else sampling,
        )


class CompletionRequest(_Request):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[_TokenId] | list[list[_TokenId]]
    max_tokens: _NumTokens = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        _refuse({"echo": self.echo, "suffix": bool(self.suffix)})
        if not self.prompt:
            raise _wrong("prompt", "prompt is empty")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt


class _TextPart(BaseModel):
    model_config = _AS_WRITTEN
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = _AS_WRITTEN
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, message: Any) -> Any:
        if isinstance(message, dict):
            if (role := message.get("role")) in ("tool", "function"):
                raise _wrong("messages", f"messages of the role {role!r} are not supported: tools are not")
            for name in ("tool_calls", "function_call"):
                if message.get(name):
                    raise _wrong("messages", f"{name} of a message are not supported: tools are not")
        return message

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_images(cls, content: Any) -> Any:
        """Names the kind of a part, which the union of text and parts would not."""
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                images = " (images are not)" if "image" in kind else ""
                raise _wrong(
                    "messages", f"parts of the type {kind[:100]!r} are not supported{images}: only text is"
                )
        return content

    def to_dict(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Request):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: _NumTokens | None = None
    max_completion_tokens: _NumTokens | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        for name, choice in (("tools", "tool_choice"), ("functions", "function_call")):
            chosen = getattr(self, choice)
            if getattr(self, name) and chosen != "none":
                raise _wrong(name, f'{name} are not supported: leave them out, or say {choice}: "none"')
            _refuse({choice: chosen not in (None, "none")})
        if self.response_format and self.response_format.get("type", "text") != "text":
            kind = self.response_format.get("type")
            raise _wrong("response_format", f"response_format {kind!r} is not supported: only 'text'")
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs", "top_logprobs needs logprobs: true")
        return self


def parse_request(kind: type[_R], body: bytes) -> _R:
    """Reads a request's body.

    Raises:
        ApiError: 400 that names the field and what is wrong with it.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = _nearest(error.errors(include_url=False))
        names = [str(part) for part in first["loc"] if not _is_kind(part)]
        text = first["msg"]
        param = names[0] if names and first["type"] != "json_invalid" else None
        where = f"{'.'.join(names[:3])}: " if param else ""
        param = first.get("ctx", {}).get("param", param)
        raise ApiError(400, f"{where}{text}", param=param, code="invalid_value") from error
    except InvalidArgumentError as error:
        raise ApiError(400, str(error)) from error


def _nearest(errors: list[ErrorDetails]) -> ErrorDetails:
    """The error of the first wrong field that says most: of its forms, the one that fitted furthest."""
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    return sorted(same, key=lambda error: (error["type"].endswith("_type"), -len(error["loc"])))[0]


def _is_kind(part: int | str) -> bool:
    """Whether a part of a place names one of a field's forms, which no client knows."""
    return part == "str" or str(part).startswith(("list[", "function-"))
