"""vLLM's scheduler under the same load, in the same process, where it is installed.

Its parts are made as its engine makes them, for a one-layer Llama without weights; the model's output is what
this module says it is. Made for vLLM 0.33; a version whose parts do not fit counts as not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpager.profile.load import VOCABULARY, Load
from kvpager.profile.measure import quiet_collector

__all__ = ["steps_of_vllm"]

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}


def steps_of_vllm(load: Load, steps: int) -> NDArray[np.int64] | None:
    """[steps] nanoseconds of `schedule` + `update_from_output`; None without a vLLM that fits."""
    if importlib.util.find_spec("vllm") is None:
        return None
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        driver = _VllmDriver(load)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    with quiet_collector():
        while not driver.step()[1]:
            pass
        return np.array([driver.step()[0] for _ in range(steps)], np.int64)


class _VllmDriver:
    """vLLM's scheduler and the requests that keep it busy."""

    def __init__(self, load: Load) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.load = load
        self._hasher = get_request_block_hasher(load.block_size, sha256)
        self._scheduler = _make_scheduler(load)
        self._random = np.random.default_rng(load.seed)
        self._prefix = self._random.integers(3, VOCABULARY, load.longest).tolist()
        self._lengths = load.lengths()
        self._submitted = 0
        for position in range(load.running):
            self._submit(part=(position + 1) / load.running)

    def _submit(self, part: float = 1.0) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        lengths = next(self._lengths)
        shared = int(lengths.prompt * self.load.prefix_share)
        own = self._random.integers(3, VOCABULARY, lengths.prompt - shared).tolist()
        request = Request(
            request_id=str(self._submitted),
            prompt_token_ids=self._prefix[:shared] + own,
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=max(1, round(lengths.output * part))),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._submitted += 1
        self._scheduler.add_request(request)

    def step(self) -> tuple[int, bool]:
        """Nanoseconds of one step, and whether all of the load decodes."""
        from vllm.v1.outputs import ModelRunnerOutput

        start = time.perf_counter_ns()
        planned = self._scheduler.schedule()
        elapsed = time.perf_counter_ns() - start
        ids = list(planned.num_scheduled_tokens)
        requests = self._scheduler.requests
        sampled = [[7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        start = time.perf_counter_ns()
        self._scheduler.update_from_output(planned, output)
        elapsed += time.perf_counter_ns() - start
        for _ in range(self.load.running - len(requests)):
            self._submit()
        return elapsed, len(ids) == self.load.running == sum(map(len, sampled))


def _make_scheduler(load: Load) -> Any:
    """A scheduler as the engine makes it, over a pool as large as ours."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=load.longest, seed=0
        )
    scheduler = SchedulerConfig(
        max_model_len=load.longest,
        is_encoder_decoder=False,
        max_num_batched_tokens=max(8192, 2 * load.running, load.longest),
        max_num_seqs=load.running,
        enable_chunked_prefill=True,
    )
    cache = CacheConfig(block_size=load.block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = load.num_blocks
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=load.block_size, num_kv_heads=2, head_size=64, dtype=torch.float32)
    groups = KVCacheConfig(
        num_blocks=load.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=load.block_size,
    )
