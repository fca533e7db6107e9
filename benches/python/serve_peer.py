"""Hugging Face transformers' continuous batching of one load; `serve.py` runs it where torch is installed.

Reads one JSON object from stdin: gguf file, prompts, max_tokens, repeat, threads, site (further packages).
Prints one JSON object: seconds of each run after the first, and the tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    os.environ["OMP_NUM_THREADS"] = str(wanted["threads"])
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.append(wanted["site"])
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(wanted["threads"])
    path = Path(wanted["gguf"])
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = GenerationConfig(
        max_new_tokens=wanted["max_tokens"],
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        num_blocks=64,
        max_batch_tokens=512,
    )
    seconds = []
    for _ in range(wanted["repeat"] + 1):
        start = time.perf_counter()
        outputs = model.generate_batch(inputs=wanted["prompts"], generation_config=config, progress_bar=False)
        seconds.append(time.perf_counter() - start)
    tokens = [list(output.generated_tokens) for output in outputs.values()]
    assert all(len(each) == wanted["max_tokens"] for each in tokens), [len(each) for each in tokens]
    print(json.dumps({"seconds": seconds[1:], "tokens": tokens}))


if __name__ == "__main__":
    main()
