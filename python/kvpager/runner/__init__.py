"""A model runner for the Llama family: weights, tokenizer, paged forward pass.

It is here so that kvpager can be run and checked as a whole. A server brings its own model and takes the same
batches, through `kvpager.engine.ModelRunner` or straight from a scheduler.
"""

from kvpager.runner.config import LlamaConfig, RopeConfig
from kvpager.runner.demo_model import find_demo_model
from kvpager.runner.kv_cache import KvCache
from kvpager.runner.llama import LlamaModel
from kvpager.runner.llama_runner import LlamaRunner
from kvpager.runner.loading import LoadedModel, load_model
from kvpager.runner.tokenizer import Tokenizer
from kvpager.runner.weights import LayerWeights, LlamaWeights

__all__ = [
    "KvCache",
    "LayerWeights",
    "LlamaConfig",
    "LlamaModel",
    "LlamaRunner",
    "LlamaWeights",
    "LoadedModel",
    "RopeConfig",
    "Tokenizer",
    "find_demo_model",
    "load_model",
]
