//! Checks of what a device runs, as far as it is on the host.

use super::views::{ints, table};
use crate::args::int;
use crate::arrays::read_ints;
use crate::error::IntoPyResult;
use kvpager_core::attention::{self as core, BatchView};
use numpy::PyUntypedArray;
use pyo3::prelude::*;

/// Checks the lengths and tables of a batch that a device runs, as far as they are on the host.
#[pyfunction]
#[pyo3(signature = (query_start, context_lens, table_rows, block_tables, num_tokens, num_blocks, block_size, window))]
#[expect(clippy::too_many_arguments, reason = "a batch has as many arrays")]
pub(super) fn _check_batch(
    query_start: &Bound<'_, PyAny>,
    context_lens: &Bound<'_, PyAny>,
    table_rows: Option<Bound<'_, PyAny>>,
    block_tables: Option<Bound<'_, PyUntypedArray>>,
    #[pyo3(from_py_with = int)] num_tokens: usize,
    #[pyo3(from_py_with = int)] num_blocks: usize,
    #[pyo3(from_py_with = int)] block_size: usize,
    window: Option<u32>,
) -> PyResult<()> {
    let table_rows = ints("table_rows", &table_rows)?;
    let query_start = read_ints::<i32>(query_start, "query_start")?;
    let context_lens = read_ints::<i32>(context_lens, "context_lens")?;
    let tables = block_tables.as_ref().map(table).transpose()?;
    let batch = BatchView {
        num_tokens,
        num_blocks,
        block_size,
        block_tables: tables.as_ref(),
        table_rows: table_rows.as_deref(),
        query_start: &query_start,
        context_lens: &context_lens,
    };
    batch.check(window).py()
}

/// Checks ids of blocks that a device copies between two arrays, or inside one.
#[pyfunction]
pub(super) fn _check_block_moves(
    name: &str,
    from_ids: &Bound<'_, PyAny>,
    to_ids: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = int)] num_from: usize,
    #[pyo3(from_py_with = int)] num_to: usize,
    in_place: bool,
) -> PyResult<()> {
    let (from, to) = (read_ints::<i32>(from_ids, name)?, read_ints::<i32>(to_ids, name)?);
    core::check_block_moves(name, (&from, num_from), (&to, num_to), in_place).py()
}
