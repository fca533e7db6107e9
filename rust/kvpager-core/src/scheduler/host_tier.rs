//! The host tier: a second pool for blocks that were taken back, and what moving them costs.
//!
//! It is a [`BlockPool`] like the device's: capacity, quotas, generations and quarantine are its rules, not
//! copies of them. A tenant's share of it is its share of the device.

use crate::block_pool::{BlockPool, PoolConfig, Quota, StepEpoch};
use crate::ids::{AccountId, BlockHandle};
use crate::{Error, Result};
use std::sync::Arc;

/// What happens when running sequences have outgrown the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Whatever costs less time by [`HostTierConfig`]: swap or recompute; recompute without a host tier.
    #[default]
    Auto,
    /// A victim gives all its blocks back and is computed again.
    Recompute,
    /// Tails of a victim go to the host tier; recompute when that is full.
    Swap,
    /// A victim ends, with reason `capacity` and the tokens it has.
    Refuse,
}

impl Overflow {
    /// Reads the option's name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that lists the names.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "recompute" => Ok(Self::Recompute),
            "swap" => Ok(Self::Swap),
            "refuse" => Ok(Self::Refuse),
            _ => Err(Error::invalid(format!(
                "overflow is {name:?}; it is one of auto, recompute, swap, refuse"
            ))),
        }
    }
}

/// Size of the host tier, and the speeds by which swapping is weighed against computing again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostTierConfig {
    /// Blocks of host memory; 0 for no host tier.
    pub num_blocks: u32,
    /// Bytes of one block over all layers.
    pub bytes_per_block: u64,
    /// Bytes a second between device and host, one way.
    pub link_bytes_per_second: f64,
    /// Tokens a second that a prefill computes.
    pub prefill_tokens_per_second: f64,
    /// Longest pause that a parked sequence should see, seconds: it comes back by then at the cost of another.
    pub max_token_gap: f64,
}

impl Default for HostTierConfig {
    fn default() -> Self {
        Self {
            num_blocks: 0,
            bytes_per_block: 2 << 20,
            link_bytes_per_second: 25e9,
            prefill_tokens_per_second: 25e3,
            max_token_gap: 1.4,
        }
    }
}

impl HostTierConfig {
    /// Seconds to move so many blocks one way.
    #[must_use]
    pub fn swap_seconds(&self, num_blocks: u32) -> f64 {
        self.bytes_per_block as f64 * f64::from(num_blocks) / self.link_bytes_per_second
    }

    /// Seconds to compute so many tokens again.
    #[must_use]
    pub fn recompute_seconds(&self, num_tokens: u32) -> f64 {
        f64::from(num_tokens) / self.prefill_tokens_per_second
    }

    /// The fields that are out of range, in words.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let positive = [
            ("link_bytes_per_second", self.link_bytes_per_second),
            ("prefill_tokens_per_second", self.prefill_tokens_per_second),
            ("max_token_gap", self.max_token_gap),
        ];
        positive
            .into_iter()
            .filter(|(_, value)| !(*value > 0.0 && value.is_finite()))
            .map(|(name, value)| format!("{name} is {value}, must be above 0"))
    }
}

/// The host pool, and what leaves either pool when the next step has opened.
pub(super) struct HostTier {
    pub(super) config: HostTierConfig,
    pool: Arc<BlockPool>,
    device_blocks: u32,
    /// By index of the tenant; none for one whose share is less than a block.
    accounts: Vec<Option<AccountId>>,
    /// Sources of this step's `swap_in`.
    leaving: Vec<BlockHandle>,
}

impl HostTier {
    /// The tier of a configuration that has one.
    pub(super) fn new(config: HostTierConfig, device: &BlockPool) -> Result<Option<Self>> {
        if config.num_blocks == 0 {
            return Ok(None);
        }
        let pool = BlockPool::new(PoolConfig {
            num_blocks: config.num_blocks,
            max_accounts: 1024,
            // This scheduler's steps are some of those that are open on the device, so whatever may open there may here.
            max_open_steps: device.max_open_steps(),
        })?;
        Ok(Some(Self {
            config,
            pool,
            device_blocks: device.num_blocks(),
            accounts: Vec::new(),
            leaving: Vec::new(),
        }))
    }

    pub(super) const fn pool(&self) -> &Arc<BlockPool> {
        &self.pool
    }

    /// A tenant's share is its share of the device, rounded down.
    pub(super) fn add_tenant(&mut self, quota: Quota) -> Result<()> {
        let share = |blocks: u32| {
            let scaled = u64::from(blocks) * u64::from(self.config.num_blocks);
            (scaled / u64::from(self.device_blocks)) as u32
        };
        let quota = Quota { guaranteed: share(quota.guaranteed), limit: share(quota.limit) };
        let account = if quota.limit > 0 { Some(self.pool.add_account(quota)?) } else { None };
        self.accounts.push(account);
        Ok(())
    }

    /// Takes blocks of a tenant's share; false if it has too few.
    pub(super) fn allocate(&self, tenant: usize, out: &mut [BlockHandle]) -> Result<bool> {
        let Some(account) = self.accounts[tenant] else { return Ok(out.is_empty()) };
        match self.pool.allocate(account, out) {
            Ok(()) => Ok(true),
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a tenant's share has so many blocks left.
    pub(super) fn has_room(&self, tenant: usize, num_blocks: u32) -> Result<bool> {
        let Some(account) = self.accounts[tenant] else { return Ok(num_blocks == 0) };
        Ok(self.pool.available(account)? >= u64::from(num_blocks))
    }

    /// Blocks that the next step reads: they leave when it has opened, so that they outlast it.
    pub(super) fn leave(&mut self, blocks: impl IntoIterator<Item = BlockHandle>) {
        self.leaving.extend(blocks);
    }

    /// Gives blocks back that no step to come reads.
    pub(super) fn release(&self, blocks: &[BlockHandle]) -> Result<()> {
        self.pool.release(blocks)
    }

    /// Opens a step here too; what it reads leaves, and outlasts it.
    pub(super) fn open_step(&mut self) -> Result<StepEpoch> {
        let epoch = self.pool.open_step()?;
        self.pool.release(&self.leaving)?;
        self.leaving.clear();
        Ok(epoch)
    }

    pub(super) fn close_step(&self, epoch: StepEpoch) -> Result<()> {
        self.pool.close_step(epoch)
    }
}
