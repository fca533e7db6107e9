//! One call of paged attention.

use super::views::{Named, ScaleArg, ints, scale, table, tensor, workspace};
use crate::args::int;
use crate::arrays::read_ints;
use crate::error::IntoPyResult;
use kvpager_core::attention::{self as core, Options, PagedAttention, SharedPrefixes, ThreadPool};
use numpy::PyUntypedArray;
use pyo3::prelude::*;

/// Scores and masks of a call.
#[derive(FromPyObject)]
pub(super) struct OptionsArg {
    scale: f32,
    causal: bool,
    window: Option<u32>,
    softcap: Option<f32>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    instruction_set: Option<String>,
}

/// The batch's integer arrays.
#[derive(FromPyObject)]
pub(super) struct BatchArg<'py> {
    block_tables: Bound<'py, PyUntypedArray>,
    table_rows: Option<Bound<'py, PyAny>>,
    query_start: Bound<'py, PyAny>,
    context_lens: Bound<'py, PyAny>,
    group_start: Option<Bound<'py, PyAny>>,
    group_sequences: Option<Bound<'py, PyAny>>,
    prefix_lens: Option<Bound<'py, PyAny>>,
}

/// Caches and their scales.
#[derive(FromPyObject)]
pub(super) struct CachesArg<'py> {
    k_cache: Named<'py>,
    v_cache: Named<'py>,
    k_scale: Option<ScaleArg<'py>>,
    v_scale: Option<ScaleArg<'py>>,
}

/// Where results go.
#[derive(FromPyObject)]
pub(super) struct OutArg<'py> {
    out: Named<'py>,
    lse: Option<Named<'py>>,
}

/// The batch's integers, copied.
struct Integers {
    table_rows: Option<Vec<i32>>,
    query_start: Vec<i32>,
    context_lens: Vec<i32>,
    group_start: Option<Vec<i32>>,
    sequences: Vec<i32>,
    prefix_lens: Vec<i32>,
}

impl Integers {
    fn read(batch: &BatchArg<'_>) -> PyResult<Self> {
        Ok(Self {
            table_rows: ints("table_rows", &batch.table_rows)?,
            query_start: read_ints(&batch.query_start, "query_start")?,
            context_lens: read_ints(&batch.context_lens, "context_lens")?,
            group_start: ints("group_start", &batch.group_start)?,
            sequences: ints("group_sequences", &batch.group_sequences)?.unwrap_or_default(),
            prefix_lens: ints("prefix_lens", &batch.prefix_lens)?.unwrap_or_default(),
        })
    }

    fn shared(&self) -> Option<SharedPrefixes<'_>> {
        self.group_start.as_ref().map(|group_start| SharedPrefixes {
            group_start,
            sequences: &self.sequences,
            prefix_lens: &self.prefix_lens,
        })
    }
}

impl OptionsArg {
    fn view(&self) -> Options<'_> {
        Options {
            scale: self.scale,
            causal: self.causal,
            window: self.window,
            softcap: self.softcap,
            alibi_slopes: self.alibi_slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            instruction_set: self.instruction_set.as_deref(),
        }
    }
}

/// The arguments of a call.
#[derive(FromPyObject)]
pub(super) struct CallArg<'py> {
    query: Named<'py>,
    caches: CachesArg<'py>,
    batch: BatchArg<'py>,
    options: OptionsArg,
    results: OutArg<'py>,
}

impl CallArg<'_> {
    fn request<'a>(&'a self, integers: &'a Integers) -> PyResult<PagedAttention<'a>> {
        let (caches, results) = (&self.caches, &self.results);
        Ok(PagedAttention {
            query: tensor("query", &self.query, true)?,
            k_cache: tensor("k_cache", &caches.k_cache, true)?,
            v_cache: tensor("v_cache", &caches.v_cache, true)?,
            k_scale: scale("k", &caches.k_scale)?,
            v_scale: scale("v", &caches.v_scale)?,
            block_tables: table(&self.batch.block_tables)?,
            table_rows: integers.table_rows.as_deref(),
            query_start: &integers.query_start,
            context_lens: &integers.context_lens,
            shared: integers.shared(),
            options: self.options.view(),
            out: tensor("out", &results.out, true)?,
            lse: results.lse.as_ref().map(|lse| tensor("lse", lse, true)).transpose()?,
        })
    }
}

/// Attention over a ragged batch, written to `out` and `lse`; partial results go to the workspace if there is one.
#[pyfunction]
#[pyo3(signature = (call, own_workspace))]
pub(super) fn _paged_attention(
    py: Python<'_>,
    call: CallArg<'_>,
    own_workspace: Option<Bound<'_, PyUntypedArray>>,
) -> PyResult<()> {
    let integers = Integers::read(&call.batch)?;
    let request = call.request(&integers)?;
    match &own_workspace {
        None => py.detach(|| request.run(ThreadPool::global())).py(),
        Some(array) => {
            let memory = workspace(array)?;
            // SAFETY: the array's own bytes (NumPy's address is never null), and it outlives this call. That nobody
            // else uses them meanwhile is the documented rule of the attention front, which has checked that they
            // are no other array of the call.
            let bytes = unsafe { &mut *memory };
            py.detach(|| request.run_in(bytes, ThreadPool::global())).py()
        }
    }
}

/// Bytes of workspace that the call needs.
#[pyfunction]
pub(super) fn _workspace_bytes(py: Python<'_>, call: CallArg<'_>) -> PyResult<usize> {
    let integers = Integers::read(&call.batch)?;
    let request = call.request(&integers)?;
    py.detach(|| request.workspace_bytes(ThreadPool::global().size())).py()
}

/// Sequences that share their first blocks: (group_start, sequences, prefix_lens).
#[pyfunction]
pub(super) fn _prefix_groups(
    py: Python<'_>,
    block_tables: &Bound<'_, PyUntypedArray>,
    table_rows: Option<Bound<'_, PyAny>>,
    query_start: &Bound<'_, PyAny>,
    context_lens: &Bound<'_, PyAny>,
    #[pyo3(from_py_with = int)] block_size: usize,
    #[pyo3(from_py_with = int)] min_tokens: usize,
) -> PyResult<(Vec<i32>, Vec<i32>, Vec<i32>)> {
    let table_rows = ints("table_rows", &table_rows)?;
    let query_start = read_ints::<i32>(query_start, "query_start")?;
    let context_lens = read_ints::<i32>(context_lens, "context_lens")?;
    let tables = table(block_tables)?;
    let rows = table_rows.as_deref();
    let find = || core::prefix_groups(&tables, rows, &query_start, &context_lens, block_size, min_tokens);
    let groups = py.detach(find).py()?;
    Ok((groups.group_start, groups.sequences, groups.prefix_lens))
}
