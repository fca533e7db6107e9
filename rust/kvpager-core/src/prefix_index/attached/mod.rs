//! Blocks of the layer groups after the first: each is attached to the first group's block of the same positions. In a
//! model in which no group sees all tokens, those of every group, attached to *homes* ([`super::homes`]).
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
//! A sequence that found the block in a group or public scope is a *guest*: the scope's account pays, once for all
//! guests of the block. So the capacity committed for a block is one for each user, and one more if it has guests; one
//! of them holds it, the others are kept here. A publication is a guest that stays. What a public scope has counts for
//! matches only while it is published: whether it is there depends on the operator alone.
//!
//! # Eviction
//! What a running sequence left behind goes first: nobody matches the middle of a window while its end is there. What
//! was matched before, or was in use at a sequence's end, goes with its home, or when nothing else is left.
//!
//! Lock order: the lock here is the innermost one. It is held for at most 64 blocks at a time.

mod announcing;
mod eviction;
mod uses;

use announcing::Name;

use super::PrefixIndex;
use super::evictor::MAX_PIECE;
use crate::block_pool::{BlockPool, Reservation, StepEpoch};
use crate::error::{Error, Result};
use crate::geometry::Span;
use crate::ids::{AccountId, BlockHandle};
use crate::memory::{Asked, bytes_of};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const NONE: u32 = u32::MAX;

/// The groups after the first, and their blocks.
pub(super) struct Attached {
    groups: Box<[Span]>,
    block_size: usize,
    state: Mutex<State>,
}

pub(super) struct State {
    pool: Arc<BlockPool>,
    /// By (first group's block id or home, group): the id of the block attached there.
    homes: Box<[u32]>,
    /// By block id.
    entries: Box<[Entry]>,
    /// By account: what was left behind, and what was of use.
    lists: Vec<[List; 2]>,
    /// By account: capacity of those who use a block that another pays for.
    shares: Vec<Option<Reservation>>,
    /// By block id, with events on: what followers call it, if they were told of it.
    names: Box<[Option<Name>]>,
}

#[derive(Clone, Copy)]
struct Entry {
    block: BlockHandle,
    account: AccountId,
    /// Where it is attached; `NONE` when its home is gone.
    home: u32,
    /// Sequences of its own account that use it.
    num_users: u32,
    /// Sequences of other accounts, and publications.
    num_guests: u32,
    num_published: u32,
    /// Whether only what is published counts.
    is_public: bool,
    /// Whether it was matched, or in use at a sequence's end.
    is_of_use: bool,
    /// The newest step that was open when a sequence ended that used it.
    fence: Option<StepEpoch>,
    previous: u32,
    next: u32,
}

impl Entry {
    const fn is_used(&self) -> bool {
        self.num_users + self.num_guests > 0
    }
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

    /// How many of the first group's blocks make one piece of work: 64 places to look at.
    fn piece(&self) -> usize {
        (MAX_PIECE / self.groups.len().max(1)).max(1)
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
            self.shares[index] = Some(self.pool.no_promise(account));
        }
        self.shares[index].as_mut().ok_or_else(|| Error::invalid("an account has no shares"))
    }

    /// The block at a home, if it can be matched.
    fn found(&self, home: usize) -> Option<u32> {
        let id = self.homes[home];
        let entry = self.entries.get(id as usize).filter(|_| id != NONE)?;
        (!entry.is_public || entry.num_published > 0).then_some(id)
    }
}

impl PrefixIndex {
    /// Says which layer groups there are after the first, which sees all tokens; or all of them, if the tree is to have
    /// so many homes for each block. Once, or again with the same.
    ///
    /// # Errors
    /// `WrongState` if there are others already, or if the index keeps blocks and is to have homes; else those of
    /// [`super::token_arena::TokenArena::new`].
    pub(crate) fn attach_groups(&self, groups: &[Span], homes_per_block: Option<u32>) -> Result<()> {
        if let (None, Some(per_block)) = (self.attached.get(), homes_per_block) {
            self.keep_homes(per_block, groups.len())?;
        }
        let attached = match self.attached.get() {
            Some(attached) => attached,
            None => {
                let attached = self.new_attached(groups)?;
                self.attached.get_or_init(|| attached)
            }
        };
        if *attached.groups != *groups || self.has_homes() != homes_per_block.is_some() {
            return Err(Error::WrongState(format!(
                "the index keeps {} layer groups besides what finds prefixes, other ones than these {}",
                attached.groups.len(),
                groups.len()
            )));
        }
        Ok(())
    }

    fn new_attached(&self, groups: &[Span]) -> Result<Attached> {
        let num_blocks = self.pool.num_blocks() as usize;
        let num_places = (self.tree_pool().num_blocks() as usize).saturating_mul(groups.len());
        let num_names = if self.events().is_some() { num_blocks } else { 0 };
        let none = Entry {
            block: BlockHandle::from_bits(0),
            account: AccountId(0),
            home: NONE,
            num_users: 0,
            num_guests: 0,
            num_published: 0,
            is_public: false,
            is_of_use: false,
            fence: None,
            previous: NONE,
            next: NONE,
        };
        let what = format_args!(
            "what an index of {} keeps of {}",
            crate::count_of(num_blocks, "block"),
            crate::count_of(groups.len(), "further layer group")
        );
        let num_bytes = bytes_of::<u32>(num_places)
            .saturating_add(bytes_of::<Entry>(num_blocks))
            .saturating_add(bytes_of::<Option<Name>>(num_names));
        let memory = Asked::new(what, num_bytes)?;
        Ok(Attached {
            groups: groups.into(),
            block_size: self.config.block_size as usize,
            state: Mutex::new(State {
                pool: Arc::clone(&self.pool),
                homes: memory.array(num_places, |_| NONE)?,
                entries: memory.array(num_blocks, |_| none)?,
                lists: Vec::new(),
                shares: Vec::new(),
                names: memory.array(num_names, |_| None)?,
            }),
        })
    }

    /// Most attached blocks that go with a block of the tree.
    pub(super) fn num_attached_groups(&self) -> usize {
        self.attached.get().map_or(0, |attached| attached.groups.len())
    }

    /// The lock of all attached blocks, if there are groups.
    pub(super) fn lock_attached(&self) -> Option<MutexGuard<'_, State>> {
        self.attached.get().map(Attached::state)
    }

    /// How many of the first group's blocks, a path from the root, can be used: the longest prefix of which every other
    /// group has what the next query sees. A guess: other threads may evict while it looks.
    pub(crate) fn usable_blocks(&self, blocks: &[BlockHandle]) -> usize {
        let Some(attached) = self.attached.get() else { return blocks.len() };
        // Where the run of blocks that are there begins, by group.
        let mut begins = vec![0; attached.groups.len()];
        let (mut logical, mut usable) = (0, 0);
        // What goes between two pieces is missed when the blocks are used.
        for piece in blocks.chunks(attached.piece()) {
            let state = attached.state();
            for &first in piece {
                logical += 1;
                let mut is_usable = true;
                for (group, begin) in begins.iter_mut().enumerate() {
                    if state.found(attached.home(first, group)).is_none() {
                        *begin = logical;
                    }
                    is_usable &= *begin <= attached.first_needed(group, logical);
                }
                if is_usable {
                    usable = logical;
                }
            }
        }
        usable
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
                    let is_right = !entry.is_used()
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
        check_shares(&state)
    }
}

/// Each account keeps what is paid for its blocks beyond their own capacity.
fn check_shares(state: &State) -> std::result::Result<(), String> {
    let mut kept = vec![0u64; state.shares.len()];
    for entry in state.entries.iter().filter(|entry| entry.is_used()) {
        let beyond = entry.num_users + u32::from(entry.num_guests > 0) - 1;
        if beyond > 0 {
            kept[entry.account.0 as usize] += u64::from(beyond);
        }
        if entry.num_published > entry.num_guests {
            return Err(format!("attached block {} is published without being kept", entry.block.id()));
        }
    }
    for (account, (share, kept)) in state.shares.iter().zip(kept).enumerate() {
        let promised = share.as_ref().map_or(0, Reservation::num_blocks);
        if u64::from(promised) != kept {
            return Err(format!("account {account} keeps {promised} shares of attached blocks, not {kept}"));
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::IndexConfig;
    use super::*;
    use crate::block_pool::PoolConfig;
    use crate::prefix_index::EvictionPolicy;
    use crate::sync::{AtomicBool, Ordering};

    #[test]
    fn a_long_look_up_lets_others_in_between_its_pieces() {
        let pool = BlockPool::new(PoolConfig { num_blocks: 4, ..PoolConfig::default() }).unwrap();
        let config = IndexConfig { block_size: 1, eviction: EvictionPolicy::Lru };
        let index = PrefixIndex::new(pool, config).unwrap();
        index.attach_groups(&[Span::Sliding(8)], None).unwrap();
        let attached = index.attached.get().unwrap();
        let long = vec![BlockHandle::from_bits(0); 1 << 23];
        let times_beside = || {
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(index.usable_blocks(&long), 0);
                    is_over.store(true, Ordering::Relaxed);
                });
                let mut num_times = 0;
                while !is_over.load(Ordering::Relaxed) {
                    drop(attached.state());
                    num_times += 1;
                    std::thread::sleep(std::time::Duration::from_micros(10));
                }
                num_times
            })
        };
        // On a machine that gives the others no processor meanwhile, at a later attempt.
        let (start, mut attempts) = (std::time::Instant::now(), vec![times_beside()]);
        while attempts.last().is_some_and(|&times| times <= 20) {
            assert!(start.elapsed().as_secs() < 60, "{attempts:?} times");
            attempts.push(times_beside());
        }
    }
}
