"""One ragged batch of every dtype, for `compute-sanitizer python sanitized_run.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from attention.reference import make_case
from kvpager.attention import kernels, paged_attention


def main() -> None:
    """Runs decode, verification, prefill and split work."""
    cupy = kernels.load_cupy()
    for dtype in ("float32", "float16", "bfloat16"):
        for heads in (4, 16):
            pairs = [(1, 900), (5, 40), (70, 100), (0, 0)]
            case = make_case(1, pairs, heads=heads, kv_heads=2, query_dtype=dtype, kv_dtype=dtype)
            case.query, case.k_cache, case.v_cache, case.block_tables = (
                cupy.asarray(a) for a in (case.query, case.k_cache, case.v_cache, case.block_tables)
            )
            case.call(paged_attention, return_lse=True)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
