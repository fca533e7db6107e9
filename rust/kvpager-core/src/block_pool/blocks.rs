//! Handing out blocks, and taking whole batches of exclusively held ones out of use.

use super::groups::{Group, WIDTH, place};
use super::state::{Kind, State};
use super::{BlockPool, faults};
use crate::error::{Error, HandleFault, Result};
use crate::ids::{AccountId, BlockHandle, BlockId};
use crate::sync::{AtomicU64, Ordering};

/// Neighbours at the start of a batch that are in one group, each once.
struct Run {
    len: usize,
    group: usize,
    mask: u64,
    /// The group before the handles were compared.
    seen: Group,
    /// Whether all handles have their blocks' generation, and the account that was asked for.
    agrees: bool,
}

/// What `take_out` does about blocks that are shared.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rule {
    /// Count them; the caller drops their references.
    Release,
    /// Take them out too if they have one reference, and refuse otherwise. All must be of this account.
    Exclusive(Option<AccountId>),
}

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Hands out blocks, all of `out` or none.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::OverQuota`], [`Error::InvalidArgument`] for an unknown account, or
    /// [`Error::NeedsReclaim`] if the capacity is there and cached blocks are in the way.
    pub fn allocate(&self, account: AccountId, out: &mut [BlockHandle]) -> Result<()> {
        let count = u32::try_from(out.len()).unwrap_or(u32::MAX);
        self.accounts.take::<FAULT>(account, count, count)?;
        self.claim(account, out);
        self.note_peak();
        Ok(())
    }

    /// Claims blocks. The caller holds capacity and free permits for them.
    pub(super) fn claim(&self, account: AccountId, out: &mut [BlockHandle]) {
        let mut slots = out.iter_mut();
        self.groups.claim::<FAULT>(slots.len(), |id| {
            let cell = &self.states[id as usize];
            // Relaxed: claiming the bit acquired what its last owner published, and it is ours.
            let word = State::handed_out(cell.load(Ordering::Relaxed), account);
            // Release pairs with the Acquire in `state`, for threads that get the handle by other ways than ours.
            cell.store(word, Ordering::Release);
            if let Some(slot) = slots.next() {
                *slot = BlockHandle::new((word >> 32) as u32, BlockId(id));
            }
        });
    }

    /// A block's state. Acquire pairs with the Release of the block's last change.
    pub(super) fn state(&self, id: u32) -> State {
        State::unpack(self.states[id as usize].load(Ordering::Acquire))
    }

    /// A handle's block, if the pool has it.
    pub(super) fn checked_id(&self, block: BlockHandle) -> Result<u32> {
        let id = block.id().0;
        if id < self.num_blocks() {
            Ok(id)
        } else {
            Err(State::free(0).error(block, HandleFault::NeverIssued))
        }
    }

    /// Whether a block may be written: one reference, and not in the index. Otherwise it is copied first.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that names no block in use.
    pub fn is_exclusive(&self, block: BlockHandle) -> Result<bool> {
        let state = self.state(self.checked_id(block)?);
        match state.kind {
            _ if state.generation != block.generation() => Err(state.fault(block)),
            Kind::Held | Kind::Shared => Ok(state.references == 1),
            Kind::Indexed => Ok(false),
            Kind::Free | Kind::Leaving | Kind::Dropped | Kind::Stored => Err(state.fault(block)),
        }
    }

    /// How many references a block has; 0 for one that is the index's.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a handle that names no block in use.
    pub fn num_references(&self, block: BlockHandle) -> Result<u32> {
        let state = self.state(self.checked_id(block)?);
        match state.kind {
            _ if state.generation != block.generation() => Err(state.fault(block)),
            Kind::Held | Kind::Shared => Ok(state.references),
            Kind::Indexed => Ok(0),
            Kind::Free | Kind::Leaving | Kind::Dropped | Kind::Stored => Err(state.fault(block)),
        }
    }

    /// The words of a group's blocks.
    fn members(&self, group: usize) -> &[AtomicU64] {
        let first = group * WIDTH;
        &self.states[first..self.states.len().min(first + WIDTH)]
    }

    fn run(&self, blocks: &[BlockHandle], wanted: Option<AccountId>) -> Result<Run> {
        let (group, _) = place(self.checked_id(blocks[0])?);
        let (first, members) = ((group * WIDTH) as u32, self.members(group));
        let mut run = Run { len: 0, group, mask: 0, seen: self.groups.load(group), agrees: true };
        let mut differences = 0;
        for block in blocks {
            let offset = block.id().0.wrapping_sub(first);
            let Some(cell) = members.get(offset as usize) else { break };
            let bit = 1 << offset;
            if run.mask & bit != 0 {
                break;
            }
            // Acquire as in `state`.
            let word = cell.load(Ordering::Acquire);
            differences |= (word ^ block.to_bits()) >> 32;
            if let Some(account) = wanted {
                differences |= u64::from(State::account_of(word) != account);
            }
            run.mask |= bit;
            run.len += 1;
        }
        run.agrees = differences == 0;
        Ok(run)
    }

    /// Takes the exclusive blocks of a batch out: they are off afterwards, and the caller's alone. Returns how
    /// many handles name shared blocks. On an error, all is as before.
    pub(super) fn take_out(&self, blocks: &[BlockHandle], rule: Rule) -> Result<usize> {
        let account = if let Rule::Exclusive(account) = rule { account } else { None };
        if let [block] = blocks
            && self.take_out_one(*block, account)
        {
            return Ok(0);
        }
        let (mut start, mut num_shared) = (0, 0);
        while start < blocks.len() {
            match self.take_out_run(&blocks[start..], rule, account) {
                Ok((taken, shared)) => {
                    start += taken;
                    num_shared += shared;
                }
                Err(error) => {
                    if FAULT != faults::KEEP_PARTIAL {
                        self.restore(&blocks[..start]);
                    }
                    return Err(error);
                }
            }
        }
        Ok(num_shared)
    }

    /// Takes the first run of a batch out. Returns its length, and how many of it are shared.
    fn take_out_run(
        &self,
        blocks: &[BlockHandle],
        rule: Rule,
        account: Option<AccountId>,
    ) -> Result<(usize, usize)> {
        loop {
            let run = self.run(blocks, account)?;
            let members = &blocks[..run.len];
            let exclusive = run.seen.exclusive() & run.mask;
            let simple = exclusive == run.mask && run.agrees;
            if !simple && FAULT != faults::BLIND_RELEASE {
                self.check_members(members, exclusive, run.seen.shared(), rule)?;
            }
            // Every handle was good after `seen` was loaded. If the group is as seen, no block of it has been
            // claimed anew since, so none has changed hands; otherwise look again.
            if exclusive != 0 && !self.groups.try_take_out(run.group, run.seen, exclusive) {
                continue;
            }
            if exclusive == run.mask {
                return Ok((run.len, 0));
            }
            if rule == Rule::Release {
                return Ok((run.len, run.len - exclusive.count_ones() as usize));
            }
            self.take_out_shared(members, run.group, exclusive)?;
            return Ok((run.len, 0));
        }
    }

    /// Takes one exclusive block out, or does nothing if it is not that simple.
    #[inline]
    pub(super) fn take_out_one(&self, block: BlockHandle, account: Option<AccountId>) -> bool {
        let Some(cell) = self.states.get(block.id().0 as usize) else { return false };
        let (group, bit) = place(block.id().0);
        loop {
            let seen = self.groups.load(group);
            // Acquire as in `state`.
            let word = cell.load(Ordering::Acquire);
            let good = seen.exclusive() & bit != 0 && word >> 32 == block.to_bits() >> 32;
            if !good || account.is_some_and(|account| State::account_of(word) != account) {
                return false;
            }
            // The handle was good after `seen` was loaded; see `take_out_run`.
            if self.groups.try_take_out(group, seen, bit) {
                return true;
            }
        }
    }

    /// Checks handles of one group against their blocks.
    fn check_members(&self, members: &[BlockHandle], exclusive: u64, shared: u64, rule: Rule) -> Result<()> {
        for &block in members {
            let state = self.state(block.id().0);
            let (_, bit) = place(block.id().0);
            let wanted = match rule {
                Rule::Exclusive(Some(account)) => state.account == account,
                _ => true,
            };
            if state.generation == block.generation() && exclusive & bit != 0 && wanted {
                continue;
            }
            let good = state.generation == block.generation() && shared & bit != 0 && state.is_referenced();
            if good && wanted && (rule == Rule::Release || state.references == 1) {
                continue;
            }
            // Off, but in this generation: another call, or an earlier place of this batch, has it.
            if state.generation == block.generation()
                && state.kind == Kind::Held
                && (exclusive | shared) & bit == 0
            {
                return Err(state.error(block, HandleFault::OverRelease));
            }
            return Err(state.fault(block));
        }
        Ok(())
    }

    /// Takes the shared members of a run out, each with one reference. Whoever gets the word to `Dropped` owns the
    /// block.
    fn take_out_shared(&self, members: &[BlockHandle], group: usize, exclusive: u64) -> Result<()> {
        for (i, &block) in members.iter().enumerate() {
            let (_, bit) = place(block.id().0);
            if exclusive & bit != 0 {
                continue;
            }
            let won = self.exchange(block, |state| match state.references {
                1 if state.is_referenced() => Ok(State { kind: Kind::Dropped, ..state }),
                _ => Err(state.fault(block)),
            });
            match won {
                Ok(state) => {
                    self.groups.take_out_shared(group, bit);
                    // Release as in `claim`.
                    let held = State::held(state.generation, state.account);
                    self.states[block.id().0 as usize].store(held.pack(), Ordering::Release);
                }
                Err(error) => {
                    let earlier =
                        members[..i].iter().map(|block| place(block.id().0).1).fold(0, |a, b| a | b);
                    self.groups.restore(group, exclusive | earlier);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Gives those of `blocks` that `take_out` took back to their holder.
    pub(super) fn restore(&self, blocks: &[BlockHandle]) {
        for &block in blocks {
            let (group, bit) = place(block.id().0);
            let state = self.state(block.id().0);
            let off = self.groups.load(group).off() & bit != 0;
            if off && state.kind == Kind::Held && state.generation == block.generation() {
                self.groups.restore(group, bit);
            }
        }
    }

    /// Takes exclusively held blocks out: off afterwards, `Held`, and the caller's alone.
    pub(super) fn detach(&self, blocks: &[BlockHandle], account: Option<AccountId>) -> Result<()> {
        self.take_out(blocks, Rule::Exclusive(account)).map(|_| ())
    }

    /// Frees blocks that are off and the caller's, each once. `give` gets runs of one account after their blocks
    /// are published.
    pub(super) fn free_detached(&self, blocks: &[BlockHandle], mut give: impl FnMut(AccountId, u32)) {
        let (mut account, mut count) = (AccountId(0), 0);
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            // Relaxed: the block is the caller's alone.
            let of = State::account_of(self.states[first.id().0 as usize].load(Ordering::Relaxed));
            if of != account && count > 0 {
                give(account, std::mem::take(&mut count));
            }
            account = of;
            if FAULT == faults::EARLY_PERMIT {
                give(account, 1);
                std::thread::yield_now();
            }
            let freed = self.free_run(rest, account, FAULT == faults::EARLY_PERMIT);
            count += if FAULT == faults::EARLY_PERMIT { 0 } else { freed as u32 };
            rest = &rest[freed..];
        }
        if count > 0 {
            give(account, count);
        }
    }

    /// Frees the first blocks of a batch that are in one group and of one account, and returns how many.
    fn free_run(&self, blocks: &[BlockHandle], account: AccountId, only_one: bool) -> usize {
        let (group, _) = place(blocks[0].id().0);
        let (first, members) = ((group * WIDTH) as u32, self.members(group));
        let (mut mask, mut count) = (0, 0);
        for block in blocks {
            let offset = block.id().0.wrapping_sub(first);
            let Some(cell) = members.get(offset as usize) else { break };
            if only_one && count == 1 {
                break;
            }
            // Relaxed: the block is the caller's alone.
            let word = cell.load(Ordering::Relaxed);
            if State::account_of(word) != account {
                break;
            }
            // Release as in `claim`; the block itself is published by `free` below.
            cell.store(State::freed::<FAULT>(word), Ordering::Release);
            mask |= 1 << offset;
            count += 1;
        }
        self.groups.free(group, mask);
        count
    }

    /// Gives capacity and free permits of published blocks back.
    pub(super) fn give_back(&self, account: AccountId, count: u32) {
        let given = self.accounts.give::<FAULT>(account, count, count);
        debug_assert!(given.is_ok() || FAULT != faults::NONE, "{given:?}");
    }

    /// Changes the word of a shared block by `next`. Returns the new state.
    pub(super) fn exchange(
        &self,
        block: BlockHandle,
        mut next: impl FnMut(State) -> Result<State>,
    ) -> Result<State> {
        let cell = &self.states[block.id().0 as usize];
        let mut word = cell.load(Ordering::Acquire);
        loop {
            let now = State::unpack(word);
            if now.generation != block.generation() && FAULT != faults::BLIND_RETAIN {
                return Err(now.fault(block));
            }
            let state = next(now)?;
            // AcqRel: what was done with the block before a reference went away comes before what is done after
            // the last one did. A failure means that another thread changed the word.
            match cell.compare_exchange_weak(word, state.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(state),
                Err(changed) => word = changed,
            }
        }
    }

    pub(super) fn refuse_open_step(&self, what: &str) -> Result<()> {
        match self.epochs.newest_open() {
            Some(epoch) => Err(Error::WrongState(format!(
                "blocks cannot be {what} while a step is open that may read them (epoch {})",
                epoch.number()
            ))),
            None => Ok(()),
        }
    }
}
