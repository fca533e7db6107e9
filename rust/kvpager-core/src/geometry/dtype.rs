//! The type that K and V are stored in, which need not be the type of the weights.

use crate::{Error, Result};

/// Element type of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    /// 32-bit floats.
    Float32,
    /// IEEE half precision.
    Float16,
    /// bfloat16.
    BFloat16,
    /// 8-bit floats (e4m3 or e5m2).
    Fp8,
    /// 8-bit integers.
    Int8,
}

/// How finely a quantised cache is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvScales {
    /// One scale a layer, kept beside the weights: no bytes in the blocks.
    PerTensor,
    /// One float32 for each token, KV head, and K or V.
    PerTokenHead,
}

impl KvDtype {
    /// Reads a dtype by the names that serving engines use.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the accepted names.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "fp32" | "float32" => Ok(Self::Float32),
            "fp16" | "float16" | "half" => Ok(Self::Float16),
            "bf16" | "bfloat16" => Ok(Self::BFloat16),
            "fp8" | "fp8_e4m3" | "fp8_e5m2" => Ok(Self::Fp8),
            "int8" => Ok(Self::Int8),
            _ => Err(Error::invalid(format!(
                "KV dtype {name:?} is unknown: use bf16, fp16, fp32, fp8 or int8"
            ))),
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::BFloat16 => 2,
            Self::Fp8 | Self::Int8 => 1,
        }
    }

    /// The name that is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "fp32",
            Self::Float16 => "fp16",
            Self::BFloat16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        }
    }

    /// What is usual for the type: int8 needs a scale for each token and head, the others none in the blocks.
    pub fn default_scales(self) -> KvScales {
        if self == Self::Int8 { KvScales::PerTokenHead } else { KvScales::PerTensor }
    }
}

impl KvScales {
    /// Reads `per_tensor` or `per_token_head`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the accepted names.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "per_tensor" => Ok(Self::PerTensor),
            "per_token_head" => Ok(Self::PerTokenHead),
            _ => Err(Error::invalid(format!(
                "KV scales {name:?} are unknown: use per_tensor or per_token_head"
            ))),
        }
    }

    /// Bytes that the scales of one stored vector take in a block.
    pub fn bytes_per_vector(self) -> u64 {
        match self {
            Self::PerTensor => 0,
            Self::PerTokenHead => 4,
        }
    }
}
