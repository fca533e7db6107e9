//! Scales of a quantised cache.

use super::{Dtype, Tensor};
use crate::{Error, Result};

/// What a stored element is multiplied by to get its value.
#[derive(Clone, Copy, Debug)]
pub enum KvScale<'a> {
    /// One: a cache that is not quantised, or an fp8 cache without a scale.
    One,
    /// One factor for the whole array (fp8).
    Whole(f32),
    /// One factor a KV head (fp8): `[num_kv_heads]`.
    Head(&'a [f32]),
    /// One factor a token and head (int8): `[num_blocks, block_size, num_kv_heads]`, fp32.
    TokenHead(Tensor<3>),
}

impl KvScale<'_> {
    /// The factor of a head; 1 where the factor is the token's.
    pub(super) fn of_head(&self, head: usize) -> f32 {
        match self {
            Self::One | Self::TokenHead(_) => 1.0,
            Self::Whole(scale) => *scale,
            Self::Head(scales) => scales[head],
        }
    }

    /// Checks that the scale fits the cache: int8 needs one a token and head, fp8 takes none, one or one a head,
    /// the rest take none; every given factor is positive and finite.
    pub(super) fn check(&self, name: &str, cache: &Tensor<4>, written: bool) -> Result<()> {
        let dtype = cache.dtype();
        let [num_blocks, block_size, num_heads, _] = cache.shape();
        match self {
            Self::One if dtype != Dtype::I8 => Ok(()),
            Self::TokenHead(scales) if dtype == Dtype::I8 => {
                let name = format!("{name}_scale");
                scales.require_dtype(&name, &[Dtype::F32])?;
                scales.require_shape(&name, [num_blocks, block_size, num_heads])?;
                if written { scales.require_writable(&name) } else { Ok(()) }
            }
            Self::Whole(scale) if dtype.size() == 1 && dtype != Dtype::I8 => check_factor(name, *scale),
            Self::Head(scales) if dtype.size() == 1 && dtype != Dtype::I8 => {
                if scales.len() != num_heads {
                    return Err(Error::invalid(format!(
                        "{name}_scale has {} factors, expected 1 or {num_heads} (one a KV head)",
                        scales.len()
                    )));
                }
                scales.iter().try_for_each(|&scale| check_factor(name, scale))
            }
            _ => Err(Error::invalid(match dtype {
                Dtype::I8 => format!(
                    "{name}_cache of int8 needs {name}_scale as a float32 array of shape \
                     [{num_blocks}, {block_size}, {num_heads}]"
                ),
                Dtype::F8E4m3 | Dtype::F8E5m2 => {
                    format!("{name}_scale of an fp8 cache is one factor or {num_heads} (one a KV head)")
                }
                _ => format!("{name}_cache of {} takes no {name}_scale", dtype.name()),
            })),
        }
    }
}

fn check_factor(name: &str, scale: f32) -> Result<()> {
    if scale.is_finite() && scale > 0.0 {
        return Ok(());
    }
    Err(Error::invalid(format!("{name}_scale has the factor {scale}, expected a positive finite number")))
}
