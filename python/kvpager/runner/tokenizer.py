"""Text to token ids and back, through the `tokenizers` package.

A GGUF file brings its vocabulary and merges; a Hugging Face directory its whole `tokenizer.json`. Both end in
one `Tokenizer`, which also knows the model's chat template and the tokens that end a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager.errors import InvalidArgumentError
from kvpager.runner.chat import ChatTemplate
from kvpager.runner.hf_directory import read_json
from kvpager.runner.optional import import_optional

__all__ = ["Tokenizer"]

_CONTROL_TOKEN = 3
"""GGUF token type of special tokens, which are matched as a whole before anything else."""
_USER_DEFINED_TOKEN = 4
_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of a byte-level vocabulary.

    Latin-1's printable characters stand for themselves; the other bytes follow in order from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Tokenizer:
    """A tokenizer with its model's chat template and end tokens.

    Attributes:
        chat_template: how messages become a prompt, or None if the model brings no template.
        stop_token_ids: tokens that end a turn.
    """

    def __init__(
        self,
        backend: Any,
        *,
        chat_template: ChatTemplate | None,
        stop_token_ids: tuple[int, ...],
        prefix_ids: tuple[int, ...] = (),
    ) -> None:
        """Keeps a `tokenizers.Tokenizer` and what belongs to it.

        Args:
            backend: the package's tokenizer.
            chat_template: the model's template, if any.
            stop_token_ids: tokens that end a turn.
            prefix_ids: tokens put before a plain prompt (a begin token, in models that were trained with
                one).
        """
        self._backend = backend
        self._prefix_ids = list(prefix_ids)
        self.chat_template = chat_template
        self.stop_token_ids = stop_token_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a plain prompt; special tokens written in the text are recognised.

        Raises:
            InvalidArgumentError: for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"the prompt is not valid UTF-8: character {error.start} cannot be encoded"
            ) from error
        return self._prefix_ids + list(
            self._backend.encode(text, add_special_tokens=not self._prefix_ids).ids
        )

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the ids of a conversation, up to where the assistant's next answer starts.

        Args:
            messages: each with "role" and "content".

        Raises:
            InvalidArgumentError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidArgumentError("this model has no chat template: give a plain prompt")
        return list(self._backend.encode(self.chat_template.render(messages), add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token's text, which may be a part of a character.

        Such a token is written `<0xF0>` in a vocabulary with byte fallback, and in a byte-level one with a
        printable character for each byte.
        """
        text = self.decode([token_id])
        if "\ufffd" not in text:
            return text.encode()
        token = str(self._backend.id_to_token(token_id))
        if match := _FALLBACK_BYTE.fullmatch(token):
            return bytes.fromhex(match[1])
        is_byte_level = all(character in _BYTE_OF for character in token)
        return bytes(_BYTE_OF[character] for character in token) if is_byte_level else text.encode()

    def new_decode_stream(self) -> Callable[[int], str]:
        """Returns a function that takes one id after the other and returns the text completed by each."""
        decoders = import_optional("tokenizers.decoders", needed_for="decoding tokens")
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(self._backend, token_id) or ""

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the byte-level BPE tokenizer that a GGUF file describes.

        Args:
            metadata: the file's keys and values.

        Raises:
            InvalidArgumentError: a missing key, or a kind of tokenizer that is not supported.
        """
        backend = _byte_level_bpe(metadata)
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]

        def special(name: str) -> tuple[int, ...]:
            token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return () if token_id is None else (int(token_id),)

        def text(ids: tuple[int, ...]) -> str:
            return "".join(tokens[token_id] for token_id in ids)

        source = metadata.get("tokenizer.chat_template")
        template = (
            ChatTemplate(source, bos_token=text(special("bos")), eos_token=text(special("eos")))
            if source
            else None
        )
        return cls(
            backend,
            chat_template=template,
            stop_token_ids=tuple(dict.fromkeys(special("eos") + special("eot"))),
            prefix_ids=special("bos") if metadata.get("tokenizer.ggml.add_bos_token") else (),
        )

    @classmethod
    def from_hugging_face(cls, directory: Path) -> Tokenizer:
        """Reads `tokenizer.json` and what stands beside it: the chat template and the end tokens.

        Raises:
            InvalidArgumentError: a file is missing or damaged.
        """
        tokenizers = import_optional("tokenizers", needed_for="reading a tokenizer")
        file = directory / "tokenizer.json"
        read_json(file)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare exceptions
            raise InvalidArgumentError(f"{file} is no tokenizer file ({error})") from error
        settings = _optional_json(directory / "tokenizer_config.json")
        source = _chat_template_source(directory, settings)
        template = None
        if source:
            bos, eos = (_token_text(settings.get(f"{name}_token")) for name in ("bos", "eos"))
            template = ChatTemplate(source, bos_token=bos, eos_token=eos)
        return cls(backend, chat_template=template, stop_token_ids=_end_tokens(directory))


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Any:
    tokenizers = import_optional("tokenizers", needed_for="building the tokenizer")
    for key in ("tokens", "token_type", "merges"):
        if not metadata.get(f"tokenizer.ggml.{key}"):
            raise InvalidArgumentError(f"the GGUF file has no tokenizer.ggml.{key}")
    if (model := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise InvalidArgumentError(
            f"tokenizer model {model!r} is not supported: only byte-level BPE ('gpt2') is"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(tokenizers, metadata.get("tokenizer.ggml.pre", "default"))
    backend.decoder = tokenizers.decoders.ByteLevel()
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    backend.add_special_tokens(_added(tokenizers, tokens, types, _CONTROL_TOKEN, special=True))
    backend.add_tokens(_added(tokenizers, tokens, types, _USER_DEFINED_TOKEN, special=False))
    return backend


def _added(tokenizers: Any, tokens: list[str], types: list[int], kind: int, *, special: bool) -> list[Any]:
    return [
        tokenizers.AddedToken(token, special=special, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == kind
    ]


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(tokenizers: Any, name: str) -> Any:
    """Returns the splitter that the GGUF key `tokenizer.ggml.pre` names."""
    pre = tokenizers.pre_tokenizers
    if name == "smollm":
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    if name == "gpt-2":
        return pre.ByteLevel(add_prefix_space=False)
    if name == "llama-bpe":
        split = pre.Split(tokenizers.Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise InvalidArgumentError(
        f"tokenizer.ggml.pre {name!r} is not supported: only 'smollm', 'gpt-2' and 'llama-bpe' are"
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _chat_template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Returns the template: its own file, or a key of `tokenizer_config.json` (one text, or named ones)."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source


def _token_text(token: Any) -> str:
    """Returns the text of a token that `tokenizer_config.json` writes as a string or as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _end_tokens(directory: Path) -> tuple[int, ...]:
    """Returns the end tokens of `generation_config.json`, else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(directory / name).get("eos_token_id")
        if ids is not None:
            return tuple(int(token_id) for token_id in (ids if isinstance(ids, list) else [ids]))
    return ()
