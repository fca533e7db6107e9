"""Type stubs of the compiled core. Held to the built module by a stub test."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str

# --- geometry -----------------------------------------------------------------------------------------------

# --- block pool ---------------------------------------------------------------------------------------------

# --- prefix index -------------------------------------------------------------------------------------------

# --- scheduler ----------------------------------------------------------------------------------------------

# --- attention ----------------------------------------------------------------------------------------------

_Named = tuple[npt.NDArray[Any], str]
_Pair = tuple[_Named, _Named]
_Scale = list[float] | _Named | None

def _append_kv(pairs: Sequence[tuple[str, _Named, _Named, _Scale]], slots: npt.NDArray[np.int64]) -> None: ...
def _paged_attention(
    query: _Named, caches: object, batch: object, options: object, out: _Named, lse: _Named | None
) -> None: ...
def _merge_states(a: _Pair, b: _Pair, to: _Pair) -> None: ...
def _copy_blocks(arrays: Sequence[tuple[str, _Named]], pairs: npt.NDArray[np.int32]) -> None: ...
def _zero_blocks(cache: _Named, block_ids: npt.NDArray[np.int32]) -> None: ...
def _gather_blocks(cache: _Named, block_ids: npt.NDArray[np.int32], out: _Named) -> None: ...
def _scatter_blocks(cache: _Named, block_ids: npt.NDArray[np.int32], values: _Named) -> None: ...
def _set_num_threads(num_threads: int) -> None: ...
def _get_num_threads() -> int: ...
def _instruction_sets() -> list[str]: ...

# --- split plan of the CUDA kernels -------------------------------------------------------------------------

def _split_plan(
    query_start: object,
    context_lens: object,
    work: object,
    merges: object,
    *,
    group: int,
    tile_rows: int,
    num_kv_heads: int,
    window: int,
    causal: bool,
    rows_above: int,
    rows_up_to: int,
    target_blocks: int,
    min_chunk: int,
) -> tuple[int, int, int]:
    """Writes work items (8 words each) and merge items (4 words each); returns how many, and the partials."""
