//! Bindings of `kvpager_core::attention`.

mod call;
mod checks;
mod views;

use crate::args::int;
use crate::arrays::read_ints;
use crate::error::{IntoPyResult, invalid};
use kvpager_core::attention::{self as core, Append, Side, Tensor, ThreadPool};
use pyo3::prelude::*;
use views::{Named, ScaleArg, scale, tensor};

/// Writes tokens to their slots; each pair is (rows, cache, scale), first the keys', then the values'.
#[pyfunction]
fn _append_kv(
    py: Python<'_>,
    pairs: Vec<(Named<'_>, Named<'_>, Option<ScaleArg<'_>>)>,
    slots: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let slots = read_ints::<i64>(slots, "slot_mapping")?;
    let mut views = Vec::new();
    for (side, (rows, cache, scale_argument)) in [Side::Key, Side::Value].into_iter().zip(&pairs) {
        let rows = tensor::<3>(side.rows(), rows, true)?;
        let cache = tensor::<4>(side.cache(), cache, true)?;
        views.push((side, Append { rows, cache, scale: scale(side.prefix(), scale_argument)? }));
    }
    py.detach(|| core::append_kv(&views, &slots, ThreadPool::global())).py()
}

/// Merges two outputs by their log-sum-exps: (out, lse) of a, of b, and the targets.
#[pyfunction]
fn _merge_states(
    py: Python<'_>,
    a: (Named<'_>, Named<'_>),
    b: (Named<'_>, Named<'_>),
    to: (Named<'_>, Named<'_>),
) -> PyResult<()> {
    let pair = |suffix: &str, pair: &(Named<'_>, Named<'_>)| -> PyResult<(Tensor<3>, Tensor<2>)> {
        Ok((tensor(&format!("out{suffix}"), &pair.0, true)?, tensor(&format!("lse{suffix}"), &pair.1, true)?))
    };
    let (a, b, to) = (pair("_a", &a)?, pair("_b", &b)?, pair("", &to)?);
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

/// Sets how many threads a call of attention may use, the caller included.
#[pyfunction]
fn _set_num_threads(py: Python<'_>, #[pyo3(from_py_with = int)] num_threads: usize) -> PyResult<()> {
    if !(1..=1024).contains(&num_threads) {
        return Err(invalid(format!("num_threads is {num_threads}, expected 1 to 1024")));
    }
    py.detach(|| ThreadPool::global().set_size(num_threads));
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
    module.add_function(wrap_pyfunction!(call::_paged_attention, module)?)?;
    module.add_function(wrap_pyfunction!(call::_workspace_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(checks::_check_batch, module)?)?;
    module.add_function(wrap_pyfunction!(checks::_check_block_moves, module)?)?;
    module.add_function(wrap_pyfunction!(_merge_states, module)?)?;
    module.add_function(wrap_pyfunction!(_copy_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_zero_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_gather_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(_scatter_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(call::_prefix_groups, module)?)?;
    module.add_function(wrap_pyfunction!(_set_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(_get_num_threads, module)?)?;
    module.add_function(wrap_pyfunction!(_instruction_sets, module)?)
}
