"""Hugging Face transformers' continuous batching of one load; `serve.py` runs it where torch is installed.

Reads one JSON object from stdin: gguf file, prompts, max_tokens, repeat, threads, site (further packages).
Prints one JSON object: seconds of each run after the first, and the tokens.

Its cache is given its size: left to itself, it takes nine tenths of the machine's memory. Loading a GGUF file
needs `accelerate` beside torch and transformers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

PAGE_SIZE, NUM_BLOCKS = 32, 512
MOST_MEMORY = 12 << 30
"""Bytes after which an allocation fails, so that nothing else on the machine is killed."""


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    os.environ["OMP_NUM_THREADS"] = str(wanted["threads"])
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.append(wanted["site"])
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(wanted["threads"])
    path = Path(wanted["gguf"])
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = GenerationConfig(
        max_new_tokens=wanted["max_tokens"],
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    cache = ContinuousBatchingConfig(page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=512)
    seconds = []
    for _ in range(wanted["repeat"] + 1):
        start = time.perf_counter()
        outputs = model.generate_batch(
            inputs=wanted["prompts"],
            generation_config=config,
            continuous_batching_config=cache,
            progress_bar=False,
        )
        seconds.append(time.perf_counter() - start)
    tokens = [list(output.generated_tokens) for output in outputs.values()]
    assert all(len(each) == wanted["max_tokens"] for each in tokens), [len(each) for each in tokens]
    print(json.dumps({"seconds": seconds[1:], "tokens": tokens}))


if __name__ == "__main__":
    main()
