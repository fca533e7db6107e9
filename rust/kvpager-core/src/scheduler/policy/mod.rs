//! Admission policies: how much a request must have promised before it runs. One file each.
//!
//! A policy is a value, chosen by name. `reserve` promises the whole life of a request, so it never takes
//! anything back. The others overcommit: they promise what is there already and judge whether what may come
//! will fit; when they are wrong, the scheduler preempts (see `preempt.rs`).

mod forecast;
mod learned;
mod peak;
mod reserve;
mod survival;
mod watermark;

pub use forecast::ForecastConfig;
pub(super) use learned::LearnedLengths;
pub use peak::Trajectory;
#[cfg(test)]
pub(super) use survival::HORIZONS;
pub(super) use survival::OutputLengths;

use super::config::SchedulerConfig;
use crate::{Error, Result};

/// A policy, chosen by name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdmissionPolicy {
    /// Prompt and maximum output are promised at admission: no preemption, ever.
    Reserve,
    /// What is known of the sequence must fit and leave this share of the pool uncommitted.
    Watermark {
        /// Share of the pool, 0 to below 1.
        free_share: f64,
    },
    /// Like `Watermark`, with a margin learned from the lengths of finished outputs.
    Forecast(ForecastConfig),
}

/// What a policy looks at.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens known now: the prompt, and what was sampled before a preemption.
    pub known_tokens: u32,
    /// Most tokens that may be sampled.
    pub max_tokens: u32,
    /// Blocks that are matched **and pinned** in the index.
    pub pinned_blocks: u32,
}

/// The pool as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRoom {
    /// Blocks that are neither held, reserved nor quarantined.
    pub uncommitted_blocks: u64,
    /// Blocks of the pool.
    pub capacity_blocks: u64,
    /// How the running sequences and the candidate will grow and end; empty for policies that do not forecast.
    pub growth: Trajectory,
}

impl AdmissionPolicy {
    /// Reads a policy's name; its parameters are the defaults.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "reserve" => Ok(Self::Reserve),
            "watermark" => Ok(Self::Watermark { free_share: watermark::DEFAULT_FREE_SHARE }),
            "forecast" => Ok(Self::Forecast(ForecastConfig::default())),
            _ => {
                Err(Error::invalid(format!("policy is {name:?}; it is one of reserve, watermark, forecast")))
            }
        }
    }

    /// The policy's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Watermark { .. } => "watermark",
            Self::Forecast(_) => "forecast",
        }
    }

    /// Whether running sequences may grow beyond what is promised to them.
    #[must_use]
    pub const fn overcommits(self) -> bool {
        !matches!(self, Self::Reserve)
    }

    /// Whether the policy needs [`AdmissionRoom::growth`].
    #[must_use]
    pub const fn forecasts(self) -> bool {
        matches!(self, Self::Forecast(_))
    }

    /// Blocks that the request must reserve to be admitted, beyond those it has pinned.
    #[must_use]
    pub fn blocks_to_reserve(self, config: &SchedulerConfig, request: AdmissionRequest) -> u32 {
        match self {
            Self::Reserve => reserve::blocks_to_reserve(config, request),
            Self::Watermark { .. } | Self::Forecast(_) => {
                let AdmissionRequest { known_tokens, prompt_tokens, max_tokens, pinned_blocks } = request;
                config.known_blocks(known_tokens, prompt_tokens, max_tokens) - pinned_blocks
            }
        }
    }

    /// Blocks that must stay uncommitted after the request took `blocks_to_reserve`.
    #[must_use]
    pub fn blocks_to_leave(self, room: AdmissionRoom) -> u64 {
        match self {
            Self::Reserve => 0,
            Self::Watermark { free_share } => watermark::blocks_to_leave(free_share, room),
            Self::Forecast(forecast) => forecast.blocks_to_leave(&room),
        }
    }

    /// Checks the parameters; the problem in words, if there is one.
    pub(super) fn problem(self) -> Option<String> {
        let share = match self {
            Self::Reserve => return None,
            Self::Watermark { free_share } => free_share,
            Self::Forecast(forecast) => forecast.free_share,
        };
        (!(0.0..1.0).contains(&share))
            .then(|| format!("the policy's free share is {share}, must be at least 0 and below 1"))
    }
}
