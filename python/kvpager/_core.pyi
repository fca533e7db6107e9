"""Type stubs of the compiled core. Held to the built module by a stub test."""

__version__: str

# --- geometry -----------------------------------------------------------------------------------------------

# --- block pool ---------------------------------------------------------------------------------------------

# --- prefix index -------------------------------------------------------------------------------------------

# --- scheduler ----------------------------------------------------------------------------------------------

# --- attention ----------------------------------------------------------------------------------------------

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
