//! Bindings of `kvpager_core::split_plan`: writes a plan into the caller's buffers.

use crate::args::int;
use crate::arrays::read_ints;
use crate::error::{IntoPyResult, invalid};
use kvpager_core::split_plan::{PlanShape, SplitPlan};
use numpy::PyReadwriteArray1;
use pyo3::prelude::*;

/// Writes `words` to the front of a caller's array.
fn fill(target: &mut PyReadwriteArray1<'_, i32>, name: &str, words: &[i32]) -> PyResult<()> {
    let room = target.as_slice_mut().map_err(|_| invalid(format!("{name} must be contiguous")))?;
    let needed = words.len();
    match room.get_mut(..needed) {
        Some(front) => front.copy_from_slice(words),
        None => {
            let len = room.len();
            return Err(invalid(format!("{name} has room for {len} words, the plan needs {needed}")));
        }
    }
    Ok(())
}

/// Plans attention work; see `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (query_start, context_lens, kv_starts, work, merges, *, group, tile_rows, num_kv_heads, window, causal,
                    rows_above, rows_up_to, target_blocks, min_chunk))]
#[expect(clippy::too_many_arguments, reason = "keyword-only mirror of PlanShape")]
fn _split_plan(
    py: Python<'_>,
    query_start: &Bound<'_, PyAny>,
    context_lens: &Bound<'_, PyAny>,
    kv_starts: Option<&Bound<'_, PyAny>>,
    mut work: PyReadwriteArray1<'_, i32>,
    mut merges: PyReadwriteArray1<'_, i32>,
    #[pyo3(from_py_with = int)] group: u32,
    #[pyo3(from_py_with = int)] tile_rows: u32,
    #[pyo3(from_py_with = int)] num_kv_heads: u32,
    #[pyo3(from_py_with = int)] window: u32,
    causal: bool,
    #[pyo3(from_py_with = int)] rows_above: u32,
    #[pyo3(from_py_with = int)] rows_up_to: u32,
    #[pyo3(from_py_with = int)] target_blocks: u32,
    #[pyo3(from_py_with = int)] min_chunk: u32,
) -> PyResult<(usize, usize, u32)> {
    let shape = PlanShape {
        group,
        tile_rows,
        num_kv_heads,
        window,
        causal,
        rows_above,
        rows_up_to,
        target_blocks,
        min_chunk,
    };
    let query_start = read_ints::<i32>(query_start, "query_start")?;
    let context_lens = read_ints::<i32>(context_lens, "context_lens")?;
    let kv_starts = kv_starts.map(|starts| read_ints::<i32>(starts, "kv_starts")).transpose()?;
    let plan = py
        .detach(|| SplitPlan::from_positions(&query_start, &context_lens, kv_starts.as_deref(), &shape))
        .py()?;
    let work_words: Vec<i32> = plan
        .work
        .iter()
        .flat_map(|w| [w.sequence, w.first_row, w.kv_begin, w.kv_end, w.partial, 0, 0, 0])
        .collect();
    let merge_words: Vec<i32> =
        plan.merges.iter().flat_map(|m| [m.sequence, m.first_row, m.first_partial, m.num_partials]).collect();
    // A refused call may leave words behind, but returns no count that would make them valid.
    fill(&mut work, "work", &work_words)?;
    fill(&mut merges, "merges", &merge_words)?;
    Ok((plan.work.len(), plan.merges.len(), plan.num_partials))
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_split_plan, module)?)
}
