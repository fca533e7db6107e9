"""What a Llama-family model's files say about its shape, checked once: `LlamaConfig`.

Both readers, GGUF metadata and a Hugging Face `config.json`, end here. What the runner cannot compute (other
architectures, biases, experts, unknown rope scalings) is an error that names the key and its value, before
any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvpager.errors import InvalidArgumentError

__all__ = ["LlamaConfig", "RopeConfig"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rotary position scheme.

    Attributes:
        theta: base of the frequencies.
        kind: "default"; "linear", every frequency divided by `factor`; "llama3", low frequencies divided,
            high ones kept, the ones between interpolated.
        factor: divisor of the scaled frequencies.
        low_frequency_factor, high_frequency_factor: bounds of the "llama3" interpolation, in turns over
            `original_max_positions`.
        original_max_positions: positions that the model was first trained with.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Returns the angle per position of each of the `head_dim / 2` pairs."""
        base = [self.theta ** (-2.0 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in base]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in base]
        return base

    def _llama3(self, frequency: float) -> float:
        turns = self.original_max_positions * frequency / (2.0 * math.pi)
        span = self.high_frequency_factor - self.low_frequency_factor
        kept = min(1.0, max(0.0, (turns - self.low_frequency_factor) / span))
        return kept * frequency + (1.0 - kept) * frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama-family model.

    Attributes:
        layer_windows: of each layer, how many tokens a query sees, its own included; None for all. Empty if
            every layer sees all.

    Raises:
        InvalidArgumentError: a value is out of range; every problem is named in one message.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, at least 1 is needed"
            for name in _POSITIVE
            if (value := getattr(self, name)) < 1
        ]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(f"{self.num_heads} heads are no multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            problems.append(f"head_dim is {self.head_dim}, an even number is needed")
        if self.rope.theta <= 0 or self.rope.factor <= 0:
            problems.append(f"rope theta {self.rope.theta} and factor {self.rope.factor} must be positive")
        if self.rope.kind == "llama3" and self.rope.high_frequency_factor <= self.rope.low_frequency_factor:
            problems.append("rope high_freq_factor is not above low_freq_factor")
        problems += self._window_problems()
        if problems:
            raise InvalidArgumentError("model configuration: " + "; ".join(problems))

    def _window_problems(self) -> list[str]:
        sizes = {window for window in self.layer_windows if window is not None}
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            return [f"{len(self.layer_windows)} windows for {self.num_layers} layers"]
        if len(sizes) > 1:
            return [f"windows of {sorted(sizes)} tokens: one size is supported"]
        return [f"a window of {size} tokens, at least 1 is needed" for size in sizes if size < 1]

    @property
    def num_qkv_heads(self) -> int:
        """Heads of the fused projection: the query's, the key's, the value's."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 K and V that one token takes over all layers."""
        return 2 * 4 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, tied_embeddings: bool) -> LlamaConfig:
        """Reads the metadata of a GGUF file.

        Args:
            metadata: key to value, as in the file.
            tied_embeddings: whether the file has no output matrix of its own.

        Raises:
            InvalidArgumentError: another architecture, a missing key, or a value that is not supported.
        """
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise InvalidArgumentError(
                f"architecture {architecture!r} is not supported: the runner computes 'llama'"
            )
        if metadata.get("llama.expert_count", 0):
            raise InvalidArgumentError("mixtures of experts are not supported (llama.expert_count)")
        read = _Reader(metadata, prefix="llama.")
        num_heads = read.integer("attention.head_count")
        hidden_size = read.integer("embedding_length")
        head_dim = read.integer("attention.key_length", hidden_size // max(num_heads, 1))
        return cls(
            num_layers=read.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=read.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=read.integer("feed_forward_length"),
            vocab_size=read.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
            max_positions=read.integer("context_length"),
            rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(read, head_dim),
            tied_embeddings=tied_embeddings,
        )

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a `config.json`.

        Raises:
            InvalidArgumentError: another architecture, a missing key, or a value that is not supported.
        """
        if config.get("model_type") not in _HUGGING_FACE_TYPES:
            raise InvalidArgumentError(
                f"model_type {config.get('model_type')!r} is not supported: the runner computes 'llama' and "
                "'mistral'"
            )
        for key, supported in _HUGGING_FACE_FIXED.items():
            if (value := config.get(key, supported)) != supported:
                raise InvalidArgumentError(f"{key} {value!r} is not supported: only {supported!r} is")
        read = _Reader(config, prefix="")
        num_heads = read.integer("num_attention_heads")
        hidden_size = read.integer("hidden_size")
        return cls(
            num_layers=read.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.integer("num_key_value_heads", num_heads),
            head_dim=read.integer("head_dim", hidden_size // max(num_heads, 1)),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            vocab_size=read.integer("vocab_size"),
            max_positions=read.integer("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps"),
            rope=_hugging_face_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            layer_windows=_hugging_face_windows(config, read),
        )


_POSITIVE = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_positions",
)

_HUGGING_FACE_TYPES = ("llama", "mistral")

_HUGGING_FACE_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Keys of `config.json` for which the runner computes one value only."""


class _Reader:
    """Typed look-ups in a mapping; a missing or wrong value is an error with the key's name."""

    def __init__(self, values: Mapping[str, Any], *, prefix: str) -> None:
        self._values = values
        self._prefix = prefix

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(self._prefix + key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgumentError(
                f"model configuration: {self._prefix + key} is {value!r}, not a number"
            )
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise InvalidArgumentError(
                f"model configuration: {self._prefix + key} is {value}, not an integer"
            )
        return int(value)

    def text(self, key: str, default: str) -> str:
        return str(self._values.get(self._prefix + key) or default)


def _hugging_face_windows(config: Mapping[str, Any], read: _Reader) -> tuple[int | None, ...]:
    """Reads `sliding_window`, for the layers that `layer_types` names or for all; only of Mistral's files."""
    if config.get("model_type") != "mistral" or config.get("sliding_window") is None:
        return ()
    window, num_layers = read.integer("sliding_window"), read.integer("num_hidden_layers")
    kinds = config.get("layer_types") or ["sliding_attention"] * num_layers
    unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise InvalidArgumentError(f"model configuration: layer_types has {unknown}, not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gguf_rope(read: _Reader, head_dim: int) -> RopeConfig:
    if (rotated := read.integer("rope.dimension_count", head_dim)) != head_dim:
        raise InvalidArgumentError(f"rope over {rotated} of {head_dim} dimensions is not supported")
    kind = read.text("rope.scaling.type", "none")
    theta = read.number("rope.freq_base", 10000.0)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=read.number("rope.scaling.factor"))
    if kind != "none":
        raise InvalidArgumentError(f"rope scaling {kind!r} is not supported: only none and linear are")
    return RopeConfig(theta=theta)


def _hugging_face_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_parameters`, or the older pair `rope_theta` and `rope_scaling`."""
    values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    values.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    read = _Reader(values, prefix="")
    kind = read.text("rope_type", read.text("type", "default"))
    theta = read.number("rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=read.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=read.number("factor"),
            low_frequency_factor=read.number("low_freq_factor"),
            high_frequency_factor=read.number("high_freq_factor"),
            original_max_positions=read.integer("original_max_position_embeddings"),
        )
    raise InvalidArgumentError(f"rope scaling {kind!r} is not supported: only default, linear and llama3 are")
