"""Chat templates: the Jinja text that a model brings, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.runner.optional import import_optional

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        """Compiles the template.

        Args:
            source: Jinja text, from a model file: it runs in an immutable sandbox.
            bos_token: text of the begin token.
            eos_token: text of the end token.

        Raises:
            InvalidArgumentError: the text is no template.
            MissingDependencyError: `jinja2` is not installed.
        """
        sandbox = import_optional("jinja2.sandbox", needed_for="rendering a chat template")
        self._jinja2 = import_optional("jinja2", needed_for="rendering a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except self._jinja2.TemplateError as error:
            raise InvalidArgumentError(f"the model's chat template is damaged: {error}") from error
        self._special = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the prompt text, up to where the assistant's answer starts.

        Raises:
            InvalidArgumentError: the template refuses the messages.
        """
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, **self._special))
        except (self._jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidArgumentError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _raise_exception(text: str) -> None:
    raise InvalidArgumentError(f"the model's chat template refuses these messages: {text}")
