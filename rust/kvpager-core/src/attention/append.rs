//! Writing new keys and values to their slots, converting and quantising on the way.

use super::dtype::{read_element, write_element};
use super::{Dtype, KvScale, Tensor, ThreadPool};
use crate::{Error, Result};

/// New keys or values, the cache they go to, and its scale.
#[derive(Clone, Copy, Debug)]
pub struct Append<'a> {
    /// `[num_tokens, num_kv_heads, head_dim]`, fp32, fp16 or bf16.
    pub rows: Tensor<3>,
    /// `[num_blocks, block_size, num_kv_heads, head_dim]`, any type, writable.
    pub cache: Tensor<4>,
    /// Divisor of fp8; for int8 the array `[num_blocks, block_size, num_kv_heads]` that is written too.
    pub scale: KvScale<'a>,
}

/// Which of the two caches, with the names of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    Key,
    /// Values.
    Value,
}

impl Side {
    /// Name of the new rows.
    #[must_use]
    pub const fn rows(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Value => "value",
        }
    }

    /// Name of the cache.
    #[must_use]
    pub const fn cache(self) -> &'static str {
        match self {
            Self::Key => "k_cache",
            Self::Value => "v_cache",
        }
    }

    /// What names of its arrays begin with.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Key => "k",
            Self::Value => "v",
        }
    }
}

/// Writes token `t` of each pair to slot `slots[t]`; -1 skips the token. Where a slot is named twice, the last
/// token stays.
///
/// # Errors
/// `InvalidArgument` for shapes, dtypes or slots that do not fit; nothing is written then.
pub fn append_kv(pairs: &[(Side, Append<'_>)], slots: &[i64], threads: &ThreadPool) -> Result<()> {
    for (side, pair) in pairs {
        pair.check(*side, slots)?;
    }
    for (_, pair) in pairs {
        pair.write_tokens(slots, threads);
    }
    Ok(())
}

/// Jobs to make for each thread, so that unequal ones even out.
const JOBS_PER_THREAD: usize = 4;

impl Append<'_> {
    fn check(&self, side: Side, slots: &[i64]) -> Result<()> {
        let [num_blocks, block_size, num_heads, head_dim] = self.cache.shape();
        let num_tokens = self.rows.shape()[0];
        self.rows.require_dtype(side.rows(), &[Dtype::F32, Dtype::F16, Dtype::Bf16])?;
        self.rows.require_shape(side.rows(), [num_tokens, num_heads, head_dim])?;
        if num_tokens != slots.len() {
            return Err(Error::invalid(format!(
                "slot_mapping has {}, but {} has {}",
                crate::count_of(slots.len(), "entry"),
                side.rows(),
                crate::count_of(num_tokens, "token")
            )));
        }
        self.cache.require_writable(side.cache())?;
        self.scale.check(side.prefix(), &self.cache, true)?;
        let num_slots = num_blocks as i64 * block_size as i64;
        for (token, &slot) in slots.iter().enumerate() {
            if slot < -1 || slot >= num_slots {
                return Err(Error::invalid(format!(
                    "slot_mapping[{token}] is {slot}, must be -1 to {} ({} of {block_size})",
                    num_slots - 1,
                    crate::count_of(num_blocks, "block")
                )));
            }
        }
        Ok(())
    }

    /// Writes all tokens. A job takes those of its blocks, in their order, so that a slot named twice is one job's.
    fn write_tokens(&self, slots: &[i64], threads: &ThreadPool) {
        let shared = threads.shares_move(self.rows.item_bytes().saturating_mul(slots.len()));
        let num_jobs = if shared { (threads.size() * JOBS_PER_THREAD).min(slots.len()) } else { 1 };
        let block_size = self.cache.shape()[1].max(1);
        let job_of = |slot: usize| if num_jobs == 1 { 0 } else { slot / block_size % num_jobs };
        let targets: Vec<Option<(usize, usize)>> =
            slots.iter().map(|&slot| usize::try_from(slot).ok().map(|slot| (job_of(slot), slot))).collect();
        threads.run(num_jobs, &|job| {
            for (token, target) in targets.iter().enumerate() {
                if let Some((_, slot)) = target.filter(|target| target.0 == job) {
                    self.write_token(token, slot);
                }
            }
        });
    }

    fn write_token(&self, token: usize, slot: usize) {
        let [_, block_size, num_heads, _] = self.cache.shape();
        let (block, offset) = (slot / block_size, slot % block_size);
        for head in 0..num_heads {
            self.write_row([token, head], [block, offset, head]);
        }
    }

    fn write_row(&self, from: [usize; 2], to: [usize; 3]) {
        let head_dim = self.rows.shape()[2];
        let source = self.rows.at([from[0], from[1], 0]);
        let target = self.cache.at([to[0], to[1], to[2], 0]);
        let dense = self.rows.has_dense_rows() && self.cache.has_dense_rows();
        if dense && self.rows.dtype() == self.cache.dtype() {
            // SAFETY: both rows hold `head_dim` elements of one type (shapes were checked) and lie in different
            // arrays by the promise of `Tensor::from_raw`.
            unsafe { source.copy_to_nonoverlapping(target, head_dim * self.rows.dtype().size()) };
            return;
        }
        let divisor = match self.scale {
            KvScale::TokenHead(scales) => {
                let scale = self.token_scale(source);
                // SAFETY: inside the array, whose shape and dtype were checked.
                unsafe { write_element(Dtype::F32, scales.at(to), scale) };
                scale
            }
            scale => scale.of_head(to[2]),
        };
        self.convert_row(source, target, divisor);
    }

    fn convert_row(&self, source: *const u8, target: *mut u8, divisor: f32) {
        let (from, to) = (self.rows.strides()[2], self.cache.strides()[3]);
        for index in 0..self.rows.shape()[2] as isize {
            // SAFETY: element `index` of rows whose lengths were checked.
            unsafe {
                let value = read_element(self.rows.dtype(), source.wrapping_offset(index * from));
                write_element(self.cache.dtype(), target.wrapping_offset(index * to), value / divisor);
            }
        }
    }

    /// Largest magnitude of the row over 127; NaN if the row has a value that is not finite, 1 for zeros.
    fn token_scale(&self, source: *const u8) -> f32 {
        let stride = self.rows.strides()[2];
        let mut largest = 0.0f32;
        for index in 0..self.rows.shape()[2] as isize {
            // SAFETY: element `index` of a row whose length was checked.
            let value = unsafe { read_element(self.rows.dtype(), source.wrapping_offset(index * stride)) };
            if !value.is_finite() {
                return f32::NAN;
            }
            largest = largest.max(value.abs());
        }
        if largest == 0.0 { 1.0 } else { (largest / 127.0).max(f32::MIN_POSITIVE) }
    }
}
