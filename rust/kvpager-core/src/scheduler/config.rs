//! What a scheduler is made with, checked once.

use super::host_tier::{HostTierConfig, Overflow};
use super::layer_groups;
use super::limits::QueueLimits;
use super::policy::AdmissionPolicy;
use crate::geometry::Span;
use crate::{Error, Result};

/// Most tokens of a sequence, and of a step: positions and counts are i32, and sums of two of them fit too.
pub const MAX_TOKENS: u32 = i32::MAX as u32 / 2;

/// When a block is zeroed before its first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroBlocks {
    /// Never: the kernels read no slot that was not written.
    Never,
    /// When the block's last owner was another account.
    OnTenantChange,
    /// Before every first write.
    Always,
}

impl ZeroBlocks {
    /// Reads the option's name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "never" => Ok(Self::Never),
            "on_tenant_change" => Ok(Self::OnTenantChange),
            "always" => Ok(Self::Always),
            _ => Err(Error::invalid(format!(
                "zero_blocks is {name:?}; it is one of never, on_tenant_change, always"
            ))),
        }
    }
}

/// Limits of a scheduler. Counts are in the unit that the name says.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Token positions in a block.
    pub block_size: u32,
    /// What the layers of each group see; each group has a row of blocks for every sequence.
    pub layer_groups: Box<[Span]>,
    /// Tokens in a step, decodes and prefill chunks together.
    pub max_batch_tokens: u32,
    /// Sequences that run at once; also the rows of the table arena.
    pub max_running: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_tokens: u32,
    /// What may wait at once, of all tenants together.
    pub queue: QueueLimits,
    /// Steps of waiting that make up for one class of priority inside a tenant; 0 if priorities do not matter.
    pub ageing_steps: u32,
    /// Steps that may be planned before the oldest of them has ended; 1 to plan with every token known.
    pub max_open_steps: u32,
    /// Longest prefill chunk of one sequence in a step; 0 for the whole budget.
    pub max_prefill_chunk: u32,
    /// What a request must have promised before it runs.
    pub policy: AdmissionPolicy,
    /// Whether a waiting request may preempt running ones of a lower class of its tenant; not under `reserve`.
    pub urgent_preempts: bool,
    /// Requests that may pass a head which does not fit.
    pub max_bypass: u32,
    /// Steps for which a head may be passed.
    pub max_bypass_steps: u64,
    /// Seconds for which a head may be passed.
    pub max_bypass_seconds: f64,
    /// When blocks are zeroed.
    pub zero_blocks: ZeroBlocks,
    /// What happens when running sequences have outgrown the pool.
    pub overflow: Overflow,
    /// Where swapped blocks go.
    pub host_tier: HostTierConfig,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            block_size: 16,
            layer_groups: Box::new([Span::Full]),
            max_batch_tokens: 512,
            max_running: 64,
            max_model_tokens: 8192,
            queue: QueueLimits { max_requests: 1024, max_tokens: u64::MAX },
            ageing_steps: 1024,
            max_open_steps: 1,
            max_prefill_chunk: 0,
            policy: AdmissionPolicy::Reserve,
            urgent_preempts: false,
            max_bypass: 64,
            max_bypass_steps: 4096,
            max_bypass_seconds: 300.0,
            zero_blocks: ZeroBlocks::OnTenantChange,
            overflow: Overflow::Auto,
            host_tier: HostTierConfig::default(),
        }
    }
}

impl SchedulerConfig {
    /// Blocks of one group that hold `num_tokens` positions.
    #[must_use]
    pub const fn blocks_for(&self, num_tokens: u32) -> u32 {
        num_tokens.div_ceil(self.block_size)
    }

    /// Blocks in the longest row of a table, over a pool of so many: a model that keeps all tokens in one of its groups
    /// runs no sequence of more blocks than there are.
    pub(super) fn columns(&self, num_blocks: u32) -> u32 {
        let longest = self.blocks_for(self.max_model_tokens);
        if self.layer_groups.contains(&Span::Full) { longest.min(num_blocks) } else { longest }
    }

    /// Checks every limit; all problems come in one message.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with each field's value.
    pub fn validate(&self) -> Result<()> {
        let mut problems = Vec::new();
        let mut at_least_one = |name: &str, value: u32| {
            if value == 0 {
                problems.push(format!("{name} is 0, must be at least 1"));
            }
        };
        at_least_one("block_size", self.block_size);
        at_least_one("max_batch_tokens", self.max_batch_tokens);
        at_least_one("max_running", self.max_running);
        at_least_one("max_model_tokens", self.max_model_tokens);
        at_least_one("max_open_steps", self.max_open_steps);
        if self.max_batch_tokens < self.max_running {
            problems.push(format!(
                "max_batch_tokens is {}, less than max_running {}: each running sequence decodes one token a step",
                self.max_batch_tokens, self.max_running
            ));
        }
        if self.max_model_tokens > MAX_TOKENS || self.max_batch_tokens > MAX_TOKENS {
            problems.push(format!(
                "max_model_tokens is {} and max_batch_tokens {}, both must be 1 to {MAX_TOKENS}",
                self.max_model_tokens, self.max_batch_tokens
            ));
        }
        problems.extend(layer_groups::problem(&self.layer_groups));
        problems.extend(self.queue.problem());
        problems.extend(self.policy.problem());
        if self.urgent_preempts && !self.policy.overcommits() {
            problems.push("urgent_preempts is true and the policy reserve, which never preempts".to_owned());
        }
        if self.max_bypass_seconds.is_nan() || self.max_bypass_seconds < 0.0 {
            problems.push(format!("max_bypass_seconds is {}, must be at least 0", self.max_bypass_seconds));
        }
        problems.extend(self.host_tier.problems());
        if self.overflow == Overflow::Swap && self.host_tier.num_blocks == 0 {
            problems.push("overflow is swap and the host tier has 0 blocks".to_owned());
        }
        if problems.is_empty() { Ok(()) } else { Err(Error::invalid(problems.join("; "))) }
    }
}
