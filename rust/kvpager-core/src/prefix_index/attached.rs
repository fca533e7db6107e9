//! Blocks of the layer groups after the first: each is attached to the first group's block of the same positions.
//!
//! The tree has the first group's blocks, which sees all tokens. A group that sees a window has a block there or not:
//! where it was let go is a *tombstone*. A prefix can be used as far as every group has the blocks that its next query
//! sees, so a tombstone ends a match only inside the window that the match needs.
//!
//! # Capacity
//! An attached block is held while sequences use it, and each of them pays for it as if it were its own: the first with
//! the block's own capacity, the others with promised capacity that is kept here for them. So whoever leaves gets its
//! share back whole, to write its next block, and a promise never rests on others staying.
//!
//! # Eviction
//! What a running sequence left behind goes first: nobody matches the middle of a window while its end is there. What
//! was matched before, or was in use at a sequence's end, goes with its home, or when nothing else is left.
//!
//! Lock order: the lock here is the innermost one.

use super::PrefixIndex;
use super::evictor::Whose;
use crate::block_pool::{BlockPool, Reservation, StepEpoch};
use crate::error::{Error, Result};
use crate::geometry::Span;
use crate::ids::{AccountId, BlockHandle};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const NONE: u32 = u32::MAX;

/// The groups after the first, and their blocks.
pub(super) struct Attached {
    groups: Box<[Span]>,
    block_size: usize,
    state: Mutex<State>,
}

struct State {
    pool: Arc<BlockPool>,
    /// By (first group's block id, group): the id of the block attached there.
    homes: Box<[u32]>,
    /// By block id.
    entries: Box<[Entry]>,
    /// By account: what was left behind, and what was of use.
    lists: Vec<[List; 2]>,
    /// By account: capacity of those who use a block that another pays for.
    shares: Vec<Option<Reservation>>,
}

#[derive(Clone, Copy)]
struct Entry {
    block: BlockHandle,
    account: AccountId,
    /// Where it is attached; `NONE` when its home is gone.
    home: u32,
    num_users: u32,
    /// Whether it was matched, or in use at a sequence's end.
    is_of_use: bool,
    /// The newest step that was open when a sequence ended that used it.
    fence: Option<StepEpoch>,
    previous: u32,
    next: u32,
}

/// Unused blocks by when they were left, linked through their entries.
#[derive(Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
}

impl Attached {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn home(&self, first: BlockHandle, group: usize) -> usize {
        first.id().0 as usize * self.groups.len() + group
    }

    /// The first logical block of a group that the query after so many blocks sees.
    fn first_needed(&self, group: usize, num_blocks: usize) -> usize {
        self.groups[group].first_visible((num_blocks * self.block_size) as u32) as usize / self.block_size
    }
}

impl State {
    fn list(&mut self, account: AccountId, is_of_use: bool) -> &mut List {
        let index = account.0 as usize;
        if self.lists.len() <= index {
            self.lists.resize(index + 1, [List { oldest: NONE, newest: NONE }; 2]);
        }
        &mut self.lists[index][usize::from(is_of_use)]
    }

    fn push(&mut self, id: u32) {
        let Entry { account, is_of_use, .. } = self.entries[id as usize];
        let newest = std::mem::replace(&mut self.list(account, is_of_use).newest, id);
        (self.entries[id as usize].previous, self.entries[id as usize].next) = (newest, NONE);
        match newest {
            NONE => self.list(account, is_of_use).oldest = id,
            before => self.entries[before as usize].next = id,
        }
    }

    fn unlink(&mut self, id: u32) {
        let Entry { account, is_of_use, previous, next, .. } = self.entries[id as usize];
        match previous {
            NONE => self.list(account, is_of_use).oldest = next,
            before => self.entries[before as usize].next = next,
        }
        match next {
            NONE => self.list(account, is_of_use).newest = previous,
            after => self.entries[after as usize].previous = previous,
        }
    }

    /// Gives an unused block back to the pool.
    fn evict(&mut self, id: u32) {
        self.unlink(id);
        let Entry { block, home, .. } = self.entries[id as usize];
        if home != NONE {
            self.homes[home as usize] = NONE;
        }
        let evicted = self.pool.evict(&[block]);
        debug_assert!(evicted.is_ok(), "unused attached blocks can be evicted: {evicted:?}");
    }

    /// The kept shares of an account.
    fn share(&mut self, account: AccountId) -> Result<&mut Reservation> {
        let index = account.0 as usize;
        if self.shares.len() <= index {
            self.shares.resize_with(index + 1, || None);
        }
        if self.shares[index].is_none() {
            self.shares[index] = Some(self.pool.reserve(account, 0)?);
        }
        self.shares[index].as_mut().ok_or_else(|| Error::invalid("an account has no shares"))
    }

    /// One more sequence uses a block, and pays for it from what is promised to it.
    fn begin_use(&mut self, id: u32, promise: &mut Reservation) -> Result<()> {
        if self.entries[id as usize].num_users == 0 {
            self.unlink(id);
            promise.hold_cached(1)?;
        } else {
            promise.move_to(1, self.share(promise.account())?)?;
        }
        let entry = &mut self.entries[id as usize];
        entry.num_users += 1;
        entry.is_of_use = true;
        Ok(())
    }
}

impl PrefixIndex {
    /// Says which layer groups there are after the first, which sees all tokens. Once, or again with the same.
    ///
    /// # Errors
    /// `WrongState` if there are others already.
    pub(crate) fn attach_groups(&self, groups: &[Span]) -> Result<()> {
        let num_blocks = self.pool.num_blocks() as usize;
        let none = Entry {
            block: BlockHandle::from_bits(0),
            account: AccountId(0),
            home: NONE,
            num_users: 0,
            is_of_use: false,
            fence: None,
            previous: NONE,
            next: NONE,
        };
        let attached = self.attached.get_or_init(|| Attached {
            groups: groups.into(),
            block_size: self.config.block_size as usize,
            state: Mutex::new(State {
                pool: Arc::clone(&self.pool),
                homes: vec![NONE; num_blocks * groups.len()].into(),
                entries: vec![none; num_blocks].into(),
                lists: Vec::new(),
                shares: Vec::new(),
            }),
        });
        if *attached.groups != *groups {
            return Err(Error::WrongState(format!(
                "the index keeps {} layer groups besides the first, other ones than these {}",
                attached.groups.len(),
                groups.len()
            )));
        }
        Ok(())
    }

    /// How many of the first group's blocks, a path from the root, can be used: the longest prefix of which every other
    /// group has what the next query sees.
    pub(crate) fn usable_blocks(&self, blocks: &[BlockHandle]) -> usize {
        let Some(attached) = self.attached.get() else { return blocks.len() };
        let state = attached.state();
        // Where the run of blocks that are there begins, by group.
        let mut begins = vec![0; attached.groups.len()];
        let mut usable = 0;
        for (logical, &first) in blocks.iter().enumerate() {
            let mut is_usable = true;
            for (group, begin) in begins.iter_mut().enumerate() {
                if state.homes[attached.home(first, group)] == NONE {
                    *begin = logical + 1;
                }
                is_usable &= *begin <= attached.first_needed(group, logical + 1);
            }
            if is_usable {
                usable = logical + 1;
            }
        }
        usable
    }

    /// Uses what every other group needs after a path of the first group's blocks; `use_block(group, logical, block)`
    /// gets them in order. False, and nothing is used, if something is not there any more.
    ///
    /// # Errors
    /// `InvalidArgument` if less is promised than that.
    pub(crate) fn use_attached(
        &self,
        blocks: &[BlockHandle],
        promise: &mut Reservation,
        mut use_block: impl FnMut(usize, usize, BlockHandle),
    ) -> Result<bool> {
        let Some(attached) = self.attached.get() else { return Ok(true) };
        let mut state = attached.state();
        let needed = |group| attached.first_needed(group, blocks.len())..blocks.len();
        let all = (0..attached.groups.len()).flat_map(|group| needed(group).map(move |l| (group, l)));
        let count = all.clone().count();
        if all.clone().any(|(group, logical)| state.homes[attached.home(blocks[logical], group)] == NONE) {
            return Ok(false);
        }
        if count > promise.num_blocks() as usize {
            let promised = promise.num_blocks();
            return Err(Error::invalid(format!("{count} attached blocks asked of a promise of {promised}")));
        }
        for (group, logical) in all {
            let id = state.homes[attached.home(blocks[logical], group)];
            state.begin_use(id, promise)?;
            use_block(group, logical, state.entries[id as usize].block);
        }
        Ok(true)
    }

    /// Attaches a block that its sequence holds alone to the first group's block of the same positions, and goes on
    /// using it. False if one is there already; the block stays the sequence's then.
    ///
    /// # Errors
    /// `InvalidHandle` for a block that is not exclusively held.
    pub(crate) fn attach(
        &self,
        first: BlockHandle,
        group: usize,
        block: BlockHandle,
        account: AccountId,
    ) -> Result<bool> {
        let Some(attached) = self.attached.get() else { return Ok(false) };
        let home = attached.home(first, group);
        let mut state = attached.state();
        if state.homes[home] != NONE {
            return Ok(false);
        }
        self.pool.index_blocks(&[block])?;
        state.homes[home] = block.id().0;
        state.entries[block.id().0 as usize] = Entry {
            block,
            account,
            home: home as u32,
            num_users: 1,
            is_of_use: false,
            fence: None,
            previous: NONE,
            next: NONE,
        };
        Ok(true)
    }

    /// A running sequence leaves a block behind, and gets what it paid back into its promise. False, and it still uses
    /// the block, if a step of another one may read it: it would not be free to go.
    ///
    /// # Errors
    /// Those of the pool.
    pub(crate) fn leave_attached(&self, block: BlockHandle, promise: &mut Reservation) -> Result<bool> {
        let Some(attached) = self.attached.get() else { return Ok(true) };
        let mut state = attached.state();
        let id = block.id().0;
        let entry = &mut state.entries[id as usize];
        if entry.num_users > 1 {
            entry.num_users -= 1;
            state.share(promise.account())?.move_to(1, promise)?;
            return Ok(true);
        }
        if entry.fence.is_some_and(|epoch| !self.pool.epoch_closed(epoch)) {
            return Ok(false);
        }
        entry.num_users = 0;
        entry.is_of_use &= entry.home != NONE;
        promise.unhold_cached(1);
        state.push(id);
        Ok(true)
    }

    /// A sequence that has ended, or was preempted, leaves what it used. What open steps may read stays until they
    /// close.
    ///
    /// # Errors
    /// Those of the pool.
    pub(crate) fn leave_all_attached(&self, blocks: &[BlockHandle], account: AccountId) -> Result<()> {
        let Some(attached) = self.attached.get() else { return Ok(()) };
        let mut state = attached.state();
        let open = self.pool.newest_open_step();
        let mut num_last = 0;
        for block in blocks {
            let id = block.id().0;
            let entry = &mut state.entries[id as usize];
            entry.num_users -= 1;
            entry.fence = open.or(entry.fence);
            if entry.num_users > 0 {
                state.share(account)?.shrink(1)?;
                continue;
            }
            entry.is_of_use = entry.home != NONE;
            num_last += 1;
            state.push(id);
        }
        self.pool.unhold_cached(account, num_last).map(|_| ())
    }

    /// Evicts unused attached blocks, oldest first: those left behind, or those of use.
    pub(super) fn evict_attached(&self, whose: Whose, num_blocks: usize, is_of_use: bool) -> usize {
        let Some(attached) = self.attached.get() else { return 0 };
        let evictor = self.evictor.current();
        let mut state = attached.state();
        let mut total = 0;
        for index in 0..state.lists.len().min(evictor.lanes.len()) {
            let allowed = evictor.allowance(&self.pool, whose, index).min(num_blocks - total);
            for _ in 0..allowed {
                let id = state.lists[index][usize::from(is_of_use)].oldest;
                let is_free =
                    |fence: Option<StepEpoch>| fence.is_none_or(|epoch| self.pool.epoch_closed(epoch));
                if id == NONE || !is_free(state.entries[id as usize].fence) {
                    break;
                }
                state.evict(id);
                total += 1;
            }
        }
        total
    }

    /// The first group's blocks go: what is attached to them goes with them, or when its last user leaves it.
    pub(super) fn evict_homes(&self, blocks: &[BlockHandle]) {
        let Some(attached) = self.attached.get() else { return };
        let mut state = attached.state();
        for &first in blocks {
            for group in 0..attached.groups.len() {
                let home = attached.home(first, group);
                let id = std::mem::replace(&mut state.homes[home], NONE);
                let Some(entry) = state.entries.get_mut(id as usize).filter(|_| id != NONE) else { continue };
                entry.home = NONE;
                let is_free = entry.fence.is_none_or(|epoch| self.pool.epoch_closed(epoch));
                if entry.num_users == 0 && is_free {
                    state.evict(id);
                }
            }
        }
    }

    /// Checks the homes, the lists and the kept shares against each other.
    pub(super) fn check_attached(&self) -> std::result::Result<(), String> {
        let Some(attached) = self.attached.get() else { return Ok(()) };
        let state = attached.state();
        for (home, &id) in state.homes.iter().enumerate().filter(|(_, id)| **id != NONE) {
            if state.entries[id as usize].home as usize != home {
                return Err(format!("attached block {id} does not know its home {home}"));
            }
        }
        for (account, lists) in state.lists.iter().enumerate() {
            for (is_of_use, list) in [false, true].into_iter().zip(lists) {
                let (mut id, mut previous) = (list.oldest, NONE);
                while id != NONE {
                    let entry = &state.entries[id as usize];
                    let is_right = entry.num_users == 0
                        && entry.previous == previous
                        && (entry.account.0 as usize, entry.is_of_use) == (account, is_of_use);
                    if !is_right {
                        return Err(format!("attached block {id} is in a list that it should not be in"));
                    }
                    (previous, id) = (id, entry.next);
                }
                if list.newest != previous {
                    return Err(format!("a list of attached blocks of account {account} has another end"));
                }
            }
        }
        Ok(())
    }
}
