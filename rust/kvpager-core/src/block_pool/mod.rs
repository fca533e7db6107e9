//! Block states, reference counts, generations, reservations and quotas; lock-free.
//!
//! Capacity and blocks are two things. An account first *commits* capacity ([`accounts`]): that is where a call is
//! refused. Whoever holds capacity then takes free permits, and with those claims bits of the [`bitmap`]; neither
//! can leave it with half of what it asked. Committed is `held + reserved + quarantined`.
//!
//! A block in the index belongs to it. Whether it is held or cached is decided by pins on the index's nodes, so
//! pinning moves counters only ([`BlockPool::hold_cached`], [`BlockPool::unhold_cached`]).
//!
//! See `docs/notes/block-pool.md`.

mod accounts;
mod bitmap;
mod epochs;
mod indexed;
mod reservation;
mod state;
mod stats;

pub use accounts::Quota;
pub use epochs::StepEpoch;
pub use reservation::Reservation;
pub use stats::{AccountStats, PoolStats};

use self::accounts::Accounts;
use self::bitmap::Bitmap;
use self::epochs::Epochs;
use self::state::{Kind, MAX_ACCOUNTS, MAX_REFERENCES, State};
use crate::error::{Error, HandleFault, Result};
use crate::ids::{AccountId, BlockHandle, BlockId};
use crate::sync::{AtomicI64, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use std::sync::Arc;

/// Blocks that one claim names on the stack.
const CHUNK: usize = 64;

/// What a pool is made with.
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// Blocks, 1 to 2^31 - 1.
    pub num_blocks: u32,
    /// Accounts that may be added, 1 to 1,024.
    pub max_accounts: u32,
    /// Steps that may be open at once, at least 1.
    pub max_open_steps: u32,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { num_blocks: 0, max_accounts: 64, max_open_steps: 8 }
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
/// # Concurrency
/// Every call may run from any thread at once. Reserving, allocating, retaining and releasing are lock-free;
/// adding accounts and changing quotas exclude each other only.
#[derive(Debug)]
pub struct BlockPool {
    states: Box<[AtomicU64]>,
    bitmap: Bitmap,
    /// Free permits: bits that may be claimed. Never above the bits that are set.
    free: CachePadded<AtomicI64>,
    accounts: Accounts,
    epochs: Epochs,
    held: CachePadded<AtomicI64>,
    peak_held: AtomicI64,
}

impl BlockPool {
    /// A pool in which every block is free. Nothing is allocated after this.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number out of range.
    pub fn new(config: PoolConfig) -> Result<Arc<Self>> {
        let PoolConfig { num_blocks, max_accounts, max_open_steps } = config;
        if num_blocks == 0 || num_blocks > i32::MAX as u32 {
            return Err(Error::invalid(format!("num_blocks is {num_blocks}, must be 1 to {}", i32::MAX)));
        }
        if max_accounts == 0 || max_accounts > MAX_ACCOUNTS || max_open_steps == 0 || max_open_steps > 1 << 16
        {
            return Err(Error::invalid(format!(
                "max_accounts is {max_accounts}, must be 1 to {MAX_ACCOUNTS}; max_open_steps is {max_open_steps}, must be 1 to {}",
                1 << 16
            )));
        }
        Ok(Arc::new(Self {
            states: (0..num_blocks).map(|_| AtomicU64::new(State::free(0).pack())).collect(),
            bitmap: Bitmap::new(num_blocks as usize),
            free: CachePadded::new(AtomicI64::new(i64::from(num_blocks))),
            accounts: Accounts::new(num_blocks, max_accounts),
            epochs: Epochs::new(num_blocks, max_accounts, max_open_steps),
            held: CachePadded::new(AtomicI64::new(0)),
            peak_held: AtomicI64::new(0),
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
        self.accounts.add(quota)
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
        self.accounts.set_quota(account, quota)
    }

    /// Most blocks that an account can ever have committed as quotas are now: its limit, and what is not
    /// guaranteed to others.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn reachable(&self, account: AccountId) -> Result<u32> {
        self.accounts.reachable(account)
    }

    /// Blocks that an account could reserve now. While other threads work it is a hint, not a promise.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown account.
    pub fn available(&self, account: AccountId) -> Result<u64> {
        self.accounts.available(account)
    }

    /// Promises blocks to an account.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::OverQuota`], or [`Error::InvalidArgument`] for an unknown account.
    pub fn reserve(self: &Arc<Self>, account: AccountId, num_blocks: u32) -> Result<Reservation> {
        self.promise(account, num_blocks)?;
        Ok(Reservation::new(Arc::clone(self), account, num_blocks))
    }

    /// Hands out blocks, all of `out` or none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::OverQuota`], [`Error::InvalidArgument`] for an unknown account, or
    /// [`Error::NeedsReclaim`] if the capacity is there and cached blocks are in the way.
    pub fn allocate(&self, account: AccountId, out: &mut [BlockHandle]) -> Result<()> {
        let count = u32::try_from(out.len()).unwrap_or(u32::MAX);
        self.accounts.take(account, count)?;
        if let Err(error) = self.take_free(out.len()) {
            self.accounts.give(account, count);
            return Err(error);
        }
        self.claim(account, out);
        Ok(())
    }

    /// Adds a reference to each block, once for each time it is named.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not held by references; nothing has changed then.
    pub fn retain(&self, blocks: &[BlockHandle]) -> Result<()> {
        for (i, &block) in blocks.iter().enumerate() {
            let retained = self.change(block, |state| {
                let state = state.expect(block, Kind::Held)?;
                if state.references == MAX_REFERENCES {
                    return Err(Error::invalid(format!(
                        "block {} has {MAX_REFERENCES} references, the most there can be",
                        block.id()
                    )));
                }
                Ok(State { references: state.references + 1, ..state })
            });
            if let Err(error) = retained {
                self.drop_references(&blocks[..i])?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes a reference from each block, once for each time it is named. The last one frees the block, or
    /// quarantines it while steps are open.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a stale or foreign handle, or more releases than references; nothing has
    /// changed then.
    pub fn release(&self, blocks: &[BlockHandle]) -> Result<()> {
        self.drop_references(blocks)?;
        match self.epochs.newest_open() {
            None => self.free_leaving(blocks),
            Some(epoch) => self.quarantine_leaving(blocks, epoch),
        }
        Ok(())
    }

    /// Whether a block may be written: one reference, and not in the index. Otherwise it is copied first.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that names no block in use.
    pub fn is_exclusive(&self, block: BlockHandle) -> Result<bool> {
        let state = self.load(block)?;
        match state.kind {
            _ if state.generation != block.generation() => Err(state.fault(block, HandleFault::Stale)),
            Kind::Held => Ok(state.references == 1),
            Kind::Indexed => Ok(false),
            Kind::Free | Kind::Leaving => Err(state.fault(block, HandleFault::OverRelease)),
        }
    }

    /// Opens a step: what is released from now on is not handed out before it closes.
    ///
    /// # Errors
    /// [`Error::WrongState`] if `max_open_steps` are open.
    pub fn open_step(&self) -> Result<StepEpoch> {
        self.epochs.open()
    }

    /// Closes a step: the device no longer reads what it read.
    ///
    /// # Errors
    /// [`Error::WrongState`] if it is not open.
    pub fn close_step(&self, epoch: StepEpoch) -> Result<()> {
        self.epochs.close(epoch, |closed| self.drain(closed))
    }

    /// Whether a step and all before it have closed.
    #[must_use]
    pub fn epoch_closed(&self, epoch: StepEpoch) -> bool {
        self.epochs.is_closed(epoch)
    }

    /// Takes a reference from each block; a block that loses its last one is `Leaving` afterwards, and this
    /// call's to free.
    fn drop_references(&self, blocks: &[BlockHandle]) -> Result<()> {
        for (i, &block) in blocks.iter().enumerate() {
            let dropped = self.change(block, |state| {
                let state = state.expect(block, Kind::Held)?;
                Ok(match state.references {
                    1 => State { references: 0, kind: Kind::Leaving, ..state },
                    more => State { references: more - 1, ..state },
                })
            });
            if let Err(error) = dropped {
                self.restore_references(&blocks[..i]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Undoes `drop_references`.
    fn restore_references(&self, blocks: &[BlockHandle]) {
        for &block in blocks {
            let restored = self.change(block, |state| match state.kind {
                Kind::Held | Kind::Leaving => {
                    Ok(State { kind: Kind::Held, references: state.references + 1, ..state })
                }
                Kind::Free | Kind::Indexed => Err(state.fault(block, HandleFault::Stale)),
            });
            debug_assert!(restored.is_ok(), "{restored:?}");
        }
    }

    /// Frees those of `blocks` that are leaving, each once.
    fn free_leaving(&self, blocks: &[BlockHandle]) {
        let mut run = FreeRun::new(self);
        for &block in blocks {
            if let Some(account) = self.finish_leaving(block) {
                run.push(account, block.id(), 0);
            }
        }
        run.finish();
    }

    /// Turns a leaving block into a free one with a new generation. Its bit is not set yet.
    fn finish_leaving(&self, block: BlockHandle) -> Option<AccountId> {
        let mut account = AccountId(0);
        let freed = self.change(block, |state| {
            let state = state.expect(block, Kind::Leaving)?;
            account = state.account;
            Ok(State::free(state.generation.wrapping_add(1)))
        });
        freed.is_ok().then_some(account)
    }

    fn quarantine_leaving(&self, blocks: &[BlockHandle], epoch: StepEpoch) {
        for &block in blocks {
            // `references` of a leaving block says whether it is on a list: 1 if it is, so that a block named
            // twice in one release is pushed once.
            let marked = self.change(block, |state| match state.expect(block, Kind::Leaving)? {
                state if state.references == 0 => Ok(State { references: 1, ..state }),
                state => Err(state.fault(block, HandleFault::WrongState)),
            });
            let Ok(state) = marked else { continue };
            if let Ok(account) = self.accounts.get(state.account) {
                account.quarantined.fetch_add(1, Ordering::Relaxed);
            }
            self.held.fetch_sub(1, Ordering::Relaxed);
            self.epochs.push(epoch, block.id());
        }
        if self.epochs.is_closed(epoch) {
            self.drain_number(epoch);
        }
    }

    fn drain_number(&self, epoch: StepEpoch) {
        self.drain(epoch.number());
    }

    /// Brings back what waited for an epoch.
    fn drain(&self, epoch: u64) {
        let mut run = FreeRun::new(self);
        self.epochs.take_list(epoch, |id| {
            let state = State::unpack(self.states[id.0 as usize].load(Ordering::Acquire));
            if let Some(account) = self.finish_leaving(BlockHandle::new(state.generation, id)) {
                run.push(account, id, 1);
            }
        });
        run.finish();
        self.epochs.take_unheld(epoch, |account, count| self.settle_unheld(account, count));
    }

    /// Commits capacity as a promise.
    fn promise(&self, account: AccountId, num_blocks: u32) -> Result<()> {
        self.accounts.take(account, num_blocks)?;
        self.accounts.get(account)?.reserved.fetch_add(i64::from(num_blocks), Ordering::Relaxed);
        Ok(())
    }

    /// Gives promised capacity back.
    fn withdraw(&self, account: AccountId, num_blocks: u32) {
        if num_blocks > 0 {
            self.note_drawn(account, num_blocks);
            self.accounts.give(account, num_blocks);
        }
    }

    /// Promised capacity is no longer a promise.
    fn note_drawn(&self, account: AccountId, num_blocks: u32) {
        if let Ok(account) = self.accounts.get(account) {
            account.reserved.fetch_sub(i64::from(num_blocks), Ordering::Relaxed);
        }
    }

    /// Takes free permits. The caller holds capacity for them, so only cached blocks can be in the way.
    fn take_free(&self, count: usize) -> Result<()> {
        let count = count as i64;
        // Acquire pairs with the Release in `FreeRun::flush`: the bits behind the permits are published.
        let taken = self.free.fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| {
            (free >= count).then_some(free - count)
        });
        taken.map(|_| ()).map_err(|free| Error::NeedsReclaim {
            needed: count as u64,
            free: free.max(0) as u64,
            cached: self.stats().cached,
        })
    }

    /// Claims blocks. The caller holds capacity and free permits for them.
    fn claim(&self, account: AccountId, out: &mut [BlockHandle]) {
        let mut ids = [BlockId(0); CHUNK];
        for chunk in out.chunks_mut(CHUNK) {
            let ids = &mut ids[..chunk.len()];
            self.bitmap.claim(ids);
            for (handle, &id) in chunk.iter_mut().zip(ids.iter()) {
                let cell = &self.states[id.0 as usize];
                // Relaxed: claiming the bit acquired what the last owner published, and the block is ours.
                let generation = State::unpack(cell.load(Ordering::Relaxed)).generation;
                let state = State { generation, kind: Kind::Held, account, references: 1 };
                // Release pairs with the Acquire in `load`: who gets the handle otherwise sees it held.
                cell.store(state.pack(), Ordering::Release);
                *handle = BlockHandle::new(generation, id);
            }
        }
        self.note_held(out.len() as i64);
    }

    fn note_held(&self, count: i64) {
        let held = self.held.fetch_add(count, Ordering::Relaxed) + count;
        if held > self.peak_held.load(Ordering::Relaxed) {
            self.peak_held.fetch_max(held, Ordering::Relaxed);
        }
    }

    fn load(&self, block: BlockHandle) -> Result<State> {
        match self.states.get(block.id().0 as usize) {
            // Acquire pairs with the Release of the block's last change.
            Some(cell) => Ok(State::unpack(cell.load(Ordering::Acquire))),
            None => Err(Error::InvalidHandle {
                id: block.id(),
                generation: block.generation(),
                current: 0,
                fault: HandleFault::NeverIssued,
            }),
        }
    }

    /// Changes a block's word by `next`, which is tried again if the word changed meanwhile. Returns what was
    /// written.
    fn change(&self, block: BlockHandle, mut next: impl FnMut(State) -> Result<State>) -> Result<State> {
        let mut now = self.load(block)?;
        let cell = &self.states[block.id().0 as usize];
        loop {
            let state = next(now)?;
            // AcqRel: what was done with the block before a reference went away comes before what is done after
            // the last one did.
            match cell.compare_exchange_weak(now.pack(), state.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(state),
                Err(word) => now = State::unpack(word),
            }
        }
    }
}

/// Blocks on their way to being free, settled up to [`CHUNK`] at a time: bits first, then permits, then capacity.
struct FreeRun<'a> {
    pool: &'a BlockPool,
    ids: [BlockId; CHUNK],
    len: usize,
    account: AccountId,
    quarantined: i64,
    /// Blocks whose capacity is kept for something else.
    keep: u32,
    /// Cached blocks were not committed: there is no capacity to give back.
    uncommitted: bool,
}

impl<'a> FreeRun<'a> {
    const fn new(pool: &'a BlockPool) -> Self {
        Self {
            pool,
            ids: [BlockId(0); CHUNK],
            len: 0,
            account: AccountId(0),
            quarantined: 0,
            keep: 0,
            uncommitted: false,
        }
    }

    fn push(&mut self, account: AccountId, id: BlockId, quarantined: i64) {
        if self.len == CHUNK || (self.len > 0 && account != self.account) {
            self.flush();
        }
        self.account = account;
        self.ids[self.len] = id;
        self.len += 1;
        self.quarantined += quarantined;
    }

    fn flush(&mut self) {
        let (count, quarantined) = (self.len as i64, std::mem::take(&mut self.quarantined));
        self.pool.bitmap.set(self.ids[..self.len].iter().copied());
        // Release pairs with the Acquire in `take_free`.
        self.pool.free.fetch_add(count, Ordering::Release);
        if self.uncommitted {
            if let Ok(account) = self.pool.accounts.get(self.account) {
                account.cached.fetch_sub(count, Ordering::Relaxed);
            }
        } else {
            self.pool.held.fetch_sub(count - quarantined, Ordering::Relaxed);
            if quarantined > 0
                && let Ok(account) = self.pool.accounts.get(self.account)
            {
                account.quarantined.fetch_sub(quarantined, Ordering::Relaxed);
            }
            let kept = self.keep.min(self.len as u32);
            self.keep -= kept;
            self.pool.accounts.give(self.account, self.len as u32 - kept);
        }
        self.len = 0;
    }

    fn finish(mut self) {
        if self.len > 0 {
            self.flush();
        }
    }
}
