//! Whole blocks: copy on write, zeroing, and batched gathers and scatters for swapping.

use super::{Tensor, ThreadPool};
use crate::{Error, Result};

/// The ids that blocks of an array have, in words.
pub(super) fn ids_of(num_blocks: usize) -> String {
    match num_blocks {
        0 => "of a block, and there is none".to_owned(),
        _ => format!("0 to {}", num_blocks - 1),
    }
}

/// Checks that ids are blocks of an array.
fn check_ids(name: &str, ids: &[i32], num_blocks: usize) -> Result<()> {
    for (index, &id) in ids.iter().enumerate() {
        if usize::try_from(id).map_or(true, |id| id >= num_blocks) {
            return Err(Error::invalid(format!("{name}[{index}] is {id}, must be {}", ids_of(num_blocks))));
        }
    }
    Ok(())
}

/// Checks that no id is named twice.
fn check_distinct(name: &str, ids: &[i32]) -> Result<()> {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::invalid(format!("{name} names block {} twice as a destination", pair[0]))),
        None => Ok(()),
    }
}

/// Checks moves of blocks before anything is moved: ids within `num_from` and `num_to` blocks, no destination named
/// twice; with `in_place` no destination that is also a source.
///
/// # Errors
/// `InvalidArgument` with the first id that is wrong; `name` is the argument's.
pub fn check_block_moves(
    name: &str,
    (from, num_from): (&[i32], usize),
    (to, num_to): (&[i32], usize),
    in_place: bool,
) -> Result<()> {
    check_ids(name, from, num_from)?;
    check_ids(name, to, num_to)?;
    check_distinct(name, to)?;
    let mut sources = from.to_vec();
    sources.sort_unstable();
    match to.iter().find(|id| in_place && sources.binary_search(id).is_ok()) {
        Some(id) => Err(Error::invalid(format!("{name} has block {id} as a source and a destination"))),
        None => Ok(()),
    }
}

/// Copies block `from` to block `to` for each pair, in each of the arrays (`[num_blocks, ...]`).
///
/// # Errors
/// `InvalidArgument` for an id outside an array, a destination named twice, or a destination that is also a
/// source; nothing is copied then.
pub fn copy_blocks(arrays: &[(&str, Tensor<4>)], pairs: &[[i32; 2]], threads: &ThreadPool) -> Result<()> {
    let (from, to): (Vec<i32>, Vec<i32>) = pairs.iter().map(|pair| (pair[0], pair[1])).unzip();
    for (name, array) in arrays {
        array.require_writable(name)?;
    }
    let num_blocks = arrays.iter().map(|(_, array)| array.shape()[0]).min().unwrap_or(0);
    check_block_moves("block_copies", (&from, num_blocks), (&to, num_blocks), true)?;
    for (_, array) in arrays {
        // No block is both written and read, or written twice, so the order does not matter.
        threads.run_moves(pairs.len(), array.item_bytes(), &|index| {
            copy_block(array, from[index] as usize, array, to[index] as usize);
        });
    }
    Ok(())
}

/// Writes zero bytes to the blocks. A block may be named twice.
///
/// # Errors
/// `InvalidArgument` for an id outside the array; nothing is written then.
pub fn zero_blocks(cache: &Tensor<4>, ids: &[i32], threads: &ThreadPool) -> Result<()> {
    cache.require_writable("cache")?;
    check_ids("block_ids", ids, cache.shape()[0])?;
    // A block that is named twice is given to one thread.
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    threads.run_moves(ids.len(), cache.item_bytes(), &|index| zero_block(cache, ids[index] as usize));
    Ok(())
}

fn zero_block(cache: &Tensor<4>, id: usize) {
    let [_, rows, columns, depth] = cache.shape();
    let size = cache.dtype().size();
    if cache.has_dense_items() && cache.item_bytes() > 0 {
        // SAFETY: the block's bytes lie without gaps, and its id was checked.
        return unsafe { cache.at([id, 0, 0, 0]).write_bytes(0, cache.item_bytes()) };
    }
    for (row, column) in product(rows, columns) {
        let target = cache.at([id, row, column, 0]);
        for index in 0..depth as isize {
            let element = target.wrapping_offset(index * cache.strides()[3]);
            // SAFETY: an element of the array: id, row, column and index are inside its shape.
            unsafe { element.write_bytes(0, size) };
        }
    }
}

/// Copies block `ids[i]` of `cache` to `out[i]`.
///
/// # Errors
/// `InvalidArgument` for an id outside the array, or an `out` of another shape or dtype.
pub fn gather_blocks(cache: &Tensor<4>, ids: &[i32], out: &Tensor<4>, threads: &ThreadPool) -> Result<()> {
    check_staging(cache, ids, out, "out")?;
    out.require_writable("out")?;
    threads.run_moves(ids.len(), cache.item_bytes(), &|index| {
        copy_block(cache, ids[index] as usize, out, index)
    });
    Ok(())
}

/// Copies `values[i]` to block `ids[i]` of `cache`.
///
/// # Errors
/// `InvalidArgument` for an id outside the array or named twice, or `values` of another shape or dtype.
pub fn scatter_blocks(
    cache: &Tensor<4>,
    ids: &[i32],
    values: &Tensor<4>,
    threads: &ThreadPool,
) -> Result<()> {
    check_staging(cache, ids, values, "values")?;
    cache.require_writable("cache")?;
    check_distinct("block_ids", ids)?;
    threads.run_moves(ids.len(), cache.item_bytes(), &|index| {
        copy_block(values, index, cache, ids[index] as usize)
    });
    Ok(())
}

fn check_staging(cache: &Tensor<4>, ids: &[i32], other: &Tensor<4>, name: &str) -> Result<()> {
    let [num_blocks, rows, columns, depth] = cache.shape();
    check_ids("block_ids", ids, num_blocks)?;
    other.require_dtype(name, &[cache.dtype()])?;
    other.require_shape(name, [ids.len(), rows, columns, depth])
}

fn product(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}

/// Copies one block between arrays whose shapes past the first axis and dtypes are equal.
fn copy_block(from: &Tensor<4>, source: usize, to: &Tensor<4>, target: usize) {
    let [_, rows, columns, depth] = from.shape();
    let size = from.dtype().size();
    if from.has_dense_items() && to.has_dense_items() && from.item_bytes() > 0 {
        let (read, write) = (from.at([source, 0, 0, 0]), to.at([target, 0, 0, 0]));
        // SAFETY: both blocks' bytes lie without gaps; they are different blocks, or lie in different arrays.
        return unsafe { read.copy_to_nonoverlapping(write, from.item_bytes()) };
    }
    let dense = from.has_dense_rows() && to.has_dense_rows();
    for (row, column) in product(rows, columns) {
        let (read, write) = (from.at([source, row, column, 0]), to.at([target, row, column, 0]));
        // SAFETY: elements of the arrays (indices are inside both shapes); the two blocks are different ones,
        // or lie in different arrays.
        unsafe {
            if dense {
                read.copy_to_nonoverlapping(write, depth * size);
                continue;
            }
            for index in 0..depth as isize {
                let read = read.wrapping_offset(index * from.strides()[3]);
                read.copy_to_nonoverlapping(write.wrapping_offset(index * to.strides()[3]), size);
            }
        }
    }
}
