"""Both file formats give the same model, and what the runner cannot compute is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from test_forward import packed_batch

from kvpager.errors import InvalidArgumentError
from kvpager.runner import LlamaConfig, LlamaModel, RopeConfig, load_model
from kvpager.runner.gguf_file import GgufFile
from kvpager.runner.hf_directory import HuggingFaceDirectory, read_json
from kvpager.runner.weights import assemble

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def model_of_directory(directory: Path) -> LlamaModel:
    config = LlamaConfig.from_hugging_face(read_json(directory / "config.json"))
    return LlamaModel(config, assemble(config, HuggingFaceDirectory(directory)))


def model_of_gguf(path: Path) -> LlamaModel:
    file = GgufFile(path)
    config = LlamaConfig.from_gguf(file.metadata, tied_embeddings="output.weight" not in file)
    return LlamaModel(config, assemble(config, file))


def logits_of(model: LlamaModel) -> np.ndarray:
    batch, num_blocks = packed_batch([PROMPT], block_size=4)
    batch.sample_rows = np.arange(len(PROMPT), dtype=np.int32)
    return np.asarray(model.forward(batch, model.new_cache(num_blocks=num_blocks, block_size=4)))


def plain_frequencies() -> np.ndarray:
    return 500.0 ** -(np.arange(0, 8, 2) / 8)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "shards"), [("F32", 1), ("F16", 3), ("BF16", 2)])
def test_hugging_face_directory_gives_the_logits_of_a_dense_forward_pass(
    tmp_path: Path, dtype: str, shards: int, tied: bool
) -> None:
    tensors = tiny_models.random_tensors(tied=tied)
    directory = tiny_models.write_hugging_face(
        tmp_path, tensors, dtype=dtype, shards=shards, tie_word_embeddings=tied
    )
    expected = tiny_models.dense_logits(tensors, PROMPT, plain_frequencies())
    np.testing.assert_allclose(logits_of(model_of_directory(directory)), expected, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_file_gives_the_logits_of_a_dense_forward_pass(tmp_path: Path, tied: bool) -> None:
    tensors = tiny_models.random_tensors(tied=tied)
    path = tiny_models.write_gguf(tmp_path / "tiny.gguf", tensors)
    expected = tiny_models.dense_logits(tensors, PROMPT, plain_frequencies())
    np.testing.assert_allclose(logits_of(model_of_gguf(path)), expected, atol=1e-4)


def test_rope_scaling_of_the_config_is_applied(tmp_path: Path) -> None:
    tensors = tiny_models.random_tensors()
    linear = {"rope_type": "linear", "factor": 4.0}
    directory = tiny_models.write_hugging_face(tmp_path / "linear", tensors, rope_scaling=linear)
    expected = tiny_models.dense_logits(tensors, PROMPT, plain_frequencies() / 4.0)
    np.testing.assert_allclose(logits_of(model_of_directory(directory)), expected, atol=1e-4)


def test_llama3_rope_keeps_high_frequencies_and_divides_low_ones() -> None:
    rope = RopeConfig(theta=500000.0, kind="llama3", factor=8.0)
    plain = RopeConfig(theta=500000.0).inverse_frequencies(128)
    for scaled, base in zip(rope.inverse_frequencies(128), plain, strict=True):
        wavelength = 2 * math.pi / base
        if wavelength < 8192 / 4.0:
            assert scaled == base
        elif wavelength > 8192 / 1.0:
            assert scaled == pytest.approx(base / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            assert scaled == pytest.approx((1 - smooth) * base / 8.0 + smooth * base)


def test_frequency_factors_of_a_gguf_file_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    tensors = tiny_models.random_tensors()
    path = tmp_path / "tiny.gguf"
    _write_with_factors(path, tensors, factors)
    expected = tiny_models.dense_logits(tensors, PROMPT, plain_frequencies() / factors)
    np.testing.assert_allclose(logits_of(model_of_gguf(path)), expected, atol=1e-4)


def _write_with_factors(path: Path, tensors: tiny_models.Tensors, factors: np.ndarray) -> None:
    original = tiny_models._gguf_tensor

    def named(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
        return (name, values) if name == "rope_freqs.weight" else original(name, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "_gguf_tensor", named)
        tiny_models.write_gguf(path, tensors | {"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None, not a number"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"head_dim": 0, "vocab_size": 0}, "head_dim is 0, at least 1 is needed; vocab_size is 0"),
    ],
)
def test_configuration_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    directory = tiny_models.write_hugging_face(tmp_path, {}, **changes)
    with pytest.raises(InvalidArgumentError, match=message):
        load_model(str(directory))


def test_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny_models.random_tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = tiny_models.write_hugging_face(tmp_path / "wrong", tensors | {name: tensors[name][:-1]})
    with pytest.raises(InvalidArgumentError, match=r"up_proj.* has shape \(39, 24\), \(40, 24\) is needed"):
        model_of_directory(wrong)
    del tensors[name]
    missing = tiny_models.write_hugging_face(tmp_path / "missing", tensors)
    with pytest.raises(InvalidArgumentError, match=r"has no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        model_of_directory(missing)
    integers = tiny_models.write_hugging_face(tmp_path / "integers", tensors, dtype="I32")
    with pytest.raises(InvalidArgumentError, match="is I32; only F16"):
        model_of_directory(integers)


def test_other_architecture_of_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_models.write_gguf(tmp_path / "other.gguf", {}, architecture="gemma")
    with pytest.raises(InvalidArgumentError, match="architecture 'gemma' is not supported"):
        load_model(str(path))


def test_gguf_tensor_of_a_type_that_nothing_reads_is_named(tmp_path: Path) -> None:
    path = tmp_path / "integers.gguf"
    writer = pytest.importorskip("gguf").GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", np.zeros((2, 32), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidArgumentError, match=r"tensor 'output.weight' of .*integers.gguf: "):
        GgufFile(path).read("output.weight")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9, 0.999])
def test_truncated_gguf_file_is_refused_at_any_length(tmp_path: Path, share: float) -> None:
    path = tiny_models.write_gguf(tmp_path / "tiny.gguf", tiny_models.random_tensors())
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(InvalidArgumentError, match="truncated, damaged or no GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9, 0.999])
def test_truncated_safetensors_file_is_refused_at_any_length(tmp_path: Path, share: float) -> None:
    directory = tiny_models.write_hugging_face(tmp_path, tiny_models.random_tensors())
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(InvalidArgumentError, match="truncated, damaged or no safetensors file"):
        HuggingFaceDirectory(directory)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no model at /nowhere/model"):
        load_model("/nowhere/model")
    with pytest.raises(InvalidArgumentError, match=r"neither a config\.json nor a GGUF file"):
        load_model(str(tmp_path))
    directory = tiny_models.write_hugging_face(tmp_path / "model", {})
    (directory / "model.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*model\.safetensors"):
        HuggingFaceDirectory(directory)
