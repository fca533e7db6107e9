//! Homes: block ids without KV, for models in which no layer group sees all tokens.
//!
//! The tree finds prefixes by rows of tokens, and each row belongs to a block id. Where the first layer group sees all
//! tokens, those are its blocks, and every other group's are attached to them. Where no group does, each of them lets
//! blocks go before what follows is done with, so there is none whose blocks could carry the rows. The tree then has ids
//! of a pool of its own that stand for nothing on the device: a *home* costs its row, 4 bytes a token, and a few words.
//! The blocks of all groups are attached to homes, and are what the device's pool counts.
//!
//! Accounts are those of the device's pool, with so many homes for each block of their quotas. So who may be evicted
//! for whom is decided for homes as it is for blocks, and what one account has used up takes nothing from another.

use super::evictor::{MAX_PIECE, Unit, Whose};
use super::token_arena::TokenArena;
use super::{ChainPin, Isolation, PrefixIndex};
use crate::block_pool::{BlockPool, PoolConfig, Quota};
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle};
use std::sync::{Arc, Mutex, PoisonError};

/// Accounts that the homes' pool has room for: as many as any pool has.
const MAX_ACCOUNTS: u32 = 1024;

/// The tree's own ids.
pub(super) struct Homes {
    pub(super) pool: Arc<BlockPool>,
    pub(super) arena: TokenArena,
    /// Homes for each block of a quota.
    per_block: u32,
    /// One account is added at a time, so that both pools number them alike.
    adding: Mutex<()>,
}

impl Homes {
    fn new(num_blocks: u32, per_block: u32, block_size: usize) -> Result<Self> {
        let num_homes = num_blocks.saturating_mul(per_block);
        let arena = TokenArena::new(num_homes, block_size)?;
        // No step reads a home: what steps may still read is fenced by the device's pool.
        let config = PoolConfig { num_blocks: num_homes, max_accounts: MAX_ACCOUNTS, max_open_steps: 1 };
        Ok(Self { pool: BlockPool::new(config)?, arena, per_block, adding: Mutex::default() })
    }

    const fn quota(&self, quota: Quota) -> Quota {
        Quota { guaranteed: quota.guaranteed * self.per_block, limit: quota.limit * self.per_block }
    }
}

impl PrefixIndex {
    /// Gives the tree homes, at most `per_block` for each block of the pool, to which `num_groups` groups are attached.
    ///
    /// # Errors
    /// `WrongState` if the index keeps anything already; `InvalidArgument` if the rows take more than the machine's
    /// memory.
    pub(super) fn keep_homes(&self, per_block: u32, num_groups: usize) -> Result<()> {
        let num_blocks = self.pool.num_blocks();
        // Places of attached blocks are numbered in 32 bits.
        let most = i32::MAX as u32 / num_blocks.saturating_mul(num_groups as u32);
        let homes = Homes::new(num_blocks, per_block.min(most).max(1), self.config.block_size as usize)?;
        let num_homes = homes.pool.num_blocks();
        let kept = self.namespaces.if_empty(|| {
            if let Some(events) = self.events() {
                events.widen(num_homes)?;
            }
            Ok(self.homes.set(homes).is_ok())
        });
        match kept.transpose()? {
            Some(true) => (0..self.pool.num_accounts()).try_for_each(|id| self.open_account(AccountId(id))),
            _ => Err(Error::WrongState(
                "the index keeps blocks already, of a model with a layer group that sees all tokens"
                    .to_owned(),
            )),
        }
    }

    /// The tree's own ids, if it has any.
    #[inline]
    pub(super) fn homes(&self) -> Option<&Homes> {
        self.homes.get()
    }

    /// The pool whose ids the tree has.
    #[inline]
    pub(super) fn tree_pool(&self) -> &Arc<BlockPool> {
        self.homes().map_or(&self.pool, |homes| &homes.pool)
    }

    /// The rows of the tree's ids.
    #[inline]
    pub(super) fn arena(&self) -> &TokenArena {
        self.homes().map_or(&self.arena, |homes| &homes.arena)
    }

    /// Whether the tree has ids of its own.
    pub(crate) fn has_homes(&self) -> bool {
        self.homes().is_some()
    }

    /// Refuses a call in which blocks of the tree would be taken for blocks of the pool.
    pub(super) fn check_has_blocks(&self) -> Result<()> {
        if self.has_homes() {
            return Err(Error::WrongState(
                "no layer group of the index's model sees all tokens: only its scheduler matches and inserts"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Gives the homes' pool the accounts that the device's has by now, and the quota that this one has.
    pub(super) fn open_account(&self, account: AccountId) -> Result<()> {
        let Some(homes) = self.homes() else { return Ok(()) };
        let wanted = homes.quota(self.pool.quota(account)?);
        if homes.pool.quota(account).is_ok_and(|quota| quota == wanted) {
            return Ok(());
        }
        let _adding = homes.adding.lock().unwrap_or_else(PoisonError::into_inner);
        for id in (0..=account.0).map(AccountId) {
            let wanted = homes.quota(self.pool.quota(id)?);
            if id.0 < homes.pool.num_accounts() {
                // A guarantee that is lent out is given at a later call: it costs hits until then.
                let _later = homes.pool.set_quota(id, wanted);
            } else {
                let without = Quota { guaranteed: 0, ..wanted };
                homes.pool.add_account(wanted).or_else(|_| homes.pool.add_account(without))?;
            }
        }
        Ok(())
    }

    /// Inserts rows of tokens below a chain's match, as far as there are homes for them, which go to `homes`.
    ///
    /// # Errors
    /// Those of [`PrefixIndex::extend_chain`].
    pub(crate) fn extend_homes(
        self: &Arc<Self>,
        pin: &mut ChainPin,
        tokens: &[u32],
        homes: &mut Vec<BlockHandle>,
    ) -> Result<()> {
        let account = self.namespaces.get(pin.last())?.account;
        for piece in tokens.chunks(MAX_PIECE * self.config.block_size as usize) {
            let start = homes.len();
            let num_rows = piece.len() / self.config.block_size as usize;
            homes.resize(start + num_rows, BlockHandle::from_bits(0));
            if !self.take_homes(account, &mut homes[start..])? {
                homes.truncate(start);
                break;
            }
            let extended = self.extend_chain_any(pin, piece, &mut homes[start..]);
            let end = start + extended.as_ref().map_or(0, |extended| extended.num_indexed);
            self.tree_pool().release(&homes[end..])?;
            homes.truncate(end);
            if extended?.num_indexed < num_rows {
                break;
            }
        }
        Ok(())
    }

    /// Takes homes for an account: its own go first, as its level says. False if there is no room.
    fn take_homes(&self, account: AccountId, out: &mut [BlockHandle]) -> Result<bool> {
        self.open_account(account)?;
        let pool = self.tree_pool();
        if self.evictor.isolation(account) == Isolation::Strict {
            let stats = pool.account_stats(account)?;
            let excess = (stats.committed + stats.cached + out.len() as u64).saturating_sub(stats.limit);
            self.evict_nodes(Unit::Homes, Whose::Own(account), excess as usize);
        }
        loop {
            match pool.allocate(account, out) {
                Ok(()) => return Ok(true),
                Err(Error::NeedsReclaim { needed, free, .. }) => {
                    let missing = needed.saturating_sub(free).max(1) as usize;
                    if self.reclaim_homes(account, missing) == 0 {
                        return Ok(false);
                    }
                }
                Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    /// The homes' pool and the trees agree.
    pub(super) fn check_homes(&self, num_blocks: usize) -> std::result::Result<(), String> {
        let Some(homes) = self.homes() else { return Ok(()) };
        homes.pool.check_invariants()?;
        let stats = homes.pool.stats();
        if stats.held + stats.cached != num_blocks as u64 || stats.reserved + stats.quarantined > 0 {
            return Err(format!("the trees have {num_blocks} homes: {stats:?}"));
        }
        Ok(())
    }

    fn reclaim_homes(&self, account: AccountId, num_homes: usize) -> usize {
        let order = self.evictor.isolation(account).order(account);
        let evict = |done, whose| done + self.evict_nodes(Unit::Homes, whose, num_homes.saturating_sub(done));
        order.into_iter().fold(0, evict)
    }
}
