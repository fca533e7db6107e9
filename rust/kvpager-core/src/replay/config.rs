//! What a replay is made with.

use super::step_time::StepTime;
use crate::prefix_index::EvictionPolicy;
use crate::scheduler::{AdmissionPolicy, HostTierConfig, Overflow};
use crate::{Error, Result};

/// When requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// As recorded, so many times as fast.
    Recorded {
        /// 2 halves every gap.
        speed: f64,
    },
    /// A Poisson stream.
    Rate {
        /// Requests a second.
        per_second: f64,
        /// Seed of the gaps.
        seed: u64,
    },
    /// All at once: as much as fits runs, always.
    Saturate,
}

/// Settings of one run.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Blocks of the pool.
    pub num_blocks: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Admission policy.
    pub policy: AdmissionPolicy,
    /// Eviction policy of the index.
    pub eviction: EvictionPolicy,
    /// Whether prefixes are looked up and kept.
    pub reuse: bool,
    /// Tokens of a step.
    pub max_batch_tokens: u32,
    /// Sequences of a step.
    pub max_running: u32,
    /// Longest request.
    pub max_model_tokens: u32,
    /// Longest prefill chunk of one sequence in a step; 0 for the whole budget.
    pub max_prefill_chunk: u32,
    /// Requests that may pass a head of their tenant which does not fit.
    pub max_bypass: u32,
    /// Steps for which a head may be passed.
    pub max_bypass_steps: u64,
    /// Seconds for which a head may be passed.
    pub max_bypass_seconds: f64,
    /// What happens when running sequences have outgrown the pool.
    pub overflow: Overflow,
    /// Where swapped blocks go.
    pub host_tier: HostTierConfig,
    /// Most output tokens that a request asks for; longer outputs are cut.
    pub max_output_tokens: u32,
    /// Prompt tokens that one hash id stands for.
    pub hash_block: u32,
    /// Names of the tenants.
    pub tenants: Vec<String>,
    /// When requests arrive.
    pub arrivals: Arrivals,
    /// How long a step takes.
    pub step_time: StepTime,
    /// Requests that wait in the scheduler at once; more wait outside, in order, without their tokens.
    pub queue_depth: u32,
}

impl ReplayConfig {
    /// A pool of so many blocks, everything else usual.
    #[must_use]
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        Self {
            num_blocks,
            block_size,
            policy: AdmissionPolicy::Reserve,
            eviction: EvictionPolicy::Lru,
            reuse: true,
            max_batch_tokens: 8192,
            max_running: 1024,
            max_model_tokens: 131_072,
            max_prefill_chunk: 0,
            max_bypass: 4096,
            max_bypass_steps: u64::MAX,
            max_bypass_seconds: 300.0,
            overflow: Overflow::Auto,
            host_tier: HostTierConfig::default(),
            max_output_tokens: 4096,
            hash_block: 512,
            tenants: vec!["all".into()],
            arrivals: Arrivals::Recorded { speed: 1.0 },
            step_time: StepTime::default(),
            queue_depth: 512,
        }
    }

    /// Checks what the scheduler does not.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the setting and its value.
    pub fn validate(&self) -> Result<()> {
        self.step_time.validate()?;
        // Beyond this, virtual times are no longer numbers that tell steps apart.
        let within = |name: &str, value: f64| {
            if (1e-9..=1e9).contains(&value) {
                return Ok(());
            }
            Err(Error::invalid(format!("{name} is {value:?}, must be 1e-9 to 1e9")))
        };
        match self.arrivals {
            Arrivals::Recorded { speed } => within("speed", speed)?,
            Arrivals::Rate { per_second, .. } => within("rate", per_second)?,
            Arrivals::Saturate => {}
        }
        if self.max_output_tokens == 0
            || self.hash_block == 0
            || self.queue_depth == 0
            || self.tenants.is_empty()
        {
            return Err(Error::invalid(
                "max_output_tokens, hash_block, queue_depth and the number of tenants must be at least 1",
            ));
        }
        Ok(())
    }
}
