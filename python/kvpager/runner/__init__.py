"""A model runner for the Llama family: weights, tokenizer, paged forward pass, sampling, a small loop.

It is here so that kvpager can be run and checked as a whole; kvpager itself is not an engine. A server brings
its own model and takes the same batches.
"""

from kvpager.runner.config import LlamaConfig, RopeConfig
from kvpager.runner.demo_model import find_demo_model
from kvpager.runner.generate import Generation, GenerationLoop, LoopConfig
from kvpager.runner.kv_cache import KvCache
from kvpager.runner.llama import LlamaModel
from kvpager.runner.loading import LoadedModel, load_model
from kvpager.runner.sampling import SamplingParams, sample
from kvpager.runner.tokenizer import TextStream, Tokenizer
from kvpager.runner.weights import LayerWeights, LlamaWeights

__all__ = [
    "Generation",
    "GenerationLoop",
    "KvCache",
    "LayerWeights",
    "LlamaConfig",
    "LlamaModel",
    "LlamaWeights",
    "LoadedModel",
    "LoopConfig",
    "RopeConfig",
    "SamplingParams",
    "TextStream",
    "Tokenizer",
    "find_demo_model",
    "load_model",
    "sample",
]
