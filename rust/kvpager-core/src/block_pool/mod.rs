//! Block states, reference counts, generations, reservations and quotas; lock-free.
//!
//! Capacity and blocks are two things. An account first *commits* capacity (`accounts`): that is where a call is
//! refused. Whoever holds capacity takes free permits with the same exchange and then claims blocks
//! (`groups`); a claim cannot fail, so no batch is ever half done or rolled back. Committed is
//! `held + reserved + quarantined`.
//!
//! A block in the index belongs to it. Whether it is held or cached is decided by pins on the index's nodes, so
//! pinning moves counters only ([`BlockPool::hold_cached`], [`BlockPool::unhold_cached`]).
//!
//! Idea, memory picture and trade-offs: `docs/notes/block-pool.md`.
//!
//! # Examples
//! ```
//! use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
//! use kvpager_core::{BlockHandle, BlockId};
//!
//! let pool = BlockPool::new(PoolConfig { num_blocks: 1024, ..PoolConfig::default() })?;
//! let tenant = pool.add_account(Quota { guaranteed: 256, limit: 1024 })?;
//! let mut prompt = [BlockHandle::new(0, BlockId(0)); 4];
//! pool.allocate(tenant, &mut prompt)?;
//! pool.retain(&prompt)?; // a fork shares them
//! pool.release(&prompt)?;
//! assert_eq!(pool.stats().held, 4);
//! pool.release(&prompt)?;
//! assert!(pool.release(&prompt).is_err()); // once too often
//! # Ok::<(), kvpager_core::Error>(())
//! ```

mod accounts;
mod blocks;
mod epochs;
pub mod faults;
mod freeing;
mod groups;
mod hint;
mod indexed;
mod lanes;
mod magazine;
mod permits;
#[cfg(not(loom))]
mod planner;
mod quarantine;
mod references;
mod reservation;
mod state;
mod stats;
mod taking;

pub use accounts::Quota;
pub use epochs::StepEpoch;
pub use magazine::Magazine;
#[cfg(not(loom))]
pub(crate) use planner::Planner;
pub use reservation::Reservation;
pub use state::MAX_ACCOUNTS;
pub use stats::{AccountStats, PoolStats};

use self::accounts::Accounts;
use self::epochs::Epochs;
use self::groups::Groups;
use self::lanes::Lanes;
use self::state::State;
use crate::error::{Error, Result, count};
use crate::ids::AccountId;
use crate::memory::{Asked, bytes_of};
#[cfg(not(loom))]
use crate::sync::AtomicBool;
use crate::sync::AtomicU64;
use std::sync::Arc;

/// Most blocks of a pool: ids are i32.
pub const MAX_BLOCKS: u32 = i32::MAX as u32;
/// Most steps of a pool that may be open at once.
pub const MAX_OPEN_STEPS: u32 = 1 << 16;

/// What a pool is made with.
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// Blocks, 1 to 2^31 - 1.
    pub num_blocks: u32,
    /// Accounts that may be added, 1 to 1,024.
    pub max_accounts: u32,
    /// Steps that may be open at once, 1 to 65,536.
    pub max_open_steps: u32,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { num_blocks: 0, max_accounts: 64, max_open_steps: 8 }
    }
}

impl PoolConfig {
    fn check(self) -> Result<()> {
        let Self { num_blocks, max_accounts, max_open_steps } = self;
        let limits = [
            ("num_blocks", num_blocks, MAX_BLOCKS),
            ("max_accounts", max_accounts, MAX_ACCOUNTS),
            ("max_open_steps", max_open_steps, MAX_OPEN_STEPS),
        ];
        match limits.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            Some((name, value, most)) => {
                Err(Error::invalid(format!("{name} is {value}, must be 1 to {most}")))
            }
            None => Ok(()),
        }
    }
}

/// Evicts cached blocks when free ones run short. The index implements it, the scheduler calls it; the pool
/// itself knows no index.
pub trait Reclaim: Send + Sync {
    /// Evicts up to `num_blocks` unpinned cached blocks for an account and returns how many became free.
    fn reclaim(&self, account: AccountId, num_blocks: u32) -> u32;
}

/// The blocks of a device.
///
/// `FAULT` is for tests of the tests, see [`faults`]; everybody else names the type `BlockPool`.
///
/// # Concurrency
/// Every call may run from any thread at once. Reserving, allocating, retaining and releasing are lock-free:
/// whenever one of their exchanges fails, another thread's has succeeded. Adding accounts and changing quotas
/// exclude each other, and only each other, by a mutex.
///
/// # Complexity
/// No call depends on the size of the pool, except the search for the last free blocks of a nearly full one (a
/// word of the summary covers 1,536 blocks) and the checks that say so. Nothing is allocated after construction.
#[derive(Debug)]
pub struct BlockPool<const FAULT: u8 = { faults::NONE }> {
    /// [`State`] by block.
    states: Box<[AtomicU64]>,
    groups: Groups,
    accounts: Accounts,
    epochs: Epochs,
    lanes: Lanes,
    /// Whether a scheduler plans steps on it.
    #[cfg(not(loom))]
    is_planned: AtomicBool,
}

impl BlockPool {
    /// A pool in which every block is free. Nothing is allocated after this.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number out of range, [`Error::OutOfMemory`] for more than there is room for.
    pub fn new(config: PoolConfig) -> Result<Arc<Self>> {
        Self::with_fault(config)
    }
}

impl<const FAULT: u8> BlockPool<FAULT> {
    /// A pool with a planted fault, see [`faults`].
    ///
    /// # Errors
    /// As for [`BlockPool::new`].
    pub fn with_fault(config: PoolConfig) -> Result<Arc<Self>> {
        config.check()?;
        let PoolConfig { num_blocks, max_accounts, max_open_steps } = config;
        let what = format_args!(
            "a pool of {}, {} and {}",
            count(num_blocks, "block"),
            count(max_accounts, "account"),
            count(max_open_steps, "open step")
        );
        let num_blocks = num_blocks as usize;
        let num_bytes = bytes_of::<AtomicU64>(num_blocks)
            .saturating_add(Groups::num_bytes(num_blocks))
            .saturating_add(Accounts::num_bytes(max_accounts))
            .saturating_add(Epochs::num_bytes(num_blocks, max_accounts, max_open_steps));
        let memory = Asked::new(what, num_bytes)?;
        Ok(Arc::new(Self {
            states: memory.array(num_blocks, |_| AtomicU64::new(State::free(0).pack()))?,
            groups: Groups::new(num_blocks, &memory)?,
            accounts: Accounts::new(config.num_blocks, max_accounts, &memory)?,
            epochs: Epochs::new(num_blocks, max_accounts, max_open_steps, &memory)?,
            lanes: Lanes::new(),
            #[cfg(not(loom))]
            is_planned: AtomicBool::new(false),
        }))
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.states.len() as u32
    }

    /// Adds an account.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a quota that the pool cannot give, or when all accounts are there.
    pub fn add_account(&self, quota: Quota) -> Result<AccountId> {
        self.accounts.add::<FAULT>(quota)
    }

    /// Accounts added so far; their ids are `0..num_accounts`.
    #[must_use]
    pub fn num_accounts(&self) -> u32 {
        self.accounts.len()
    }

    /// An account's quota.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn quota(&self, account: AccountId) -> Result<Quota> {
        self.accounts.quota(account)
    }

    /// Changes an account's quota. A limit below what is committed takes effect as blocks are released.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account, or a guarantee that is lent out.
    pub fn set_quota(&self, account: AccountId, quota: Quota) -> Result<()> {
        self.accounts.set_quota::<FAULT>(account, quota)
    }

    /// Says how many of an account's blocks stay until their owner lets them go, whoever is short: nobody else can
    /// ever have them, and [`BlockPool::reachable`] counts them so.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn set_pinned(&self, account: AccountId, num_blocks: u32) -> Result<()> {
        self.accounts.set_pinned(account, num_blocks)
    }

    /// What [`BlockPool::set_pinned`] said last.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn pinned(&self, account: AccountId) -> Result<u32> {
        self.accounts.pinned(account)
    }

    /// Most blocks that an account can ever have committed as quotas are now: its limit, and what is neither
    /// guaranteed to others nor pinned by them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn reachable(&self, account: AccountId) -> Result<u32> {
        self.accounts.reachable(account)
    }

    /// [`BlockPool::reachable`] without the account's own limit.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn beside_others(&self, account: AccountId) -> Result<u32> {
        self.accounts.beside_others(account)
    }

    /// Blocks that an account could reserve now. While other threads work it is a hint, not a promise.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn available(&self, account: AccountId) -> Result<u64> {
        self.accounts.available(account)
    }

    /// Opens a step: what is released from now on is not handed out before it closes.
    ///
    /// # Errors
    /// [`Error::WrongState`] if `max_open_steps` are open.
    pub fn open_step(&self) -> Result<StepEpoch> {
        self.epochs.open()
    }

    /// Closes a step: the device no longer reads what it read. Frees what waited for it, if all steps before it
    /// are closed as well.
    ///
    /// # Errors
    /// [`Error::WrongState`] if it is not open.
    pub fn close_step(&self, epoch: StepEpoch) -> Result<()> {
        self.epochs.close(epoch, |closed| self.drain(closed))
    }

    /// Steps that may be open at once.
    pub(crate) fn max_open_steps(&self) -> u32 {
        self.epochs.most_open()
    }

    /// The newest step that is open now.
    pub(crate) fn newest_open_step(&self) -> Option<StepEpoch> {
        self.epochs.newest_open()
    }

    /// Whether a step and all before it have closed.
    #[must_use]
    pub fn epoch_closed(&self, epoch: StepEpoch) -> bool {
        self.epochs.is_closed(epoch)
    }
}
