//! Admission policies: how many blocks a request must have promised before it runs. One file each.

mod reserve;

use super::config::SchedulerConfig;
use crate::{Error, Result};

/// A policy, chosen by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// Prompt and maximum output are promised at admission: no preemption, ever.
    Reserve,
}

/// What a policy looks at.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Most tokens that may be sampled.
    pub max_tokens: u32,
    /// Blocks of the prompt that are matched **and pinned** in the index.
    pub pinned_blocks: u32,
}

impl AdmissionPolicy {
    /// Reads a policy's name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "reserve" => Ok(Self::Reserve),
            _ => Err(Error::invalid(format!("policy is {name:?}; it is one of reserve"))),
        }
    }

    /// The policy's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
        }
    }

    /// Blocks that the request must reserve to be admitted, beyond those it has pinned.
    #[must_use]
    pub const fn blocks_to_reserve(self, config: &SchedulerConfig, request: AdmissionRequest) -> u32 {
        match self {
            Self::Reserve => reserve::blocks_to_reserve(config, request),
        }
    }
}
