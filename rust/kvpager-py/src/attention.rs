//! Bindings of `kvpager_core::attention`.
//!
//! Arrays come as pairs (ndarray, element type name): the memory, shape and strides are the array's own, and the
//! name says what its bytes are, since NumPy itself has no bf16 or fp8.

use crate::args::int;
use crate::arrays::read_ints;
use crate::error::{IntoPyResult, invalid};
use kvpager_core::attention::{
    self as core, Append, BatchView, Dtype, Int32Matrix, KvScale, Options, PagedAttention, SharedPrefixes,
    Tensor, ThreadPool,
};
use numpy::npyffi::flags::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;

/// An array and the name of its element type.
type Named<'py> = (Bound<'py, PyUntypedArray>, String);

/// A scale as the front passes it: nothing, factors (one, or one a head), or an array a token and head.
#[derive(FromPyObject)]
enum ScaleArg<'py> {
    Factors(Vec<f32>),
    Array(Named<'py>),
}

/// Address and whether the array may be written.
fn raw(array: &Bound<'_, PyUntypedArray>) -> (*mut u8, bool) {
    let object = array.as_array_ptr();
    // SAFETY: `object` is a live NumPy array; the fields are plain.
    let fields = unsafe { &(*object).fields };
    (fields.data.cast(), fields.flags & NPY_ARRAY_WRITEABLE != 0)
}

/// A view of an array as `N` dimensions; missing trailing dimensions count 1.
fn tensor<const N: usize>(name: &str, named: &Named<'_>, exact: bool) -> PyResult<Tensor<N>> {
    let (array, dtype_name) = named;
    let dtype = Dtype::from_name(dtype_name)
        .ok_or_else(|| invalid(format!("{name} has dtype {dtype_name}, which attention does not know")))?;
    let ndim = array.ndim();
    if ndim > N || (exact && ndim < N) || ndim == 0 {
        let expected = if exact { format!("{N}") } else { format!("1 to {N}") };
        return Err(invalid(format!("{name} has {ndim} dimensions, expected {expected}")));
    }
    if array.dtype().itemsize() != dtype.size() {
        return Err(invalid(format!(
            "{name} has items of {} bytes, not {dtype_name}",
            array.dtype().itemsize()
        )));
    }
    let (mut shape, mut strides) = ([1; N], [dtype.size() as isize; N]);
    shape[..ndim].copy_from_slice(array.shape());
    strides[..ndim].copy_from_slice(array.strides());
    let (data, writable) = raw(array);
    // SAFETY: NumPy's shape and strides stay inside the array's memory, which lives as long as the caller's
    // reference. That nobody else writes it meanwhile is the documented rule of the attention front.
    Ok(unsafe { Tensor::from_raw(data, dtype, shape, strides, writable) })
}

fn table(array: &Bound<'_, PyUntypedArray>) -> PyResult<Int32Matrix> {
    let dtype = array.dtype();
    if array.ndim() != 2 || dtype.itemsize() != 4 || dtype.kind() != b'i' || dtype.alignment() != 4 {
        return Err(invalid(format!(
            "block_tables must be a 2-dimensional int32 array, has {} dimensions of {dtype}",
            array.ndim()
        )));
    }
    let (data, _) = raw(array);
    let strides = [array.strides()[0], array.strides()[1]];
    if !(data as usize).is_multiple_of(4) || strides.iter().any(|stride| stride % 4 != 0) {
        return Err(invalid("block_tables is not aligned to 4 bytes"));
    }
    // SAFETY: as in `tensor`; the alignment was checked.
    Ok(unsafe { Int32Matrix::from_raw(data.cast(), [array.shape()[0], array.shape()[1]], strides) })
}

fn scale<'a>(name: &str, argument: &'a Option<ScaleArg<'_>>) -> PyResult<KvScale<'a>> {
    Ok(match argument {
        None => KvScale::One,
        Some(ScaleArg::Factors(factors)) => match factors.as_slice() {
            [factor] => KvScale::Whole(*factor),
            factors => KvScale::Head(factors),
        },
        Some(ScaleArg::Array(array)) => KvScale::TokenHead(tensor(&format!("{name}_scale"), array, true)?),
    })
}

fn ints(name: &str, object: &Option<Bound<'_, PyAny>>) -> PyResult<Option<Vec<i32>>> {
    object.as_ref().map(|object| read_ints::<i32>(object, name)).transpose()
}

/// Writes tokens to their slots; each pair is (name, rows, cache, scale).
#[pyfunction]
fn _append_kv(
    py: Python<'_>,
    pairs: Vec<(String, Named<'_>, Named<'_>, Option<ScaleArg<'_>>)>,
    slots: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let slots = read_ints::<i64>(slots, "slot_mapping")?;
    let mut views = Vec::new();
    for (name, rows, cache, scale_argument) in &pairs {
        let rows = tensor::<3>(name, rows, true)?;
        let cache = tensor::<4>(&format!("{name}_cache"), cache, true)?;
        views.push((name.as_str(), Append { rows, cache, scale: scale(name, scale_argument)? }));
    }
    py.detach(|| core::append_kv(&views, &slots, ThreadPool::global())).py()
}

/// Scores and masks of a call.
#[derive(FromPyObject)]
struct OptionsArg {
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
struct BatchArg<'py> {
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
struct CachesArg<'py> {
    k_cache: Named<'py>,
    v_cache: Named<'py>,
    k_scale: Option<ScaleArg<'py>>,
    v_scale: Option<ScaleArg<'py>>,
}

/// Attention over a ragged batch, written to `out` and `lse`.
#[pyfunction]
#[pyo3(signature = (query, caches, batch, options, out, lse))]
fn _paged_attention(
    py: Python<'_>,
    query: Named<'_>,
    caches: CachesArg<'_>,
    batch: BatchArg<'_>,
    options: OptionsArg,
    out: Named<'_>,
    lse: Option<Named<'_>>,
) -> PyResult<()> {
    let table_rows = ints("table_rows", &batch.table_rows)?;
    let query_start = read_ints::<i32>(&batch.query_start, "query_start")?;
    let context_lens = read_ints::<i32>(&batch.context_lens, "context_lens")?;
    let group_start = ints("group_start", &batch.group_start)?;
    let sequences = ints("group_sequences", &batch.group_sequences)?.unwrap_or_default();
    let prefix_lens = ints("prefix_lens", &batch.prefix_lens)?.unwrap_or_default();
    let shared = group_start.as_ref().map(|group_start| SharedPrefixes {
        group_start,
        sequences: &sequences,
        prefix_lens: &prefix_lens,
    });
    let request = PagedAttention {
        query: tensor("query", &query, true)?,
        k_cache: tensor("k_cache", &caches.k_cache, true)?,
        v_cache: tensor("v_cache", &caches.v_cache, true)?,
        k_scale: scale("k", &caches.k_scale)?,
        v_scale: scale("v", &caches.v_scale)?,
        block_tables: table(&batch.block_tables)?,
        table_rows: table_rows.as_deref(),
        query_start: &query_start,
        context_lens: &context_lens,
        shared,
        options: Options {
            scale: options.scale,
            causal: options.causal,
            window: options.window,
            softcap: options.softcap,
            alibi_slopes: options.alibi_slopes.as_deref(),
            sinks: options.sinks.as_deref(),
            instruction_set: options.instruction_set.as_deref(),
        },
        out: tensor("out", &out, true)?,
        lse: lse.as_ref().map(|lse| tensor("lse", lse, true)).transpose()?,
    };
    py.detach(|| request.run(ThreadPool::global())).py()
}

/// Checks the lengths and tables of a batch that a device runs, as far as they are on the host.
#[pyfunction]
#[pyo3(signature = (query_start, context_lens, table_rows, block_tables, num_tokens, num_blocks, block_size, window))]
#[expect(clippy::too_many_arguments, reason = "a batch has as many arrays")]
fn _check_batch(
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
fn _check_block_moves(
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

/// Merges two outputs by their log-sum-exps: (out, lse) of a, of b, and the targets.
#[pyfunction]
fn _merge_states(
    py: Python<'_>,
    a: (Named<'_>, Named<'_>),
    b: (Named<'_>, Named<'_>),
    to: (Named<'_>, Named<'_>),
) -> PyResult<()> {
    let pair = |name: &str, pair: &(Named<'_>, Named<'_>)| -> PyResult<(Tensor<3>, Tensor<2>)> {
        Ok((tensor(&format!("out_{name}"), &pair.0, true)?, tensor(&format!("lse_{name}"), &pair.1, true)?))
    };
    let (a, b, to) = (pair("a", &a)?, pair("b", &b)?, pair("merged", &to)?);
    py.detach(|| core::merge_states((&a.0, &a.1), (&b.0, &b.1), (&to.0, &to.1), ThreadPool::global())).py()
}

/// Copies blocks inside each of the named arrays; `pairs` is flattened (from, to).
#[pyfunction]
fn _copy_blocks(py: Python<'_>, arrays: Vec<(String, Named<'_>)>, pairs: &Bound<'_, PyAny>) -> PyResult<()> {
    let flat = read_ints::<i32>(pairs, "block_copies")?;
    let pairs: Vec<[i32; 2]> = flat.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
    let views: Vec<(&str, Tensor<4>)> = arrays
        .iter()
        .map(|(name, array)| Ok((name.as_str(), tensor(name, array, false)?)))
        .collect::<PyResult<_>>()?;
    py.detach(|| core::copy_blocks(&views, &pairs, ThreadPool::global())).py()
}

/// Zeroes blocks of an array.
#[pyfunction]
fn _zero_blocks(py: Python<'_>, cache: Named<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
    let ids = read_ints::<i32>(block_ids, "block_ids")?;
    let cache = tensor::<4>("cache", &cache, false)?;
    py.detach(|| core::zero_blocks(&cache, &ids, ThreadPool::global())).py()
}

/// Copies blocks out of an array.
#[pyfunction]
fn _gather_blocks(
    py: Python<'_>,
    cache: Named<'_>,
    block_ids: &Bound<'_, PyAny>,
    out: Named<'_>,
) -> PyResult<()> {
    let ids = read_ints::<i32>(block_ids, "block_ids")?;
    let (cache, out) = (tensor::<4>("cache", &cache, false)?, tensor::<4>("out", &out, false)?);
    py.detach(|| core::gather_blocks(&cache, &ids, &out, ThreadPool::global())).py()
}

/// Copies blocks into an array.
#[pyfunction]
fn _scatter_blocks(
    py: Python<'_>,
    cache: Named<'_>,
    block_ids: &Bound<'_, PyAny>,
    values: Named<'_>,
) -> PyResult<()> {
    let ids = read_ints::<i32>(block_ids, "block_ids")?;
    let (cache, values) = (tensor::<4>("cache", &cache, false)?, tensor::<4>("values", &values, false)?);
    py.detach(|| core::scatter_blocks(&cache, &ids, &values, ThreadPool::global())).py()
}

/// Sequences that share their first blocks: (group_start, sequences, prefix_lens).
#[pyfunction]
fn _prefix_groups(
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

/// Sets how many threads a call of attention may use, the caller included.
#[pyfunction]
fn _set_num_threads(#[pyo3(from_py_with = int)] num_threads: usize) -> PyResult<()> {
    if !(1..=1024).contains(&num_threads) {
        return Err(invalid(format!("num_threads is {num_threads}, expected 1 to 1024")));
    }
    ThreadPool::global().set_size(num_threads);
    Ok(())
}

/// Threads that a call of attention may use.
#[pyfunction]
fn _get_num_threads() -> usize {
    ThreadPool::global().size()
}

/// Instruction sets of this processor that attention has kernels for, the fastest first.
#[pyfunction]
fn _instruction_sets() -> Vec<&'static str> {
    core::instruction_sets()
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(_append_kv, module)?)?;
    module.add_function(wrap_pyfunction!(_paged_attention, module)?)?;
    module.add_function(wrap_pyfunction!(_check_batch, module)?)?;
    module.add_function(wrap_pyfunction!(_check_block_moves, module)?)?;
    module.add_function(wrap_pyfunction!(_merge_states, module)?)?;
    module.add_function(wrap_pyfunction!(_copy_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_zero_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_gather_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_scatter_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_prefix_groups, module)?)?;
    module.add_function(wrap_pyfunction!(_set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(_get_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(_instruction_sets, module)?)
}
