//! Using attached blocks: who begins, who leaves, and who pays meanwhile.

use super::{Entry, NONE, State};
use crate::block_pool::Reservation;
use crate::error::Result;
use crate::ids::{AccountId, BlockHandle, NamespaceId};
use crate::prefix_index::PrefixIndex;
use crate::prefix_index::evictor::MAX_PIECE;
use std::ops::Range;

/// A block that a sequence uses from now on.
pub(crate) struct UsedBlock {
    pub(crate) group: usize,
    pub(crate) block: BlockHandle,
    /// Whether another account pays for it.
    pub(crate) is_guest: bool,
}

impl State {
    /// One more sequence uses a block. One of its account pays for it from what is promised to it.
    fn begin_use(&mut self, id: u32, promise: &mut Reservation) -> Result<bool> {
        let entry = self.entries[id as usize];
        let is_guest = entry.account != promise.account();
        if is_guest {
            self.begin_visit(id)?;
        } else if entry.is_used() {
            promise.move_to(1, self.share(entry.account)?)?;
        } else {
            promise.hold_cached(1)?;
            self.unlink(id);
        }
        let entry = &mut self.entries[id as usize];
        entry.num_users += u32::from(!is_guest);
        entry.is_of_use = true;
        Ok(is_guest)
    }

    /// One more guest uses a block: the first one makes its account pay.
    fn begin_visit(&mut self, id: u32) -> Result<()> {
        let entry = self.entries[id as usize];
        if entry.num_guests == 0 && entry.is_used() {
            self.share(entry.account)?.grow(1)?;
        } else if entry.num_guests == 0 {
            self.pool.hold_cached(entry.account, 1)?;
            self.unlink(id);
        }
        self.entries[id as usize].num_guests += 1;
        Ok(())
    }

    /// A guest leaves a block: the last one ends its account's payment.
    fn end_visit(&mut self, id: u32) -> Result<()> {
        let entry = &mut self.entries[id as usize];
        entry.num_guests -= 1;
        let Entry { account, num_users, num_guests, .. } = *entry;
        if num_guests > 0 {
            return Ok(());
        }
        if num_users > 0 {
            return self.share(account)?.shrink(1);
        }
        let epoch = self.pool.unhold_cached(account, 1)?;
        let entry = &mut self.entries[id as usize];
        entry.fence = epoch.or(entry.fence);
        entry.is_of_use = entry.home != NONE;
        self.push(id);
        Ok(())
    }
}

impl PrefixIndex {
    /// Uses what every other group needs, from block `start` on, after a path of the first group's blocks; `use_block` gets
    /// them in order. False, and nothing is used, if something is not there any more.
    ///
    /// # Errors
    /// `OutOfBlocks` or `OverQuota` if another account has no room for what it has; `InvalidArgument` if less is
    /// promised than the own account's. Nothing is used then. What the promise paid by then has left it.
    pub(crate) fn use_attached(
        &self,
        blocks: &[BlockHandle],
        start: usize,
        promise: &mut Reservation,
        use_block: impl FnMut(UsedBlock),
    ) -> Result<bool> {
        let Some(attached) = self.attached.get() else { return Ok(true) };
        let needed = |group| start.max(attached.first_needed(group, blocks.len()))..blocks.len();
        let all = (0..attached.groups.len()).flat_map(|group| needed(group).map(move |l| (group, l)));
        let all: Vec<(usize, usize)> = all.collect();
        let mut used = Vec::with_capacity(all.len());
        let mut use_piece = |piece: &[(usize, usize)]| {
            let mut state = attached.state();
            for &(group, logical) in piece {
                let Some(id) = state.found(attached.home(blocks[logical], group)) else { return Ok(false) };
                let is_guest = state.begin_use(id, promise)?;
                used.push(UsedBlock { group, block: state.entries[id as usize].block, is_guest });
            }
            Ok(true)
        };
        let done = all.chunks(MAX_PIECE).try_fold(true, |done, piece| Ok(done && use_piece(piece)?));
        if matches!(done, Ok(true)) {
            used.into_iter().for_each(use_block);
        } else {
            let used: Vec<BlockHandle> = used.iter().map(|used| used.block).collect();
            self.leave_all_attached(&used, promise.account())?;
        }
        done
    }

    /// Uses blocks that are in use once more, for a branch that shares them with who uses them.
    ///
    /// # Errors
    /// `InvalidArgument` if less is promised than there are blocks of its account; those before are used then.
    pub(crate) fn use_again(&self, blocks: &[BlockHandle], promise: &mut Reservation) -> Result<()> {
        let Some(attached) = self.attached.get() else { return Ok(()) };
        for piece in blocks.chunks(MAX_PIECE) {
            let mut state = attached.state();
            for block in piece {
                state.begin_use(block.id().0, promise)?;
            }
        }
        Ok(())
    }

    /// Attaches a block that its sequence holds alone to the first group's block of the same positions, and goes on
    /// using it. False if one is there already; the block stays the sequence's then. What is public counts for matches
    /// when it is published. `first` is a block of `namespace`.
    ///
    /// # Errors
    /// `InvalidHandle` for a block that is not exclusively held.
    pub(crate) fn attach(
        &self,
        (namespace, first): (NamespaceId, BlockHandle),
        group: usize,
        block: BlockHandle,
        account: AccountId,
        is_public: bool,
    ) -> Result<bool> {
        let Some(attached) = self.attached.get() else { return Ok(false) };
        let home = attached.home(first, group);
        let named = if is_public { None } else { self.name_attached(namespace, first, group) };
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
            num_guests: 0,
            num_published: 0,
            is_public,
            is_of_use: false,
            fence: None,
            previous: NONE,
            next: NONE,
        };
        if let Some((_tree, name)) = named {
            self.announce(&mut state, block.id().0, name);
        }
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
        if entry.account != promise.account() {
            return state.end_visit(id).map(|()| true);
        }
        if entry.num_users + entry.num_guests > 1 {
            entry.num_users -= 1;
            state.share(promise.account())?.move_to(1, promise)?;
            return Ok(true);
        }
        if !self.is_closed(entry.fence) {
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
        for piece in blocks.chunks(MAX_PIECE) {
            let mut state = attached.state();
            let open = self.pool.newest_open_step();
            let mut num_last = 0;
            for block in piece {
                let id = block.id().0;
                let entry = &mut state.entries[id as usize];
                entry.fence = open.or(entry.fence);
                if entry.account != account {
                    state.end_visit(id)?;
                    continue;
                }
                entry.num_users -= 1;
                if entry.is_used() {
                    state.share(account)?.shrink(1)?;
                    continue;
                }
                entry.is_of_use = entry.home != NONE;
                num_last += 1;
                state.push(id);
            }
            self.pool.unhold_cached(account, num_last)?;
        }
        Ok(())
    }

    /// The first group's blocks of a path whose attached blocks of a group the next query sees.
    pub(crate) fn needed_blocks(&self, group: usize, num_blocks: usize) -> Range<usize> {
        self.attached.get().map_or(0..0, |attached| attached.first_needed(group, num_blocks)..num_blocks)
    }

    /// Keeps an attached block for a publication, until [`PrefixIndex::unpublish_attached`]. If the publishing sequence
    /// uses it, its use passes over; else what is promised to it pays, unless the account does already. None if the
    /// block is gone, or if there is no room to keep it.
    ///
    /// # Errors
    /// Those of the pool.
    pub(crate) fn publish_attached(
        &self,
        (namespace, first): (NamespaceId, BlockHandle),
        group: usize,
        is_in_use: bool,
        promise: &mut Reservation,
    ) -> Result<Option<BlockHandle>> {
        let Some(attached) = self.attached.get() else { return Ok(None) };
        let named = self.name_attached(namespace, first, group);
        let mut state = attached.state();
        let id = state.homes[attached.home(first, group)];
        let Some(&entry) = state.entries.get(id as usize).filter(|_| id != NONE) else { return Ok(None) };
        let pays = entry.num_guests == 0;
        if !is_in_use && pays && promise.num_blocks() == 0 && promise.grow(1).is_err() {
            return Ok(None);
        }
        match (is_in_use, pays) {
            (true, true) | (false, false) => {}
            (true, false) => state.share(entry.account)?.shrink(1)?,
            (false, true) if entry.is_used() => promise.move_to(1, state.share(entry.account)?)?,
            (false, true) => {
                promise.hold_cached(1)?;
                state.unlink(id);
            }
        }
        let kept = &mut state.entries[id as usize];
        kept.num_users -= u32::from(is_in_use);
        kept.num_guests += 1;
        kept.num_published += 1;
        kept.is_of_use = true;
        if let (Some((_tree, name)), 1) = (named, kept.num_published) {
            self.announce(&mut state, id, name);
        }
        Ok(Some(entry.block))
    }

    /// Lets go of what a publication kept.
    ///
    /// # Errors
    /// Those of the pool.
    pub(crate) fn unpublish_attached(&self, blocks: &[BlockHandle]) -> Result<()> {
        let Some(attached) = self.attached.get() else { return Ok(()) };
        for piece in blocks.chunks(MAX_PIECE) {
            let mut state = attached.state();
            for block in piece {
                let id = block.id().0;
                let entry = &mut state.entries[id as usize];
                entry.num_published -= 1;
                if entry.num_published == 0 {
                    self.withdraw(&mut state, id);
                }
                state.end_visit(id)?;
            }
        }
        Ok(())
    }
}
