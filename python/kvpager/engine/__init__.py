"""Engines over a scheduler: a synchronous one, and one with a thread for asyncio servers.

A `ModelRunner` computes batches; the engine plans, samples, commits and delivers. See `docs/embedding.md`.
"""

from kvpager.engine.async_engine import AsyncEngine, GenerationStream
from kvpager.engine.config import EngineConfig, GenerationParams, blocks_needed
from kvpager.engine.counters import EngineSnapshot, Histogram, TenantCounters
from kvpager.engine.engine import DEFAULT_TENANT, Engine
from kvpager.engine.generation import Generation, Listener, TokenLogprobs
from kvpager.engine.model_runner import ModelRunner, NullRunner, RunnerLostError
from kvpager.engine.null_text import ByteTokenizer
from kvpager.engine.output import GenerationOutput
from kvpager.engine.sampling import SamplingParams, sample
from kvpager.engine.text import StopFinder, TextStream, TextTokenizer

__all__ = [
    "DEFAULT_TENANT",
    "AsyncEngine",
    "ByteTokenizer",
    "Engine",
    "EngineConfig",
    "EngineSnapshot",
    "Generation",
    "GenerationOutput",
    "GenerationParams",
    "GenerationStream",
    "Histogram",
    "Listener",
    "ModelRunner",
    "NullRunner",
    "RunnerLostError",
    "SamplingParams",
    "StopFinder",
    "TenantCounters",
    "TextStream",
    "TextTokenizer",
    "TokenLogprobs",
    "blocks_needed",
    "sample",
]
